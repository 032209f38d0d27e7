"""Checkpoints as Accelerate and the Hugging Face Trainer really save them; runs inside the ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from oracle.ensured import Rows, zero_config
from oracle.gather import gather_states
from oracle.hf_models import config_of, tokens
from oracle.train import start_world

_TWO_ROWS = {"train_micro_batch_size_per_gpu": 2}


def _dump(engine: Any, folder: Path) -> None:
    """Leaves masters and moments in ``folder/truth.safetensors``; collective."""
    tensors = gather_states(engine).tensors
    if dist.get_rank() == 0:
        save_file({key: value.contiguous() for key, value in tensors.items()}, str(folder / "truth.safetensors"))
    dist.barrier()


def _one_step(folder: str, config: dict[str, Any]) -> tuple[Accelerator, Any]:
    """One step under ``Accelerator``, then ``save_state`` into ``folder/state``; the accelerator and the engine."""
    rank, _ = start_world()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    torch.manual_seed(4321)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = AutoModelForCausalLM.from_config(config_of("gpt2"))
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    ids = tokens(2, rank)
    accelerator.backward(engine(input_ids=ids, labels=ids).loss)
    optimizer.step()
    accelerator.save_state(str(Path(folder, "state")))
    return accelerator, engine


def accelerate_save(folder: str, stage: int) -> str:
    """One step and ``save_state`` into ``folder/state``; returns the engine's class."""
    _, engine = _one_step(folder, zero_config(stage) | _TWO_ROWS)
    _dump(engine, Path(folder))
    return type(engine).__name__


def gathered_16bit(folder: str) -> str:
    """One step at stage 3 in bf16, ``save_state`` into ``folder/state`` and ``save_model`` into ``folder/model``.

    The latter gathers 16-bit weights, as ``zero3_save_16bit_model: true`` of Accelerate's configuration has it.
    """
    config = zero_config(3) | _TWO_ROWS | {"bf16": {"enabled": True}}
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    accelerator, engine = _one_step(folder, config)
    accelerator.save_model(engine, str(Path(folder, "model")))
    return type(engine).__name__


class _DumpOnSave(TrainerCallback):
    """Dumps the states that the first checkpoint holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run: Any = None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Called on all ranks once a checkpoint is written."""
        if not (self.folder / "truth.safetensors").exists():
            dist.barrier()
            _dump(self.run.model_wrapped, self.folder)


def trainer(folder: str, stage: int, resume: str | None = None) -> dict[str, float]:
    """Trains four steps under ``Trainer`` and saves ``folder/output/checkpoint-2`` on the way.

    Args:
        folder: where output and truth go.
        stage: ZeRO stage.
        resume: a ``checkpoint-N`` folder with a universal checkpoint to go on from; none if None.

    Returns:
        The losses by step.
    """
    _, world = start_world()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    torch.manual_seed(4321)
    arguments = TrainingArguments(
        output_dir=str(Path(folder, "output")),
        deepspeed=zero_config(stage) | {"checkpoint": {"load_universal": resume is not None}},
        per_device_train_batch_size=4 // world,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=7,
    )
    model = AutoModelForCausalLM.from_config(config_of("gpt2"))
    # All rows alike: the trainer deals them out in an order that depends on the number of ranks.
    dump = _DumpOnSave(Path(folder))
    dump.run = Trainer(model=model, args=arguments, train_dataset=Rows(16, alike=True), callbacks=[dump])
    dump.run.train(resume_from_checkpoint=resume)
    return {str(entry["step"]): entry["loss"] for entry in dump.run.state.log_history if "loss" in entry}
