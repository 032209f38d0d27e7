"""The engine process that stays: jobs share its imports and nothing else, and it ends with its worker."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from house.waiting import wait_until
from reshard.choices import JobState, TargetFormat
from reshard.models.jobs import ConvertRequest, Job
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.limits import Roots
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.store import JobStore
from reshard_service.probes.prober import Prober
from reshard_service.settings import ServiceSettings
from reshard_worker.child import Runners
from reshard_worker.settings import WorkerSettings
from reshard_worker.supervisor import Supervisor
from servers.process import ServerProcess
from servers.scripted import scripted, units_done
from servers.stack import Stack, end_tree, scripted_runner, tree_of

SCRIPTED = tuple(shlex.split(scripted_runner()["RESHARD_RUNNER_COMMAND"]))
DATA = Path(__file__).parent.parent / "data" / "zero3_tiny"


class Workplace:
    """A supervisor that keeps its engine process, and jobs straight in their database."""

    def __init__(self, directory: Path, argv: tuple[str, ...]) -> None:
        self.directory = directory
        self._database = Database(f"sqlite:///{directory}/jobs.db")
        self._store = JobStore(self._database)
        self._leases = Leases(self._database, lease_s=30)
        self._argv = argv
        self.runners = Runners(argv, warm=True)

    def close(self) -> None:
        self.runners.close()
        self._database.close()

    def run(self, name: str, source: str = "", *, memory: int | None = None, **script: object) -> Job:
        spec = SourceSpec(url=source or scripted(**script))
        request = ConvertRequest(source=spec, target=str(self.directory / name), to=TargetFormat.UNIVERSAL)
        job = self._store.create(request, max_attempts=1)
        settings = WorkerSettings(runner_command=self._argv, engine_memory_bytes=memory)
        Supervisor(self._leases, settings, name="test", runners=self.runners).run_next()
        return self._store.get(job.id)

    def runs(self, name: str, **script: object) -> int:
        """The process that did a job."""
        assert self.run(name, **script).state is JobState.SUCCEEDED
        ((_, pid),) = set(units_done(self.directory / name))
        return pid

    def kept(self) -> psutil.Process:
        """The process that stays."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            # A process that has just been started may show no command line yet, and one that has ended shows none.
            found.clear()
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    if any(w in child.cmdline() for w in self._argv[-1:]):
                        found.append(child)
            return bool(found)

        wait_until(is_there)
        (process,) = found
        return process


@pytest.fixture
def place(tmp_path: Path) -> Generator[Workplace]:
    made = Workplace(tmp_path, SCRIPTED)
    yield made
    made.close()


def test_each_job_has_a_process_of_its_own(place: Workplace) -> None:
    place.runners.prepare()
    before = place.kept()
    jobs = [place.runs(f"out{number}", units=1) for number in range(3)]
    assert place.kept() == before
    assert len({before.pid, *jobs}) == 4
    wait_until(lambda: before.children() == [])

    # A job that fails with a typed error takes nothing with it.
    refused = place.run("refused", fail="checkpoint.incomplete")
    assert refused.error is not None
    assert refused.error.code == "checkpoint.incomplete"
    # A memory limit is that of one job.
    walled = place.run("walled", hog=1 << 30, memory=512 << 20)
    assert walled.error is not None
    assert walled.error.code == "checkpoint.too_large"
    assert place.run("free", hog=1 << 30, memory=0).state is JobState.SUCCEEDED
    assert place.kept() == before


def test_a_job_that_dies_is_told_as_before_and_the_next_one_runs(place: Workplace) -> None:
    number = signal.SIGKILL
    crashed = place.run("crash", crash=int(number))
    assert crashed.error is not None
    last = crashed.error.details["last_error"]
    assert (last["code"], last["details"]["signal"]) == ("job.lost", int(number))
    place.runs("after", units=1)
    # The one that waits for work dies: the next job starts another one.
    idle = place.kept()
    idle.kill()
    idle.wait(5)
    place.runs("last", units=1)
    assert place.kept() != idle


