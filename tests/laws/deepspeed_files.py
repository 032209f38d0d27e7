"""Logical states as the files that `engine.save_checkpoint` of DeepSpeed 0.19.8 writes, without DeepSpeed's engine.

Every key, shape, storage and padding is where the real engine puts it (`test_deepspeed_source.py` compares them with
checkpoints of real runs). What DeepSpeed leaves undefined or zero, the padding, is filled with a pattern of its own, so
that a reader which takes padding for data is found out.

Source: deepspeed 0.19.8 `runtime/engine.py`, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`,
`runtime/bf16_optimizer.py`, `runtime/fp16/fused_optimizer.py`, `runtime/fp16/unfused_optimizer.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

from laws.torch_values import tensor_of, torch_value
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.testing.logical import MASTER, Bits, LogicalParameter, LogicalState

Stage = Literal[0, 1, 2, 3, "bf16"]
VERSION = "0.19.8"
PADDING = 0xA5  # of each byte: no number that any tensor draws on purpose


@dataclass(frozen=True)
class Layout:
    """How a run was cut and saved.

    Attributes:
        stage: ZeRO stage, or `"bf16"` for BF16_Optimizer.
        world: data-parallel ranks.
        round_robin: `round_robin_gradients`.
        alignment: `parameter_alignment`.
        sub_group_size: stage 3, in elements of one rank.
        counter: where the optimizer counts: beside each state, or (fused ones) in the param group.
        elastic: list-form optimizer states.
        fused: stage 0 with 16 bits: one flat master instead of one per parameter.
        zip_files: torch's archive; else its legacy stream.
        tag: directory of the save.
        late: so many of the optimizer's parameters were frozen when it had them already.
    """

    stage: Stage
    world: int
    round_robin: bool = False
    alignment: bool = False
    sub_group_size: int = 10**9
    counter: Literal["state", "group"] = "state"
    elastic: bool = False
    fused: bool = False
    zip_files: bool = True
    tag: str = "global_step3"
    late: int = 0

    def listed_frozen(self, state: LogicalState) -> tuple[LogicalParameter, ...]:
        """The parameters that DeepSpeed calls frozen: not the optimizer's, or frozen when they already were."""
        late = self.frozen_late(state)
        return tuple(p for p in state.parameters if p.group is None or p.fqn in late)

    def frozen_late(self, state: LogicalState) -> frozenset[str]:
        """The parameters that were frozen when the optimizer had them already."""
        return frozenset(p.fqn for p in state.trained[: self.late])


@dataclass(frozen=True)
class Flat:
    """A flat group: its parameters in flat order, and the padding after each."""

    parameters: tuple[LogicalParameter, ...]
    pads: tuple[int, ...]
    group: int

    @property
    def used(self) -> int:
        """Elements, paddings between parameters included."""
        return sum(prod(p.shape) for p in self.parameters) + sum(self.pads)

    @property
    def offsets(self) -> list[int]:
        """Where each parameter begins."""
        found, at = [], 0
        for parameter, pad in zip(self.parameters, self.pads, strict=True):
            found.append(at)
            at += prod(parameter.shape) + pad
        return found

    def joined(self, tensors: Sequence[Bits], length: int) -> bytes:
        """The parameters' tensors put end to end, padded to `length` elements."""
        size = BY_NAME[tensors[0].dtype].itemsize_bytes
        parts: list[bytes] = []
        for bits, pad in zip(tensors, self.pads, strict=True):
            parts += (bits.data, bytes([PADDING]) * (pad * size))
        whole = b"".join(parts)
        return whole + bytes([PADDING]) * (length * size - len(whole))


def round_robin(parameters: Sequence[LogicalParameter], world: int) -> list[LogicalParameter]:
    """DeepSpeed's order under `round_robin_gradients` (`_round_robin_reorder`)."""
    return [parameters[i] for first in range(world) for i in range(first, len(parameters), world)]


def flat_groups(state: LogicalState, layout: Layout) -> list[Flat]:
    """The groups of stages 1, 2 and BF16_Optimizer."""
    unit = 16 // BY_NAME[state.dtype].itemsize_bytes if layout.alignment else 1
    found: list[Flat] = []
    for group in range(len(state.groups or ())):
        parameters: Sequence[LogicalParameter] = state.of_group(group)
        if layout.round_robin:
            parameters = round_robin(parameters, layout.world)
        pads: list[int] = []
        at = 0
        for index, parameter in enumerate(parameters):
            at += prod(parameter.shape)
            pads.append(-at % unit if index + 1 < len(parameters) else 0)
            at += pads[-1]
        found.append(Flat(tuple(parameters), tuple(pads), group))
    return found


