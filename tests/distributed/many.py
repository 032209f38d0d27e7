"""Workers of one conversion as forked processes, whose reads and checks are counted where they are made."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from house.waiting import wait_until
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest
from reshard.shared_work import SharedWork
from reshard_engine.distributed.checks import CheckItem, Checks
from reshard_engine.operations.shared_checks import AgreementChecks, FullChecks
from reshard_engine.storage.local import LocalStore
from reshard_engine.storage.locations import WRITABLE, service_store
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.storage.urls import scheme_of

CALL_S = 0.04
"""Each read waits for so long, as for a network: waiting is what the workers divide."""
MEETING_S = 60.0
LEASE_S = 10.0
"""A worker that is silent for so long counts as dead."""


@dataclass(frozen=True)
class Ended:
    """The last words of one worker, and the bytes that it read."""

    status: int
    """The exit status; negative for a signal."""
    result: Mapping[str, Any]
    """A `ConvertResult`, or the problem of an error with its `code`."""
    read_bytes: Mapping[str, int]
    """Bytes of the source (`source`) and of the target before the commit (`target`)."""
    checks: Sequence[tuple[int, int]]
    """(wave, number) of the checks that it finished, in order."""
    costs: Sequence[int]
    """The cost of each of these checks, in bytes."""


def convert_together(
    request: ConvertRequest,
    directory: Path,
    count: int,
    *,
    disturb: Callable[[int], None] = lambda number: None,
    helpers: Sequence[int] = (),
    meet: bool = False,
) -> list[Ended]:
    """Convert with so many workers, each of which calls `disturb` first; returns what they said.

    A count of 0 is a plain conversion. The workers in `helpers` only help, as under a service. With `meet` no worker
    finishes its first check before every worker has begun one, however late the machine starts some of them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    met = count if meet else 0
    pids = [_forked(request, directory, n, count, disturb, n in helpers, met) for n in range(max(1, count))]
    return [_waited(pid, directory, number) for number, pid in enumerate(pids)]


def _waited(pid: int, directory: Path, number: int) -> Ended:
    until = time.monotonic() + 120
    while (status := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    answer, log = directory / f"{number}.json", directory / f"{number}.log"
    said = json.loads(answer.read_text()) if answer.exists() else {"result": {}, "read": {}}
    lines = log.read_text().splitlines() if log.exists() else []
    made = [tuple(map(int, line.split())) for line in lines]
    checks, costs = [(wave, index) for wave, index, _ in made], [cost for _, _, cost in made]
    return Ended(os.waitstatus_to_exitcode(status[1]), said["result"], said["read"], checks, costs)


def _forked(
    request: ConvertRequest,
    directory: Path,
    number: int,
    count: int,
    disturb: Callable[[int], None],
    helps: bool,
    met: int,
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        read: Counter[str] = Counter()
        scheme, source = scheme_of(request.source.url), request.source.url.rpartition("://")[2] + "/"
        for store in (LocalStore, *([service_store(scheme)] if scheme in WRITABLE else [])):
            _count_reads(store, source, read)
        for checks in (AgreementChecks, FullChecks):
            _log_checks(checks, directory / f"{number}.log", met)
        disturb(number)
        work = SharedWork(number=number, count=count, lease_s=LEASE_S) if count else None
        engine = load_engine()
        try:
            run = engine.help if helps else engine.convert
            result = run(request, work=work).model_dump(mode="json")
            status = 0
        except ReshardError as error:
            result = error.to_problem()
            status = 3
        (directory / f"{number}.json").write_text(json.dumps({"result": result, "read": dict(read)}))
    finally:
        os._exit(status)


def _count_reads(store: type[Any], source: str, read: Counter[str]) -> None:
    real = store.read_into

    def read_into(self: Any, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        if self.scheme == "file" or ".reshard" not in info.path:  # the texts of workers are not counted
            time.sleep(CALL_S)
            read["source" if info.path.startswith(source) else "target"] += len(buffer)
        real(self, info, offset, buffer)

    store.read_into = read_into


def _log_checks(checks: type[Checks], log: Path, met: int) -> None:
    real, began = checks.perform, log.with_suffix(".began")

    def perform(self: Any, item: CheckItem) -> Any:
        if met:
            began.touch()
            wait_until(
                lambda: len([*log.parent.glob("*.began")]) == met,
                timeout_s=MEETING_S,
                what=lambda: f"workers that began a check: {[p.stem for p in log.parent.glob('*.began')]} of {met}",
            )
        result = real(self, item)
        with log.open("a") as file:
            file.write(f"{item.wave} {item.index} {item.cost_bytes}\n")
        return result

    mock.patch.object(checks, "perform", perform).start()
