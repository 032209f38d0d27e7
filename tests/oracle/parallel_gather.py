"""Logical training state out of engines that are cut over several kinds of ranks at once.

Every rank joins its own partitions over the group that its optimizer partitions them over, and sends the parameters as
it knows them to rank 0, which checks that copies agree and joins slices by the cuts that the layers state.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oracle.gather import FlatGroup, flat_groups, names_of
from oracle.parallel_cuts import Cut, CutError, same_bits


@dataclass(frozen=True)
class LocalState:
    """What one rank knows: its slices of parameters, whole over its data-parallel peers.

    Attributes:
        place: the rank's coordinates besides data parallelism, first the one along which tensors are cut.
        replica: its data-parallel coordinate.
        tensors: slices keyed ``<kind>/<name>``.
        cuts: how each parameter is cut along the first coordinate.
        scalars: non-tensor optimizer state by state and name.
        groups: hyper-parameters of the parameter groups, each with its ``names``.
        flat_order: names in each flat buffer.
        wrong_weights: names whose model-dtype weight is not the rounded master.
    """

    place: tuple[int, int]
    replica: int
    tensors: dict[str, Tensor]
    cuts: dict[str, Cut]
    scalars: dict[str, dict[str, float]]
    groups: list[dict[str, Any]]
    flat_order: list[list[str]]
    wrong_weights: list[str]


@dataclass
class Joined:
    """All ranks' states as one logical state; ``notes`` go into the dump's companion."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def _partition_group(engine: Any, group: FlatGroup) -> Any:
    """The ranks that a flat group is partitioned over; experts have others than the rest of the model."""
    optimizer = engine.optimizer
    if group.how == "split":
        return optimizer.dp_process_group
    return optimizer.real_dp_process_group[group.group]


def _parts(group: FlatGroup, local: Tensor, process_group: Any) -> list[Tensor]:
    """All partitions of a flat buffer, moved as bytes: gloo has no collectives for some dtypes."""
    if group.how == "whole":
        return [local.detach().flatten()]
    raw = local.detach().contiguous().view(torch.uint8)
    parts = [torch.empty_like(raw) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, raw, group=process_group)
    return [part.view(local.dtype) for part in parts]


def _whole(group: FlatGroup, local: Tensor, process_group: Any) -> dict[str, Tensor]:
    parts = _parts(group, local, process_group)
    if group.how == "split":
        joined = {s.name: torch.cat([p.narrow(0, s.offset, s.piece) for p in parts])[: s.numel] for s in group.slots}
        return {s.name: joined[s.name].view(s.shape).clone() for s in group.slots}
    flat = torch.cat(parts)
    return {s.name: flat.narrow(0, s.offset, s.numel).view(s.shape).clone() for s in group.slots}


def _model_weight(engine: Any, param: Any) -> Tensor:
    if not hasattr(param, "ds_id"):
        weight: Tensor = param.detach().clone()
        return weight
    group = engine.optimizer.dp_process_group
    raw = param.ds_tensor.detach().contiguous().view(torch.uint8)
    parts = [torch.empty_like(raw) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, raw, group=group)
    return torch.cat(parts).view(param.ds_tensor.dtype)[: param.ds_numel].view(param.ds_shape).clone()


def local_state(
    engine: Any,
    place: tuple[int, int],
    replica: int,
    *,
    rename: Callable[[str], str] = lambda name: name,
    cut_of: Callable[[str, Any], Cut] = lambda name, param: param.cut,
) -> LocalState:
    """This rank's part of the state; collective over its data-parallel peers.

    Args:
        engine: the live engine.
        place: the rank's coordinates; see ``LocalState``.
        replica: its data-parallel coordinate.
        rename: logical name of a local one (experts are numbered per rank).
        cut_of: how a parameter is cut; by default what its layer wrote on it.
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, float]] = {}
    found = flat_groups(engine)
    for group in found:
        over = None if group.how == "whole" else _partition_group(engine, group)
        tensors |= {f"fp32/{rename(name)}": whole for name, whole in _whole(group, group.master, over).items()}
        for key, value in sorted(group.state.items()):
            if torch.is_tensor(value) and value.shape == group.master.shape:
                tensors |= {f"{key}/{rename(name)}": whole for name, whole in _whole(group, value, over).items()}
            elif value is not None:
                scalars.setdefault(key, {}).update({rename(slot.name): float(value) for slot in group.slots})
    cuts = {}
    for name, param in engine.module.named_parameters():
        kind = "module" if param.requires_grad else "frozen"
        tensors[f"{kind}/{rename(name)}"] = _model_weight(engine, param)
        cuts[rename(name)] = cut_of(name, param)
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"names": [rename(name) for name in names_of(found, g)]}
        for g, group in enumerate(engine.optimizer.param_groups)
    ]
    order = [[rename(s.name) for s in group.slots] for group in found]
    return LocalState(place, replica, tensors, cuts, scalars, groups, order, _wrong_weights(tensors))


def _wrong_weights(tensors: dict[str, Tensor]) -> list[str]:
    masters = {key.removeprefix("fp32/"): value for key, value in tensors.items() if key.startswith("fp32/")}
    weights = {name: tensors[f"module/{name}"] for name in masters}
    return [name for name, master in masters.items() if not same_bits(master.to(weights[name].dtype), weights[name])]


def all_states(mine: LocalState) -> list[LocalState] | None:
    """Every rank's state on rank 0, None elsewhere; collective over the world."""
    everybody: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everybody, dst=0)
    return everybody


