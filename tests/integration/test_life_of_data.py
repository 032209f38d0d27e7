"""Leftovers of jobs in and beside their targets, and who removes them: the real engine on a disk and in stores."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import gpt_parameters, write_zero_checkpoint

from house.database_time import let_pass
from house.expected import some
from house.requests import asked
from house.tiers import STORES, rest_full
from reshard.choices import JobState, TargetFormat
from reshard.engine import load_engine
from reshard.errors import JobError, RequestError, from_problem
from reshard.models.jobs import ConvertRequest, Job
from reshard.options import SourceSpec
from reshard_engine.execute.sinks import leftovers
from reshard_jobs.database import Database
from reshard_jobs.queue.discards import Discards
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.nodes import Nodes
from reshard_jobs.queue.reaper import Reaper, Retention
from reshard_jobs.queue.store import JobStore
from reshard_jobs.settings import JobSettings
from reshard_worker import discarding
from reshard_worker.host_faults import HostWatch
from reshard_worker.settings import WorkerSettings
from reshard_worker.supervisor import Outcome, Supervisor
from servers.fixtures import started
from servers.stores import ObjectServer

RUNNER = (sys.executable, "-P", str(Path(__file__).parent.parent / "servers" / "failing_runner.py"))
PART_BYTES = 5 << 20
KEEP_S = 3600.0


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two ZeRO-3 checkpoints of about 60 MB with the same parameters and other values."""
    root = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("run", "other")):
        write_zero_checkpoint(root / name, gpt_parameters(256, 1, 16_000), stage=3, ranks=2, seed=seed)
    return root / "run", root / "other"


@dataclass
class Place:
    """A worker of one database, whose engines fail after three units while the file `healed` does not exist."""

    database: Database
    parent: str
    """The directory or prefix of targets."""
    healed: Path
    look: Callable[[], list[str]]
    """Everything in and beside the targets, uploads included."""
    write: Callable[[str, bytes], None] = lambda _name, _data: None
    """Writes an object beside the targets, past the engine."""

    def __post_init__(self) -> None:
        self.store = JobStore(self.database)
        self.leases = Leases(self.database, lease_s=2.0, keep_failed_s=KEEP_S)
        self.discards = Discards(self.database, lease_s=2.0)
        jobs = JobSettings(lease_s=2.0, heartbeat_s=0.5, keep_failed_s=KEEP_S)
        settings = WorkerSettings(jobs=jobs, runner_command=RUNNER, max_workers=1)
        self.worker = Supervisor(self.leases, settings, name="test", discards=self.discards)

    def submit(self, source: Path, name: str = "out", **options: Any) -> Job:
        return self.store.create(self.request(source, name, **options))

    def request(self, source: Path, name: str = "out", **options: Any) -> ConvertRequest:
        wanted = {"to": TargetFormat.UNIVERSAL, "part_bytes": PART_BYTES, "threads": 1, **options}
        return asked(source=SourceSpec(url=str(source)), target=f"{self.parent}/{name}", **wanted)

    def failed(self, source: Path, name: str = "out") -> Job:
        """A job that has FAILED for good after three units."""
        job = self.submit(source, name)
        assert self.worker.run_next() is Outcome.FAILED
        assert self.strays(), "it left nothing"
        return self.store.get(job.id)

    def heal(self) -> None:
        """From now on, nothing fails."""
        self.healed.touch()

    def strays(self) -> list[str]:
        """What only unfinished conversions may have."""
        return [path for path in self.look() if "reshard-" in path or path.startswith("upload ")]

    def is_right(self, source: Path, name: str = "out") -> None:
        """Assert that a target is whole and has the values of this source."""
        assert load_engine().verify(f"{self.parent}/{name}").ok
        assert load_engine().convert(self.request(source, name)).already_done


@pytest.fixture(params=["local", *STORES])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Place]:
    monkeypatch.setenv("FAIL_AFTER_UNITS", "3")
    monkeypatch.setenv("FAIL_WITH", "storage.protocol")
    monkeypatch.setenv("FAIL_UNLESS", str(tmp_path / "healed"))
    database = Database(f"sqlite:///{tmp_path}/jobs.db")
    if request.param == "local":
        targets = tmp_path / "targets"
        targets.mkdir()
        yield Place(
            database,
            str(targets),
            tmp_path / "healed",
            lambda: [str(p.relative_to(targets)) for p in targets.rglob("*")],
        )
    else:
        server = started(request, request.param)
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        bucket = server.new_bucket()
        place = Place(
            database, f"{server.scheme}://{bucket}/targets", tmp_path / "healed", lambda: held(server, bucket)
        )
        place.write = lambda name, data: server.put(bucket, f"targets/{name}", data)
        yield place
    database.close()


