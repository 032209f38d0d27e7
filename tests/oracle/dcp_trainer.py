"""Transformers' Trainer with FSDP, trained, saved and resumed; runs inside the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import reshard
from oracle.dcp_accelerate import join_as_accelerate
from oracle.dcp_models import mean_over_ranks
from oracle.dcp_peft import adapted, save_as_peft_does
from oracle.dcp_truth import dump
from oracle.ensured import Rows, join_as_deepspeed, zero_config
from oracle.hf_models import config_of
from oracle.train import dump_states

GLOBAL_ROWS = 12
"""Rows of a step, on any number of ranks."""
SAVED_STEP, STEPS = 3, 6
_LAYERS = {"gpt2": "GPT2Block", "llama": "LlamaDecoderLayer"}


class _Dumps(TrainerCallback):
    """Dumps the state that the checkpoint of step 3 holds, or the one with which a resumed run begins."""

    def __init__(self, folder: Path, *, resumed: bool, kind: str, adapter: str | None) -> None:
        self.folder, self.resumed = folder, resumed
        self.kind, self.adapter = kind, adapter
        self.trainer: Any = None

    def _dump(self, stem: str) -> None:
        trainer = self.trainer
        if trainer.is_deepspeed_enabled:
            dump_states(trainer.model_wrapped, self.folder, stem, {"lr_scheduler": trainer.lr_scheduler.state_dict()})
            return
        dump(trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler, self.folder, stem)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Called when a checkpoint is loaded."""
        if self.resumed:
            self._dump("resumed")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Called on all ranks once a checkpoint is written."""
        if not self.resumed and state.global_step == SAVED_STEP:
            self._dump("truth")
            if self.adapter is not None and state.is_world_process_zero:
                tensors = load_file(self.folder / "truth.safetensors")
                save_as_peft_does(self.kind, self.adapter, tensors, self.folder / "peft")


class _Recording(Trainer):
    """Keeps each step's loss: logs follow intervals that a resumed Trainer takes from the checkpoint."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The step itself, and the mean of its losses."""
        loss = super().training_step(*args, **kwargs)
        self.losses[str(self.state.global_step + 1)] = mean_over_ranks(loss)
        return loss

    losses: dict[str, float]


def _distribution(kind: str, version: int, stage: int | None, *, universal: bool) -> dict[str, Any]:
    """The arguments that say how the run is spread over the ranks: DeepSpeed at a stage, or FSDP."""
    if stage is not None:
        return {"deepspeed": {**zero_config(stage), "checkpoint": {"load_universal": universal}}}
    config = {
        "version": version,
        "transformer_layer_cls_to_wrap": [_LAYERS[kind]],
        "state_dict_type": "SHARDED_STATE_DICT",
        "sync_module_states": "false",
    }
    return {"fsdp": True, "fsdp_config": config}


def trainer(
    folder: str,
    kind: str,
    version: int = 2,
    resume: str | None = None,
    stage: int | None = None,
    to: str | None = None,
    adapter: str | None = None,
    universal: bool = False,
    line: str | None = None,
) -> dict[str, Any]:
    """Trains to step 6 under ``Trainer``, from the start or from a checkpoint.

    Args:
        folder: output directory; the checkpoint of step 3 and its truth are left in it.
        kind: ``llama``, or ``gpt2``, whose head is tied.
        version: of FSDP.
        resume: a ``checkpoint-N``.
        stage: trains with DeepSpeed's ZeRO at that stage in place of FSDP.
        to: what ``reshard.ensure`` is asked to make of ``resume`` first.
        adapter: trains one of this kind on a frozen model (`oracle.dcp_peft_cases`); PEFT's own word on it is left in
            ``folder/peft``.
        universal: DeepSpeed loads a universal checkpoint.
        line: the call of a script that resumes, in place of the one here.

    Returns:
        ``losses`` by step, and the ``path`` that was resumed from.
    """
    _, world = join_as_accelerate() if stage is None else join_as_deepspeed()
    resumed = resume is not None or line is not None
    seed = 98765 if resumed else 4321
    # Before the arguments: with ZeRO-3 in them, transformers would draw the base model anew, part by part.
    model: Any = None if adapter is None else adapted(kind, adapter, seed)
    torch.manual_seed(seed)
    arguments = TrainingArguments(
        output_dir=str(Path(folder, "output")),
        per_device_train_batch_size=GLOBAL_ROWS // world,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        max_steps=STEPS,
        save_steps=SAVED_STEP,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=7,
        **_distribution(kind, version, stage, universal=universal),
    )
    if model is None:
        model = AutoModelForCausalLM.from_config(config_of(kind))
    dumps = _Dumps(Path(folder), resumed=resumed, kind=kind, adapter=adapter)
    run = _Recording(model=model, args=arguments, train_dataset=Rows(GLOBAL_ROWS * STEPS), callbacks=[dumps])
    run.losses = {}
    dumps.trainer = run
    path = resume if resume is None or to is None else reshard.ensure(resume, to=to, zero_stage=stage)
    if line is None:
        run.train(resume_from_checkpoint=path)
    else:
        eval(line, {"trainer": run})
    return {"losses": run.losses, "path": path}
