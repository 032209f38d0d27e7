"""docs/recipes/kubernetes.md: the manifests' own commands, run as the kubelet would, on a checkpoint of a real run."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from house.launchers import without_launchers
from house.repository import ROOT
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.truth import differences
from reshard.errors import CODES

FOLDER = ROOT / "deploy" / "kubernetes" / "training"
MOUNT = "/checkpoints"
RUN = "run1"
RANKS = 3
RETRYABLE = {int(entry.exit_code) for entry in CODES.values() if entry.retryable}
REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The documents of a manifest by their kind."""
    return {d["kind"]: d for d in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))}


def replicated_jobs(name: str) -> list[dict[str, Any]]:
    """The jobs of the JobSet that a manifest is, or makes."""
    found = documents(name)
    spec = found["JobSet"]["spec"] if "JobSet" in found else found["ClusterTrainingRuntime"]["spec"]["template"]["spec"]
    jobs: list[dict[str, Any]] = spec["replicatedJobs"]
    return jobs


def pod(job: dict[str, Any]) -> dict[str, Any]:
    """The specification of a job's pods."""
    spec: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return spec


def expand(text: str, variables: Mapping[str, str]) -> str:
    """As the kubelet expands commands, arguments and variables: `$(NAME)`, `$$`, and what it does not know stays."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return REFERENCE.sub(value, text)


def environment(container: dict[str, Any], volume: Path, **values: str) -> dict[str, str]:
    """The container's variables, with the volume where it is here; `values` are edits of the manifest."""
    found: dict[str, str] = {}
    for entry in container["env"]:
        if "valueFrom" in entry:
            # The label that JobSet puts on its pods: its name, which Trainer takes from the TrainJob.
            assert entry["valueFrom"] == {
                "fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}
            }
            found[entry["name"]] = RUN
        else:
            text: str = values.get(entry["name"]) or entry["value"]
            found[entry["name"]] = re.sub(rf"^{MOUNT}(?=/)", str(volume), expand(text, found))
    return found


@dataclass(frozen=True)
class Jobs:
    """The two jobs of a manifest, as their pods run, on a volume of this machine."""

    name: str
    volume: Path

    @property
    def run(self) -> Path:
        """What the training saves into."""
        return self.volume / RUN

    def reshard(self, world: int = RANKS) -> subprocess.CompletedProcess[str]:
        """Runs the first job's container."""
        (container,) = pod(replicated_jobs(self.name)[0])["containers"]
        variables = environment(container, self.volume, WORLD=str(world))
        words = [expand(word, variables) for word in (*container["command"], *container["args"])]
        inherited = without_launchers()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**inherited, **variables, "PATH": path}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)

    def resumes_from(self) -> Path:
        """What the training is told to load."""
        (container,) = pod(replicated_jobs(self.name)[1])["containers"]
        variables = environment(container, self.volume)
        parser = argparse.ArgumentParser()
        parser.add_argument("--resume", type=Path, required=True)
        parser.add_argument("--save", type=Path, required=True)
        words = [expand(word, variables) for word in container["args"]]
        given = parser.parse_args(words[words.index("train.py") + 1 :])
        assert given.save == self.run
        found: Path = given.resume
        return found


