"""Conversions on the local file system, in processes that die, hang, or get errors from the operating system."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from faults.judge import Outcome, Tree, difference, partial_result, strays
from faults.os_faults import disturbed_calls
from faults.small import name_of, small_request, sources_of
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.operations.conversion import Conversion
from reshard_engine.testing.stores import Fault, Operation, Steps

ENGINE = load_engine()


@dataclass(frozen=True)
class Case:
    """A conversion below a directory, and what is in the target's parent before it."""

    root: Path
    request: ConvertRequest
    new: Outcome
    old: Outcome | None = None
    before: Path | None = None
    other: Outcome | None = None
    """What the other checkpoint becomes in this target."""

    @property
    def parent(self) -> Path:
        return self.root / "jobs"

    def prepare(self) -> None:
        """The parent as it was at first."""
        shutil.rmtree(self.parent, ignore_errors=True)
        if self.before is not None:
            shutil.copytree(self.before, self.parent)

    def operations(self) -> tuple[list[Operation], list[str]]:
        """What an undisturbed run does below the root, and what was not counted."""
        self.prepare()
        facts = json.loads(run_child(self, Steps()).wait())
        return [Operation(*o) for o in facts["operations"]], facts["unseen"]


def fresh_case(root: Path, to: str) -> Case:
    """Into an empty place. The sources are `root/run` and `root/other`, or others for targets of others."""
    source, another = sources_of(to)
    request = small_request(str(root / source), str(root / "jobs"), to)
    other = _outcome(root / "jobs", small_request(str(root / another), str(root / "jobs"), to))
    return Case(root, request, _outcome(root / "jobs", request), other=other)


def case_of(root: Path, request: ConvertRequest) -> Case:
    """A request of its own into an empty place."""
    return Case(root, request, _outcome(root / "jobs", request))


def overwrite_case(root: Path, to: str) -> Case:
    """Over a finished conversion of another checkpoint."""
    source, other = sources_of(to)
    first = small_request(str(root / other), str(root / "jobs"), to)
    old = _outcome(root / "jobs", first)
    before = root / "before"
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(root / "jobs", before)
    request = small_request(str(root / source), str(root / "jobs"), to, overwrite=True)
    return Case(root, request, _outcome(root / "jobs", request, keep=True), old, before, old)


def _outcome(parent: Path, request: ConvertRequest, *, keep: bool = False) -> Outcome:
    if not keep:
        shutil.rmtree(parent, ignore_errors=True)
    conversion = Conversion.prepare(request)
    conversion.run(on_progress=None, should_stop=None)
    name = name_of(request)
    commit = frozenset(f"{name}/{f.path}" for f in conversion.plan.files if f.commit)
    return Outcome(name, tree(parent), commit, conversion.plan.pointer)


def tree(parent: Path) -> Tree:
    """Every file in the target's parent."""
    if not parent.exists():
        return {}
    files = [p for p in parent.rglob("*") if p.is_file()]
    empty = [p for p in parent.rglob("*") if p.is_dir() and not any(p.iterdir())]
    return {str(p.relative_to(parent)): p.read_bytes() for p in files} | {
        f"{p.relative_to(parent)}/": b"" for p in empty
    }


def attempt(request: ConvertRequest) -> str:
    """How a run in this process ended."""
    try:
        return "recognised" if ENGINE.convert(request).already_done else "done"
    except ReshardError as error:
        return error.code


class Child:
    """A forked process that runs one conversion."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe

    def stopped(self) -> bool:
        """Wait until it hangs or ends; whether it hangs."""
        _, status = os.waitpid(self._pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return True
        self._pid = 0
        return False

    def end(self) -> str:
        """How its conversion ended."""
        return json.loads(self.wait())["end"]

    def wait(self) -> str:
        """What it said before its end; "" if it was killed."""
        if self._pid:
            os.kill(self._pid, signal.SIGCONT)
        with os.fdopen(self._pipe, "rb") as pipe:
            said = pipe.read().decode()
        if self._pid:
            os.waitpid(self._pid, 0)
        return said


def run_child(case: Case, steps: Steps) -> Child:
    """Fork; the child converts under `steps`, says how that ended, and ends."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Child(pid, reader)
    try:
        with disturbed_calls(str(case.root), steps) as calls:
            end = attempt(case.request)
        operations = [(o.number, o.name, o.path) for o in steps.done]
        os.write(writer, json.dumps({"end": end, "operations": operations, "unseen": calls.unseen}).encode())
    except Exception:  # noqa: BLE001 - no exception of a conversion is untyped: the parent judges this one
        os.write(writer, json.dumps({"end": "untyped", "problem": traceback.format_exc()}).encode())
    finally:
        os._exit(0)


