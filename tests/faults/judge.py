"""What may be seen in and beside a target at any moment, and what must be there at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from house.measured import say
from reshard_engine.integrity.manifest import MANIFEST_NAME

Tree = Mapping[str, bytes]
"""Files by their path relative to the target's parent."""


@dataclass(frozen=True)
class Outcome:
    """What an undisturbed conversion leaves in the target's parent."""

    name: str
    """The target's."""
    tree: Tree
    commit: frozenset[str]
    """The files without which a loader refuses."""
    pointer: str | None

    @property
    def manifest(self) -> str:
        return f"{self.name}/{MANIFEST_NAME}"

    def below(self, found: Tree) -> dict[str, bytes]:
        """What is in the target."""
        return {path: body for path, body in found.items() if path.startswith(self.name + "/")}

    def is_all_of(self, found: Tree) -> bool:
        """Whether this outcome is there and nothing else."""
        return _comparable(found, self.manifest) == _comparable(self.tree, self.manifest)

    def is_whole_in(self, found: Tree) -> bool:
        """Whether the target is complete, whatever is beside it."""
        return _comparable(self.below(found), self.manifest) == _comparable(self.below(self.tree), self.manifest)

    def explains(self, found: Tree, *, going: bool = False) -> bool:
        """Whether a loader that is given the tag refuses, or sees this outcome only.

        `going`: the outcome is an old one, which `--overwrite` withdraws: its manifest may go after a commit file.
        """
        here = self.below(found)
        if not any(path in here for path in (*self.commit, self.manifest)):
            return self.pointer not in found
        last = {*self.commit, self.manifest}
        if any(here.get(path) != body for path, body in self.below(self.tree).items() if path not in last):
            return False
        if any(path in here and here[path] != self.tree[path] for path in self.commit):
            return False
        if self.manifest in here and not going and not self.is_whole_in(found):
            return False
        return self.pointer not in found or self.is_whole_in(found)


def partial_result(found: Tree, new: Outcome, *, old: Outcome | None = None) -> str | None:
    """What is wrong with what can be read now, or None. `old` is what the target held at first."""
    if new.explains(found) or (old is not None and old.explains(found, going=True)):
        return None
    kinds = {path: _kind(path, body, new, old) for path, body in sorted(found.items()) if not path.startswith(".")}
    return f"a partial result is readable: {kinds}"


def difference(found: Tree, wanted: Outcome) -> str | None:
    """What is missing, other, or too much, or None; a manifest of another second counts as the same."""
    if wanted.is_all_of(found):
        return None
    lost = sorted(path for path, body in wanted.tree.items() if found.get(path) != body)
    return f"missing or other: {lost}, more: {sorted(set(found) - set(wanted.tree))}"


def strays(found: Tree) -> list[str]:
    """Staging, journals, claims: what may be beside a target only while a conversion is unfinished."""
    return sorted(path for path in found if path.startswith("."))


def _comparable(found: Tree, manifest: str) -> dict[str, object]:
    """Files; of the manifest what does not depend on the time (its own digest and a local pin do)."""
    facts: dict[str, object] = dict(found)
    if manifest in found:
        held = json.loads(found[manifest])
        del held["created_at"], held["sha256"]
        for file in held["files"]:
            del file["pin"]
        facts[manifest] = held
    return facts


def _kind(path: str, body: bytes, new: Outcome, old: Outcome | None) -> str:
    if new.tree.get(path) == body:
        return "new"
    return "old" if old is not None and old.tree.get(path) == body else f"{len(body)} bytes"


@dataclass
class Ledger:
    """Trials and failures by mode, for the table that the suite prints."""

    title: str
    ends: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    failures: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def note(self, mode: str, end: str, where: str, problems: Sequence[str]) -> None:
        """One trial: how its first attempt ended, and what was wrong with it."""
        self.ends.setdefault(mode, Counter())[end] += 1
        if problems:
            self.failures.append((mode, f"{mode} at {where} ({end}): {'; '.join(problems)}"))

    def settle(self) -> None:
        """Show the table; fail if a trial failed."""
        say(self.title, f"{'mode':26} {'trials':>7} {'failures':>9} {'95 % bound':>11}   the disturbed run ended with")
        for mode, ends in self.ends.items():
            trials, failed = ends.total(), sum(m == mode for m, _ in self.failures)
            bound = "-" if failed else f"{3 / trials:.4f}"
            say(f"{mode:26} {trials:7} {failed:9} {bound:>11}   {_words(ends)}")
        assert not self.failures, "\n".join([f"{len(self.failures)} failures", *(t for _, t in self.failures[:8])])


def _words(ends: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in ends.most_common())