@pytest.fixture(params=["jobset.yaml", "trainjob.yaml"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def jobs(name: str, trained: TrainedFactory, tmp_path: Path) -> Jobs:
    """Jobs whose volume holds a real run of two ranks."""
    made = Jobs(name, tmp_path / "volume")
    shutil.copytree(trained("z2_fp32", world=2).dir, made.run)
    return made


def test_the_training_waits_for_the_checkpoint(name: str) -> None:
    reshard, training = replicated_jobs(name)
    assert reshard["name"] == "reshard"
    # The first one of a JobSet may not depend on anything.
    assert "dependsOn" not in reshard
    assert training["dependsOn"] == [{"name": "reshard", "status": "Complete"}]


def test_a_wrong_checkpoint_ends_it_and_a_passing_failure_does_not(name: str) -> None:
    found = documents(name)
    spec = found["JobSet"]["spec"] if "JobSet" in found else found["ClusterTrainingRuntime"]["spec"]["template"]["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["targetReplicatedJobs"], rule["onJobFailureReasons"]) == (
        "FailJobSet",
        ["reshard"],
        ["PodFailurePolicy"],
    )
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    job = replicated_jobs(name)[0]
    (ends,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    final = {int(entry.exit_code) for entry in CODES.values()} - RETRYABLE
    # An interrupted or evicted one is tried again; so is one that waited too long.
    assert ends["onExitCodes"] == {"containerName": "reshard", "operator": "In", "values": sorted(final - {124, 130})}
    # Kubernetes takes a podFailurePolicy with `Never` only.
    assert pod(job)["restartPolicy"] == "Never"


def test_pods_are_bounded_and_not_root(name: str) -> None:
    (claim,) = documents("checkpoints.yaml").values()
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for spec in map(pod, replicated_jobs(name)):
        assert spec["securityContext"]["runAsNonRoot"]
        (container,) = spec["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["checkpoints"] == MOUNT
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert mounts.keys() == volumes.keys()
        assert volumes["checkpoints"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    # Both write below the run: as one user.
    first, second = (pod(job)["securityContext"] for job in replicated_jobs(name))
    assert first == second


def test_the_checkpoint_is_for_as_many_ranks_as_there_are(name: str) -> None:
    reshard, training = replicated_jobs(name)
    (container,) = pod(reshard)["containers"]
    (world,) = (int(entry["value"]) for entry in container["env"] if entry["name"] == "WORLD")
    (container,) = pod(training)["containers"]
    (local,) = (int(m[1]) for word in container["args"] if (m := re.fullmatch(r"--nproc-per-node=(\d+)", word)))
    found = documents(name)
    if "JobSet" in found:
        nodes = training["template"]["spec"]["parallelism"]
        assert f"--nnodes={nodes}" in container["args"]
        assert training["template"]["spec"]["completions"] == nodes
        jobset = found["JobSet"]["metadata"]["name"]
        assert f"--rdzv-endpoint={jobset}-{training['name']}-0-0.{jobset}:29500" in container["args"]
    else:
        runtime, job = found["ClusterTrainingRuntime"], found["TrainJob"]
        nodes = runtime["spec"]["mlPolicy"]["numNodes"]
        assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
        assert (training["name"], container["name"]) == ("node", "node")
        assert training["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert world == nodes * local
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == local


def test_the_training_resumes_from_a_name_known_in_advance(
    jobs: Jobs, trained: TrainedFactory, oracle: Oracle, tmp_path: Path
) -> None:
    saved = trained("z2_fp32", world=2)

    done = jobs.reshard()

    assert done.returncode == 0, done.stderr
    link = jobs.resumes_from()
    resumed = oracle.resume_native(saved.case, link, tmp_path / "state", world=RANKS)
    assert differences(saved.truth, resumed.state) == []
    # A pod that is started again finds it.
    target, stamp = link.resolve(), os.stat(link / "latest").st_mtime_ns
    assert target.parent == jobs.run / ".reshard"
    again = jobs.reshard()
    assert again.returncode == 0, again.stderr
    assert (link.resolve(), os.stat(link / "latest").st_mtime_ns) == (target, stamp)
    assert sorted(path.name for path in jobs.volume.iterdir()) == [RUN, link.name]


def test_a_restart_takes_what_was_saved_since(jobs: Jobs) -> None:
    assert jobs.reshard().returncode == 0
    before = jobs.resumes_from().resolve()
    shutil.copytree(jobs.run / "global_step3", jobs.run / "global_step6")
    (jobs.run / "latest").write_text("global_step6")
    done = jobs.reshard()
    assert done.returncode == 0, done.stderr
    after = jobs.resumes_from().resolve()
    assert after != before
    assert (after / "latest").read_text() == "global_step6"


def test_a_checkpoint_that_fits_is_resumed_as_it_is(jobs: Jobs) -> None:
    assert jobs.reshard().returncode == 0
    done = jobs.reshard(world=2)
    assert done.returncode == 0, done.stderr
    assert jobs.resumes_from().resolve() == jobs.run.resolve()


def test_the_first_start(name: str, tmp_path: Path) -> None:
    jobs = Jobs(name, tmp_path)
    for _ in range(2):
        done = jobs.reshard()
        assert done.returncode == 0, done.stderr
        assert jobs.resumes_from().resolve() == jobs.run.resolve()
        assert list(jobs.run.iterdir()) == []


def test_a_missing_rank_ends_the_job_and_leaves_the_name_alone(jobs: Jobs) -> None:
    next(jobs.run.rglob("*_1_mp_rank_00_optim_states.pt")).unlink()
    done = jobs.reshard()
    assert done.returncode == 3
    assert "error: checkpoint.incomplete: " in done.stderr
    assert not os.path.lexists(jobs.resumes_from())
