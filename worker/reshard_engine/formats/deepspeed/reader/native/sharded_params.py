"""ZeRO-3: each parameter is cut into equal pieces, and a rank's flat tensor is the concatenation of its pieces.

Sub-groups follow one another, so their flat tensors, put end to end, hold the parameters of all
`param_shapes` entries in order, whatever `sub_group_size` was. The tail of a parameter's last piece
is uninitialised memory: it belongs to no element and is never read.

Source: deepspeed 0.19.8 `runtime/zero/partition_parameters.py` (`_aligned_size`, `_partition_param`),
`runtime/zero/stage3.py` (`_create_fp16_sub_groups`, `_rigid_state_dict`); verified by running.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from reshard.errors import SourceError
from reshard_engine.formats.deepspeed.reader.native.flat_groups import Partition
from reshard_engine.formats.deepspeed.reader.native.model_states import Shapes
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
