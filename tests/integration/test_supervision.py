"""What a supervisor allows its engine process: places, memory, time to plan; and what it makes of a bug."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select

from house.database_time import let_pass
from house.requests import asked
from reshard.choices import JobKind, JobState, TargetFormat
from reshard.errors import RequestError
from reshard.models.jobs import ConvertRequest, ConvertResult, FileEntry, Job
from reshard.options import SourceSpec
from reshard_engine.warm_process import engine_memory_bytes
from reshard_jobs.database import Database
from reshard_jobs.limits import Roots
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.nodes import Nodes
from reshard_jobs.queue.refusals import streak
from reshard_jobs.queue.store import JobStore
from reshard_jobs.settings import JobSettings
from reshard_jobs.tables import RefusalRow
from reshard_worker import supervisor as supervisor_module
from reshard_worker.host_faults import HostWatch
from reshard_worker.protocol import Command, Result, parse_message
from reshard_worker.settings import WorkerSettings, engine_command
from reshard_worker.supervisor import Outcome, Supervisor
from servers.scripted import journal_of, scripted
from servers.stack import scripted_runner

DATA = Path(__file__).parent.parent / "data" / "zero3_tiny"
SCRIPTED = WorkerSettings(runner_command=tuple(shlex.split(scripted_runner()["RESHARD_RUNNER_COMMAND"])))


@dataclass
class Workplace:
    """Jobs straight in their database, without an API that could have judged them."""

    database: Database
    store: JobStore
    leases: Leases
    directory: Path

    def create(self, source: str, target: str, *, kind: JobKind = JobKind.CONVERT, **options: Any) -> Job:
        request = asked(source=SourceSpec(url=source), target=target, **{"to": TargetFormat.UNIVERSAL, **options})
        return self.store.create(request, kind=kind)

    def see_through(self, job: Job, settings: WorkerSettings) -> Job:
        Supervisor(self.leases, settings, name="test").run_next()
        return self.store.get(job.id)

    def failure(self, job: Job, settings: WorkerSettings) -> str:
        ended = self.see_through(job, settings)
        assert ended.state is JobState.FAILED
        assert ended.error is not None
        return ended.error.code


@pytest.fixture
def place(tmp_path: Path) -> Generator[Workplace]:
    database = Database(f"sqlite:///{tmp_path}/jobs.db")
    yield Workplace(database, JobStore(database), Leases(database, lease_s=30), tmp_path)
    database.close()


def rooted(settings: WorkerSettings, *roots: Path) -> WorkerSettings:
    return settings.model_copy(update={"jobs": JobSettings(roots=Roots(tuple(map(str, roots))))})


def test_a_worker_obeys_its_own_roots(place: Workplace) -> None:
    root, secret = place.directory / "root", place.directory / "secret"
    root.mkdir()
    secret.mkdir()
    (root / "link").symlink_to(secret)
    settings = rooted(SCRIPTED, root)
    for source in (f"{root}/link/units=1", f"{secret}/units=1", f"file://{root}/ck?x/../../secret/units=1", "units=1"):
        assert place.failure(place.create(source, f"{root}/out"), settings) in {
            "request.root_forbidden",
            "request.invalid",
        }
    for target in (f"{root}/link/out", f"{secret}/out", str(root)):
        assert place.failure(place.create(f"{root}/units=1", target), settings) == "request.root_forbidden"
    assert not list(secret.iterdir())


def test_a_link_that_changes_after_submission_does_not_lead_out(place: Workplace) -> None:
    root, secret = place.directory / "root", place.directory / "secret"
    (root / "in").mkdir(parents=True)
    secret.mkdir()
    (root / "link").symlink_to(root / "in")
    job = place.create(f"{root}/units=1", f"{root}/link/out")
    (root / "link").unlink()
    (root / "link").symlink_to(secret)
    assert place.failure(job, rooted(SCRIPTED, root)) == "request.root_forbidden"


def test_the_engine_gets_the_very_places_that_were_judged(place: Workplace) -> None:
    root, heard = place.directory / "root", place.directory / "heard"
    (root / "in").mkdir(parents=True)
    (root / "link").symlink_to(root / "in")
    code = f"import sys; open({str(heard)!r}, 'w').write(sys.stdin.readline())"
    settings = rooted(SCRIPTED.model_copy(update={"runner_command": (sys.executable, "-c", code)}), root)
    job = place.create(f"file://localhost{root}/link/../in/ck/", f"{root}//link/./out/")
    assert place.failure(job, settings) == "internal.error"
    command = Command.model_validate_json(heard.read_bytes())
    assert (command.request.source.url, command.request.target) == (f"{root}/in/ck", f"{root}/in/out")
    assert command.memory_bytes == engine_memory_bytes(command.request, None) > command.request.memory_limit_bytes


def test_a_clean_up_stays_below_the_roots(place: Workplace) -> None:
    job = place.create(scripted(units=2), f"{place.directory}/out")
    claim = place.leases.claim(job.id, worker="lost")
    assert claim is not None
    journal = journal_of(job.request)
    journal.mkdir()
    place.store.cancel(job.id)
    assert place.leases.release(claim)
    ended = place.see_through(job, rooted(SCRIPTED, place.directory / "elsewhere"))
    assert ended.state is JobState.CANCELLED
    assert ended.error is not None
    assert ended.error.code == "request.root_forbidden"
    assert journal.exists()


@pytest.mark.parametrize(
    ("kind", "script"), [(JobKind.CONVERT, {"prepare_s": 60}), (JobKind.PLAN, {"plan_s": 60})], ids=["convert", "plan"]
)
def test_planning_has_a_deadline(place: Workplace, kind: JobKind, script: dict[str, object]) -> None:
    job = place.create(scripted(**script), f"{place.directory}/out", kind=kind)
    ended = place.see_through(job, SCRIPTED.model_copy(update={"planning_limit_s": 1.5}))
    assert ended.state is JobState.FAILED
    assert ended.error is not None
    assert ended.error.code == "source.too_slow"
    assert ended.attempt == 1


def test_pauses_between_attempts_grow_by_failures_alone(place: Workplace) -> None:
    settings = SCRIPTED.model_copy(update={"retry_delay_s": 100.0})
    job = place.create(scripted(units=1, fail="storage.unavailable"), f"{place.directory}/out")
    for _ in range(6):  # graceful stops of workers, as in a rolling restart
        claim = place.leases.claim(job.id, worker="leaves")
        assert claim is not None
        assert place.leases.release(claim)
    for pause_s in (100, 200):
        place.see_through(job, settings)
        let_pass(place.database, pause_s - 50)
        assert place.leases.claim(job.id, worker="early") is None
        let_pass(place.database, 51)
    failed = place.see_through(job, settings)
    assert failed.error is not None
    assert (failed.error.code, failed.error.details["attempts"]) == ("job.attempts_exhausted", 3)


def test_a_conversion_may_take_longer_than_its_plan(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    job = place.create(scripted(units=6, unit_s=0.5), f"{place.directory}/out")

    def monotonic() -> float:
        """An hour passes when the plan is made."""
        running = place.store.get(job.id).state is JobState.RUNNING
        return time.monotonic() + (3600.0 if running else 0.0)

    monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=monotonic))
    supervisor = Supervisor(place.leases, SCRIPTED.model_copy(update={"planning_limit_s": 60.0}), name="test")
    assert supervisor.run_next() is Outcome.SUCCEEDED


def test_an_engine_has_a_second_wall_around_its_memory(place: Workplace) -> None:
    hungry = scripted(hog=1 << 30)
    walled = SCRIPTED.model_copy(update={"engine_memory_bytes": 512 << 20})
    assert place.failure(place.create(hungry, f"{place.directory}/walled"), walled) == "checkpoint.too_large"
    free = SCRIPTED.model_copy(update={"engine_memory_bytes": 0})
    assert place.see_through(place.create(hungry, f"{place.directory}/free"), free).state is JobState.SUCCEEDED


@pytest.mark.parametrize(
    ("settings", "asked", "maximum"),
    [
        ({}, {"memory_limit_bytes": 10**18, "threads": 1024}, None),
        ({}, {"threads": 1024}, max(64, 4 * len(os.sched_getaffinity(0)))),
        ({"max_memory_bytes": 4 << 30}, {"memory_limit_bytes": (4 << 30) + 1}, 4 << 30),
        ({"max_threads": 3}, {"threads": 4}, 3),
    ],
)
def test_a_request_does_not_choose_its_own_wall(
    place: Workplace, settings: dict[str, int], asked: dict[str, int], maximum: int | None
) -> None:
    worker = SCRIPTED.model_copy(update={"jobs": JobSettings(**settings)})
    ended = place.see_through(place.create(scripted(), f"{place.directory}/out", **asked), worker)
    assert ended.error is not None
    assert ended.error.code == "request.above_maximum"
    assert ended.error.details["maximum"] == (maximum or ended.error.details["maximum"])
    assert str(ended.error.details["maximum"]) in ended.error.detail
    assert ended.attempt == 1


def test_a_request_that_names_no_wall_gets_the_operators() -> None:
    request = ConvertRequest(source=SourceSpec(url="/in"), target="/out", to=TargetFormat.UNIVERSAL)
    small = WorkerSettings(jobs=JobSettings(max_memory_bytes=256 << 20, max_threads=1))
    given = engine_command("convert", request, small).request
    assert (given.memory_limit_bytes, given.threads) == (256 << 20, 1)
    given = engine_command("convert", request, WorkerSettings()).request
    assert (given.memory_limit_bytes, given.threads) == (request.memory_limit_bytes, None)
    greedy = request.model_copy(update={"memory_limit_bytes": 10**18})
    assert engine_command("discard", greedy, small).op == "discard"


def test_the_wall_leaves_room_for_the_real_engine(place: Workplace) -> None:
    shutil.copytree(DATA, place.directory / "ck")
    job = place.create(
        f"{place.directory}/ck", f"{place.directory}/out", to=TargetFormat.SAFETENSORS, dtype="bf16", threads=64
    )
    ended = place.see_through(job, WorkerSettings())
    assert ended.state is JobState.SUCCEEDED, ended.error


def test_a_bug_is_told_to_the_operator_and_not_to_the_record(
    place: Workplace, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = place.see_through(place.create(scripted(bug=1), f"{place.directory}/out"), SCRIPTED)
    assert ended.error is not None
    assert ended.error.code == "internal.error"
    assert "secret" not in ended.model_dump_json()
    assert "ZeroDivisionError" not in ended.model_dump_json()
    assert "ZeroDivisionError: a bug with a secret in its text" in capfd.readouterr().err


def test_settings_of_the_walls() -> None:
    assert WorkerSettings.from_env({}).engine_memory_bytes is None
    found = WorkerSettings.from_env({"RESHARD_ENGINE_MEMORY": "8GiB", "RESHARD_PLANNING_LIMIT_S": "60"})
    assert (found.engine_memory_bytes, found.planning_limit_s) == (8 << 30, 60.0)
    assert WorkerSettings.from_env({"RESHARD_ENGINE_MEMORY": "0"}).engine_memory_bytes == 0
    for name in ("RESHARD_ENGINE_MEMORY", "RESHARD_PLANNING_LIMIT_S"):
        with pytest.raises(RequestError, match=r"request\.invalid"):
            WorkerSettings.from_env({name: "lots"})


def test_names_that_are_no_text_reach_the_record_escaped(place: Workplace) -> None:
    # The error's fix names what is there: a folder whose name is not UTF-8.
    checkpoint = place.directory / "ck"
    shutil.copytree(DATA, checkpoint)
    (tag,) = (path for path in checkpoint.iterdir() if path.is_dir())
    tag.rename(checkpoint / os.fsdecode(b"tag\xff"))
    ended = place.see_through(place.create(str(checkpoint), f"{place.directory}/out"), WorkerSettings())
    assert ended.error is not None
    assert ended.error.code == "checkpoint.bad_latest"
    assert "tag\\udcff" in ended.error.fix
    ended.model_dump_json()


def test_a_result_with_names_that_are_no_text_crosses_the_pipe() -> None:
    files = (FileEntry(path="a\udcff", size_bytes=1),)
    result = ConvertResult(
        target="/out", to=TargetFormat.UNIVERSAL, files=files, read_bytes=1, write_bytes=1, seconds={}, plan_digest=""
    )
    found = parse_message(Result(converted=result).line())
    assert isinstance(found, Result)
    assert found.converted is not None
    assert found.converted.files[0].path == "a\\udcff"
    assert replace_files(found.converted) == replace_files(result)


def replace_files(result: ConvertResult) -> ConvertResult:
    return result.model_copy(update={"files": ()})


NO_THREADS = """
import threading
from reshard_worker import runner
# A stack larger than the address space: the system refuses every thread, as it does at a limit on processes.
threading.stack_size(1 << 47)
raise SystemExit(runner.main())
"""


def test_a_host_without_threads_passes_its_job_on(place: Workplace) -> None:
    shutil.copytree(DATA, place.directory / "in")
    job = place.create(f"{place.directory}/in", f"{place.directory}/out", threads=2)
    nodes = Nodes(place.database, lease_s=30)
    exhausted = WorkerSettings(runner_command=(sys.executable, "-c", NO_THREADS))
    for name in ("bad", "good"):
        nodes.seen(name)
    host = HostWatch(nodes, "bad", pause_s=10)
    assert Supervisor(place.leases, exhausted, name="bad", host=host).run_next() is Outcome.HANDED_OVER
    waiting = place.store.get(job.id)
    assert waiting.state is JobState.QUEUED
    with place.database.read() as session:
        assert session.scalars(select(RefusalRow.code)).all() == ["job.host_exhausted"]
        assert streak(session, "bad") == 1, "the worker is marked"
    assert Supervisor(place.leases, WorkerSettings(), name="bad").run_next() is None, "it does not try the job again"
    ended = place.store.get(job.id) if Supervisor(place.leases, WorkerSettings(), name="good").run_next() else waiting
    assert ended.state is JobState.SUCCEEDED, ended.error


def test_a_host_on_which_no_engine_starts_passes_its_job_on(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    place.create("/in", "/out")
    nodes = Nodes(place.database, lease_s=30)
    for name in ("bad", "good"):
        nodes.seen(name)

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    host = HostWatch(nodes, "bad", pause_s=10)
    assert Supervisor(place.leases, SCRIPTED, name="bad", host=host).run_next() is Outcome.HANDED_OVER