def scripted(number: int, fault: Fault, code: int) -> Steps:
    """Faults of a real process: errors of the operating system, SIGKILL, SIGSTOP."""
    return Steps(
        {number: fault},
        error=lambda: OSError(code, os.strerror(code)),
        kill=lambda: os.kill(os.getpid(), signal.SIGKILL),
        hang=lambda: os.kill(os.getpid(), signal.SIGSTOP),
    )


def disturbed(case: Case, number: int, fault: Fault, code: int = errno.EIO) -> tuple[str, list[str]]:
    """One trial of a fault after which nobody is left: how it ended, and what was wrong."""
    case.prepare()
    said = run_child(case, scripted(number, fault, code)).wait()
    facts = json.loads(said) if said else {"end": "killed"}
    end = facts["end"]
    problems = [_seen(case), facts.get("problem")]
    twin = case.root / "twin"
    shutil.rmtree(twin, ignore_errors=True)
    if case.parent.exists():
        shutil.copytree(case.parent, twin)
    problems += _collected(case)
    shutil.rmtree(case.parent, ignore_errors=True)
    if twin.exists():
        twin.rename(case.parent)
    problems += _resumed(case)
    return end, [p for p in problems if p]


def hung(case: Case, number: int, meanwhile: Meanwhile) -> tuple[str, list[str]]:
    """One trial of a process that is stopped at an operation while another one acts, and then goes on."""
    case.prepare()
    zombie = run_child(case, scripted(number, Fault.HANG, errno.EIO))
    assert zombie.stopped()
    problems = [_seen(case)]
    try:
        wanted, found = meanwhile(case)
        problems += found
    finally:
        end = json.loads(zombie.wait())["end"]
    problems.append(_seen(case) if wanted is case.new else None)
    ENGINE.discard(case.request)
    found = tree(case.parent)
    # Both were there to the end: who overwrites, and came last, won.
    won = [wanted, case.new] if end == "done" and (case.request.overwrite or wanted is None) else [wanted]
    whole = any(w is not None and w.is_all_of(found) for w in won) or (wanted is None and not strays(found))
    problems.append(None if whole else f"in the end: {sorted(found)}")
    return end, [p for p in problems if p]


def finish(case: Case) -> tuple[Outcome | None, list[str | None]]:
    """Another process runs the same request: to its end, or it is told that the target is busy."""
    end = attempt(case.request)
    allowed = {"done", "recognised", "request.target_busy"}
    return case.new, [None if end in allowed else f"the other run ended with {end}"]


def replace(case: Case) -> tuple[Outcome | None, list[str | None]]:
    """Someone converts another checkpoint into the same target, `--overwrite`."""
    url = f"{case.request.source.url.removesuffix('run')}other"
    other = case.request.model_copy(update={"source": SourceSpec(url=url), "overwrite": True})
    end = attempt(other)
    assert case.other is not None
    return case.other, [None if end in {"done", "recognised"} else f"the other run ended with {end}"]


Meanwhile = Callable[[Case], tuple[Outcome | None, list[str | None]]]


def _seen(case: Case) -> str | None:
    return partial_result(tree(case.parent), case.new, old=case.old)


def _collected(case: Case) -> list[str | None]:
    ENGINE.discard(case.request)
    found = tree(case.parent)
    here = case.new.below(found)
    partly = here and not case.new.is_whole_in(found) and not (case.old and case.old.is_whole_in(found))
    return [
        f"after discard: {left}" if (left := strays(found)) else None,
        f"after discard: a part of the target: {sorted(here)}" if partly else None,
        partial_result(found, case.new, old=case.old),
    ]


def _resumed(case: Case) -> list[str | None]:
    end = attempt(case.request)
    found = tree(case.parent)
    return [
        None if end in {"done", "recognised"} else f"the resumed run ended with {end}",
        difference(found, case.new),
    ]
