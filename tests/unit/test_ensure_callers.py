"""Many callers of `reshard.ensure` make one conversion, here or by a service, and none waits for the dead."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import reshard
from house.expected import raised, some
from house.saves import DATA, make_checkpoint, make_save, same, wanted
from house.waiting import wait_until
from reshard.choices import EnsureWorkers, JobState, OpaquePolicy, WeightDtype
from reshard.engine import load_engine
from reshard.ensuring import converters as _converters
from reshard.ensuring.converters import LocalConverter
from reshard.ensuring.election import Election, Invitation, Records
from reshard.ensuring.local_checkpoints import finished
from reshard.ensuring.together import SHARED_BYTES, Launch, Sharing
from reshard.ensuring.world import visible_processes
from reshard.errors import JobError, RequestError, ReshardError, SourceError, StorageError, from_problem
from reshard.models.jobs import ConvertRequest, Inspection, Job, Problem
from reshard.models.resume import ResumeLayout, RunLaunch
from reshard.options import RunLayout, SourceSpec

pytestmark = pytest.mark.usefixtures("no_launcher")


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
from reshard.engine import load_engine

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
    said = [process.communicate(timeout=180) for process in ranks]
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
    said = [process.communicate(timeout=180) for process in ranks]
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
    # The winner would have taken 600 s.
    out, err = loser.communicate(timeout=120)
    assert (out.split()[0], err) == ("converted", "")
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

    def inspect(self, source: SourceSpec, *, launch: RunLaunch) -> Inspection:
        return load_engine().inspect(source, launch=launch)

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
    assert service.jobs[key].request.layout == RunLayout(dp=3)
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

    def blind(source: SourceSpec, *, launch: RunLaunch) -> Inspection:
        raise SourceError("source.not_found", f"nothing is at {source.url} for {launch.dp} ranks")

    monkeypatch.setattr(service, "inspect", blind)
    assert raised(StorageError, reshard.ensure, checkpoint, dp=3).code == "storage.unavailable"
    assert service.jobs == {}


def test_a_failed_job_is_told_and_then_tried_again(checkpoint: Path, service: Service) -> None:
    service.ends = [StorageError("storage.no_space", "the store is full")]
    with pytest.raises(StorageError, match="the store is full"):
        reshard.ensure(checkpoint, dp=3)
    assert finished(reshard.ensure(checkpoint, dp=3), ("global_step3",))
    assert [j.state for j in service.jobs.values()] == [JobState.FAILED, JobState.SUCCEEDED]


# The processes that convert for `reshard.ensure`: by nodes, size and wish.


TORCHRUN = {"WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
TORCHRUN |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
DEEPSPEED = {"WORLD_SIZE": "16", "RANK": "8", "LOCAL_RANK": "0", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
SLURM = {"SLURM_NTASKS": "32", "SLURM_PROCID": "17", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NNODES": "4"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "12", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environ", "nodes", "number", "first"),
    [
        (TORCHRUN, 2, 1, False),
        (DEEPSPEED, 2, 1, True),
        (SLURM, 4, 2, False),
        # A step has fewer nodes than its job.
        ({**SLURM, "SLURM_STEP_NUM_NODES": "3"}, 3, 2, False),
        # `srun -n1 reshard ensure` in a job of four nodes.
        ({**SLURM, "SLURM_NTASKS": "1"}, 1, 2, False),
        # torchrun inside an allocation of Slurm.
        ({**SLURM, **TORCHRUN}, 2, 1, False),
        (MPIRUN, 3, 0, True),
        ({"WORLD_SIZE": "8", "RANK": "3"}, 1, 0, True),
        ({}, 1, 0, True),
    ],
    ids=["torchrun", "deepspeed", "slurm", "step", "one task", "torchrun in slurm", "mpirun", "bare", "none"],
)
def test_the_launcher_tells_of_nodes(environ: dict[str, str], nodes: int, number: int, first: bool) -> None:
    found = Launch.of(environ)
    assert (found.nodes, found.number, found.first_on_node) == (nodes, number, first)
    assert found.node == f"{socket.gethostname()} {number}"


def sharing(workers: str, environ: dict[str, str], *, possible: bool = True) -> Sharing:
    return Sharing(EnsureWorkers(workers), Launch.of(environ), possible)


def test_large_checkpoints_are_divided_among_nodes() -> None:
    work = sharing("auto", TORCHRUN).among_nodes(SHARED_BYTES)
    assert work is not None
    assert (work.number, work.count) == (1, 2)
    assert sharing("auto", TORCHRUN).among_nodes(SHARED_BYTES - 1) is None
    assert sharing("nodes", TORCHRUN).among_nodes(1) is not None
    assert sharing("1", TORCHRUN).among_nodes(1 << 50) is None
    assert sharing("nodes", TORCHRUN, possible=False).among_nodes(1 << 50) is None
    # One node: its processes share one network. In an object store nobody elects one of them.
    alone = {**TORCHRUN, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    assert sharing("auto", alone).among_nodes(1 << 50) is None
    assert sharing("auto", alone).among_all(SHARED_BYTES) is not None
    assert sharing("auto", {}).among_all(1 << 50) is None


def test_only_another_node_helps() -> None:
    here = Launch.of(TORCHRUN).node
    assert sharing("auto", TORCHRUN).helps(here) is None
    assert sharing("auto", TORCHRUN).helps("another node 0") is not None
    assert sharing("1", TORCHRUN).helps("another node 0") is None


def test_other_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="workers is 'all'"):
        reshard.ensure(tmp_path, dp=4, workers="all")


def test_a_helper_raises_the_error_of_the_owner_that_has_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = make_save(tmp_path / "save")
    reshard.ensure(save, dp=2)
    (record,) = (save / ".reshard").glob("*.json")
    record.unlink()
    records, key = Records(str(save)), record.stem
    owner = Election(str(record.with_suffix(".claim"))).claim()
    assert owner is not None
    result = ResumeLayout(to="zero", layout=RunLayout(dp=3), identity="{}", label="dp3")
    records.invite(key, Invitation(nonce=owner.nonce, node="another node 0", path="out", wanted=result))
    asked: list[str] = []
    held = ExitStack()
    held.enter_context(owner)

    def help_until_the_end(_self: LocalConverter, request: ConvertRequest, *_: object) -> None:
        asked.append(request.target)
        records.withdraw(key)
        records.tell_failure(key, owner.nonce, StorageError("storage.no_space", "full"))
        held.close()
        raise StorageError("storage.unavailable", "the helper's own")

    monkeypatch.setattr(LocalConverter, "help", help_until_the_end)
    with held, pytest.raises(StorageError, match="full"):
        reshard.ensure(save, dp=2)
    assert asked == [str(save / "out" / "global_step3")]


# The layout that `reshard.ensure` makes for: from its arguments, the launcher and the source.


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WORLD_SIZE": "8", "SLURM_NTASKS": "2"}, 8),
        ({"SLURM_NTASKS": "16"}, 16),
        ({"SLURM_NTASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_NTASKS": "2"}, 4),
        ({"PMI_SIZE": " 6 "}, 6),
        ({"WORLD_SIZE": ""}, None),
        ({"WORLD_SIZE": "1"}, 1),
    ],
    ids=str,
)
def test_the_visible_world(environ: dict[str, str], expected: int | None) -> None:
    assert visible_processes(environ) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"environ": {}},
        {"environ": {"WORLD_SIZE": "many"}},
        {"dp": 0, "environ": {}},
        {"dp": 2, "tp": -1, "environ": {}},
        {"dp": 2, "zero_stage": 4, "environ": {}},
        {"dp": 2, "dtype": "int8", "environ": {}},
    ],
    ids=str,
)
def test_wishes_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        wanted(**options)
    assert caught.value.code == "request.invalid"
    if options == {"environ": {}}:
        assert "--dp N" in caught.value.fix