def joined(states: list[LocalState]) -> Joined:
    """One logical state.

    The notes say where copies differ (``replica_differences``: keys; the copy of the first stage wins), what the
    paddings hold (``padding``: padded rows and non-zero elements by key) and which weights are not the rounded masters.

    Raises:
        CutError: copies on tensor-parallel ranks differ, or slices do not fit.
    """
    result = Joined()
    differing: set[str] = set()
    by_place = _first_replicas(states, differing)
    padding: dict[str, dict[str, Any]] = {}
    for stage in sorted({place[1] for place in by_place}):
        ranks = [by_place[place] for place in sorted(by_place) if place[1] == stage]
        for key in ranks[0].tensors:
            cut = ranks[0].cuts[key.partition("/")[2]]
            whole = cut.join(_slices(key, ranks))
            if cut.vocab is not None:
                behind = whole[cut.vocab :].contiguous()
                padding[key] = {
                    "rows": whole.shape[0],
                    "nonzero": int(behind.count_nonzero()),
                    "row_crcs": [zlib.crc32(row.view(torch.uint8).numpy().tobytes()) for row in behind],
                }
                whole = whole[: cut.vocab]
            if key in result.tensors and not same_bits(result.tensors[key], whole):
                differing.add(key)
            result.tensors.setdefault(key, whole)
    scalars, groups = _united(list(by_place.values()), differing)
    result.notes = {
        "scalars": scalars,
        "groups": groups,
        "flat_order": by_place[min(by_place)].flat_order,
        "replica_differences": sorted(differing),
        "padding": padding,
        "wrong_weights": sorted({name for state in states for name in state.wrong_weights}),
    }
    return result


def _slices(key: str, ranks: list[LocalState]) -> list[Tensor]:
    """Slices in rank order; ranks whose weight has no elements have no optimizer state of it either."""
    name = key.partition("/")[2]
    missing = [state for state in ranks if key not in state.tensors]
    if any(state.tensors[f"module/{name}"].numel() for state in missing):
        raise CutError(f"a rank has elements of {name}, but no {key}")
    return [state.tensors[key] for state in ranks if key in state.tensors]


def _first_replicas(states: list[LocalState], differing: set[str]) -> dict[tuple[int, int], LocalState]:
    """One state per place, after a look at whether its data-parallel copies agree."""
    first: dict[tuple[int, int], LocalState] = {}
    for state in sorted(states, key=lambda s: s.replica):
        known = first.setdefault(state.place, state)
        differing |= {key for key, value in state.tensors.items() if not same_bits(known.tensors[key], value)}
    return first


def _united(states: list[LocalState], differing: set[str]) -> tuple[dict[str, dict[str, float]], list[dict[str, Any]]]:
    """Scalars and parameter groups of all places."""
    scalars: dict[str, dict[str, float]] = {}
    groups: list[dict[str, Any]] = []
    for state in states:
        for key, values in state.scalars.items():
            for name, value in values.items():
                if scalars.setdefault(key, {}).setdefault(name, value) != value:
                    differing.add(f"{key}/{name}")
        for g, group in enumerate(state.groups):
            if g == len(groups):
                groups.append({**group, "names": []})
            if {**group, "names": 0} != {**groups[g], "names": 0}:
                differing.add(f"hyper-parameters of group {g}")
            groups[g]["names"] += [name for name in group["names"] if name not in groups[g]["names"]]
    return scalars, groups
