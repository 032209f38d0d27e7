"""Every directory that users name: the save folder, one tag, HF Trainer's, Accelerate's and Lightning's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from house.expected import raised
from oracle.driver import Oracle, Trained
from oracle.fixtures import TrainedFactory
from oracle.outputs import convert, read_safetensors, read_universal
from oracle.truth import NOT_LOADED_BY_UNIVERSAL, Truth, differences
from reshard.errors import SourceError

STAGES = ["zero2_tiny", "zero3_tiny"]


@pytest.fixture(params=STAGES)
def run(request: pytest.FixtureRequest, trained: TrainedFactory) -> Trained:
    """A small real checkpoint."""
    return trained(request.param)


def masters(source: Path, out: Path, *, tag: str | None = None) -> object:
    """The trained weights that a conversion of ``source`` gives."""
    convert(source, out, "safetensors", tag=tag)
    tensors = read_safetensors(out).tensors
    return {name: value for name, value in tensors.items() if name not in ("adapter.weight", "seen", "wave")}


def nested(run: Trained, folder: Path, tag: str) -> Path:
    """``folder/<tag>/`` and ``folder/latest``, as ``engine.save_checkpoint(folder, tag)`` leaves them."""
    shutil.copytree(run.tag_dir, folder / tag)
    (folder / "latest").write_text(tag)
    shutil.copy(run.dir / "zero_to_fp32.py", folder)
    return folder


def test_the_save_folder_and_one_tag(run: Trained, tmp_path: Path) -> None:
    assert masters(run.dir, tmp_path / "by-latest") == run.truth.kind("fp32")
    assert masters(run.tag_dir, tmp_path / "by-folder") == run.truth.kind("fp32")
    assert masters(run.dir, tmp_path / "by-tag", tag=run.tag) == run.truth.kind("fp32")


def test_a_tag_wins_over_latest(trained: TrainedFactory, tmp_path: Path) -> None:
    two, three = trained("zero2_tiny"), trained("zero3_tiny")
    save = nested(two, tmp_path / "save", "global_step2")
    nested(three, save, "global_step10")
    assert masters(save, tmp_path / "latest") == three.truth.kind("fp32")
    assert masters(save, tmp_path / "tagged", tag="global_step2") == two.truth.kind("fp32")
    error = raised(SourceError, convert, save, tmp_path / "none", "safetensors", tag="global_step3")
    assert error.code == "source.not_found"
    assert "global_step" in error.fix


def test_latest_that_names_nothing(run: Trained, tmp_path: Path) -> None:
    save = nested(run, tmp_path / "save", "global_step3")
    (save / "latest").write_text("global_step9")
    error = raised(SourceError, convert, save, tmp_path / "out", "safetensors")
    assert error.code == "checkpoint.bad_latest"
    assert "--tag global_step3" in error.fix


def test_a_hugging_face_trainer_checkpoint_resumes(run: Trained, oracle: Oracle, tmp_path: Path) -> None:
    # transformers writes these beside DeepSpeed's folder, and resumes from a folder that matches global_step*.
    folder = nested(run, tmp_path / "checkpoint-3", "global_step3")
    (folder / "config.json").write_text("{}")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    for name in ("scheduler.pt", "training_args.bin", "rng_state_0.pth", "rng_state_1.pth"):
        torch.save({"not": "DeepSpeed's"}, folder / name)
    convert(folder, folder / "global_step3_universal", "universal")
    assert (folder / "latest_universal").read_text() == "global_step3_universal"
    assert read_universal(folder / "global_step3_universal").kind("exp_avg") == run.truth.kind("exp_avg")
    resumed = oracle.resume_universal(run.case, folder, tmp_path / "out", world=3, steps=0)
    assert differences(run.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == []
    # What was written beside the source does not change what the source is.
    assert masters(folder, tmp_path / "again") == run.truth.kind("fp32")


def test_a_trainer_output_folder_is_not_a_checkpoint(run: Trained, tmp_path: Path) -> None:
    nested(run, tmp_path / "output" / "checkpoint-3", "global_step3")
    error = raised(SourceError, convert, tmp_path / "output", tmp_path / "out", "safetensors")
    assert error.code == "source.unknown_kind"
    assert "checkpoint-3" in str(error)


def test_an_accelerate_folder(run: Trained, tmp_path: Path) -> None:
    # `Accelerator.save_state` names the tag after the model's index.
    folder = nested(run, tmp_path / "state", "pytorch_model")
    for name in ("random_states_0.pkl", "random_states_1.pkl", "scheduler.bin"):
        torch.save({"not": "DeepSpeed's"}, folder / name)
    assert masters(folder, tmp_path / "out") == run.truth.kind("fp32")


def test_a_lightning_folder(run: Trained, tmp_path: Path) -> None:
    folder = nested(run, tmp_path / "epoch=0-step=3.ckpt", "checkpoint")
    assert masters(folder, tmp_path / "out") == run.truth.kind("fp32")
    assert masters(folder / "checkpoint", tmp_path / "out2") == run.truth.kind("fp32")


@pytest.mark.parametrize("name", STAGES)
def test_the_frozen_test_data_read_as_expected(name: str, tmp_path: Path) -> None:
    data = Path(__file__).resolve().parent.parent / "data" / name
    expected = Truth(data / "expected.safetensors", data / "expected.json")
    assert masters(data, tmp_path / "out") == expected.kind("fp32")
    convert(data, tmp_path / "universal", "universal")
    found = read_universal(tmp_path / "universal")
    assert {kind: found.kind(kind) for kind in ("exp_avg", "exp_avg_sq")} == {
        kind: expected.kind(kind) for kind in ("exp_avg", "exp_avg_sq")
    }
    assert found.steps == expected.step
