"""ZeRO-1, ZeRO-2 and BF16_Optimizer: each group's parameters concatenated, padded once, cut into equal pieces.

One rule is right for every run: concatenate the ranks' partitions of a group, walk `param_shapes` in its
order (this is the flat order, also under `round_robin_gradients`), and add the alignment padding after each
parameter. The reader ignores `param_slice_mappings`, which are wrong under `round_robin_gradients`.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`_configure_distributed_optimizer`,
`get_data_parallel_partitions`), `runtime/bf16_optimizer.py`; verified by running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from reshard.errors import SourceError
from reshard_engine.formats.deepspeed.partitioning import NCCL_START_ALIGNMENT
from reshard_engine.formats.deepspeed.reader.native.model_states import Shapes
from reshard_engine.tensors.shard_map import Column, ShardMapBuilder


@dataclass(frozen=True, slots=True)
class Partition:
    """One rank's flat tensor: elements and where they begin in its file."""

    file: int
    offset: int
    numel: int


def add_flat_group(
    builder: ShardMapBuilder,
    tensors: Sequence[int],
    shapes: Shapes,
    *,
    partitions: Sequence[Partition],
    paddings: Sequence[int],
    itemsize_bytes: int,
    what: str,
) -> None:
    """Register the pieces of one group and one state.

    Args:
        builder: Collects the pieces.
        tensors: The tensor number of each parameter of the group, in flat order.
        shapes: Names and shapes of the group, in flat order.
        partitions: One flat tensor per rank, in rank order.
        paddings: Alignment padding after each parameter, in elements; empty for none.
        itemsize_bytes: Bytes per element of the flat tensors.
        what: The group and state, for messages.

    Raises:
        SourceError: `checkpoint.coverage` if the partitions do not add up to the shapes.
    """
    numel = np.array([prod(s) for _, s in shapes], dtype=np.int64)
    pads = np.array(paddings, dtype=np.int64) if paddings else np.zeros_like(numel)
    if len(pads) != len(numel):
        raise SourceError("checkpoint.malformed", f"{what}: {len(pads)} alignment paddings for {len(numel)} parameters")
    starts = np.concatenate(([0], np.cumsum(numel + pads)))[:-1].astype(np.int64)
    ends = starts + numel
    total = int(starts[-1] + numel[-1] + pads[-1]) if len(numel) else 0
    lengths = np.array([p.numel for p in partitions], dtype=np.int64)
    held = int(lengths.sum())
    _check_sizes(lengths, total, held, len(partitions), what)
    rank_starts = np.concatenate(([0], np.cumsum(lengths)))[:-1].astype(np.int64)
    begin, end = _segments(starts, ends, rank_starts, lengths)
    owner = np.searchsorted(starts, begin, side="right") - 1
    # Zero-element parameters share their start with the next one; the last of them owns the segment.
    inside = (owner >= 0) & (begin < ends[owner]) if len(numel) else np.zeros(0, dtype=bool)
    begin, end, owner = begin[inside], end[inside], owner[inside]
    rank = np.searchsorted(rank_starts, begin, side="right") - 1
    files = np.array([p.file for p in partitions], dtype=np.int64)
    offsets = np.array([p.offset for p in partitions], dtype=np.int64)
    builder.pieces(
        np.array(tensors, dtype=np.int64)[owner],
        begin - starts[owner],
        end - starts[owner],
        file=files[rank],
        offset=offsets[rank] + (begin - rank_starts[rank]) * itemsize_bytes,
    )


def _segments(starts: Column, ends: Column, rank_starts: Column, lengths: Column) -> tuple[Column, Column]:
    """The flat interval cut at every parameter's and every rank's boundary."""
    cuts = np.unique(np.concatenate((starts, ends, rank_starts, rank_starts + lengths)))
    limit = int(ends.max(initial=0))
    cuts = cuts[cuts <= limit]
    return cuts[:-1], cuts[1:]


def _check_sizes(lengths: Column, total: int, held: int, ranks: int, what: str) -> None:
    # The engine pads a group to a multiple of 2 * ranks; older versions aligned differently, hence the slack.
    room = held - total
    if room < 0 or room >= 2 * NCCL_START_ALIGNMENT * ranks:
        raise SourceError(
            "checkpoint.coverage",
            f"{what}: {ranks} ranks hold {held} elements, the parameters need {total}",
            fix="the files are of runs with different models or world sizes",
        )
    longest = int(lengths.max(initial=0))
    short = np.flatnonzero(lengths < longest)
    # All ranks hold equal partitions, but files lack the padding at the end: it may cover one rank or several.
    if len(short) and bool((lengths[short[0] + 1 :] > 0).any()):
        raise SourceError("checkpoint.coverage", f"{what}: rank {short[0]} of {ranks} holds a short partition")
