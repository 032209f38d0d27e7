"""Logical training state out of a live FSDP run, by name, whole; and the dump of it.

Nothing here goes through torch's state-dict functions: those are what writes the checkpoints, and the FULL state of
FSDP1 has a bug on CPU (``exp_avg`` equals ``exp_avg_sq`` under ``use_orig_params``, torch 2.13).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from oracle.dcp_models import clean

States = dict[str, Tensor]
Piece = tuple[int, Tensor]
"""The first element of a piece within its parameter, and the piece, flat."""


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def _flat_units(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every FSDP1 unit with parameters: its name as a prefix, and its handle."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            yield clean(f"{name}." if name else ""), module._handle


def _slots(handle: Any) -> Iterator[tuple[int, str, tuple[int, ...], int, int]]:
    """Index, name, shape, first element and last of each parameter in a unit's flat one, padding left out."""
    flat, offset, index = handle.flat_param, 0, 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            yield index, flat._fqns[index], tuple(flat._shapes[index]), offset, offset + numel
            index += 1
        offset += numel


def _local(handle: Any, value: Tensor, first: int, last: int) -> Piece | None:
    """This rank's piece of a flat tensor, as far as it holds elements ``first`` to ``last``."""
    piece = value.numel()
    begin = handle.rank * piece
    low, high = max(first, begin), min(last, begin + piece)
    return (low - first, value.detach()[low - begin : high - begin].clone()) if low < high else None


def _joined(pieces: dict[str, Piece], shapes: dict[str, tuple[int, ...]]) -> States:
    """Whole tensors out of all ranks' pieces; every element has to be there."""
    everywhere = _all_ranks(pieces)
    whole: States = {}
    for key in dict.fromkeys(key for found in everywhere for key in found):
        shape = shapes[key.partition("/")[2]]
        parts = [found[key] for found in everywhere if key in found]
        flat = torch.empty(torch.Size(shape).numel(), dtype=parts[0][1].dtype)
        seen = torch.zeros(flat.shape, dtype=torch.bool)
        for offset, part in parts:
            flat[offset : offset + part.numel()] = part
            seen[offset : offset + part.numel()] = True
        assert seen.all(), f"{key}: no rank holds some of its elements"
        whole[key] = flat.reshape(shape)
    return whole


class _State:
    """A run's state as it is collected."""

    def __init__(self) -> None:
        self.tensors: States = {}
        self.scalars: dict[str, dict[str, float]] = {}
        self.names: dict[Any, list[str]] = {}

    def take_scalar(self, key: str, names: list[str], value: Any) -> None:
        self.scalars.setdefault(key, {}).update(dict.fromkeys(names, float(value)))


def _collect_fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer) -> _State:
    found = _State()
    for name, param in model.named_parameters():
        fqn = clean(name)
        found.names[param] = [fqn]
        found.tensors[f"{'fp32' if param.requires_grad else 'frozen'}/{fqn}"] = _whole(param)
        for key, value in optimizer.state.get(param, {}).items():
            if torch.is_tensor(value) and value.ndim and value.shape == param.shape:
                found.tensors[f"{key}/{fqn}"] = _whole(value)
            elif value is not None:
                found.take_scalar(key, [fqn], value.full_tensor() if isinstance(value, DTensor) else value)
    return found


def _pieces_fsdp1(
    found: _State, optimizer: torch.optim.Optimizer, handle: Any, prefix: str, slot: Any
) -> dict[str, Piece]:
    """This rank's pieces of one parameter and its states; under ``use_orig_params`` those are cut already."""
    index, relative, _, first, last = slot
    flat, fqn, original = handle.flat_param, prefix + relative, handle._use_orig_params
    owner = flat._params[index] if original else flat
    found.names.setdefault(owner, []).append(fqn)
    local = getattr(flat, "_local_shard", flat)  # set by the first forward pass
    mine = _local(handle, local, first, last)
    pieces = {} if mine is None else {f"{'fp32' if owner.requires_grad else 'frozen'}/{fqn}": mine}
    for key, value in optimizer.state.get(owner, {}).items():
        if value is None:
            continue
        if not torch.is_tensor(value) or not value.ndim:
            found.take_scalar(key, [fqn], value)
        elif not original and (part := _local(handle, value, first, last)):
            pieces[f"{key}/{fqn}"] = part
        elif original and mine is not None:
            pieces[f"{key}/{fqn}"] = mine[0], value.detach().flatten().clone()
    return pieces


