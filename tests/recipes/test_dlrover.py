"""docs/recipes/dlrover.md: the function in DLRover's place, on a checkpoint of a real run. DLRover is not installed."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from house.repository import ROOT
from oracle.conversions import target_of
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.truth import NOT_LOADED_BY_UNIVERSAL, differences
from reshard.engine import load_engine

PLACE = "dlrover.python.elastic_agent.torch.ckpt_saver"


class Saver:
    """As far as the agent knows `DeepSpeedCheckpointSaver`."""

    def ucp(self, input_dir: str, output_dir: str, ucp_device_type: str) -> bool:
        raise AssertionError("the original is called")


@pytest.fixture
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dlrover_ucp", ROOT / "docs" / "recipes" / "dlrover_ucp.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def saver(recipe: ModuleType) -> Saver:
    """A saver whose method is ours."""
    fresh = type("Saver", (Saver,), {"ucp": Saver.ucp})
    recipe.install(fresh)
    made: Saver = fresh()
    return made


@pytest.fixture
def checkpoint(trained: TrainedFactory, tmp_path: Path) -> Path:
    """`checkpoint-3/global_step3` of a real run of two ranks, where DLRover has it."""
    run = trained("z2_fp32", world=2)
    assert run.tag == "global_step3"
    shutil.copytree(run.dir, tmp_path / "output" / "checkpoint-3")
    return tmp_path / "output" / "checkpoint-3"


def convert(saver: Saver, checkpoint: Path) -> bool:
    """As `ElasticTrainingAgent.ucp` calls it."""
    return saver.ucp(str(checkpoint / "global_step3"), str(checkpoint / "ucp"), "cpu")


def test_the_signature_is_theirs(recipe: ModuleType) -> None:
    ours, theirs = inspect.signature(recipe.ucp), inspect.signature(Saver.ucp)
    assert list(ours.parameters) == list(theirs.parameters)
    assert ours.return_annotation == theirs.return_annotation


def test_deepspeed_loads_what_it_made(
    saver: Saver, checkpoint: Path, trained: TrainedFactory, oracle: Oracle, tmp_path: Path
) -> None:
    run = trained("z2_fp32", world=2)

    assert convert(saver, checkpoint) is True

    assert load_engine().verify(str(checkpoint / "ucp")).ok
    # What DeepSpeed's script leaves there too.
    assert (checkpoint / "latest_universal").read_text() == "ucp"
    resumed = oracle.resume_universal(
        target_of(run.case), checkpoint, tmp_path / "state", world=3, restore_from=run.truth
    )
    assert differences(run.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == []
    # Membership may change again before the next save.
    stamp = (checkpoint / "ucp" / "reshard.json").stat().st_mtime_ns
    assert convert(saver, checkpoint) is True
    assert (checkpoint / "ucp" / "reshard.json").stat().st_mtime_ns == stamp


def test_a_broken_checkpoint_is_no_success(saver: Saver, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    next(checkpoint.rglob("*_1_mp_rank_00_optim_states.pt")).unlink()
    before = sorted(path.name for path in checkpoint.iterdir())
    assert convert(saver, checkpoint) is False
    (line,) = caplog.messages
    assert "checkpoint.incomplete: " in line
    assert "; fix: copy " in line
    assert caplog.records[0].levelno == logging.ERROR
    assert sorted(path.name for path in checkpoint.iterdir()) == before


def test_what_is_at_the_place_already_stays(saver: Saver, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    (checkpoint / "ucp").mkdir()
    (checkpoint / "ucp" / "notes.txt").write_text("mine")
    assert convert(saver, checkpoint) is False
    assert "request.target_exists: " in caplog.text
    assert [path.name for path in (checkpoint / "ucp").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TIMEOUT_S", 0.01, "TimeoutExpired"),
        ("sys.executable", "/nowhere/python", "FileNotFoundError"),
        ("sys.executable", "/bin/false", "exit code 1"),
    ],
    ids=["too long", "no interpreter", "a process that says nothing"],
)
def test_nothing_is_raised(
    name: str,
    value: Any,
    said: str,
    recipe: ModuleType,
    saver: Saver,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place, _, attribute = name.rpartition(".")
    monkeypatch.setattr(sys if place else recipe, attribute, value)
    assert convert(saver, checkpoint) is False
    (line,) = caplog.messages
    assert said in line
    assert not (checkpoint / "latest_universal").exists()


def test_a_dlrover_that_has_no_ucp_is_named(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(PLACE)
    setattr(module, "DeepSpeedCheckpointSaver", type("DeepSpeedCheckpointSaver", (), {}))  # noqa: B010
    monkeypatch.setitem(sys.modules, PLACE, module)
    monkeypatch.setattr(recipe, "version", {"dlrover": "0.6.1"}.__getitem__)
    for parent in [PLACE.rsplit(".", n)[0] for n in range(1, PLACE.count(".") + 1)]:
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    with pytest.raises(
        recipe.UnsupportedDlroverError, match=r"^dlrover 0\.6\.1 has no `ucp` in DeepSpeedCheckpointSav"
    ):
        recipe.install()


def test_a_ucp_of_another_signature_is_left_alone(recipe: ModuleType) -> None:
    def other(self: object, input_dir: str) -> bool:
        return bool(input_dir)

    changed = type("Saver", (), {"ucp": other})
    with pytest.raises(recipe.UnsupportedDlroverError, match=r"has `ucp\(self, input_dir\)` in Saver"):
        recipe.install(changed)
    assert vars(changed)["ucp"] is other


def test_without_dlrover_install_says_so(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dlrover", None)
    with pytest.raises(recipe.UnsupportedDlroverError, match=f"has no {PLACE}"):
        recipe.install()