def sub_groups(state: LogicalState, layout: Layout) -> list[Flat]:
    """Stage 3: the sub-groups of each param group (`_create_fp16_sub_groups`)."""
    found: list[Flat] = []
    for group in range(len(state.groups or ())):
        members: list[LogicalParameter] = []
        held = 0
        parameters = state.of_group(group)
        for index, parameter in enumerate(parameters):
            members.append(parameter)
            held += -(-prod(parameter.shape) // layout.world)
            if held >= layout.sub_group_size or index + 1 == len(parameters):
                found.append(Flat(tuple(members), (0,) * len(members), group))
                members, held = [], 0
    return found


def _typed(data: bytes, dtype: str) -> torch.Tensor:
    return tensor_of(Bits(dtype, (len(data) // BY_NAME[dtype].itemsize_bytes,), data))


@dataclass
class CheckpointWriter:
    """The files of one case."""

    state: LogicalState
    layout: Layout
    directory: Path

    @property
    def _named(self) -> Mapping[str, LogicalParameter]:
        return {p.fqn: p for p in self.state.parameters}

    def save(self, value: Any, name: str) -> None:
        """One file, as the engine saves it."""
        torch.save(value, self.directory / name, _use_new_zipfile_serialization=self.layout.zip_files)

    # -- model states ---------------------------------------------------------------------------------

    def model_states(self, rank: int, flats: Sequence[Flat], optimizer: Any) -> dict[str, Any]:
        """The keys of `_common_checkpoint_state` in its order, then the client's."""
        state, stage = self.state, self.layout.stage
        values = {key: torch_value(value) for key, value in state.values.items()}
        shapes = [OrderedDict((p.fqn, torch.Size(p.shape)) for p in flat.parameters) for flat in flats]
        frozen = self.layout.listed_frozen(state) if stage in (2, 3) else None
        shared = {} if rank else dict(state.aliases)
        own = {
            "module": self._module(flats),
            "buffer_names": list(state.buffers),
            "optimizer": optimizer,
            "param_shapes": None if stage == 0 else shapes,
            "frozen_param_shapes": frozen and OrderedDict((p.fqn, torch.Size(p.shape)) for p in frozen),
            "shared_params": None if stage == 0 else shared,
            "frozen_param_fragments": frozen and OrderedDict((p.fqn, self._fragment(p, rank)) for p in frozen),
            "lr_scheduler": values.pop("lr_scheduler"),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": values.pop("skipped_steps"),
            "global_steps": values.pop("global_steps"),
            "global_samples": values.pop("global_samples"),
            "dp_world_size": self.layout.world,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": values.pop("ds_config"),
            "ds_version": VERSION,
        }
        if frozen == ():
            own |= {"frozen_param_shapes": OrderedDict(), "frozen_param_fragments": OrderedDict()}
        return own | values

    def _module(self, flats: Sequence[Flat]) -> OrderedDict[str, torch.Tensor]:
        state, stage = self.state, self.layout.stage
        weights = {} if stage in (0, 3) else dict(self._views(flats))
        found: OrderedDict[str, torch.Tensor] = OrderedDict()
        for name in state.order:
            if name in state.aliases:
                found[name] = found[state.aliases[name]]
            elif name in state.buffers:
                found[name] = tensor_of(state.buffers[name])
            elif stage == 3:
                found[name] = torch.empty(0, dtype=getattr(torch, self._weight(self._named[name]).dtype))
            else:
                found[name] = weights.get(name, tensor_of(self._weight(self._named[name])))
        return found

    def _weight(self, parameter: LogicalParameter) -> Bits:
        if parameter.weight is None:
            raise AssertionError("cases hold every weight")
        return parameter.weight

    def _views(self, flats: Sequence[Flat]) -> Iterator[tuple[str, torch.Tensor]]:
        """Stages 1, 2, BF16: the weights are views of the group's padded flat buffer."""
        for flat in flats:
            buffer = _typed(
                flat.joined([self._weight(p) for p in flat.parameters], self._length(flat)), self.state.dtype
            )
            for parameter, offset in zip(flat.parameters, flat.offsets, strict=True):
                view = buffer[offset : offset + prod(parameter.shape)]
                yield parameter.fqn, view.view(parameter.shape)

    def _fragment(self, parameter: LogicalParameter, rank: int) -> torch.Tensor:
        weight = self._weight(parameter)
        if self.layout.stage != 3:
            return tensor_of(weight)
        return _typed(self._share(weight, rank), weight.dtype)

    def _share(self, bits: Bits, rank: int) -> bytes:
        """A rank's part of one tensor at stage 3, its undefined tail included."""
        size = BY_NAME[bits.dtype].itemsize_bytes
        share = -(-bits.numel // self.layout.world) * size
        return bits.data[rank * share : (rank + 1) * share].ljust(share, bytes([PADDING]))

    # -- optimizer states -----------------------------------------------------------------------------

    def _length(self, flat: Flat) -> int:
        """Elements of a flat group, padded for all ranks: a multiple of twice their number."""
        unit = 2 * self.layout.world
        return -(-flat.used // unit) * unit

    def _counter(self, group: int) -> dict[str, Any]:
        step = self.state.steps[group]
        return {} if step is None or self.layout.counter == "group" else {"step": torch_value(step)}

    def _param_groups(self, numbers: Mapping[int, list[int]]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for index, group in enumerate(self.state.groups or ()):
            step = self.state.steps[index]
            counted = {"step": torch_value(step)} if self.layout.counter == "group" and step is not None else {}
            found.append({**torch_value(dict(group)), **counted, "params": numbers[index]})
        return found

    def _flat_states(self, flat: Flat, length: int) -> dict[str, bytes]:
        return {
            name: flat.joined([p.states[name] for p in flat.parameters], length)
            for name in (MASTER, *self.state.state_names)
        }

    def _dtype(self, name: str) -> str:
        return self.state.trained[0].states[name].dtype

    def zero12(self, rank: int, flats: Sequence[Flat]) -> dict[str, Any]:
        """`state_dict` of stages 1 and 2, or of BF16_Optimizer."""
        layout, bf16 = self.layout, self.layout.stage == "bf16"
        masters: list[torch.Tensor] = []
        states: dict[int, dict[str, Any]] = {}
        paddings: list[int] = []
        for index, flat in enumerate(flats):
            length = self._length(flat)
            share = length // layout.world
            padding = min(share, max(0, (rank + 1) * share - flat.used))
            paddings.append((length - flat.used) * (rank + 1 == layout.world) if bf16 else padding)
            tensors = {
                name: _typed(data, self._dtype(name))[rank * share : (rank + 1) * share].clone()
                for name, data in self._flat_states(flat, length).items()
            }
            masters.append(tensors.pop(MASTER)[: share - (0 if bf16 else padding)].requires_grad_())
            if layout.elastic:
                tensors = {name: tensor[: share - padding] for name, tensor in tensors.items()}
            if tensors:
                states[index] = {**self._counter(flat.group), **tensors}
        base: Any = {"state": states, "param_groups": self._param_groups({i: [i] for i in range(len(flats))})}
        if layout.elastic:
            base = [states[i] for i in range(len(flats))]
        counts = {"group_paddings": paddings}
        if not bf16:
            counts["param_alignment_paddings"] = [list(flat.pads) for flat in flats]
        found = {**self._extras(), "base_optimizer_state": base, "single_partition_of_fp32_groups": masters}
        if not bf16:
            found["zero_stage"] = _stage_enum(layout.stage)
        found |= {**counts, "partition_count": [layout.world] * len(flats), "ds_version": VERSION}
        return found | {"param_slice_mappings": [self._mapping(rank, flat) for flat in flats]}

    def _extras(self) -> dict[str, Any]:
        return {key: torch_value(value) for key, value in self.state.optimizer_values.items()}

    def _mapping(self, rank: int, flat: Flat) -> OrderedDict[str, Any]:
        """`param_slice_mappings`, with DeepSpeed's offsets: wrong under round robin without alignment paddings."""
        from deepspeed.utils.tensor_fragment import fragment_address

        own = self.state.of_group(flat.group)
        if self.layout.round_robin and not any(flat.pads):
            flat = Flat(own, flat.pads, flat.group)
        offsets = {p.fqn: at for p, at in zip(flat.parameters, flat.offsets, strict=True)}
        share = self._length(flat) // self.layout.world
        low, high = rank * share, (rank + 1) * share
        found: OrderedDict[str, Any] = OrderedDict()
        for parameter in own:
            at = offsets[parameter.fqn]
            begin, end = max(at, low), min(at + prod(parameter.shape), high)
            if begin < end:
                found[parameter.fqn] = fragment_address(numel=end - begin, start=begin - low)
        return found

    def zero3(self, rank: int, flats: Sequence[Flat]) -> dict[str, Any]:
        """`_rigid_state_dict` of stage 3."""
        masters: list[torch.Tensor] = []
        states: dict[int, dict[str, Any]] = {}
        numbers: dict[int, list[int]] = {}
        ids = {p.fqn: i for i, p in enumerate(self.state.parameters)}
        for index, flat in enumerate(flats):
            numbers.setdefault(flat.group, []).append(index)
            tensors = {
                name: _typed(b"".join(self._share(p.states[name], rank) for p in flat.parameters), self._dtype(name))
                for name in (MASTER, *self.state.state_names)
            }
            master = tensors.pop(MASTER).requires_grad_()
            master.ds_id = f"{ids[flat.parameters[0].fqn]}_{ids[flat.parameters[-1].fqn]}"  # type: ignore[attr-defined]
            masters.append(master)
            if tensors:
                states[index] = {**self._counter(flat.group), **tensors}
        extras = self._extras()
        return {
            "zero_stage": _stage_enum(3),
            **extras,
            "partition_count": self.layout.world,
            "optimizer_state_dict": {"state": states, "param_groups": self._param_groups(numbers)},
            "fp32_flat_groups": masters,
        }

    def stage0(self) -> dict[str, Any]:
        """The `optimizer` entry: torch's own state dict, in a wrapper with masters for 16-bit models."""
        ids = {p.fqn: i for i, p in enumerate(p for g in range(len(self.state.steps)) for p in self.state.of_group(g))}
        groups = {g: [ids[p.fqn] for p in self.state.of_group(g)] for g in range(len(self.state.steps))}
        names = self.state.state_names
        if self.layout.fused:
            return self._stage0_fused(names)
        states = {
            ids[p.fqn]: {**self._counter(p.group or 0), **{n: tensor_of(p.states[n]) for n in names}}
            for g in groups
            for p in self.state.of_group(g)
            if names
        }
        inner = {"state": states, "param_groups": self._param_groups(groups)}
        if self.state.dtype == "float32":
            return inner
        masters = [[tensor_of(p.states[MASTER]).requires_grad_() for p in self.state.of_group(g)] for g in groups]
        return {**self._extras(), "optimizer_state_dict": inner, "fp32_groups": masters}

    def _stage0_fused(self, names: Sequence[str]) -> dict[str, Any]:
        parameters = self.state.of_group(0)
        flat = Flat(parameters, (0,) * len(parameters), 0)
        tensors = {n: _typed(data, self._dtype(n)) for n, data in self._flat_states(flat, flat.used).items()}
        master = tensors.pop(MASTER).requires_grad_()
        states = {0: {**self._counter(0), **tensors}} if names else {}
        inner = {"state": states, "param_groups": self._param_groups({0: [0]})}
        return {**self._extras(), "optimizer_state_dict": inner, "fp32_groups_flat": [master]}


def _stage_enum(stage: Any) -> Any:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    return ZeroStageEnum(stage)


def write_checkpoint(state: LogicalState, layout: Layout, directory: Path) -> None:
    """Write `latest` and the tag directory."""
    folder = directory / layout.tag
    folder.mkdir()
    writer = CheckpointWriter(state, layout, folder)
    (directory / "latest").write_text(layout.tag)
    if layout.stage == 0:
        writer.save(writer.model_states(0, (), writer.stage0()), "mp_rank_00_model_states.pt")
        return
    flats = sub_groups(state, layout) if layout.stage == 3 else flat_groups(state, layout)
    prefix = "bf16_" if state.dtype == "bfloat16" else ""
    for rank in range(layout.world):
        inner = writer.zero3(rank, flats) if layout.stage == 3 else writer.zero12(rank, flats)
        outer = {
            "optimizer_state_dict": inner,
            "ds_config": torch_value(state.values["ds_config"]),
            "ds_version": VERSION,
        }
        writer.save(outer, f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if layout.stage == 3:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            writer.save(writer.model_states(rank, flats, None), name)
    if layout.stage != 3:
        writer.save(writer.model_states(0, flats, None), "mp_rank_00_model_states.pt")
