"""The oracle's model under Accelerate with FSDP 1 or 2; runs inside the ranks."""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType

from oracle.dcp_cases import FsdpRun
from oracle.dcp_models import Running, group_names, optimizer_of, scheduler_of, start_world
from oracle.models import Block, build_model


def join_as_accelerate() -> tuple[int, int]:
    """Joins the world, and has Accelerate see it; returns (rank, world).

    Without an accelerator device, accelerate 1.15.0 (`state.py`, `_prepare_backend`) finds no backend and takes each
    rank for a world of its own; and with the one that it has for CPUs it knows no FSDP. This names one for it.
    """
    rank, world = start_world()
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    state: Any = PartialState
    state._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_XPU)
    return rank, world


def plugin_of(version: int, blocks: list[str], **options: Any) -> FullyShardedDataParallelPlugin:
    """FSDP's options as ``accelerate config`` would have them, with sharded state dicts."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=blocks,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
        reshard_after_forward=True if version == 2 else "FULL_SHARD",
        **options,
    )


def start(run: FsdpRun, *, seed: int) -> tuple[Accelerator, Running]:
    """A run that ``Accelerator.prepare`` made, with freshly drawn weights."""
    version = 2 if run.parallel == "fsdp2" else 1
    options: dict[str, Any] = {} if version == 2 else {"use_orig_params": run.parallel == "fsdp1"}
    accelerator = Accelerator(
        fsdp_plugin=plugin_of(version, [Block.__name__], **options), step_scheduler_with_optimizer=False
    )
    model: Any = build_model(run.model, seed)
    names = group_names(run, model)
    optimizer: Any = optimizer_of(run, model, names)
    scheduler = scheduler_of(run, optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    return accelerator, Running(run, model, optimizer, scheduler)
