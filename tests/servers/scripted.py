"""An engine that follows a script, for tests of what surrounds the engine. Never used by the product.

The script is the last part of the source URL: `/scripted/units=20,unit_s=0.1,fail=storage.unavailable`.
It "converts" to a local directory: one file per unit in a journal beside the target, then, at its
commit, the target itself. A finished unit is never done again. With `held=3` it does three units and
waits for `release`.

Entries: `python scripted.py` is a runner process; `python scripted.py probe ...` a probe; and
`servers.scripted:create_app` an API whose probes it answers.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from reshard.errors import JobError, RequestError, class_of
from reshard.installed_formats import target_names
from reshard.models.jobs import (
    ConvertRequest,
    ConvertResult,
    FileEntry,
    Inspection,
    PlanSummary,
    Progress,
    VerifyReport,
)
from reshard.models.resume import RunLaunch
from reshard.options import SourceSpec
from reshard.shared_work import SharedWork

UNIT_BYTES = 1000


class ScriptedEngine:
    """Does what the source URL says."""

    def inspect(self, source: SourceSpec, *, launch: RunLaunch | None = None) -> Inspection:
        _look(_script(source))
        return Inspection(
            url=source.url,
            tag=None,
            format="scripted",
            framework_version=None,
            zero_stage=None,
            world={},
            step=None,
            param_groups=0,
            parameters=0,
            parameter_elems=0,
            optimizer_states=(),
            dtypes=(),
            files=0,
            total_bytes=0,
            foreign_globals=(),
            warnings=(),
            tensors=(),
        )

    def plan(self, request: ConvertRequest) -> PlanSummary:
        script = _script(request.source)
        _look(script)
        if request.to not in target_names():
            # As the real one does: the API leaves the check to it, because an engine may know more targets.
            raise RequestError("request.invalid", f"{request.to} is not a known target", fix="change it")
        time.sleep(float(script.get("plan_s", 0)))
        units = int(script.get("units", 4))
        return PlanSummary(
            digest="scripted",
            source_format="scripted",
            source_url=request.source.url,
            tag=None,
            target=request.target,
            to=request.to,
            tensors=0,
            files=(FileEntry(path="output", size_bytes=units * UNIT_BYTES),),
            units=units,
            read_bytes=0,
            write_bytes=units * UNIT_BYTES,
            peak_memory_bytes=0,
        )

    def convert(
        self,
        request: ConvertRequest,
        *,
        work: SharedWork | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_plan: Callable[[str, int], None] | None = None,
        abandoned: Collection[str] = (),
    ) -> ConvertResult:
        del work, abandoned  # it has nothing for helpers
        script = _script(request.source)
        units = int(script.get("units", 4))
        report = on_progress or _ignore
        journal, target = journal_of(request), Path(request.target)
        report(Progress(phase="planning"))
        time.sleep(float(script.get("prepare_s", 0)))
        if on_plan is not None:
            # A worker of the release before is told no bytes.
            told = ("scripted", int(script.get("writes", units * UNIT_BYTES)))
            on_plan(*told[: len(inspect.signature(on_plan).parameters)])
        journal.mkdir(parents=True, exist_ok=True)
        if "hog" in script:
            bytearray(int(script["hog"]))
        stop = should_stop if should_stop is not None and "deaf" not in script else _never
        for unit in range(units):
            while not stop() and unit == int(script.get("held", -1)) and not _release_of(journal).exists():
                time.sleep(0.02)
            if stop():
                raise JobError("job.cancelled", "stopped between units")
            self._unit(script, journal, unit)
            done = (unit + 1) * UNIT_BYTES
            report(Progress(phase="running", bytes_done=done, bytes_total=units * UNIT_BYTES, units_done=unit + 1))
        report(Progress(phase="verifying", bytes_done=units * UNIT_BYTES, bytes_total=units * UNIT_BYTES))
        time.sleep(float(script.get("verify_s", 0)))
        report(Progress(phase="committing", bytes_done=units * UNIT_BYTES, bytes_total=units * UNIT_BYTES))
        time.sleep(float(script.get("commit_s", 0)))
        body = b"".join((journal / f"unit{unit}").read_bytes() for unit in range(units))
        target.mkdir(parents=True, exist_ok=True)
        (target / "output").write_bytes(body)
        with (target / "commits").open("a") as commits:
            commits.write(f"{os.getpid()}\n")
        return ConvertResult(
            target=request.target,
            to=request.to,
            files=(FileEntry(path="output", size_bytes=len(body)),),
            read_bytes=0,
            write_bytes=len(body),
            seconds={},
            plan_digest="scripted",
        )

    def verify(self, target: str, *, profile: str | None = None, sample: float | None = None) -> VerifyReport:
        del profile, sample
        return VerifyReport(target=target, files=1, read_bytes=0, ok=True, problems=(), seconds=0.0)

    def discard(self, request: ConvertRequest, **_limits: Any) -> None:
        shutil.rmtree(journal_of(request), ignore_errors=True)

    def _unit(self, script: dict[str, str], journal: Path, unit: int) -> None:
        done = journal / f"unit{unit}"
        if done.exists():
            return
        time.sleep(float(script.get("unit_s", 0)))
        if unit == int(script.get("at", 0)):
            self._misbehave(script, journal)
        done.write_bytes(f"unit {unit}".encode().ljust(UNIT_BYTES, b"."))
        with (journal.parent / f"{journal.name}.log").open("a") as log:
            log.write(f"{unit} {os.getpid()}\n")

    def _misbehave(self, script: dict[str, str], journal: Path) -> None:
        times = len(list(journal.glob("failed*")))
        if times >= int(script.get("times", 1000)):
            return
        (journal / f"failed{times}").touch()
        if code := script.get("fail"):
            raise class_of(code)(code, f"scripted: {code}", fix="change the script")
        if "crash" in script:
            os.kill(os.getpid(), int(script["crash"]))
        if "bug" in script:
            raise ZeroDivisionError("a bug with a secret in its text")


def scripted(**script: Any) -> str:
    """A source URL with a script."""
    return "/scripted/" + ",".join(f"{name}={value}" for name, value in script.items())


def journal_of(request: ConvertRequest) -> Path:
    """Where the finished units of a request are."""
    target = Path(request.target)
    return target.parent / f".{target.name}.journal"


def release(target: Path) -> None:
    """Let a script for a target that is `held` go on, now and in later attempts."""
    _release_of(target.parent / f".{target.name}.journal").touch()


def units_done(target: Path) -> list[tuple[int, int]]:
    """(unit, process id) of every unit that was done for a target, in order."""
    log = target.parent / f".{target.name}.journal.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(unit), int(pid)) for unit, pid in (line.split() for line in lines)]


def _script(source: SourceSpec) -> dict[str, str]:
    words = [word.partition("=") for word in source.url.rpartition("/")[2].split(",") if word]
    return {name: value for name, _, value in words}


def _look(script: dict[str, str]) -> None:
    time.sleep(float(script.get("inspect_s", 0)))
    if "eat" in script:
        bytearray(int(script["eat"]))
    if "inspect_crash" in script:
        os.kill(os.getpid(), int(script["inspect_crash"]))
    if code := script.get("refuse"):
        raise class_of(code)(code, f"scripted: {code}", fix="change the script")


def _release_of(journal: Path) -> Path:
    return journal.parent / f"{journal.name}.released"


def _never() -> bool:
    return False


def _ignore(_progress: Progress) -> None:
    return


def create_app() -> Any:
    """An API whose probes ask the scripted engine."""

    from reshard_service.app import create_app as create
    from reshard_service.settings import ServiceSettings

    command = (sys.executable, "-P", __file__, "probe")
    return create(ServiceSettings.from_env().model_copy(update={"probe_command": command}))


def main() -> int:
    """A runner or a probe with the scripted engine in the engine's place."""
    if sys.argv[1:2] == ["probe"]:
        from reshard_service.probes import process

        del sys.argv[1]
        process.load_engine = ScriptedEngine
        return process.main()
    from reshard_worker import runner

    runner.load_engine = ScriptedEngine
    return runner.main()


if __name__ == "__main__":
    sys.exit(main())
