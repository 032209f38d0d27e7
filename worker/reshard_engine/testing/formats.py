"""The protocols by which a format inherits the laws: a writer of logical states, or a reader of the engine's output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hypothesis.strategies import SearchStrategy

from reshard.models import ConvertRequest
from reshard_engine.testing.logical import Bits, LogicalState, Tree


@dataclass(frozen=True)
class Case:
    """A run, and the partitioning that its framework would choose.

    Attributes:
        state: what the run holds.
        layout: the format's own description of the cut; printed when a law is broken.
    """

    state: LogicalState
    layout: Any


@dataclass(frozen=True)
class Saved:
    """A case in files.

    Attributes:
        state: what the files keep of the logical state; a format may keep less than a run holds.
        labels: items of the zoo that only the format can see (see the glossary).
        frozen_late: parameters that the optimizer owns and that were frozen since: some targets hold them as both.
        never_updated: parameters that the optimizer owns and that no gradient reached: the state has zeros for them.
        copies: aliases of which the files say only that they are equal: targets have them as tensors of their own.
        run_names: names by which DeepSpeed finds tensors again, where others leave them out, as of `torch.compile`.
        choices: fields of `SourceSpec` by which a user says what the files do not.
    """

    state: LogicalState
    labels: frozenset[str] = frozenset()
    frozen_late: frozenset[str] = frozenset()
    never_updated: frozenset[str] = frozenset()
    copies: frozenset[str] = frozenset()
    run_names: Mapping[str, str] = field(default_factory=dict[str, str])
    choices: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def in_the_run(self) -> Saved:
        """The saved state under the names by which DeepSpeed finds tensors again."""
        names = self.run_names
        late, never, copies = (
            frozenset(names.get(n, n) for n in found) for found in (self.frozen_late, self.never_updated, self.copies)
        )
        return Saved(self.state.renamed(names), self.labels, late, never, copies)


class SourceFormat(Protocol):
    """A way of saving training state, written the way the real framework writes it.

    Attributes:
        name: for reports.
        full: whether the files hold everything that a resumable target needs; else they hold weights.
        zoo: the items that must be met, each with the least share of examples that meet it.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    full: bool

    @property
    def zoo(self) -> Mapping[str, float]: ...  # noqa: D102

    def cases(self) -> SearchStrategy[Case]:
        """Runs that can be saved this way."""
        ...

    def write(self, case: Case, directory: Path) -> Saved:
        """Write the files that the framework would write into an empty directory: what the user then names."""
        ...

    def checks_metadata(self, case: Case) -> bool:
        """True if checksums cover everything but tensor data, so that every flipped bit outside of it is found."""
        ...


@dataclass(frozen=True)
class Content:
    """The contents of a target, as an independent reader finds them.

    Attributes:
        tensors: by a name that says role and fqn.
        cast: names of the tensors that were cast; NaN payloads in them may differ.
        values: non-tensor state by name.
        overflows: by fqn, how many finite elements became infinite; only of expected contents.
    """

    tensors: Mapping[str, Bits]
    cast: frozenset[str] = frozenset()
    values: Mapping[str, Tree] = field(default_factory=dict[str, Tree])
    overflows: Mapping[str, int] = field(default_factory=dict[str, int])


class TargetOracle(Protocol):
    """A target format, read by a reader that shares no code with the engine."""

    name: str
    wants_full_state: bool
    """True if only sources with optimizer states can be converted to this target."""

    def options(self) -> SearchStrategy[Mapping[str, Any]]:
        """Fields of `ConvertRequest` that choose this target and its options."""
        ...

    def expected(self, saved: Saved, request: ConvertRequest) -> Content:
        """The contents that the target must have for a source."""
        ...

    def read(self, files: Mapping[str, bytes]) -> Content:
        """Read the contents of a target's files; an assertion fails for any unexpected file."""
        ...
