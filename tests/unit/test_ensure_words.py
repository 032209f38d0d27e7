"""`reshard ensure` says where its number of ranks comes from, takes no node for a rank, and prints absolute paths."""

from __future__ import annotations

from pathlib import Path

import pytest

import reshard
from house.expected import raised
from house.launchers import forget_launchers
from house.promises import command
from house.saves import DATA, make_save, wanted
from reshard.errors import RequestError


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_launchers(monkeypatch, "SLURM_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_GPUS_ON_NODE")


@pytest.fixture
def save(tmp_path: Path) -> Path:
    return make_save(tmp_path / "run")


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_NTASKS"])
def test_the_origin_of_the_number_of_ranks_is_said(variable: str, save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "2")
    code, told, said = command("ensure", str(save))
    assert (code, told) == (0, f"{save}\n")
    assert f"2 ranks, from {variable}; --dp N overrides" in said
    for more in (("--dp", "2"), ("-q",)):
        code, _, said = command("ensure", str(save), *more)
        assert (code, "overrides" in said) == (0, False)


def test_a_memory_limit_is_kept(save: Path) -> None:
    words = ("ensure", str(save), "--dp", "3", "-q")
    code, told, said = command(*words, "--memory-limit", "1KB")
    assert (code, told, "request.budget_too_small" in said, "--memory-limit" in said) == (8, "", True, True)
    assert raised(RequestError, reshard.ensure, save, dp=3, memory_limit=1000).code == "request.budget_too_small"
    code, told, _ = command(*words, "--memory-limit", "64MiB")
    assert code == 0
    assert reshard.ensure(save, dp=3, memory_limit="2GiB") == told.strip()  # the same result


def test_what_fits_already_says_that_nothing_was_converted(save: Path) -> None:
    _, _, said = command("ensure", str(save), "--dp", "2")
    assert "nothing was converted: the source has this layout already" in said


def test_a_distributed_checkpoint_says_that_it_loads_anywhere(tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert command("convert", str(DATA / "zero2_tiny"), str(made), "--to", "dcp", "-q")[0] == 0
    code, told, said = command("ensure", str(made))
    assert (code, told) == (0, f"{made}\n")
    assert "nothing was converted: a distributed checkpoint (DCP) loads on any number of ranks as it is" in said
    line = said.partition("for a copy: reshard ")[2].strip().replace("DST", str(tmp_path / "copy"))
    assert command(*line.split(), "-q")[0] == 0
    assert command("diff", str(made), str(tmp_path / "copy"))[0] == 0


ONE_A_NODE = {"SLURM_NTASKS": "4", "SLURM_NNODES": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (ONE_A_NODE, None),
        ({**ONE_A_NODE, "SLURM_GPUS_ON_NODE": "8"}, None),
        ({**ONE_A_NODE, "SLURM_GPUS_PER_NODE": "gpu:h100:8"}, None),
        ({**ONE_A_NODE, "SLURM_GPUS_ON_NODE": "1"}, 4),
        ({**ONE_A_NODE, "SLURM_GPUS_PER_NODE": "h100:1"}, 4),
        ({**ONE_A_NODE, "WORLD_SIZE": "32"}, 32),
        ({"SLURM_NTASKS": "32", "SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "8"}, 32),
        ({"SLURM_NTASKS": "4", "SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "1"}, 4),
        ({"SLURM_NTASKS": "4"}, 4),
    ],
    ids=str,
)
def test_one_task_a_node_is_no_number_of_ranks(environ: dict[str, str], expected: int | None) -> None:
    if expected is not None:
        assert wanted(environ=environ).processes == expected
        return
    error = raised(RequestError, wanted, environ=environ)
    assert (error.code, "--dp N" in error.fix) == ("request.invalid", True)
    assert "SLURM_NTASKS is 4 and SLURM_NNODES is 4" in error.message
    assert ("32 ranks" in error.message) is (len(environ) > 2)
    assert wanted(dp=8, environ=environ).dp == 8


def test_the_path_is_absolute_whether_the_source_fits_or_not(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(save.parent)
    assert command("ensure", save.name, "--dp", "2")[1] == f"{save}\n"
    assert command("ensure", save.name, "--dp", "3")[1].startswith(f"{save}/.reshard/")


def test_a_service_that_is_away_can_be_done_without(save: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _seconds: None)  # between the tries
    away = "http://127.0.0.1:9"
    code, _, said = command("ensure", str(save), "--dp", "3", "--url", away)
    assert (code, "leave --url out" in said) == (6, True)
    monkeypatch.setenv("RESHARD_URL", away)
    code, _, said = command("ensure", str(save), "--dp", "3")
    assert (code, "service.unavailable" in said) == (6, True)
    assert "or convert here: unset RESHARD_URL" in said
