"""The Trainer and Accelerate, trained, saved, and resumed through ``reshard.ensure``; runs inside the ranks.

Nothing but the path says that a checkpoint was resharded: the configurations of all runs are the same.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import reshard
from oracle.hf_models import config_of, tokens
from oracle.nvme import enable_swapping, swap_folder
from oracle.train import start_world

GLOBAL_ROWS = 6
"""Rows of a step, on two ranks or on three."""
STEPS = 6
SAVED_STEP = 3


def join_as_deepspeed() -> tuple[int, int]:
    """Joins the world, and has Accelerate see it; returns (rank, world).

    Without a GPU, accelerate 1.15.0 (`state.py`, `_prepare_backend`) finds no backend for DeepSpeed and takes each rank
    for a world of its own: all would train the same rows, and save one random state. This names the backend it lacks.
    """
    rank, world = start_world()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    state: Any = PartialState
    state._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_CPU)
    return rank, world


def zero_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Each row another sequence: who deals them out wrongly has other losses. Or all rows one sequence."""

    def __init__(self, count: int, *, alike: bool = False) -> None:
        self.count, self.alike = count, alike

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tokens(1, 0 if self.alike else index)[0]
        return {"input_ids": ids, "labels": ids}


def script(path: str, arguments: list[str], environment: dict[str, str], without_gpu: str, direct: bool = False) -> str:
    """Runs a training script as it stands in this world, which spares a launcher and the imports of its processes.

    Args:
        path: the script.
        arguments: its own.
        environment: variables that a launcher sets.
        without_gpu: a module that puts in what this machine lacks.
        direct: its ``reshard.ensure`` converts nothing.

    Returns:
        What this rank printed.
    """
    join_as_deepspeed()
    os.environ |= environment | {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    runpy.run_path(without_gpu)
    sys.argv = [path, *arguments]
    if direct:
        vars(reshard)["ensure"] = partial(reshard.ensure, direct=True)
    with redirect_stdout(StringIO()) as said:
        runpy.run_path(path, run_name="__main__")
    if direct:
        atexit._run_exitfuncs()  # a rank ends without them
    return said.getvalue()


def trainer(
    folder: str,
    stage: int,
    source: str | None = None,
    dp: int | None = None,
    plain: bool = False,
    lora: bool = False,
    optim: str = "adamw_torch",
    direct: bool = False,
) -> dict[str, Any]:
    """Trains to the end under ``Trainer``, from the start or from ``reshard.ensure(source)``.

    Args:
        folder: output directory; a checkpoint is saved at step 3 and at the end.
        stage: ZeRO stage.
        source: a ``checkpoint-N`` of a run on another number of ranks.
        dp: what ``ensure`` is asked for; None leaves it to the visible world.
        plain: resume from the source itself.
        lora: train an adapter of PEFT; the Trainer then leaves the frozen weights out of what DeepSpeed saves.
        optim: the Trainer's name of the optimizer.
        direct: by ``reshard.direct`` in place of ``ensure``; a file that is opened below ``source`` to write fails.

    Returns:
        ``losses`` by step, and the ``path`` that was resumed from.
    """
    _, world = join_as_deepspeed()
    torch.manual_seed(4321)
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=zero_config(stage),
        per_device_train_batch_size=GLOBAL_ROWS // world,
        learning_rate=5e-2 if lora else 3e-3,
        optim=optim,
        lr_scheduler_type="linear",
        warmup_steps=2,
        max_steps=STEPS,
        save_steps=SAVED_STEP,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=7,
    )
    model: Any = AutoModelForCausalLM.from_config(config_of("gpt2"))
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True))
    run = Trainer(model=model, args=arguments, train_dataset=Rows(GLOBAL_ROWS * STEPS))
    with _resumed_from(source, direct=direct, plain=plain, dp=dp) as path:
        run.train(resume_from_checkpoint=path)
    log = [entry for entry in run.state.log_history if "loss" in entry]
    return {"path": path, "losses": {str(e["step"]): [e["loss"], e["learning_rate"]] for e in log}}


@contextmanager
def _resumed_from(source: str | None, *, direct: bool, plain: bool = False, **given: Any) -> Iterator[str | None]:
    """The path to resume from, by ``ensure`` or by ``direct``."""
    if source is None or plain:
        yield source
    elif direct:
        watch_writes(source)
        with reshard.direct(source, **given) as path:
            yield path
    else:
        yield reshard.ensure(source, **given)


def watch_writes(folder: str) -> None:
    """Fail whatever opens a file below a folder to write, makes a directory there, or renames into it."""
    within = os.path.join(os.path.realpath(folder), "")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event in ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.truncate")
        if event == "open":
            mode, flags = arguments[1], arguments[2]
            opened = flags if isinstance(flags, int) else 0
            writes = bool(opened & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or any(c in (mode or "") for c in "wax+")
        if writes and any(isinstance(a, str) and os.path.abspath(a).startswith(within) for a in arguments[:2]):
            raise PermissionError(f"{event} below {folder}: {arguments}")

    sys.addaudithook(hook)


def accelerate(
    folder: str,
    stage: int,
    source: str | None = None,
    device: str | None = None,
    universal: bool = False,
    direct: bool = False,
) -> dict[str, Any]:
    """Trains to the end under ``Accelerator``, from the start or from ``load_state(reshard.ensure(source))``.

    Args:
        folder: where states are saved.
        stage: ZeRO stage.
        source: a state of a run on another number of ranks.
        device: where the optimizer's states are offloaded to; nowhere if None.
        universal: ``source`` is a universal checkpoint, and is loaded as it is.
        direct: by ``reshard.direct``, as above.

    Returns:
        ``losses`` (mean over ranks) and learning rates by step, the ``path`` that was resumed from, and ``drawn``: a
        random number of this rank right after the state was loaded, or saved.
    """
    rank, world = join_as_deepspeed()
    torch.manual_seed(4321)
    mine = GLOBAL_ROWS // world
    config = zero_config(stage) | {"train_micro_batch_size_per_gpu": mine}
    if device is not None:
        config |= {"zero_force_ds_cpu_optimizer": False, "aio": {"block_size": 512}}
        config["zero_optimization"] |= {"sub_group_size": 500, "offload_optimizer": {"device": device}}
    if universal:
        config["checkpoint"] = {"load_universal": True}
    if device == "nvme":
        enable_swapping()
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = swap_folder()
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), step_scheduler_with_optimizer=False
    )
    model = AutoModelForCausalLM.from_config(config_of("gpt2"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    engine, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    torch.manual_seed(100 + rank)
    path, first, drawn = None, 0, 0.0
    if source is not None:
        with _resumed_from(source, direct=direct, plain=universal) as path:
            accelerator.load_state(path)
        first, drawn = SAVED_STEP, float(torch.rand(1))
    losses: dict[str, list[float]] = {}
    for step in range(first, STEPS):
        ids = tokens(GLOBAL_ROWS, step)[rank * mine : (rank + 1) * mine]
        loss = engine(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses[str(step + 1)] = [float(mean) / world, rate]
        if step + 1 == SAVED_STEP:
            accelerator.save_state(str(Path(folder, "state")))
            drawn = float(torch.rand(1))
    accelerator.save_state(str(Path(folder, "last")))
    return {"path": path, "losses": losses, "drawn": drawn}
