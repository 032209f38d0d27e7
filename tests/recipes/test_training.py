"""The training recipes as they stand in docs/recipes, on CPUs.

Each is run to its end on one number of processes, and again on another from a checkpoint of that run: the steps that
both have must be the same steps. torchrun and `accelerate launch` are real in one resumed run each, and torchrun in the
restart; the others run the same script on a warmed world, which spares the imports of all processes.
`cpu/sitecustomize.py` puts in what a machine without a GPU lacks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import yaml

from house.repository import ROOT
from oracle.conversions import agree
from oracle.launcher import Worlds
from servers.process import free_port

RECIPES = ROOT / "docs" / "recipes"
_HERE = Path(__file__).parent
_TIMEOUT_S = 200.0


@dataclass(frozen=True)
class Said:
    """What a launcher and its processes printed. Apart: a warning in the middle of a line is not a line of ours."""

    out: str
    err: str


class LaunchError(RuntimeError):
    """A launcher that did not end well; the end of what it printed is the message."""

    def __init__(self, said: Said) -> None:
        super().__init__(f"{said.out[-2000:]}\n{said.err[-8000:]}")
        self.said = said


def launch(launcher: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Said:
    """Runs a launcher to its end; none of its processes is left behind."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = (shutil.which(launcher, path=programs) or launcher, *arguments)
    mark = uuid4().hex
    variables = {
        **os.environ,
        **(environment or {}),
        "RECIPE_RUN": mark,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PATH": programs,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_HERE / "cpu"), os.environ.get("PYTHONPATH")))),
    }
    with subprocess.Popen(
        command,
        env=variables,
        cwd=RECIPES,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said = Said(*process.communicate(timeout=_TIMEOUT_S))
        finally:
            # Launchers end their processes, which are in sessions of their own; a launcher that is late does not.
            for each in psutil.process_iter():
                with suppress(psutil.Error):
                    if each.environ().get("RECIPE_RUN") == mark:
                        each.kill()
    if process.returncode:
        raise LaunchError(said)
    return said


def torchrun(script: str, output: Path, processes: int, *options: str, **variables: str) -> Said:
    """A recipe under torchrun."""
    command = ("torchrun", "--standalone", f"--nproc-per-node={processes}", *options)
    return launch(*command, script, str(output), environment=variables)


def warm(worlds: Worlds, name: str, output: Path, processes: int, *, direct: bool = False, **variables: str) -> Said:
    """A recipe on a warmed world, without a launcher; what rank 0 printed. With `direct`, it converts nothing."""
    without_gpu = str(_HERE / "cpu" / "sitecustomize.py")
    options: dict[str, Any] = {"arguments": [str(output)], "environment": variables, "without_gpu": without_gpu}
    options["direct"] = direct
    said = worlds.run("oracle.ensured:script", world=processes, path=str(RECIPES / name), **options)
    return Said(said[0], "")


def lines_of(said: Said) -> list[dict[str, Any]]:
    """Lines of JSON, in order."""
    return [json.loads(line) for line in said.out.splitlines() if line.startswith('{"step"')]


def records(said: Said) -> dict[int, dict[str, Any]]:
    """Lines of JSON by step."""
    return {line["step"]: line for line in lines_of(said)}


def losses(found: Mapping[int, Mapping[str, Any]], *steps: int) -> tuple[float, ...]:
    """The losses of some steps."""
    return tuple(found[step]["loss"] for step in steps)


def different(values: tuple[float, ...]) -> bool:
    """Whether losses can show anything: those of different steps are not the same."""
    return len(set(values)) == len(values)


def trainer_log(output: Path) -> dict[int, dict[str, Any]]:
    """What a Trainer logged, by step."""
    state = json.loads((output / "checkpoint-6" / "trainer_state.json").read_text())
    return {entry["step"]: entry for entry in state["log_history"] if "loss" in entry}


def test_the_trainer_goes_on_on_two_processes_and_then_on_three(worlds: Worlds, tmp_path: Path) -> None:
    four, two, three = (tmp_path / name for name in ("four", "two", "three"))
    warm(worlds, "train_trainer.py", four, 4)
    shutil.copytree(four / "checkpoint-2", two / "checkpoint-2")
    torchrun("train_trainer.py", two, 2)
    shutil.copytree(two / "checkpoint-4", three / "checkpoint-4")
    warm(worlds, "train_trainer.py", three, 3)

    through, last = trainer_log(four), trainer_log(three)
    assert list(last) == list(through) == [1, 2, 3, 4, 5, 6]
    assert agree(losses(last, 5, 6), losses(through, 5, 6), significant=6)
    assert agree(losses(trainer_log(two), 3, 4, 5, 6), losses(through, 3, 4, 5, 6), significant=6)
    assert [last[step]["learning_rate"] for step in last] == [through[step]["learning_rate"] for step in through]
    assert different(losses(through, 1, 2, 3, 4, 5, 6))
    assert [p.name.rpartition("-")[0] for p in (two / "checkpoint-2" / ".reshard").glob("global_step2*")] == [
        "global_step2-dp2"
    ]


def test_the_trainer_goes_on_on_two_and_three_processes_without_a_conversion(worlds: Worlds, tmp_path: Path) -> None:
    four, two, three = (tmp_path / name for name in ("four", "two", "three"))
    warm(worlds, "train_trainer.py", four, 4)
    shutil.copytree(four / "checkpoint-2", two / "checkpoint-2")
    warm(worlds, "train_trainer.py", two, 2, direct=True)
    shutil.copytree(two / "checkpoint-4", three / "checkpoint-4")
    warm(worlds, "train_trainer.py", three, 3, direct=True)
    through = trainer_log(four)
    assert agree(losses(trainer_log(two), 3, 4, 5, 6), losses(through, 3, 4, 5, 6), significant=6)
    assert agree(losses(trainer_log(three), 5, 6), losses(through, 5, 6), significant=6)
    assert not list(tmp_path.rglob(".reshard"))


@pytest.mark.full  # tests/oracle/test_ensure_frameworks.py has its call; the script's own lines are few
def test_accelerate_launch_goes_on_on_three_processes(worlds: Worlds, tmp_path: Path) -> None:
    told = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    through = records(warm(worlds, "train_accelerate.py", tmp_path, 2, **told))
    options = ["--num_processes", "3", "--main_process_port", str(free_port()), "--use_deepspeed", "--zero_stage", "2"]
    resumed = records(launch("accelerate", "launch", *options, "train_accelerate.py", str(tmp_path)))
    assert list(through) == [1, 2, 3, 4, 5, 6]
    assert list(resumed) == [4, 5, 6]
    assert agree(losses(resumed, 4, 5, 6), losses(through, 4, 5, 6), significant=6)
    assert [resumed[step]["rate"] for step in resumed] == [through[step]["rate"] for step in resumed]
    assert different(losses(through, 1, 2, 3, 4, 5, 6))


@pytest.fixture(scope="module")
def through(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    """The torchrun recipe without any accident: its output, and what it printed."""
    output = tmp_path_factory.mktemp("through") / "run"
    return output, records(warm(worlds, "train_torchrun.py", output, 2))


def save_of(output: Path, step: int, folder: Path) -> Path:
    """A save directory that ends with a step."""
    shutil.copytree(output / f"global_step{step}", folder / f"global_step{step}")
    (folder / "latest").write_text(f"global_step{step}")
    return folder


def test_torchrun_starts_a_killed_run_again(through: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path) -> None:
    """Rank 0 is killed by SIGKILL when it has saved step 4; nothing is done again, and nothing was converted."""
    variables = {"DIE_AT": "4", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    said = torchrun("train_torchrun.py", tmp_path / "run", 2, "--max-restarts", "3", **variables)
    assert [line["step"] for line in lines_of(said)] == [1, 2, 3, 4, 5, 6]
    assert losses(records(said), 5, 6) == losses(through[1], 5, 6)
    assert "exitcode: -9" in said.err
    assert not list((tmp_path / "run" / ".reshard").glob("global_step*"))


def test_it_goes_on_on_three_processes(
    worlds: Worlds, through: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path
) -> None:
    save = save_of(through[0], 4, tmp_path / "run")
    found = records(warm(worlds, "train_torchrun.py", save, 3))
    assert list(found) == [5, 6]
    assert {line["world"] for line in found.values()} == {3}
    assert agree(losses(found, 5, 6), losses(through[1], 5, 6), significant=6)
    assert different(losses(through[1], 1, 2, 3, 4, 5, 6))


def test_no_process_trains_from_nothing_when_the_checkpoint_is_spoilt(
    through: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path
) -> None:
    save = save_of(through[0], 4, tmp_path / "run")
    (save / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(LaunchError) as caught:
        torchrun("train_torchrun.py", save, 2)
    assert "checkpoint.incomplete" in caught.value.said.err
    assert records(caught.value.said) == {}


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    """The job file of docs/recipes/skypilot.md."""
    return yaml.safe_load((ROOT / "deploy" / "skypilot" / "train.yaml").read_text())


def skypilot(task: Mapping[str, Any], save: Path, processes: int) -> Said:
    """The `run` block on a node of SkyPilot: bash in a home with the clone that `setup` makes; one address a line."""
    home = save.parent / "home"
    home.mkdir()
    (home / "reshard").symlink_to(ROOT)
    told = {
        "HOME": str(home),
        "RUN": str(save),
        "MASTER_PORT": str(free_port()),
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": str(processes),
    }
    return launch("bash", "-c", task["run"], environment=told)


def test_the_job_of_skypilot_has_its_run_on_the_volume_and_installs_what_is_tested(task: Mapping[str, Any]) -> None:
    """The fields are those of https://docs.skypilot.co/en/latest/reference/yaml-spec.html in November 2026."""
    assert set(task) == {"name", "num_nodes", "resources", "volumes", "envs", "setup", "run"}
    assert "-c ~/reshard/constraints.txt" in task["setup"]
    (mounted,) = task["volumes"]
    assert task["envs"]["RUN"].startswith(f"{mounted}/")


def test_a_preempted_job_of_skypilot_goes_on_with_another_number_of_gpus(
    task: Mapping[str, Any], through: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path
) -> None:
    found = records(skypilot(task, save_of(through[0], 4, tmp_path / "run"), 3))
    assert list(found) == [5, 6]
    assert {line["world"] for line in found.values()} == {3}
    assert agree(losses(found, 5, 6), losses(through[1], 5, 6), significant=6)


def test_a_spoilt_checkpoint_ends_the_job_of_skypilot(
    task: Mapping[str, Any], through: tuple[Path, dict[int, dict[str, Any]]], tmp_path: Path
) -> None:
    save = save_of(through[0], 4, tmp_path / "run")
    (save / "global_step4" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(LaunchError) as caught:
        skypilot(task, save, 1)
    assert "checkpoint.incomplete" in caught.value.said.err
    assert records(caught.value.said) == {}


def test_lightning_goes_on_on_three_devices(worlds: Worlds, tmp_path: Path) -> None:
    def steps(said: Said) -> dict[int, dict[str, Any]]:
        found = [words for line in said.out.splitlines() if (words := line.split())[:1] == ["step"]]
        return {int(words[1]): {"loss": float(words[3])} for words in found}

    two, three = tmp_path / "two", tmp_path / "three"
    # Said to Lightning by torchrun, and how it knows that it was started by it.
    told = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
    through = steps(warm(worlds, "train_lightning.py", two, 2, **told))
    saved = "epoch=0-step=3.ckpt"
    shutil.copytree(two / saved, three / saved)
    resumed = steps(warm(worlds, "train_lightning.py", three, 3, **told))
    again = tmp_path / "again"
    shutil.copytree(two / saved, again / saved)
    assert steps(warm(worlds, "train_lightning.py", again, 3, direct=True, **told)) == resumed
    assert not (again / saved / ".reshard").exists()
    assert list(through) == [1, 2, 3, 4, 5, 6]
    assert list(resumed) == [4, 5, 6]
    assert agree(losses(resumed, 4, 5, 6), losses(through, 4, 5, 6), significant=6)
    assert different(losses(through, 1, 2, 3, 4, 5, 6))
    assert [p.name.rpartition("-")[0] for p in (three / saved / ".reshard").glob("checkpoint*")] == ["checkpoint-dp3"]
