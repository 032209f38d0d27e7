"""What Accelerate and the Hugging Face Trainer really save is read, and the Trainer goes on from our output."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle.conversions import agree
from oracle.launcher import Worlds
from oracle.outputs import convert, read_safetensors, read_universal
from oracle.truth import RawTensor, Truth


def truth_of(folder: Path) -> dict[str, RawTensor]:
    """Masters and moments by ``<state>/<fqn>`` at the save."""
    return Truth(folder / "truth.safetensors", folder / "none").tensors


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_save_state(stage: int, worlds: Worlds, tmp_path: Path) -> None:
    engines = worlds.run("oracle.frameworks:accelerate_save", world=2, folder=str(tmp_path), stage=stage)
    assert engines == ["DeepSpeedEngine"] * 2
    assert (tmp_path / "state" / "latest").read_text() == "pytorch_model"
    convert(tmp_path / "state", tmp_path / "universal", "universal")
    assert read_universal(tmp_path / "universal").atoms == truth_of(tmp_path)


def test_weights_that_were_gathered_at_the_save_are_those_of_the_sharded_save(worlds: Worlds, tmp_path: Path) -> None:
    """`zero3_save_16bit_model`: what rank 0 collected is what comes out of the shards, and can be a source."""
    worlds.run("oracle.frameworks:gathered_16bit", world=2, folder=str(tmp_path))
    gathered = read_safetensors(tmp_path / "model")
    for source in ("state", "model"):
        convert(tmp_path / source, tmp_path / "out" / source, "safetensors", dtype="bf16")
        ours = read_safetensors(tmp_path / "out" / source)
        assert ours.tensors == gathered.tensors
    assert {value.dtype for value in gathered.tensors.values()} == {"BF16"}
    assert read_safetensors(tmp_path / "out" / "state").aliases == {"lm_head.weight": "transformer.wte.weight"}


@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_resumes_on_another_world(stage: int, worlds: Worlds, tmp_path: Path) -> None:
    through, resumed = tmp_path / "through", tmp_path / "resumed"
    for folder in (through, resumed):
        folder.mkdir()
    uninterrupted = worlds.run("oracle.frameworks:trainer", world=2, folder=str(through), stage=stage)[0]
    checkpoint = through / "output" / "checkpoint-2"
    convert(checkpoint, checkpoint / "global_step2_universal", "universal")
    assert read_universal(checkpoint / "global_step2_universal").atoms == truth_of(through)

    run = worlds.run("oracle.frameworks:trainer", world=1, folder=str(resumed), stage=stage, resume=str(checkpoint))[0]

    assert list(run) == list(uninterrupted) == ["1", "2", "3", "4"]
    # Five digits, not six: early in Adam's life a gradient's last bits decide the sign of whole steps.
    assert agree((run["3"], run["4"]), (uninterrupted["3"], uninterrupted["4"]), significant=5)
    # The log of steps 1 and 2 comes with the checkpoint; 3 and 4 were trained anew.
    convert(resumed / "output" / "checkpoint-4", tmp_path / "weights", "safetensors")
    convert(through / "output" / "checkpoint-4", tmp_path / "weights-through", "safetensors")
    assert set(read_safetensors(tmp_path / "weights").tensors) == set(
        read_safetensors(tmp_path / "weights-through").tensors
    )
