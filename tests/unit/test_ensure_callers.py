"""Many callers of `reshard.ensure` make one conversion, here or by a service, and none waits for the dead."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import reshard
from house.expected import raised, some
from house.saves import DATA, LAUNCHERS, make_checkpoint, make_save, same
from house.waiting import wait_until
from reshard.choices import JobState, OpaquePolicy, WeightDtype
from reshard.ensuring import converters as _converters
from reshard.ensuring.election import Election
from reshard.ensuring.local_checkpoints import finished
from reshard.errors import JobError, RequestError, ReshardError, SourceError, StorageError, from_problem
from reshard.local import load_engine
from reshard.models.jobs import ConvertRequest, Inspection, Job, Problem
from reshard.options import DeepSpeedOptions, SourceSpec


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHERS, "RESHARD_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return make_save(tmp_path / "run" / "save")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "run" / "checkpoint-3")


# -- many callers ---------------------------------------------------------------------------------------

RANK = """
import sys, time
from pathlib import Path
from reshard.ensuring import converters as _converters
from reshard.ensuring.world import Wanted
from reshard.ensuring import ensured
from reshard.local import load_engine

save, log, pause_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
engine = load_engine()

class Logged:
    inspect = staticmethod(engine.inspect)

    def convert(self, request, **hooks):
        with log.open("a") as file:
            file.write("begun\\n")
        time.sleep(pause_s)
        result = engine.convert(request, **hooks)
        with log.open("a") as file:
            file.write(f"already_done={result.already_done}\\n")
        return result

_converters.load_engine = Logged
found = ensured(save, Wanted(dp=3), timeout_s=60)
print(found.outcome.value, found.path)
"""


def rank(save: Path, log: Path, pause_s: float = 0.3) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", RANK, str(save), str(log), str(pause_s)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_many_ranks_make_one_conversion(checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = [rank(checkpoint, log) for _ in range(6)]
    said = [process.communicate(timeout=60) for process in ranks]
    assert [err for _, err in said] == [""] * 6
    outcomes, paths = zip(*(out.split() for out, _ in said), strict=True)
    assert sorted(outcomes) == ["converted"] + ["earlier"] * 5
    assert len(set(paths)) == 1
    assert log.read_text() == "begun\nalready_done=False\n"
    assert same(checkpoint, paths[0])
    left = {p.suffix for p in (checkpoint / ".reshard").iterdir() if p.is_file()}
    assert left == {".json"}


def test_an_error_is_everyones_who_waited(save: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    shutil.rmtree(save / "global_step3")
    shutil.copytree(DATA / "zero3_tiny" / "global_step3", save / "global_step3")
    failing = RANK.replace(
        "result = engine.convert(request, **hooks)", "raise StorageError('storage.no_space', 'full')"
    )
    failing = "from reshard.errors import StorageError\n" + failing
    argv = [sys.executable, "-c", failing, str(save), str(log), "3"]
    ranks = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=60) for process in ranks]
    assert all("StorageError: storage.no_space: full" in err for _, err in said)
    assert log.read_text() == "begun\n"
    # Who comes later tries again.
    assert finished(reshard.ensure(save, dp=3), ("global_step3",))
    assert {p.suffix for p in (save / ".reshard").iterdir() if p.is_file()} == {".json"}


def test_a_killed_winner_does_not_block_the_others(checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    winner = rank(checkpoint, log, 600)
    wait_until(log.exists)
    loser = rank(checkpoint, log, 0)
    time.sleep(1.0)
    assert loser.poll() is None
    winner.send_signal(signal.SIGKILL)
    winner.communicate()
    began = time.monotonic()
    out, err = loser.communicate(timeout=30)
    assert (out.split()[0], err) == ("converted", "")
    assert time.monotonic() - began < 10
    assert log.read_text() == "begun\nbegun\nalready_done=False\n"


@contextmanager
def held(path: Path) -> Iterator[None]:
    claim = some(Election(str(path)).claim())
    with claim:
        yield


def test_waiting_ends(save: Path) -> None:
    assert reshard.ensure(save, dp=2)
    reshard.ensure(save, dp=3)
    record = next(p for p in (save / ".reshard").glob("*.json") if json.loads(p.read_text())["path"] is None)
    record.unlink()
    with held(record.with_suffix(".claim")):
        assert raised(JobError, reshard.ensure, save, dp=2, timeout_s=0.3).code == "job.wait_timeout"
    assert reshard.ensure(save, dp=2) == str(save)


def test_a_conversion_that_takes_too_long_is_kept_for_later(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = load_engine()

    class Slow:
        inspect = staticmethod(real.inspect)

        def convert(self, request: ConvertRequest, **hooks: Any) -> Any:
            time.sleep(0.4)
            return real.convert(request, **hooks)

    monkeypatch.setattr(_converters, "load_engine", Slow)
    assert raised(JobError, reshard.ensure, save, dp=3, timeout_s=0.2).code == "job.wait_timeout"
    monkeypatch.undo()
    assert finished(reshard.ensure(save, dp=3), ("global_step3",))


def test_a_busy_target_is_waited_for(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = load_engine(), [0]

    class Busy:
        inspect = staticmethod(real.inspect)

        def convert(self, request: ConvertRequest, **hooks: Any) -> Any:
            tries[0] += 1
            if tries[0] < 4:
                raise RequestError("request.target_busy", "another process is writing")
            return real.convert(request, **hooks)

    monkeypatch.setattr(_converters, "load_engine", Busy)
    assert finished(reshard.ensure(save, dp=3), ("global_step3",))
    assert tries == [4]


# -- by a service ---------------------------------------------------------------------------------------


class Service:
    """Stands for the client of a service that shares this machine's files: jobs by idempotency key."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.ends: list[ReshardError] = []

    def __call__(self, url: str) -> Service:
        assert url == "http://service"
        return self

    def inspect(self, url: str, *, tag: str | None) -> Inspection:
        return load_engine().inspect(SourceSpec(url=url, tag=tag))

    def submit_request(self, request: ConvertRequest, *, labels: dict[str, str], idempotency_key: str) -> Job:
        assert labels == {"made-by": "ensure"}
        if idempotency_key not in self.jobs:
            self.jobs[idempotency_key] = Job(
                id=idempotency_key,
                state=JobState.QUEUED,
                done=False,
                attempt=1,
                max_attempts=3,
                request=request,
                created_at=datetime.now(UTC),
            )
        return self.jobs[idempotency_key]

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        job = self.jobs[job_id]
        facts: dict[str, Any] = {"state": JobState.SUCCEEDED, "done": True}
        if self.ends:
            facts = {"state": JobState.FAILED, "done": True, "error": Problem(**self.ends.pop(0).to_problem())}
        else:
            load_engine().convert(job.request)
        self.jobs[job_id] = job.model_copy(update=facts)
        return self.jobs[job_id]

    def result(self, job_id: str) -> None:
        if (error := self.jobs[job_id].error) is not None:
            raise from_problem(error.model_dump())


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    found = Service()
    monkeypatch.setattr("reshard.api.client.Client", found)
    monkeypatch.setenv("RESHARD_URL", "http://service")
    return found


