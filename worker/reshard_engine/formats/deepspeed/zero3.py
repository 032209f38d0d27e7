"""ZeRO-3: each parameter is cut into equal shares, and a rank's flat tensor is the concatenation of its shares.

Sub-groups follow one another, so their flat tensors, put end to end, hold the parameters of all
`param_shapes` entries in order, whatever `sub_group_size` was. The tail of a parameter's last piece
is uninitialised memory: it belongs to no element and is never read.

Source: deepspeed 0.19.8 `runtime/zero/partition_parameters.py` (`_aligned_size`, `_partition_param`),
`runtime/zero/stage3.py` (`_create_fp16_sub_groups`, `_rigid_state_dict`); verified by running.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from reshard.errors import SourceError, printable
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.deepspeed.config import has_16bit_masters
from reshard_engine.formats.deepspeed.files import OPTIMIZER_STATE
from reshard_engine.formats.deepspeed.native.target import LocalModel, LocalParameter, Target
from reshard_engine.formats.deepspeed.optimizer import (
    Groups,
    scaler_entries,
    state_runs,
    trained_groups,
    zero_stage_node,
)
from reshard_engine.formats.deepspeed.parallel.experts import partition_groups, slice_of
from reshard_engine.formats.deepspeed.partitioning import Run, clipped, sub_groups
from reshard_engine.formats.deepspeed.rank_files import ModelStates, RankStates, Shapes
from reshard_engine.formats.deepspeed.zero12 import Partition
from reshard_engine.pickles.nodes import Node, PList, PRuns, PTensor, mapping_of
from reshard_engine.storage.locations import Location, refuse_link_elsewhere
from reshard_engine.tensors.dtypes import FLOAT32 as MASTER
from reshard_engine.tensors.shard_map import ShardMapBuilder


def add_sharded_params(
    builder: ShardMapBuilder,
    tensors: Sequence[int],
    shapes: Shapes,
    *,
    partitions: Sequence[Sequence[Partition]],
    itemsize_bytes: int,
    what: str,
) -> None:
    """Register the pieces of one state of parameters that ZeRO-3 cut.

    Args:
        builder: Collects the pieces.
        tensors: The tensor number of each parameter, in flat order over all sub-groups.
        shapes: Names and shapes in the same order.
        partitions: Per rank its flat tensors in sub-group order.
        itemsize_bytes: Bytes per element of the flat tensors.
        what: The state, for messages.

    Raises:
        SourceError: `checkpoint.coverage` if a rank's tensors do not have the length that the shapes give.
    """
    ranks = len(partitions)
    numel = np.array([prod(s) for _, s in shapes], dtype=np.int64)
    share = -(-numel // ranks)
    local_end = np.cumsum(share)
    local = local_end - share
    expected = int(local_end[-1]) if len(share) else 0
    for rank, groups in enumerate(partitions):
        held = sum(g.numel for g in groups)
        if held != expected:
            raise SourceError(
                "checkpoint.coverage",
                f"{what}: rank {rank} of {ranks} holds {held} elements, the parameters' shares are {expected}",
                fix="the files are of runs with different models or world sizes",
            )
        begin = np.minimum(rank * share, numel)
        end = np.minimum((rank + 1) * share, numel)
        lengths = np.array([g.numel for g in groups], dtype=np.int64)
        group_start = np.concatenate(([0], np.cumsum(lengths)))[:-1]
        group = np.searchsorted(group_start, local, side="right") - 1 if len(groups) else np.zeros(0, dtype=np.int64)
        if bool((local + share > (group_start + lengths)[group])[end > begin].any()):
            raise SourceError("checkpoint.coverage", f"{what}: a parameter of rank {rank} crosses two sub-groups")
        files = np.array([g.file for g in groups], dtype=np.int64)
        offsets = np.array([g.offset for g in groups], dtype=np.int64)
        builder.pieces(
            np.array(tensors, dtype=np.int64),
            begin,
            end,
            file=files[group],
            offset=offsets[group] + (local - group_start[group]) * itemsize_bytes,
        )


def add_sharded_tensor(
    builder: ShardMapBuilder, tensor: int, *, partitions: Sequence[Partition], itemsize_bytes: int, what: str
) -> None:
    """Register one frozen parameter: each rank holds a flat share of it, in a tensor of its own."""
    stored = builder.tensors[tensor]
    add_sharded_params(
        builder,
        [tensor],
        ((stored.fqn, stored.shape),),
        partitions=[[p] for p in partitions],
        itemsize_bytes=itemsize_bytes,
        what=what,
    )


# Optimizer files of stage 3: each parameter is cut into equal shares, and a rank's shares are joined by sub-group.
#
# Source: deepspeed 0.19.8 `runtime/zero/stage3.py` (`_rigid_state_dict`, `_rigid_load_state_dict`).


def share_of(runs: Sequence[Run], numel: int, rank: int, ranks: int) -> list[Run]:
    """One rank's share of a parameter, padded with zeros to the length that all shares have."""
    share = -(-numel // ranks)
    return clipped(runs, rank * share, (rank + 1) * share)


class ShardedStates:
    """The optimizer's state of one model-parallel rank, where each parameter is cut over the data-parallel ranks.

    Fused experts are cut over the ranks that hold the same experts. They share no sub-group with other parameters.
    """

    def __init__(self, groups: Groups, model: LocalModel, target: Target) -> None:
        """Cut the groups into sub-groups once for all ranks."""
        self._groups, self._target, self._fused = groups, target, model.fused
        self._sub_groups: list[list[LocalParameter]] = []
        self._numbers: list[list[int]] = []
        for members in trained_groups(model, groups.count):
            first = len(self._sub_groups)
            by_ranks: dict[bool, list[LocalParameter]] = {}
            for parameter in members:
                by_ranks.setdefault(parameter.fqn in model.fused, []).append(parameter)
            for experts, same in by_ranks.items():
                numels = [p.numel // (target.layout.ep if experts else 1) for p in same]
                cuts = sub_groups(numels, self._ranks(experts=experts), sub_group_size=target.sub_group_size)
                self._sub_groups += [[same[i] for i in cut] for cut in cuts]
            self._numbers.append(list(range(first, len(self._sub_groups))))

    def _ranks(self, *, experts: bool) -> int:
        """The number of ranks that share a sub-group."""
        return self._target.dp // (self._target.layout.ep if experts else 1)

    def _experts(self, members: Sequence[LocalParameter]) -> bool:
        return members[0].fqn in self._fused

    def _held(self, members: Sequence[LocalParameter], rank: int) -> list[LocalParameter]:
        """The parameters of a sub-group, with fused ones cut to the experts of a data-parallel rank."""
        ep, mine = self._target.layout.ep, self._target.expert_place(rank)[0]
        return [slice_of(p, ep, mine) for p in members] if self._experts(members) else list(members)

    def optimizer_of(self, rank: int) -> Node:
        """`optimizer_state_dict` of one data-parallel rank."""
        entries: dict[str | int, Node] = {"zero_stage": zero_stage_node(3)}
        entries |= scaler_entries(self._target)
        entries["partition_count"] = self._target.dp
        if self._fused:
            shared = [(self._experts(m), self._sharing(rank, experts=self._experts(m))) for m in self._sub_groups]
            entries["ds_zero_partition_groups"] = partition_groups(shared, self._target, rank)
        state: dict[str | int, Node] = {}
        masters: list[Node] = []
        for number, whole in enumerate(self._sub_groups):
            experts, members = self._experts(whole), self._held(whole, rank)
            ranks, place = self._ranks(experts=experts), self._target.expert_place(rank)[1] if experts else rank
            runs = {s: _joined(members, s, place, ranks) for s in self._groups.states_of(members[0].group)}
            shape = (sum(-(-p.numel // ranks) for p in members),)
            masters.append(PRuns(self._groups.dtype_of("fp32", members).name, shape, runs["fp32"]))
            if self._groups.has_state(members):
                state[number] = self._groups.state_entry(members, runs, shape)
        groups = self._groups.with_params(self._numbers, ep=self._target.layout.ep)
        entries[OPTIMIZER_STATE] = mapping_of({"state": mapping_of(state), "param_groups": groups})
        entries["fp32_flat_groups"] = PList(masters)
        return mapping_of(entries)

    def _sharing(self, rank: int, *, experts: bool) -> list[int]:
        """The ranks that share a sub-group with this one."""
        everybody = range(self._target.dp)
        mine = self._target.expert_place(rank)[0]
        return [r for r in everybody if self._target.expert_place(r)[0] == mine] if experts else list(everybody)

    def shapes(self) -> list[list[LocalParameter]]:
        """The content of `param_shapes`: the members of each sub-group, as the first rank holds them."""
        return [self._held(members, 0) for members in self._sub_groups]


def _joined(members: Sequence[LocalParameter], state: str, place: int, ranks: int) -> tuple[Run, ...]:
    """One state of a sub-group on the rank at `place` among the ranks that share the sub-group."""
    return tuple(run for p in members for run in share_of(state_runs(p, state), p.numel, place, ranks))


# Optimizer states that a ZeRO-3 run kept on NVMe: raw files beside the rank files, one per sub-group and state.
#
# A swapped sub-group's tensors are empty in the rank file. Their attribute `ds_id` names the file in the rank's folder:
# `0_7.tensor.swp` for the masters of the sub-group of parameters 0 to 7, `exp_avg-0_7.tensor.swp` for a state. The file
# holds the rank's flat tensor from its first byte on, in fp32, and is padded to the alignment of asynchronous I/O. It
# is longer where an earlier run left a longer file. Sub-groups under 1 MiB stay in the rank file. Masters of 16 bits
# have files of 16 bits, but their empty tensors say fp32: the reader refuses such runs.
#
# Source: deepspeed 0.19.8 `runtime/engine.py` (`save_checkpoint`: the swap folder is copied without gradients),
# `runtime/swap_tensor/optimizer_utils.py` (`SwapTensorContext`, `_get_state_tensors`, `_io_aligned_numel`),
# `runtime/zero/stage3.py` (`_create_fp32_partitions`); verified by running, with libaio and without.

FOLDER = "offloaded_tensors"
_CPU_FIX = "save with offload_optimizer.device cpu"
_ATTRIBUTE = "ds_id"
_SUFFIX = ".tensor.swp"
_FILE = re.compile(rf"rank(?P<rank>[0-9]{{2,9}})/(?P<name>[^/]+){re.escape(_SUFFIX)}")


def with_swapped(
    states: Sequence[Sequence[RankStates]], model: ModelStates, location: Location
) -> list[list[RankStates]]:
    """All ranks, by model-parallel rank, with the files that they kept in the swap folders of the tag directory.

    Raises:
        SourceError: `source.unsupported` under model parallelism and for masters of 16 bits, `name.invalid` for a link
            to a file elsewhere.
    """
    if len(states) > 1:
        raise SourceError(
            "source.unsupported",
            f"optimizer states were offloaded to NVMe under model parallelism ({len(states)} model-parallel ranks): "
            f"the folders in {FOLDER}/ are of global ranks, and nothing says which model-parallel rank each is",
            fix=_CPU_FIX,
        )
    if has_16bit_masters(model):
        raise SourceError(
            "source.unsupported",
            "optimizer states were offloaded to NVMe with masters of 16 bits (master_weights_and_grads), and the rank "
            "files state a wrong type for these",
            fix=_CPU_FIX,
        )
    files = _swap_files(location)
    return [[_with_its_own(s, files.get(rank, {})) for rank, s in enumerate(states[0])]]


def _swap_files(location: Location) -> dict[int, dict[str, SourceFile]]:
    """The swap files by rank and by the name of the swapped tensor."""
    found: dict[int, dict[str, SourceFile]] = {}
    for path, info in location.child(FOLDER).files().items():
        if named := _FILE.fullmatch(path):
            # A swap file has no header: its bytes are written unchecked, so a link could leak any other file.
            refuse_link_elsewhere(location, info.path)
            file = SourceFile(location.store, f"{FOLDER}/{path}", (info,))
            found.setdefault(int(named["rank"]), {})[named["name"]] = file
    return found


def _with_its_own(states: RankStates, files: Mapping[str, SourceFile]) -> RankStates:
    """A rank's states with those swap files that its empty tensors name."""
    named = (name for tensor in _tensors(states) if (name := _name_of(tensor)) is not None)
    return replace(states, swapped={name: files[name] for name in named if name in files})


def swapped_partition(states: RankStates, tensor: PTensor, numel: int, number: Mapping[SourceFile, int]) -> Partition:
    """The place in a swap file of a rank's flat tensor of `numel` elements, of which the rank file has none.

    Raises:
        SourceError: `checkpoint.incomplete` if the file is missing or too short, `source.unsupported` if it may be of
            another type than fp32.
    """
    name = _name_of(tensor)
    if name is None:
        # Nothing says that it was swapped: the later check of the number of elements refuses it.
        return Partition(number[states.torch_file.file], 0, 0)
    file = states.swapped.get(name)
    if file is None:
        raise SourceError(
            "checkpoint.incomplete",
            f"{printable(states.torch_file.file.name)} says that {printable(name)}{_SUFFIX} has {numel} elements that "
            f"were offloaded to NVMe, and {FOLDER}/ has no such file for its rank",
            fix=f"copy {FOLDER}/ of the same tag; where nodes kept it for themselves (use_node_local_storage), their "
            "folders have the same names, and are not read",
        )
    if tensor.dtype != MASTER.name:
        raise SourceError(
            "source.unsupported",
            f"{printable(states.torch_file.file.name)} says that {printable(name)}{_SUFFIX} is {tensor.dtype}: "
            "nothing says which type the file has",
            fix=_CPU_FIX,
        )
    wanted = numel * MASTER.itemsize_bytes
    if file.size_bytes < wanted:
        raise SourceError(
            "checkpoint.incomplete",
            f"{printable(file.name)} has {file.size_bytes} bytes, its sub-group takes {wanted}",
            fix="the file is truncated, or of another save: copy the checkpoint again",
        )
    return Partition(number[file], 0, numel)


def _tensors(states: RankStates) -> Iterator[PTensor]:
    yield from states.fp32
    for group in states.states:
        yield from (value for value in group.values() if isinstance(value, PTensor))


def _name_of(tensor: PTensor) -> str | None:
    return None if tensor.numel else dict(tensor.attributes).get(_ATTRIBUTE)
