"""docs/recipes/many-workers.md: the job script, the manifest and the scripts for Ray and Dask, as they are placed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from house.conversions import convert
from house.launchers import without_launchers
from house.repository import ROOT
from house.sources import copied_source
from recipes.stand_ins import DASK, RAY, SRUN
from reshard.engine import load_engine
from reshard.errors import CODES
from reshard_engine.integrity.manifest import MANIFEST_NAME

PAGE = ROOT / "docs" / "recipes" / "many-workers.md"
JOB = ROOT / "deploy" / "kubernetes" / "convert" / "job.yaml"
SCRIPT = ROOT / "deploy" / "slurm" / "convert.sbatch"
PLACED = {"ray": ("ray", RAY), "dask": ("distributed", DASK)}
RETRYABLE = {int(entry.exit_code) for entry in CODES.values() if entry.retryable}


def environment(**more: str) -> dict[str, str]:
    inherited = without_launchers()
    return {**inherited, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


def contents(directory: Path) -> dict[str, bytes]:
    files = {p.relative_to(directory).as_posix(): p for p in directory.rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name != MANIFEST_NAME}


run = copied_source("zero2_tiny", "run1")


@pytest.fixture
def same_as_alone(run: Path, tmp_path: Path) -> Callable[[Path], bool]:
    """Whether a directory holds what one process writes."""
    alone = tmp_path / "alone"
    convert(run, alone)
    return lambda made: contents(made) == contents(alone) and load_engine().verify(str(made)).ok


def test_a_step_of_slurm(run: Path, tmp_path: Path, same_as_alone: Callable[[Path], bool]) -> None:
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f"#!{sys.executable}\n{SRUN}")
    srun.chmod(0o755)
    env = environment(SLURM_NTASKS="3", SLURM_CPUS_ON_NODE="2")
    env["PATH"] = f"{srun.parent}:{env['PATH']}"

    def start(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
        words = ["bash", str(SCRIPT), str(source), str(target), "--to", "universal"]
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)

    done = start(run, tmp_path / "made")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "made")] * 3
    assert same_as_alone(tmp_path / "made")
    missing = start(tmp_path / "nowhere", tmp_path / "other")
    assert missing.returncode == 3
    assert missing.stderr.count("error: source.not_found") == 3


def test_an_indexed_job(run: Path, tmp_path: Path, same_as_alone: Callable[[Path], bool]) -> None:
    spec = yaml.safe_load(JOB.read_text())["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    words = [re.sub("^/checkpoints/", f"{run.parent}/", word) for word in container["args"]]
    argv = [sys.executable, "-m", "reshard.cli.main", *words]
    # Three of the eight pods are there, and they were not started in order.
    pods = [subprocess.Popen(argv, env=environment(JOB_COMPLETION_INDEX=str(index))) for index in (5, 0, 3)]
    assert [pod.wait(timeout=120) for pod in pods] == [0, 0, 0]
    made = Path(words[2])
    assert made.parent == tmp_path
    assert same_as_alone(made)


def test_the_indexed_job_is_well_formed() -> None:
    job = yaml.safe_load(JOB.read_text())
    spec: dict[str, Any] = job["spec"]
    pod = spec["template"]["spec"]
    assert (job["apiVersion"], job["kind"], spec["completionMode"]) == ("batch/v1", "Job", "Indexed")
    assert spec["completions"] == spec["parallelism"]
    (ends,) = spec["podFailurePolicy"]["rules"]
    final = {int(entry.exit_code) for entry in CODES.values()} - RETRYABLE
    assert ends["onExitCodes"] == {"containerName": "reshard", "operator": "In", "values": sorted(final - {124, 130})}
    # Kubernetes takes a podFailurePolicy with `Never` only.
    assert pod["restartPolicy"] == "Never"
    assert pod["securityContext"]["runAsNonRoot"]
    (container,) = pod["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert "memory" in container["resources"]["limits"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    claim = yaml.safe_load((JOB.parent.parent / "training" / "checkpoints.yaml").read_text())
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}


@pytest.mark.parametrize("kind", ["real", "stand-in"])
@pytest.mark.parametrize("engine", PLACED)
def test_tasks_of_an_engine(
    engine: str, kind: str, run: Path, tmp_path: Path, same_as_alone: Callable[[Path], bool]
) -> None:
    package, code = PLACED[engine]
    more = {"RAY_DEDUP_LOGS": "0"}
    if kind == "stand-in":
        (tmp_path / "fake" / package).mkdir(parents=True)
        (tmp_path / "fake" / package / "__init__.py").write_text(code)
        more["PYTHONPATH"] = f"{tmp_path / 'fake'}:{os.environ.get('PYTHONPATH', '')}"
    elif not any(True for _ in metadata.Distribution.discover(name=package)):
        pytest.skip(f"{package} is not installed: pip install {package}")
    script = ROOT / "docs" / "recipes" / f"convert_with_{engine}.py"

    def start(source: Path, target: Path) -> int:
        words = [sys.executable, str(script), "3", str(source), str(target), "--to", "universal", "--quiet"]
        return subprocess.run(words, env=environment(**more), cwd=tmp_path, timeout=200).returncode

    assert start(run, tmp_path / "made") == 0
    assert same_as_alone(tmp_path / "made")
    if kind == "real" or engine == "ray":
        assert start(tmp_path / "nowhere", tmp_path / "other") == 3


def test_the_page_names_what_is_tested() -> None:
    named = set(re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()))
    here = {os.path.relpath(p, PAGE.parent) for p in (JOB, SCRIPT)}
    assert here | {f"convert_with_{engine}.py" for engine in PLACED} <= named
