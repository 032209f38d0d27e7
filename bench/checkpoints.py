"""Checkpoints of any size in the exact shape that DeepSpeed 0.19.8 writes, without training.

A GPT-like parameter list, random data, ZeRO-2 or ZeRO-3 files for any number of ranks. The keys are
those of `reference` checkpoints written by DeepSpeed itself (`tests/data`); `ds_to_universal` and
`zero_to_fp32` read them, which the benchmark relies on.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

STATES = ("exp_avg", "exp_avg_sq")


def gpt_parameters(hidden: int, layers: int, vocab: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a GPT with tied embeddings."""
    found: list[tuple[str, tuple[int, ...]]] = [("wte.weight", (vocab, hidden)), ("wpe.weight", (1024, hidden))]
    for layer in range(layers):
        h = f"h.{layer}"
        found += [
            (f"{h}.ln_1.weight", (hidden,)),
            (f"{h}.ln_1.bias", (hidden,)),
            (f"{h}.attn.c_attn.weight", (hidden, 3 * hidden)),
            (f"{h}.attn.c_attn.bias", (3 * hidden,)),
            (f"{h}.attn.c_proj.weight", (hidden, hidden)),
            (f"{h}.attn.c_proj.bias", (hidden,)),
            (f"{h}.ln_2.weight", (hidden,)),
            (f"{h}.ln_2.bias", (hidden,)),
            (f"{h}.mlp.c_fc.weight", (hidden, 4 * hidden)),
            (f"{h}.mlp.c_fc.bias", (4 * hidden,)),
            (f"{h}.mlp.c_proj.weight", (4 * hidden, hidden)),
            (f"{h}.mlp.c_proj.bias", (hidden,)),
        ]
    return [*found, ("ln_f.weight", (hidden,)), ("ln_f.bias", (hidden,))]


def many_small_parameters(count: int, size: int = 64) -> list[tuple[str, tuple[int, ...]]]:
    """Many small parameters, as a mixture of experts or a LoRA run has them."""
    return [(f"layers.{i}.weight", (size, 4 + i % 7)) for i in range(count)]


def group_entry(ids: list[int]) -> dict[str, Any]:
    flags = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
    return {
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        **{flag: None if flag in ("foreach", "fused") else False for flag in flags},
        "decoupled_weight_decay": True,
        "params": ids,
    }


def config_of(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }


def common_entries(
    stage: int, ranks: int, shapes: OrderedDict[str, torch.Size], module: OrderedDict[str, torch.Tensor]
) -> dict[str, Any]:
    return {
        "module": module,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": OrderedDict(),
        "frozen_param_fragments": OrderedDict(),
        "shared_params": {},
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 7,
        "global_samples": 56,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": config_of(stage),
        "ds_version": "0.19.8",
    }


def write_zero_checkpoint(
    directory: Path, parameters: list[tuple[str, tuple[int, ...]]], *, stage: int, ranks: int, seed: int = 0
) -> Path:
    """Write `directory/global_step7` and `latest`; returns the tag directory.

    Masters and moments of each rank are random; at stage 2 `module` holds the cast masters.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    tag = directory / "global_step7"
    tag.mkdir(parents=True)
    shapes = OrderedDict((name, torch.Size(shape)) for name, shape in parameters)
    numels = [math.prod(shape) for _, shape in parameters]
    generator = torch.Generator().manual_seed(seed)
    if stage == 3:
        length = sum(-(-n // ranks) for n in numels)
        module: OrderedDict[str, torch.Tensor] = OrderedDict(
            (n, torch.empty(0, dtype=torch.bfloat16)) for n, _ in parameters
        )
    else:
        total = sum(numels)
        length = 2 * math.ceil(total / (2 * ranks))
    masters: list[torch.Tensor] = []
    for rank in range(ranks):
        flats = {key: torch.randn(length, generator=generator) for key in ("fp32", *STATES)}
        flats["exp_avg_sq"].square_()
        state = {0: {"step": torch.tensor(7.0), **{k: flats[k] for k in STATES}}}
        base = {"state": state, "param_groups": [group_entry([0])]}
        if stage == 3:
            inner: dict[str, Any] = {
                "zero_stage": ZeroStageEnum(stage),
                "loss_scaler": LossScaler(scale=1.0),
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": ranks,
                "optimizer_state_dict": base,
                "fp32_flat_groups": [flats["fp32"]],
            }
            torch.save(
                common_entries(stage, ranks, shapes, module), tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            )
        else:
            padding = max(0, (rank + 1) * length - sum(numels))
            master = flats["fp32"][: length - padding]
            masters.append(master.to(torch.bfloat16))
            inner = {
                "loss_scaler": LossScaler(scale=1.0),
                "dynamic_loss_scale": False,
                "overflow": False,
                "clip_grad": 1.0,
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": [master],
                "zero_stage": ZeroStageEnum(stage),
                "group_paddings": [padding],
                "param_alignment_paddings": [[0] * len(parameters)],
                "partition_count": [ranks],
                "ds_version": "0.19.8",
                "param_slice_mappings": [_slices(parameters, numels, rank, length)],
            }
        outer = {"optimizer_state_dict": inner, "ds_config": config_of(stage), "ds_version": "0.19.8"}
        torch.save(outer, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    if stage != 3:
        flat = torch.cat(masters)
        views = flat.split(numels)
        weights = OrderedDict((n, v.view(s)) for (n, s), v in zip(parameters, views, strict=True))
        torch.save(common_entries(stage, ranks, shapes, weights), tag / "mp_rank_00_model_states.pt")
    (directory / "latest").write_text("global_step7")
    return tag


def _slices(
    parameters: list[tuple[str, tuple[int, ...]]], numels: list[int], rank: int, length: int
) -> OrderedDict[str, Any]:
    """`param_slice_mappings`, which `ds_to_universal` needs: where each parameter's part is in the partition."""
    from deepspeed.utils.tensor_fragment import fragment_address

    found: OrderedDict[str, Any] = OrderedDict()
    low, high = rank * length, (rank + 1) * length
    at = 0
    for (name, _), numel in zip(parameters, numels, strict=True):
        begin, end = max(at, low), min(at + numel, high)
        if begin < end:
            found[name] = fragment_address(numel=end - begin, start=begin - low)
        at += numel
    return found
