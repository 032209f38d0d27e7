"""The law of a run's directory: everything that speaks of its newest complete checkpoint names the same one.

A run is drawn: up to six steps, each of them whole, or spoilt in one of several ways, and a pointer in one of ten
spellings. What `ls`, `inspect`, `convert`, `ensure` and the fixes of their errors say of it is compared with what was
drawn; `prune` removes nothing that is protected, and changes nothing outside the run.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings, strategies as st

import reshard
from house.promises import command
from house.saves import DATA
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.reports import PrunePolicy
from reshard_engine.operations.runs.pruning import decide

RANK = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def _truncate(tag: Path) -> None:
    with (tag / RANK).open("r+b") as file:
        file.truncate(1_000)


def _empty_files(tag: Path) -> None:
    for path in tag.iterdir():
        path.write_bytes(b"")


def _empty(tag: Path) -> None:
    shutil.rmtree(tag)
    tag.mkdir()


def _dead_link(tag: Path) -> None:
    (tag / RANK).unlink()
    (tag / RANK).symlink_to(tag / "gone.pt")


def _live_link(tag: Path) -> None:
    pool = tag.parents[1] / f"pool-{tag.parent.name}-{tag.name}.pt"
    (tag / RANK).rename(pool)
    (tag / RANK).symlink_to(pool)


SPOILERS: dict[str, Callable[[Path], object]] = {
    "truncated": _truncate,
    "empty files": _empty_files,
    "empty directory": _empty,
    "without a rank": lambda tag: (tag / RANK).unlink(),
    "without the model": lambda tag: (tag / MODEL).unlink(),
    "dead link": _dead_link,
}
HARMLESS: dict[str, Callable[[Path], object]] = {
    "whole": lambda tag: None,
    "whole, linked file": _live_link,
    "whole, a dead link beside": lambda tag: (tag / "extra.pt").symlink_to("nowhere"),
}
POINTERS: dict[str, Callable[[str, Path], str]] = {
    "none": lambda name, run: "",
    "plain": lambda name, run: name,
    "with a newline": lambda name, run: f"{name}\n",
    "with blanks": lambda name, run: f"  {name} ",
    "from here": lambda name, run: f"./{name}",
    "with a slash": lambda name, run: f"{name}/",
    "absolute": lambda name, run: f"{run}/{name}",
    "to a place outside": lambda name, run: "../victim",
    "to nothing": lambda name, run: "global_step999999",
    "too long": lambda name, run: "x" * 5_000,
}
MARKS = ".reshard-removing-..%2Fvictim", ".reshard-removing-%2E%2E", ".reshard-removing-"
"""Marks of removals that no `prune` wrote."""
NAMES = "plain", "with a newline", "with blanks"
"""The spellings with which DeepSpeed finds the tag."""
PROTECTS = *NAMES, "from here", "with a slash", "absolute"


@dataclass(frozen=True)
class Step:
    """One drawn step."""

    number: int
    state: str

    @property
    def whole(self) -> bool:
        return self.state in HARMLESS


@dataclass(frozen=True)
class Run:
    """A drawn run and its directory."""

    place: Path
    steps: tuple[Step, ...]
    trainers: bool
    pointer: str
    named: str

    def name(self, step: Step) -> str:
        return f"checkpoint-{step.number}" if self.trainers else f"global_step{step.number}"

    @property
    def whole(self) -> list[str]:
        return [self.name(s) for s in sorted(self.steps, key=lambda s: s.number) if s.whole]

    @property
    def newest(self) -> str | None:
        return self.whole[-1] if self.whole else None


_saves = dict[int, Path]()


def _save_of(number: int) -> Path:
    """The recorded save, with another number of steps in its state."""
    if number not in _saves:
        place = Path(tempfile.mkdtemp(prefix="runs-")) / "tag"
        shutil.copytree(DATA / "zero2_tiny" / "global_step3", place)
        state = torch.load(place / MODEL, weights_only=False)
        torch.save({**state, "global_steps": number}, place / MODEL)
        _saves[number] = place
    return _saves[number]


def _build(place: Path, steps: tuple[Step, ...], trainers: bool, pointer: str, at: int) -> Run:
    run = Run(place / "run", steps, trainers, pointer, "")
    run.place.mkdir()
    shutil.copytree(_save_of(7), place / "victim")
    for step in steps:
        home = run.place / run.name(step)
        tag = home / f"global_step{step.number}" if trainers else home
        shutil.copytree(_save_of(step.number), tag)
        if trainers:
            (home / "latest").write_text(tag.name)
            (home / "trainer_state.json").write_text(json.dumps({"global_step": step.number}))
        {**SPOILERS, **HARMLESS}[step.state](tag)
    for name in MARKS:
        (run.place / name).write_text('{"first": 0, "files": []}')
    named = run.name(steps[at % len(steps)]) if steps else "global_step1"
    if pointer != "none":
        (run.place / "latest").write_text(POINTERS[pointer](named, run.place))
    return Run(run.place, steps, trainers, pointer, named)


STEPS = st.lists(
    st.tuples(st.integers(1, 999), st.sampled_from([*SPOILERS, *HARMLESS, "whole", "whole"])),
    max_size=6,
    unique_by=lambda row: row[0],
).map(lambda rows: tuple(Step(*row) for row in rows))


def _said(text: str, run: Run) -> str | None:
    """The checkpoint that a fix calls the newest complete one; None if it names none."""
    text = text.rpartition("fix: ")[2]
    if "newest complete checkpoint" not in text:
        return None
    told = re.search(r"--tag (\S+)", text) or re.search(rf"{re.escape(str(run.place))}/([^\s/;]+)", text)
    assert told is not None, text
    return told[1]


def _everything_below(place: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file but the records of `ensure`."""
    return {
        str(path.relative_to(place)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(place.rglob("*"))
        if (not path.is_dir() or path.is_symlink()) and ".reshard" not in path.parts
    }


def _judge(run: Run) -> None:
    listing = load_engine().steps(str(run.place))
    assert [s.name for s in listing.steps if s.complete] == run.whole
    assert listing.newest == run.newest
    _judge_the_run(run)
    for step in run.steps:
        if not step.whole:
            _judge_a_broken_step(run, run.name(step))


def _judge_the_run(run: Run) -> None:
    """What `inspect`, `convert` and `ensure` say of the directory of the run."""
    place = str(run.place)
    code, out, err = command("inspect", place, "--json")
    follows = run.pointer in NAMES and not run.trainers
    if run.pointer == "none" and run.newest is not None:
        assert code == 0, err
        assert run.newest in out
        code, _, err = command("convert", place, f"{place}-out", "--to", "zero", "--dp", "3")
        assert code == 2, err
        assert f"fix: reshard convert {place}/{run.newest} {place}-out --to zero --dp 3\n" in err
    elif follows and run.named in run.whole:
        assert code == 0, err
    elif code != 0 and not (run.pointer in NAMES and run.named in run.whole):
        assert _said(err, run) == run.newest, err
    if not (follows and run.named in run.whole):
        with pytest.raises(ReshardError) as caught:
            reshard.ensure(run.place, dp=3, workers="1")
        if run.pointer in NAMES and run.named in run.whole:  # the pointer names no tag, and still a checkpoint
            assert caught.value.fix == f"name the checkpoint itself: reshard inspect {run.place / run.named}"
        else:
            assert _said(caught.value.fix, run) == run.newest, caught.value.fix


def _judge_a_broken_step(run: Run, name: str) -> None:
    """What `inspect` and `ensure` say of one step that is not complete."""
    place = str(run.place / name)
    code, _, err = command("inspect", place)
    assert code != 0
    assert _said(err, run) == run.newest, err
    with pytest.raises(ReshardError) as caught:
        reshard.ensure(place, dp=3, workers="1")
    assert _said(caught.value.fix, run) == run.newest, caught.value.fix


@pytest.mark.timeout(0)
@settings(
    max_examples=40,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(steps=STEPS, trainers=st.booleans(), pointer=st.sampled_from(list(POINTERS)), at=st.integers(0, 5))
def test_all_name_the_same_newest_complete_checkpoint(
    steps: tuple[Step, ...], trainers: bool, pointer: str, at: int
) -> None:
    with tempfile.TemporaryDirectory() as place:
        run = _build(Path(os.path.realpath(place)), steps, trainers, pointer, at)
        if not steps and pointer == "none":
            return
        before = _everything_below(run.place.parent)
        _judge(run)
        assert _everything_below(run.place.parent) == before
        event(f"{len(run.whole)} whole of {len(steps)}")


@pytest.mark.timeout(0)
@settings(
    max_examples=20,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    steps=STEPS.filter(bool),
    trainers=st.booleans(),
    pointer=st.sampled_from(list(POINTERS)),
    at=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_prune_keeps_what_is_protected_and_stays_in_the_run(
    steps: tuple[Step, ...], trainers: bool, pointer: str, at: int, seed: int
) -> None:
    """One hundred policies are decided for each run, and one of them is carried out."""
    with tempfile.TemporaryDirectory() as place:
        run = _build(Path(os.path.realpath(place)), steps, trainers, pointer, at)
        listing, rng = load_engine().steps(str(run.place)), random.Random(seed)
        policies = [
            PrunePolicy(keep_last=rng.randint(1, 4), keep_every=rng.choice([None, 2, 3, 10])) for _ in range(100)
        ]
        for policy in policies:
            _judge_decisions(run, {d.name for d in decide(listing, policy) if not d.kept_for}, policy)
        before = _everything_below(run.place.parent)
        words = ["prune", str(run.place), "--keep-last", str(policies[0].keep_last), "--yes"]
        code, _, err = command(*words)
        assert code == 0, err
        gone = {run.name(s) for s in steps if not (run.place / run.name(s)).exists()}
        _judge_decisions(run, gone, PrunePolicy(keep_last=policies[0].keep_last))
        after = _everything_below(run.place.parent)
        removed = {path for path in before if path not in after}
        assert all(path.split("/")[0] == "run" and path.split("/")[1] in gone for path in removed)
        assert all(after[path] == before[path] for path in after)


def _judge_decisions(run: Run, gone: set[str], policy: PrunePolicy) -> None:
    assert gone <= set(run.whole[: -policy.keep_last])
    if run.pointer in PROTECTS:
        assert run.named not in gone
    for step in run.steps:
        if policy.keep_every is not None and step.number % policy.keep_every == 0:
            assert run.name(step) not in gone