def test_an_operators_wrapper_stays_around_the_engine(tmp_path: Path) -> None:
    place = Workplace(tmp_path, ("nice", "-n", "7", *SCRIPTED))
    try:
        place.runs("first", units=1)
        assert place.kept().nice() == os.nice(0) + 7
        # A wrapper that passes no variables on: a new process for each job, as without.
        bare = Workplace(tmp_path, ("env", "-i", *SCRIPTED))
        assert bare.runs("second", units=1) != bare.runs("third", units=1)
        bare.close()
    finally:
        place.close()


def test_the_real_engine_converts_twice_in_one_place(tmp_path: Path) -> None:
    place = Workplace(tmp_path, WorkerSettings().runner_command)
    try:
        shutil.copytree(DATA, tmp_path / "ck")
        for name in ("one", "two"):
            ended = place.run(name, str(tmp_path / "ck"))
            assert ended.state is JobState.SUCCEEDED, ended.error
    finally:
        place.close()


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def engines_of(worker: ServerProcess) -> list[psutil.Process]:
    return [p for p in tree_of(worker.pid) if any(word.endswith("scripted.py") for word in p.cmdline())]


def test_no_engine_outlives_its_worker(stack: Stack, tmp_path: Path) -> None:
    database = Database(stack.database_url)
    store = JobStore(database)
    for turn, (number, busy) in enumerate([(signal.SIGKILL, True), (signal.SIGTERM, False)]):
        worker = stack.start_worker({"RESHARD_WARM_ENGINE": "1"})
        try:
            # Before the first job.
            wait_until(lambda worker=worker: len(engines_of(worker)) == 1)
            if busy:
                source = SourceSpec(url=scripted(units=4000, unit_s=0.05))
                place = tmp_path / f"out{turn}"
                store.create(ConvertRequest(source=source, target=str(place), to=TargetFormat.UNIVERSAL))
                wait_until(lambda place=place: len(units_done(place)) > 1)
                assert len(engines_of(worker)) == 2
            family = tree_of(worker.pid)
            worker.popen.send_signal(number)
            wait_until(lambda family=family: not any(map(alive, family)))
        finally:
            end_tree(worker)
            for job in store.list().jobs:
                if not job.done:
                    store.cancel(job.id)
    database.close()


def test_probes_share_imports_and_are_replaced_when_they_die() -> None:
    def probes() -> list[psutil.Process]:
        mine = psutil.Process().children()
        return [p for p in mine if any("reshard_service.probes.process" in word for word in p.cmdline())]

    async def look() -> None:
        prober = Prober(ServiceSettings())
        inspect: Callable[[], Coroutine[object, object, object]] = lambda: prober.inspect(  # noqa: E731
            SourceSpec(url=str(DATA)), tenant="", roots=Roots(), limit_s=60
        )
        await prober.prepare()
        (first,) = probes()
        assert await inspect() == await inspect()
        await asyncio.gather(*(inspect() for _ in range(6)))
        left = probes()
        assert first in left
        assert len(left) <= ServiceSettings().probes
        for process in left:
            process.kill()
        await inspect()
        await prober.close()

    asyncio.run(look())
    assert probes() == []


FIRST_PROCESS = """
import subprocess, sys
child = "from reshard_engine.warm_process import die_with_parent; die_with_parent(); print('lives')"
sys.exit(subprocess.run([sys.executable, "-c", child]).returncode)
"""
ORPHAN = """
import subprocess, sys
child = "import time; time.sleep(1); from reshard_engine import warm_process; warm_process.die_with_parent(); print(1)"
subprocess.Popen([sys.executable, "-c", child])
"""


def test_the_first_process_of_a_container_has_living_children(tmp_path: Path) -> None:
    # As in the manifests for Kubernetes: the container has no init, and the worker is its process 1.
    unshare = shutil.which("unshare")
    inside = [unshare or "unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if unshare is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("this host allows no PID namespace")
    child = subprocess.run([*inside, sys.executable, "-c", FIRST_PROCESS], capture_output=True, text=True, timeout=180)
    assert (child.returncode, child.stdout) == (0, "lives\n"), child.stderr
    # An orphan of which the first process is another program ends.
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    words = shlex.join([sys.executable, str(script)])
    lost = subprocess.run([*inside, "sh", "-c", f"{words}; sleep 2"], capture_output=True, text=True, timeout=180)
    assert (lost.returncode, lost.stdout) == (0, ""), lost.stderr
