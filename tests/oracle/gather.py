"""Logical training state out of a live DeepSpeed engine, by name, whole, from its flat partitions.

DeepSpeed's own ``safe_get_full_fp32_param`` walks offsets that are wrong under ``round_robin_gradients`` (0.19.8), so
an oracle cannot use it.  Here every optimizer class is reduced to one view, ``FlatGroup``: the parameters in flat
order, and how they lie in the ranks' flat buffers.  Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py,
stage3.py, runtime/bf16_optimizer.py, runtime/fp16/fused_optimizer.py and unfused_optimizer.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

States = dict[str, Tensor]


@dataclass(frozen=True)
class Slot:
    """One parameter in a flat group.

    Attributes:
        name: fqn.
        shape: whole shape.
        offset: in elements, of the joined buffers; for ``split`` of each rank's buffer.
        numel: elements of the whole parameter.
        piece: elements that each rank holds, padding included; ``numel`` unless ``split``.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    piece: int


@dataclass(frozen=True)
class FlatGroup:
    """Parameters whose states lie in one flat buffer per rank.

    Attributes:
        how: ``whole`` every rank has all of it; ``concat`` the ranks' buffers joined are the group (ZeRO-1/2, BF16);
            ``split`` each parameter is cut over the ranks and the pieces are joined per rank (ZeRO-3).
        group: index of the param group whose hyper-parameters apply.
    """

    how: Literal["whole", "concat", "split"]
    group: int
    slots: tuple[Slot, ...]
    master: Tensor
    state: dict[str, Any]


@dataclass(frozen=True)
class Gathered:
    """Tensors keyed ``<state>/<fqn>``, non-tensor per-parameter state, and flat order with hyper-parameters."""

    tensors: States
    scalars: dict[str, dict[str, float]]
    flat_order: list[list[str]]
    groups: list[dict[str, Any]]


def _slots(params: list[Any], names: dict[Any, str], offsets: list[int]) -> tuple[Slot, ...]:
    return tuple(
        Slot(names[p], tuple(p.shape), offset, p.numel(), p.numel()) for p, offset in zip(params, offsets, strict=True)
    )


def _running(sizes: list[int]) -> list[int]:
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return offsets[:-1]


def flat_groups(engine: Any) -> list[FlatGroup]:
    """The engine's optimizer as flat groups, whatever its class."""
    optimizer = engine.optimizer
    names = {p: n for n, p in engine.module.named_parameters()}
    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer":
        return _zero12(optimizer, names)
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return _zero3(optimizer, names)
    if kind == "BF16_Optimizer":
        return _plain_flat(optimizer, names, optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, "concat")
    if kind == "FP16_Optimizer":
        return _plain_flat(optimizer, names, optimizer.fp16_groups, optimizer.fp32_groups_flat, "whole")
    if kind == "FP16_UnfusedOptimizer":
        return _per_param(optimizer.optimizer, names, optimizer.fp16_groups, optimizer.fp32_groups)
    params = [[p for p in group["params"] if p.requires_grad and p.numel()] for group in optimizer.param_groups]
    return _per_param(optimizer, names, params, params)


def _per_param(
    optimizer: Any, names: dict[Any, str], params: list[list[Any]], masters: list[list[Any]]
) -> list[FlatGroup]:
    """Stage 0: every rank holds each parameter's states whole, one flat group per parameter."""
    groups = []
    for g, (weights, of_group) in enumerate(zip(params, masters, strict=True)):
        for weight, master in zip(weights, of_group, strict=True):
            state = {
                key: value.flatten() if torch.is_tensor(value) and value.shape == master.shape else value
                for key, value in optimizer.state.get(master, {}).items()
            }
            groups.append(FlatGroup("whole", g, _slots([weight], names, [0]), master.detach().flatten(), state))
    return groups


def _zero12(optimizer: Any, names: dict[Any, str]) -> list[FlatGroup]:
    groups = []
    for g, params in enumerate(optimizer.round_robin_bit16_groups):
        master = optimizer.single_partition_of_fp32_groups[g]
        slots = _slots(params, names, optimizer.round_robin_bit16_offsets[g])
        groups.append(FlatGroup("concat", g, slots, master, optimizer.optimizer.state.get(master, {})))
    return groups


def _plain_flat(
    optimizer: Any, names: dict[Any, str], params_of: list[Any], masters: list[Tensor], how: Literal["concat", "whole"]
) -> list[FlatGroup]:
    return [
        FlatGroup(
            how,
            g,
            _slots(params, names, _running([p.numel() for p in params])),
            masters[g],
            optimizer.optimizer.state.get(masters[g], {}),
        )
        for g, params in enumerate(params_of)
    ]


def _zero3(optimizer: Any, names: dict[Any, str]) -> list[FlatGroup]:
    groups = []
    for k, params in enumerate(optimizer.fp16_groups):
        pieces = [p.partition_numel() for p in params]
        slots = tuple(
            Slot(names[p], tuple(p.ds_shape), offset, p.ds_numel, piece)
            for p, offset, piece in zip(params, _running(pieces), pieces, strict=True)
        )
        master, state = _swapped_in(optimizer, optimizer.fp32_partitioned_groups_flat[k])
        groups.append(FlatGroup("split", optimizer.sub_group_to_group_id[k], slots, master, state))
    return groups