def stop_after(request: ConvertRequest, *, units: int) -> None:
    """Convert outside the service, and stop once more than this many units are done."""
    done: list[int] = []
    with pytest.raises(JobError, match=r"job\.cancelled"):
        load_engine().convert(
            request,
            on_progress=lambda p: done.append(p.units_done),
            should_stop=lambda: max(done, default=0) > units,
        )


def held(server: ObjectServer, bucket: str) -> list[str]:
    """The objects and the unfinished uploads of a bucket."""
    uploads = [f"upload {key.removeprefix('targets/')}" for key in server.unfinished(bucket)]
    return [*server.read_all(bucket, "targets/"), *uploads]


def test_a_retry_goes_on_where_the_failed_job_stopped(place: Place, sources: tuple[Path, Path]) -> None:
    job = place.failed(sources[0])
    assert job.leftovers_until is not None
    assert job.finished_at is not None
    assert abs((job.leftovers_until - job.finished_at).total_seconds() - KEEP_S) < 1
    assert place.worker.run_next() is None, "the files are kept for the retry"
    place.heal()
    again = place.store.retry(job.id)
    assert (again.state, again.retries, again.error, again.leftovers_until) == (JobState.QUEUED, 1, None, None)
    assert place.store.retry(job.id).retries == 1, "to retry twice is harmless"
    assert place.worker.run_next() is Outcome.SUCCEEDED
    ended = place.store.get(job.id)
    assert ended.result is not None
    assert ended.result.resumed_bytes > 0
    assert not place.strays()
    place.is_right(sources[0])


def test_cancel_of_a_failed_job_gives_its_files_up(place: Place, sources: tuple[Path, Path]) -> None:
    job = place.failed(sources[0])
    for _ in range(2):
        assert place.store.cancel(job.id).state is JobState.FAILED
    assert place.worker.run_next() is Outcome.DISCARDED
    assert place.look() == []
    ended = place.store.get(job.id)
    assert (ended.state, ended.leftovers_until) == (JobState.FAILED, None)
    assert ended.error is not None
    assert ended.error.code == "storage.protocol"
    # It can still be retried, from the beginning.
    place.heal()
    place.store.retry(job.id)
    assert place.worker.run_next() is Outcome.SUCCEEDED
    place.is_right(sources[0])


