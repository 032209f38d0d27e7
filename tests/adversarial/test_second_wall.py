"""With the bounds of the interpreter opened, the limited process around it still ends, and what started it lives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from adversarial.corpus import carriers
from reshard.choices import TargetFormat
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest, Inspection
from reshard.options import SourceSpec
from reshard_jobs.limits import Roots
from reshard_service.probes.prober import Prober, ProbeTimeout
from reshard_service.settings import ServiceSettings
from reshard_worker.protocol import Command, Failure, parse_message

OPENED = dict.fromkeys(
    ("RESHARD_PICKLE_OPCODES", "RESHARD_PICKLE_NODE_BYTES", "RESHARD_PICKLE_STREAM_BYTES"), str(10**15)
)
WALL_BYTES = 512 << 20
DEADLINE_S = 3.0


@pytest.fixture
def hungry(tmp_path: Path) -> Path:
    """A skeleton of two megabytes whose values take half a gigabyte."""
    carriers.payload(b"](" + b"}" * 2_000_000 + b"e")(tmp_path / "hungry")
    return tmp_path / "hungry"


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A skeleton that takes half a minute to read."""
    carriers.payload(b"N0" * 20_000_000 + b"N")(tmp_path / "endless")
    return tmp_path / "endless"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wall 1 is open: probes and runners inherit the environment."""
    for key, value in OPENED.items():
        monkeypatch.setenv(key, value)


def _probes() -> Iterator[psutil.Process]:
    """Processes below this one that look at checkpoints."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "reshard_service.probes.process" in " ".join(process.cmdline()):
                yield process


def _prober() -> Prober:
    return Prober(ServiceSettings(probe_memory_bytes=WALL_BYTES))


def _with_one_prober(*works: Callable[[Prober], object]) -> list[object]:
    """What each look ended with, one after another in one service."""

    async def look() -> list[object]:
        prober = _prober()
        ended: list[object] = []
        for work in works:
            try:
                ended.append(await work(prober))  # pyright: ignore[reportGeneralTypeIssues]
            except (ReshardError, ProbeTimeout) as error:
                ended.append(error)
        await prober.close()
        return ended

    return asyncio.run(look())


def _inspect(source: Path, limit_s: float) -> Callable[[Prober], object]:
    return lambda prober: prober.inspect(SourceSpec(url=str(source)), tenant="", roots=Roots(), limit_s=limit_s)


@pytest.mark.usefixtures("opened")
def test_a_probe_that_needs_too_much_memory(hungry: Path, tmp_path: Path) -> None:
    carriers.plain(tmp_path / "good")
    stopped, after = _with_one_prober(_inspect(hungry, 60), _inspect(tmp_path / "good", 60))
    assert isinstance(stopped, ReshardError)
    assert stopped.code == "checkpoint.too_large"
    assert isinstance(after, Inspection), "the service answers the next caller"


@pytest.mark.usefixtures("opened")
def test_a_probe_that_takes_too_long(endless: Path, tmp_path: Path) -> None:
    carriers.plain(tmp_path / "good")
    before, started = set(_probes()), time.monotonic()  # services of other test files may have some
    stopped, after = _with_one_prober(_inspect(endless, DEADLINE_S), _inspect(tmp_path / "good", 60))
    assert isinstance(stopped, ProbeTimeout)
    assert isinstance(after, Inspection)
    assert time.monotonic() - started < DEADLINE_S + 30
    assert not set(_probes()) - before


@pytest.mark.usefixtures("opened")
def test_a_runner_that_needs_too_much_memory(hungry: Path, tmp_path: Path) -> None:
    request = ConvertRequest(source=SourceSpec(url=str(hungry)), target=str(tmp_path / "o"), to=TargetFormat.UNIVERSAL)
    command = Command(op="convert", request=request, memory_bytes=WALL_BYTES)
    done = subprocess.run(
        [sys.executable, "-m", "reshard_worker.runner"],
        input=command.line(), capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    last = parse_message(done.stdout.splitlines()[-1])
    assert isinstance(last, Failure)
    assert last.problem.code == "checkpoint.too_large"
    assert not (tmp_path / "o").exists()


def test_the_first_wall_stops_them_too(hungry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: closed again, wall 1 answers with its own code, long before wall 2."""
    monkeypatch.setenv("RESHARD_PICKLE_NODE_BYTES", str(64 << 20))
    (stopped,) = _with_one_prober(_inspect(hungry, 60))
    assert isinstance(stopped, ReshardError)
    assert stopped.code == "pickle.too_much_memory"
