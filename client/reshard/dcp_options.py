"""Options of PyTorch's distributed checkpoints (DCP): as FSDP, torchtitan, Accelerate and other frameworks save them.

The entry point of the format names this module; the engine's class of the format is imported when it is needed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AliasChoices, Field

from reshard.choices import ParamOrder
from reshard.installed_formats import InstalledFormat
from reshard.option import Option, Place
from reshard.options import FormatOptions, is_none
from reshard.targets import Load, Target


class Framework(StrEnum):
    """The frameworks whose checkpoints differ in the keys of model and optimizer, and in the files beside them."""

    STATE_DICT = "state-dict"
    """`dcp.save({"model": ..., "optimizer": ...})` with the state dicts of `get_state_dict`."""
    TORCHTITAN = "torchtitan"
    """The model at the root, the optimizer flattened."""
    ACCELERATE = "accelerate"
    """`Accelerator.save_state`: the directories `pytorch_model_fsdp_0` and `optimizer_0`."""
    TRAINER = "trainer"
    """A `checkpoint-N` of the Hugging Face Trainer: as `accelerate`, with the Trainer's own files."""
    LIGHTNING = "lightning"
    """A sharded checkpoint of Lightning: `model`, `optimizer_0`, and `meta.pt`."""
    TORCHTUNE = "torchtune"
    """torchtune's output directory, with `--to torch_save`: `epoch_N` and `recipe_state`."""


class DcpOptions(FormatOptions):
    """Options of distributed checkpoints."""

    framework: Annotated[
        Framework | None,
        Option(label="Framework that loads it", ensure="SRC's", digested="grammar"),
    ] = Field(
        default=None,
        validation_alias=AliasChoices("framework", "grammar"),
        description="Keys and files as this framework loads them; default: the source's, or state-dict.",
    )
    files: Annotated[int | None, Option(label="Number of files")] = Field(
        default=None, ge=1, le=1 << 16, description="Number of .distcp files; default: one for each 4 GB."
    )
    target_model_key: Annotated[str | None, Option(label="Place of the model")] = Field(
        default=None,
        max_length=256,
        description="Place of the model in DST, such as app.model; default: that of --framework.",
    )
    target_optimizer_key: Annotated[str | None, Option(label="Place of the optimizer")] = Field(
        default=None,
        max_length=256,
        description="Place of the optimizer in DST, such as app.optim; default: that of --framework.",
    )
    target_scheduler_key: Annotated[str | None, Option(label="Key of the scheduler")] = Field(
        default=None,
        max_length=256,
        exclude_if=is_none,
        description="With --to torch_save, the key of the scheduler in the file; default: SRC's, or lr_scheduler.",
    )
    target_param_order: Annotated[ParamOrder | None, Option(label="Order of the optimizer's numbers")] = Field(
        default=None,
        exclude_if=is_none,
        description="With --to torch_save, what the optimizer's numbers count: groups (default), as "
        "Optimizer.load_state_dict takes them; or model, as Lightning's FSDP and ModelParallelStrategy do.",
    )
    trainer_files: Annotated[str | None, Option(label="Files of the trainer"), Place()] = Field(
        default=None,
        min_length=1,
        max_length=4096,
        description="Directory of a trainer's files (trainer_state.json, schedulers, random states) for the target.",
    )
    torch_file: Annotated[str, Option(label="Name of the file")] = Field(
        default="checkpoint.pt",
        pattern=r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}",
        max_length=128,
        description="With --to torch_save, the name of the file; optimizer.pt for a Trainer without FSDP.",
    )


DCP = InstalledFormat(
    name="dcp",
    implementation="reshard_engine.formats.dcp.format:Dcp",
    targets={
        "dcp": Target(
            name="dcp",
            label="FSDP and torchtitan (DCP)",
            contains="PyTorch distributed checkpoint: FSDP, torchtitan, Accelerate, Trainer, Lightning (--framework)",
            use="FSDP (DCP)",
            also=("fsdp", "fsdp2", "distcp"),
            options=("framework", "files", "target_model_key", "target_optimizer_key", "trainer_files"),
            loads=(
                Load("trainer.fit(model, ckpt_path={dir})", having="meta.pt"),
                Load("trainer.train(resume_from_checkpoint={dir})", having="trainer_state.json"),
                Load("accelerator.load_state({dir})", having="pytorch_model_fsdp_0/*"),
                Load("dcp.load(state_dict, checkpoint_id={dir})"),
            ),
            ending="fsdp",
        ),
        "torch_save": Target(
            name="torch_save",
            label="One file of torch.save",
            contains="torch.save: one file, or full files of Accelerate, the Trainer, torchtune (--framework)",
            options=(
                "framework",
                "target_model_key",
                "target_optimizer_key",
                "target_scheduler_key",
                "target_param_order",
                "trainer_files",
                "torch_file",
            ),
        ),
    },
    options=DcpOptions,
)