def test_a_target_beside_it_with_the_same_plan_does_not_keep_the_files_of_a_failed_job(
    place: Place, sources: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have one plan, and the pointer beside them is that of the one that succeeded."""
    monkeypatch.setenv("FAIL_AFTER_UNITS", "0")
    whole = {"part_bytes": 64 << 20}  # an object store has no part of a file, so whole objects are left
    place.healed.touch()
    place.submit(sources[0], "sibling", **whole)
    assert place.worker.run_next() is Outcome.SUCCEEDED
    before = sorted(place.look())
    place.healed.unlink()
    job = place.submit(sources[0], **whole)
    assert place.worker.run_next() is Outcome.FAILED
    assert len(place.look()) > len(before)
    place.store.cancel(job.id)
    assert place.worker.run_next() is Outcome.DISCARDED
    assert sorted(place.look()) == before
    place.is_right(sources[0], "sibling")


def test_the_files_of_a_failed_job_go_when_their_time_is_over(
    place: Place, sources: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time passes in the database alone: by the clock of an object store, the files were written just now.
    monkeypatch.setattr(discarding, "_IDLE_S", 0.0)
    job = place.failed(sources[0])
    reaper = Reaper(place.database, lease_s=2.0)
    assert not reaper.sweep().work_waits
    let_pass(place.database, KEEP_S + 1)
    assert reaper.sweep().work_waits, "the reaper wakes a worker"
    assert place.worker.run_next() is Outcome.DISCARDED
    assert place.look() == []
    assert place.store.get(job.id).leftovers_until is None
    assert not reaper.sweep().work_waits


def test_a_full_store_is_freed_at_once(
    place: Place, sources: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_WITH", "storage.no_space")
    job = place.failed(sources[0])
    assert job.error is not None
    assert "kept" not in job.error.detail
    place.submit(sources[1], "elsewhere")
    assert place.worker.run_next() is Outcome.DISCARDED, "before the next job, which would find no room either"
    assert place.look() == []


def test_a_full_store_is_freed_at_once_when_nobody_is_left_to_try(
    place: Place, sources: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner hands the job over, the other worker goes, and the reaper fails the job."""
    monkeypatch.setenv("FAIL_WITH", "storage.no_space")
    nodes = Nodes(place.database, lease_s=2.0)
    nodes.seen("test")
    nodes.seen("other")
    place.leases.lease_s = 600.0  # however long the engine takes, the other worker is there
    job = place.submit(sources[0])
    assert place.worker.run_next() is Outcome.HANDED_OVER
    assert place.strays()
    nodes.leave("other")
    let_pass(place.database, 10.0)
    nodes.seen("test")
    reaper = Reaper(place.database, lease_s=2.0, retention=Retention(keep_failed_s=KEEP_S))
    swept = reaper.sweep()
    assert swept.failed == (job.id,)
    assert swept.work_waits, "somebody is woken for it"
    assert place.worker.run_next() is Outcome.DISCARDED
    assert place.look() == []


def test_a_worker_in_quarantine_frees_the_store_that_it_found_full(
    place: Place, sources: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three jobs in a row that found it full, and the files of the third would stay for the whole quarantine."""
    monkeypatch.setenv("FAIL_WITH", "storage.no_space")
    nodes = Nodes(place.database, lease_s=600.0)
    nodes.seen("test")
    host = HostWatch(nodes, "test", pause_s=600.0)
    settings = WorkerSettings(jobs=JobSettings(lease_s=2.0, heartbeat_s=0.5), runner_command=RUNNER, max_workers=1)
    worker = Supervisor(place.leases, settings, name="test", discards=place.discards, host=host)
    for number in range(3):
        place.submit(sources[0], f"out{number}")
    met = [worker.run_next() for _ in range(5)]
    assert [outcome for outcome in met if outcome is Outcome.FAILED] == [Outcome.FAILED] * 3
    assert host.in_quarantine
    assert worker.run_next() is Outcome.DISCARDED
    assert place.look() == []
    waiting = place.submit(sources[1], "waits")
    assert worker.run_next() is None
    assert place.store.get(waiting.id).state is JobState.QUEUED


def test_what_an_attempt_before_met_is_not_why_the_last_one_was_lost(place: Place, sources: tuple[Path, Path]) -> None:
    """A worker found its store full, and others were lost after it: what they wrote is kept, and no disk is blamed."""
    job = place.submit(sources[0])
    claim = some(place.leases.claim(job.id, worker="one"))
    assert place.leases.record_plan(claim, "a plan")
    assert place.leases.retry(claim, from_problem({"code": "storage.no_space", "detail": "full"}), delay_s=0.0)
    reaper = Reaper(place.database, lease_s=2.0, retention=Retention(keep_failed_s=KEEP_S))
    for _ in range(2):
        assert place.leases.claim(job.id, worker="two") is not None
        let_pass(place.database, 2.2)
        swept = reaper.sweep()
    assert swept.failed == (job.id,)
    error = some(place.store.get(job.id).error)
    assert error.details["last_error"]["code"] == "job.lost"
    assert place.discards.pending(due=True) == []


def test_another_source_takes_the_target_of_a_failed_job_over(place: Place, sources: tuple[Path, Path]) -> None:
    job = place.failed(sources[0])
    place.heal()
    place.submit(sources[1])
    assert place.worker.run_next() is Outcome.SUCCEEDED
    place.is_right(sources[1])
    assert not place.strays()
    # The failed job owns nothing there any more: neither its clean-up nor its retry harms the target.
    place.store.cancel(job.id)
    assert place.worker.run_next() is Outcome.DISCARDED
    place.is_right(sources[1])
    place.store.retry(job.id)
    assert place.worker.run_next() is Outcome.FAILED
    error = some(place.store.get(job.id).error)
    assert error.code == "request.target_exists"
    place.is_right(sources[1])


def test_the_same_request_again_owns_the_files_of_the_failed_one(place: Place, sources: tuple[Path, Path]) -> None:
    first, second = place.failed(sources[0]), place.submit(sources[0])
    assert place.worker.run_next() is Outcome.FAILED
    assert place.store.get(second.id).state is JobState.FAILED
    before = place.strays()
    place.store.cancel(first.id)
    assert place.worker.run_next() is Outcome.DISCARDED
    assert place.strays() == before, "they are the second job's now"
    place.heal()
    place.store.retry(second.id)
    assert place.worker.run_next() is Outcome.SUCCEEDED
    result = some(place.store.get(second.id).result)
    assert result.resumed_bytes > 0


def test_the_files_of_another_program_are_left_alone(
    place: Place, sources: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Someone's own conversion into the same target stopped halfway: `reshard convert` goes on with it later.
    stop_after(place.request(sources[1]), units=2)
    before = place.strays()
    assert before
    job = place.submit(sources[0])
    assert place.worker.run_next() is Outcome.FAILED
    place.store.cancel(job.id)
    assert place.worker.run_next() is Outcome.DISCARDED
    assert set(before) <= set(place.strays())
    monkeypatch.setenv("FAIL_UNLESS", "/")
    assert load_engine().convert(place.request(sources[1])).resumed_bytes > 0


@pytest.mark.parametrize("place", rest_full(STORES, "s3"), indirect=True)  # local journals have locks that tell
def test_a_conversion_that_went_on_outside_the_service_is_not_torn_down(
    place: Place, sources: tuple[Path, Path]
) -> None:
    """A user who finishes a failed job by hand, with `reshard convert`, writes the same plan."""
    place.failed(sources[0])
    stop_after(place.request(sources[0]), units=4)
    let_pass(place.database, KEEP_S + 1)
    assert place.worker.run_next() is Outcome.DISCARDED, "it is looked at"
    assert place.strays(), "and kept: it was written to a moment ago"
    assert load_engine().convert(place.request(sources[0])).resumed_bytes > 0


@pytest.mark.parametrize("place", rest_full(STORES, "s3"), indirect=True)
def test_the_newest_write_tells_that_a_conversion_goes_on(
    place: Place, sources: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old files of the failed job stay with the new ones of who goes on. Without new ones they are removed."""
    engine, request, alone = load_engine(), place.request(sources[0]), place.request(sources[0], "alone")
    place.failed(sources[0], "alone")
    place.failed(sources[0])
    time.sleep(2.0)  # stores tell times in whole seconds
    between = time.time()
    stop_after(request, units=4)
    monkeypatch.setattr(leftovers, "time", SimpleNamespace(time=lambda: between + 1000.0))
    engine.discard(alone, plans=[engine.plan(alone).digest], idle_s=1001.5)
    assert not [path for path in place.strays() if "alone" in path]
    with pytest.raises(RequestError, match=r"request\.target_busy"):
        engine.discard(request, plans=[engine.plan(request).digest], idle_s=1001.5)
    assert place.strays()


def test_a_cancel_that_no_worker_could_clean_up_is_cleaned_up_later(place: Place, sources: tuple[Path, Path]) -> None:
    job = place.submit(sources[0])
    claim = some(place.leases.claim(job.id, worker="lost"))
    digest = load_engine().plan(claim.request).digest
    assert place.leases.record_plan(claim, digest)
    stop_after(claim.request, units=2)
    assert place.strays()
    place.store.cancel(job.id)
    reaper = Reaper(place.database, lease_s=0.01)
    let_pass(place.database, 2.2)
    assert reaper.sweep().cancelled == (job.id,)
    assert place.store.get(job.id).leftovers_until is not None
    assert place.worker.run_next() is Outcome.DISCARDED
    assert place.look() == []


@pytest.mark.parametrize(
    "place", rest_full(STORES, "s3"), indirect=True
)  # on local storage, a stopped process's lock keeps others out
def test_a_record_that_came_after_the_end_is_removed(place: Place, sources: tuple[Path, Path]) -> None:
    """A worker that was lost wakes up after its job SUCCEEDED elsewhere, and dies after one more write."""
    place.heal()
    job = place.submit(sources[0])
    lost = some(place.leases.claim(job.id, worker="lost"))
    digest = load_engine().plan(lost.request).digest
    assert place.leases.record_plan(lost, digest)
    let_pass(place.database, 2.2)
    assert Reaper(place.database, lease_s=2.0).sweep().requeued == (job.id,)
    assert place.worker.run_next() is Outcome.SUCCEEDED
    assert not place.strays()
    place.write(f".out.reshard-{digest[:16]}/unit-0.json", b"{}")
    assert place.strays()
    assert not place.leases.record_plan(lost, digest), "the zombie may not begin again"
    assert place.store.get(job.id).leftovers_until is not None
    assert place.worker.run_next() is None
    place.discards.bring_forward()
    assert place.worker.run_next() is Outcome.DISCARDED
    assert not place.strays()
    assert place.store.get(job.id).state is JobState.SUCCEEDED
    place.is_right(sources[0])


def test_gc_removes_what_is_due_and_says_so(
    place: Place, sources: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = place.failed(sources[0])
    monkeypatch.setenv("RESHARD_DATABASE_URL", f"sqlite:///{tmp_path}/jobs.db")

    def gc(*flags: str) -> dict[str, Any]:
        argv = [sys.executable, "-m", "reshard.cli.main", "gc", "--json", *flags]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    wanted = [{"id": job.id, "problem": None}]
    assert gc()["jobs"] == []
    assert gc("--now", "--dry-run")["jobs"] == wanted
    assert place.strays()
    assert gc("--now")["jobs"] == wanted
    assert place.look() == []
    assert gc("--now")["jobs"] == []