def _collect_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer) -> _State:
    found, shapes, pieces = _State(), dict[str, tuple[int, ...]](), dict[str, Piece]()
    for prefix, handle in _flat_units(model):
        for slot in _slots(handle):
            shapes[prefix + slot[1]] = slot[2]
            pieces |= _pieces_fsdp1(found, optimizer, handle, prefix, slot)
    found.tensors |= _joined(pieces, shapes)
    for scalars in _all_ranks(found.scalars):
        for key, values in scalars.items():
            found.scalars.setdefault(key, {}).update(values)
    return found


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[States, dict[str, Any]]:
    """Tensors by ``<kind>/<fqn>`` and the JSON companion, as ``oracle.truth.Truth`` reads them; collective."""
    flat = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    found = (_collect_fsdp1 if flat else _collect_fsdp2)(model, optimizer)
    persistent = {clean(name) for module, prefix in _modules(model) for name in _persistent(module, prefix)}
    for name, buffer in model.named_buffers():
        if clean(name) in persistent:
            found.tensors[f"buffer/{clean(name)}"] = _whole(buffer)
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"names": [name for param in group["params"] for name in found.names[param]]}
        for group in optimizer.param_groups
    ]
    return found.tensors, {"scalars": found.scalars, "groups": groups}


def _modules(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    return ((module, f"{name}." if name else "") for name, module in model.named_modules())


def _persistent(module: nn.Module, prefix: str) -> list[str]:
    names = [name for name, value in module._buffers.items() if value is not None]
    return [prefix + name for name in names if name not in module._non_persistent_buffers_set]


def _all_ranks(value: Any) -> list[Any]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


def dump(
    model: nn.Module, optimizer: Any, scheduler: Any, folder: Path, stem: str, extra: dict[str, Any] | None = None
) -> None:
    """Writes ``<stem>.safetensors`` and ``<stem>.json`` (rank 0); collective.

    Args:
        model: the wrapped model.
        optimizer: the optimizer, in a wrapper of Accelerate's or torchtitan's if it is in one.
        scheduler: its scheduler, or None.
        folder: where the files go.
        stem: their name.
        extra: more to say.
    """
    bare = getattr(optimizer, "optimizer", optimizer)
    (bare,) = getattr(bare, "optimizers", [bare])
    tensors, meta = collect(model, bare)
    rates = None if scheduler is None else scheduler.state_dict()
    ranks = _all_ranks([meta["groups"], rates])
    meta |= {
        "lr_scheduler": rates,
        "world": dist.get_world_size(),
        "aliases": _aliases(model),
        "ranks_that_disagree": [rank for rank, theirs in enumerate(ranks) if theirs != ranks[0]],
    }
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        whole = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
        save_file(whole, folder / f"{stem}.safetensors")
        (folder / f"{stem}.json").write_text(json.dumps(meta | (extra or {}), indent=1, sort_keys=True))
    dist.barrier()


def _aliases(model: nn.Module) -> dict[str, str]:
    """Tied names, alias to owner; the owner is the name that ``named_parameters`` reports."""
    owners = {id(param): clean(name) for name, param in model.named_parameters()}
    everything = model.named_parameters(remove_duplicate=False)
    found = {clean(name): owners[id(param)] for name, param in everything if owners[id(param)] != clean(name)}
    for prefix, handle in _flat_units(model):
        for info in handle.flat_param._shared_param_infos:
            names = (info.module_name, info.param_name), (info.prim_module_name, info.prim_param_name)
            alias, owner = (prefix + clean(".".join(filter(None, pair))) for pair in names)
            found[alias] = owner
    return found