def test_a_service_makes_one_job(checkpoint: Path, service: Service) -> None:
    assert reshard.ensure(checkpoint, dp=2) == str(checkpoint)
    assert service.jobs == {}
    result = Path(reshard.ensure(checkpoint, dp=3))
    assert (result / "trainer_state.json").exists()
    assert reshard.ensure(checkpoint, dp=3) == str(result)
    (key,) = service.jobs
    assert service.jobs[key].request.options.deepspeed == DeepSpeedOptions(dp=3)
    # The result went away: an ended job of the same key is not mistaken for it.
    shutil.rmtree(result)
    assert reshard.ensure(checkpoint, dp=3) == str(result)
    assert len(service.jobs) == 2
    assert len({k.rpartition("-")[0] for k in service.jobs}) == 1


def test_a_service_is_told_every_wish(checkpoint: Path, service: Service) -> None:
    reshard.ensure(checkpoint, dp=3, dtype="fp32", opaque="keep")
    (job,) = service.jobs.values()
    assert job.request.opaque is OpaquePolicy.KEEP
    assert job.request.dtype is WeightDtype.FP32


def test_a_service_that_does_not_see_the_checkpoint_is_no_first_start(
    checkpoint: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job scripts start from nothing at `source.not_found`: only a look from here may say that."""

    def blind(url: str, *, tag: str | None) -> Inspection:
        raise SourceError("source.not_found", f"nothing is at {url}")

    monkeypatch.setattr(service, "inspect", blind)
    assert raised(StorageError, reshard.ensure, checkpoint, dp=3).code == "storage.unavailable"
    assert service.jobs == {}


def test_a_failed_job_is_told_and_then_tried_again(checkpoint: Path, service: Service) -> None:
    service.ends = [StorageError("storage.no_space", "the store is full")]
    with pytest.raises(StorageError, match="the store is full"):
        reshard.ensure(checkpoint, dp=3)
    assert finished(reshard.ensure(checkpoint, dp=3), ("global_step3",))
    assert [j.state for j in service.jobs.values()] == [JobState.FAILED, JobState.SUCCEEDED]