def _swapped_in(optimizer: Any, master: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A sub-group's master and states; copies of what DeepSpeed itself reads back where they are on NVMe."""
    state = optimizer.optimizer.state.get(master, {})
    if not optimizer.swap_optimizer or master.numel():
        return master, state
    optimizer.optimizer_swapper.swap_in_optimizer_state(master)
    copies = {key: value.detach().clone() if torch.is_tensor(value) else value for key, value in state.items()}
    whole = master.detach().clone()
    optimizer.optimizer_swapper.release_swap_buffers(master)
    return whole, copies


def _all_ranks(local: Tensor) -> list[Tensor]:
    """Every rank's ``local``, moved as bytes: gloo has no collectives for some dtypes, and no bit may change."""
    raw = local.detach().contiguous().view(torch.uint8)
    parts = [torch.empty_like(raw) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, raw)
    return [part.view(local.dtype) for part in parts]


def _unflatten(group: FlatGroup, local: Tensor) -> dict[str, Tensor]:
    """Whole tensors by name out of one flat buffer of ``group``."""
    ranks = [local.detach()] if group.how == "whole" else _all_ranks(local)
    if group.how != "split":
        flat = torch.cat(ranks)
        return {s.name: flat.narrow(0, s.offset, s.numel).view(s.shape).clone() for s in group.slots}
    whole = {}
    for s in group.slots:
        joined = torch.cat([rank.narrow(0, s.offset, s.piece) for rank in ranks])
        whole[s.name] = joined[: s.numel].view(s.shape).clone()
    return whole


def gather_states(engine: Any) -> Gathered:
    """Masters and optimizer states of every optimized parameter; a collective call."""
    tensors: States = {}
    scalars: dict[str, dict[str, float]] = {}
    found = flat_groups(engine)
    tensors |= _whole_matrices(engine)
    for group in found:
        tensors.update({f"fp32/{name}": value for name, value in _unflatten(group, group.master).items()})
        for key, value in sorted(group.state.items()):
            if torch.is_tensor(value) and value.shape == group.master.shape:
                tensors.update({f"{key}/{name}": whole for name, whole in _unflatten(group, value).items()})
            elif value is not None and not (torch.is_tensor(value) and value.dim()):
                for slot in group.slots:
                    scalars.setdefault(key, {})[slot.name] = float(value)
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"names": names_of(found, g)}
        for g, group in enumerate(engine.optimizer.param_groups)
    ]
    return Gathered(tensors, scalars, [[s.name for s in group.slots] for group in found], groups)


def _whole_matrices(engine: Any) -> States:
    """The momentum of Muon at stages 1 and 2, where a rank keeps whole matrices: all that its partition touches."""
    optimizer = engine.optimizer
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer" or optimizer.cpu_offload:
        return {}
    names = {p: n for n, p in engine.module.named_parameters()}
    found: States = {}
    for g, group in enumerate(optimizer.optimizer.param_groups):
        state = optimizer.optimizer.state.get(optimizer.single_partition_of_fp32_groups[g], {})
        if not group.get("use_muon"):
            continue
        held: States = {}
        at = 0
        for param in optimizer.params_in_partition[g] if "momentum_buffer" in state else ():
            held[names[param]] = state["momentum_buffer"].narrow(0, at, param.numel()).view(param.shape).clone()
            at += param.numel()
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, held)
        for name, value in (item for rank in everybody for item in rank.items()):
            if not torch.equal(found.setdefault(f"momentum_buffer/{name}", value), value):
                raise AssertionError(f"two ranks hold different momenta of {name}")
    return found


def names_of(groups: list[FlatGroup], index: int) -> list[str]:
    """Parameter names of param group ``index``, in flat order."""
    return [slot.name for group in groups if group.group == index for slot in group.slots]


def _whole_param(param: Any) -> Tensor:
    if hasattr(param, "ds_id") and not param.ds_tensor.dim():
        # Its piece is on NVMe, where DeepSpeed's own gathering fetches it from.
        with deepspeed.zero.GatheredParameters([param]):
            return param.detach().clone()
    if hasattr(param, "ds_id"):
        joined = torch.cat(_all_ranks(param.ds_tensor))
        return joined[: param.ds_numel].view(param.ds_shape).clone()
    return param.detach().clone()


def gather_module(engine: Any) -> States:
    """Model-dtype weights (``module/``), frozen weights (``frozen/``) and this rank's buffers (``buffer/``)."""
    tensors: States = {}
    for name, param in engine.module.named_parameters():
        tensors[f"{'module' if param.requires_grad else 'frozen'}/{name}"] = _whole_param(param)
    persistent = set(engine.module.state_dict(keep_vars=True))
    for name, buffer in engine.module.named_buffers():
        if name in persistent:
            tensors[f"buffer/{name}"] = buffer.detach().clone()
    return tensors
