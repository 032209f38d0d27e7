"""docs/recipes/slurm.md: the very job script, on a checkpoint of a real run, with stand-ins for Slurm's commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from house.launchers import without_launchers
from house.repository import ROOT
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.truth import differences
from recipes.stand_ins import SRUN
from servers.process import free_port

SCRIPT = ROOT / "deploy" / "slurm" / "train.sbatch"
RANKS = 3

SCONTROL = """
import os, sys
with open(os.environ["CALLS"] + "/scontrol", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
"""

TRAIN = """
import json, os, sys
names = ("SLURM_PROCID", "SLURM_NTASKS")
with open(os.environ["CALLS"] + "/rank-" + os.environ["SLURM_PROCID"], "w") as file:
    json.dump({"argv": sys.argv[1:], **{name: os.environ[name] for name in names}}, file)
"""


@dataclass(frozen=True)
class Started:
    """What a start of the job came to."""

    code: int
    stderr: str
    ranks: list[dict[str, object]]
    """What each rank of the training was called with; empty if it was not started."""
    scontrol: list[str]

    @property
    def argv(self) -> list[str]:
        """The arguments of the training: the same on every rank."""
        assert [(r["SLURM_PROCID"], r["SLURM_NTASKS"]) for r in self.ranks] == [
            (str(n), str(RANKS)) for n in range(RANKS)
        ]
        (words,) = {json.dumps(rank["argv"]) for rank in self.ranks}
        found: list[str] = json.loads(words)
        return found


@dataclass(frozen=True)
class Cluster:
    """A directory of stand-ins, and the environment of a batch script."""

    folder: Path

    def start(self, run: Path, **variables: str) -> Started:
        """Starts the job script as `sbatch` does."""
        calls = self.folder / "calls"
        shutil.rmtree(calls, ignore_errors=True)
        calls.mkdir()
        inherited = without_launchers()
        slurm = {"SLURM_NTASKS": str(RANKS), "SLURM_CPUS_ON_NODE": "2", "SLURM_JOB_ID": "77"}
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**inherited, **slurm, "PATH": path, "CALLS": str(calls), "RUN": str(run), **variables}
        words = ["bash", str(SCRIPT), sys.executable, str(self.folder / "train.py"), "--save", str(run)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
        ranks = [json.loads(path.read_text()) for path in sorted(calls.glob("rank-*"))]
        asked = calls / "scontrol"
        return Started(
            done.returncode, done.stderr, ranks, asked.read_text().split("\n")[:-1] if asked.exists() else []
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    programs = tmp_path / "cluster" / "bin"
    programs.mkdir(parents=True)
    for name, code in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(f"#!{sys.executable}\n{code}")
        (programs / name).chmod(0o755)
    (programs.parent / "train.py").write_text(TRAIN)
    return Cluster(programs.parent)


def test_a_requeue_on_other_ranks_goes_on_where_the_run_was(
    cluster: Cluster, trained: TrainedFactory, oracle: Oracle, tmp_path: Path
) -> None:
    saved = trained("z2_fp32", world=2)
    run = tmp_path / "run1"
    shutil.copytree(saved.dir, run)

    first = cluster.start(run)

    assert first.code == 0, first.stderr
    assert first.argv[:3] == ["--save", str(run), "--resume"]
    checkpoint = Path(first.argv[3])
    assert checkpoint.parent == run / ".reshard"
    resumed = oracle.resume_native(saved.case, checkpoint, tmp_path / "state", world=RANKS)
    assert differences(saved.truth, resumed.state) == []
    # A second start takes what is there.
    stamp = os.stat(checkpoint / "latest").st_mtime_ns
    again = cluster.start(run)
    assert (again.code, again.argv) == (0, first.argv)
    assert os.stat(checkpoint / "latest").st_mtime_ns == stamp
    assert [path.name for path in (run / ".reshard").iterdir() if path.is_dir()] == [checkpoint.name]


@pytest.mark.parametrize("made", [False, True], ids=["no directory", "an empty one"])
def test_the_first_start(made: bool, cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run1"
    if made:
        run.mkdir()
    started = cluster.start(run)
    assert started.code == 0, started.stderr
    assert started.argv == ["--save", str(run)]


@pytest.mark.parametrize(
    ("missing", "code"),
    [("*_1_mp_rank_00_optim_states.pt", "checkpoint.incomplete"), ("latest", "source.unknown_kind")],
)
def test_what_is_not_whole_stops_the_job(
    missing: str, code: str, cluster: Cluster, trained: TrainedFactory, tmp_path: Path
) -> None:
    run = tmp_path / "run1"
    shutil.copytree(trained("z2_fp32", world=2).dir, run)
    (lost,) = run.rglob(missing)
    lost.unlink()
    started = cluster.start(run)
    assert (started.code, started.ranks, started.scontrol) == (3, [], [])
    assert f"error: {code}: " in started.stderr


def test_a_passing_failure_goes_back_into_the_queue(cluster: Cluster, trained: TrainedFactory, tmp_path: Path) -> None:
    run = tmp_path / "run1"
    shutil.copytree(trained("z2_fp32", world=2).dir, run)
    nobody = f"http://127.0.0.1:{free_port()}"
    started = cluster.start(run, RESHARD_URL=nobody, RETRIES="1")
    assert (started.code, started.ranks, started.scontrol) == (6, [], ["requeue 77"])
    assert "service.unavailable" in started.stderr
    # Not for ever. The client asks for seconds until it gives up: once is enough.
    (cluster.folder / "bin" / "reshard").write_text("#!/bin/sh\nexit 6\n")
    (cluster.folder / "bin" / "reshard").chmod(0o755)
    started = cluster.start(run, RETRIES="1", SLURM_RESTART_COUNT="1")
    assert (started.code, started.ranks, started.scontrol) == (6, [], [])


def test_the_training_ends_the_job_with_its_own_exit_code(cluster: Cluster, tmp_path: Path) -> None:
    (cluster.folder / "train.py").write_text("import sys; sys.exit(9)")
    assert cluster.start(tmp_path / "run1").code == 9


def test_a_script_without_a_run_starts_nothing(cluster: Cluster) -> None:
    started = cluster.start(Path(), RUN="")
    assert (started.code, started.ranks) == (1, [])
    assert "the directory that the training script saves into" in started.stderr
