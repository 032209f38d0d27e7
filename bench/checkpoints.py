"""Checkpoints of any size in the exact shape that DeepSpeed 0.19.8 writes, without training.

A GPT-like parameter list, random data, ZeRO-2 or ZeRO-3 files for any number of ranks. The keys are
those of `reference` checkpoints written by DeepSpeed itself (`tests/data`); `ds_to_universal` and
`zero_to_fp32` read them, which the benchmark relies on.
"""

from __future__ import annotations

import math
import warnings
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
        if stage == 3:
            inner: dict[str, Any] = {
                "zero_stage": _stage(stage),
                "loss_scaler": _loss_scaler(),
                "dynamic_loss_scale": False,
                "overflow": False,
                "partition_count": ranks,
                "optimizer_state_dict": _base_state(flats),
                "fp32_flat_groups": [flats["fp32"]],
            }
            torch.save(
                common_entries(stage, ranks, shapes, module), tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            )
            outer = {"optimizer_state_dict": inner, "ds_config": config_of(stage), "ds_version": "0.19.8"}
            torch.save(outer, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        else:
            masters.append(_write_partition(tag, parameters, flats, stage=stage, rank=rank, ranks=ranks))
    if stage != 3:
        torch.save(
            common_entries(stage, ranks, shapes, _views(parameters, masters)), tag / "mp_rank_00_model_states.pt"
        )
    (directory / "latest").write_text("global_step7")
    return tag


def write_distributed_checkpoint(directory: Path, parameters: list[tuple[str, tuple[int, ...]]]) -> Path:
    """Write a distributed checkpoint of fp32 weights, by torch alone and from one process; returns the directory."""
    import torch.distributed.checkpoint as dcp  # its import takes a second, and few benchmarks need it

    generator = torch.Generator().manual_seed(0)
    model = {name: torch.randn(shape, generator=generator) for name, shape in parameters}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there are no ranks
        dcp.save({"model": model}, checkpoint_id=str(directory), no_dist=True)
    return directory


def is_row_parallel(name: str) -> bool:
    """Whether tensor parallelism cuts it along its second dimension."""
    return name.endswith("c_proj.weight")


def is_replicated(name: str) -> bool:
    """Whether every tensor-parallel rank has all of it."""
    return ".ln_" in name or name.startswith("ln_") or name.endswith("c_proj.bias") or name == "wpe.weight"


def write_tensor_parallel_checkpoint(
    directory: Path, parameters: list[tuple[str, tuple[int, ...]]], *, tp: int, ranks: int, seed: int = 0
) -> Path:
    """The same at stage 1 for `tp` tensor-parallel times `ranks` data-parallel ranks; returns the tag directory.

    The output projections are cut along their second dimension, embeddings and input projections along their first,
    the rest is on every rank. `universal_checkpoint_info` says so, as Megatron-DeepSpeed writes it.
    """
    tag = directory / "global_step7"
    tag.mkdir(parents=True)
    generator, common = torch.Generator().manual_seed(seed), torch.Generator()
    info = {
        "universal_checkpoint_version": 0.2,
        "parameter_with_row_parallelism_patterns": [r".*c_proj\.weight"],
        "tp_replicated_parameter_patterns": [r".*ln_.*", r".*c_proj\.bias", r"wpe\.weight"],
    }
    for model_rank in range(tp):
        local: list[tuple[str, tuple[int, ...]]] = []
        for name, shape in parameters:
            if is_replicated(name):
                local.append((name, shape))
            elif is_row_parallel(name):
                local.append((name, (shape[0], shape[1] // tp)))
            else:
                local.append((name, (shape[0] // tp, *shape[1:])))
        total = sum(math.prod(shape) for _, shape in local)
        length = 2 * math.ceil(total / (2 * ranks))
        whole: dict[str, torch.Tensor] = {}
        for number, key in enumerate(("fp32", *STATES)):
            flat = torch.randn(length * ranks, generator=generator)
            common.manual_seed(seed + 1 + number)
            at = 0
            for name, shape in local:
                if is_replicated(name):  # equal on every rank, as training keeps them
                    flat[at : at + math.prod(shape)] = torch.randn(math.prod(shape), generator=common)
                at += math.prod(shape)
            whole[key] = flat.square_() if key == "exp_avg_sq" else flat
        masters = [
            _write_partition(
                tag,
                local,
                {key: flat[rank * length : (rank + 1) * length].clone() for key, flat in whole.items()},
                stage=1,
                rank=rank,
                ranks=ranks,
                model_rank=model_rank,
            )
            for rank in range(ranks)
        ]
        shapes = OrderedDict((name, torch.Size(shape)) for name, shape in local)
        entries = common_entries(1, ranks, shapes, _views(local, masters)) | {
            "mp_world_size": tp,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": tp},
            "universal_checkpoint_info": info,
        }
        torch.save(entries, tag / f"mp_rank_{model_rank:02d}_model_states.pt")
    (directory / "latest").write_text("global_step7")
    return tag


def _base_state(flats: dict[str, torch.Tensor]) -> dict[str, Any]:
    state = {0: {"step": torch.tensor(7.0), **{k: flats[k] for k in STATES}}}
    return {"state": state, "param_groups": [group_entry([0])]}


def _write_partition(
    tag: Path,
    parameters: list[tuple[str, tuple[int, ...]]],
    flats: dict[str, torch.Tensor],
    *,
    stage: int,
    rank: int,
    ranks: int,
    model_rank: int = 0,
) -> torch.Tensor:
    """Write the optimizer file of one rank of stage 1 or 2; returns its masters in the module's type."""
    numels, length = [math.prod(shape) for _, shape in parameters], len(flats["fp32"])
    padding = max(0, (rank + 1) * length - sum(numels))
    master = flats["fp32"][: length - padding]
    inner: dict[str, Any] = {
        "loss_scaler": _loss_scaler(),
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": _base_state(flats),
        "single_partition_of_fp32_groups": [master],
        "zero_stage": _stage(stage),
        "group_paddings": [padding],
        "param_alignment_paddings": [[0] * len(parameters)],
        "partition_count": [ranks],
        "ds_version": "0.19.8",
        "param_slice_mappings": [_slices(parameters, numels, rank, length)],
    }
    outer = {"optimizer_state_dict": inner, "ds_config": config_of(stage), "ds_version": "0.19.8"}
    torch.save(outer, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt")
    return master.to(torch.bfloat16)


def _views(
    parameters: list[tuple[str, tuple[int, ...]]], masters: list[torch.Tensor]
) -> OrderedDict[str, torch.Tensor]:
    numels = [math.prod(shape) for _, shape in parameters]
    views = torch.cat(masters)[: sum(numels)].split(numels)
    return OrderedDict((n, v.view(s)) for (n, s), v in zip(parameters, views, strict=True))


def _loss_scaler() -> object:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    return LossScaler(scale=1.0)


def _stage(number: int) -> object:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum(number)


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
