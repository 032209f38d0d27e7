"""DeepSpeed's layout of parameters in flat tensors, and the partitions of these over data-parallel ranks.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`__init__`: alignment and padding),
`runtime/bf16_optimizer.py`, `runtime/zero/partition_parameters.py` (`_aligned_size`), `runtime/zero/stage3.py`
(`_create_fp16_sub_groups`); verified by loading with each engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from reshard_engine.tensors.layout import ZEROS

NCCL_START_ALIGNMENT = 2
Run = tuple[int, int, int]
"""(tensor or `ZEROS`, first element, last element + 1)."""


def alignment_elems(itemsize_bytes: int) -> int:
    """The number of elements to a multiple of which `parameter_alignment` pads each parameter."""
    return 16 // gcd(16, itemsize_bytes)


@dataclass(frozen=True, slots=True)
class Concatenated:
    """One group of stages 1 and 2: parameters one after another, padded at the end, cut into equal pieces."""

    starts: tuple[int, ...]
    """First element of each parameter, in flat order."""
    paddings: tuple[int, ...]
    """Elements of alignment padding behind each parameter."""
    numel: int
    """Elements without the padding at the end."""
    partition_numel: int
    """Elements of one rank's piece."""

    def padding_of(self, rank: int) -> int:
        """Elements at the end of a rank's piece that belong to no parameter."""
        return max(0, min(self.partition_numel, (rank + 1) * self.partition_numel - self.numel))


def concatenate(numels: Sequence[int], ranks: int, *, alignment: int = 1) -> Concatenated:
    """The layout of a group of parameters with these numbers of elements, in flat order."""
    starts: list[int] = []
    paddings: list[int] = []
    at = 0
    for index, numel in enumerate(numels):
        starts.append(at)
        at += numel
        paddings.append(0 if index == len(numels) - 1 else -at % alignment)
        at += paddings[-1]
    unit = NCCL_START_ALIGNMENT * ranks
    return Concatenated(tuple(starts), tuple(paddings), at, -(-at // unit) * NCCL_START_ALIGNMENT)


def sub_groups(numels: Sequence[int], ranks: int, *, sub_group_size: int) -> list[range]:
    """The sub-groups of one param group at stage 3, as ranges of its parameters."""
    shares = [-(-n // ranks) for n in numels]
    if sub_group_size >= sum(shares):
        return [range(len(numels))] if numels else []
    found: list[range] = []
    first = held = 0
    for index, share in enumerate(shares):
        held += share
        if held >= sub_group_size or index == len(shares) - 1:
            found.append(range(first, index + 1))
            first, held = index + 1, 0
    return found


def clipped(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """The elements `[begin, end)` of the runs joined end to end; elements behind the last run are zeros."""
    found: list[Run] = []
    at = 0
    for tensor, first, last in runs:
        low, high = max(begin, at), min(end, at + last - first)
        if low < high:
            found.append((tensor, first + low - at, first + high - at))
        at += last - first
        if at >= end:
            return found
    if max(begin, at) < end:
        found.append((ZEROS, 0, end - max(begin, at)))
    return found


def pieces(runs: Sequence[Run], piece_numel: int, count: int) -> list[list[Run]]:
    """The runs joined end to end, filled up with zeros, and cut into `count` equal pieces in one pass."""
    found: list[list[Run]] = [[] for _ in range(count)]
    at = 0
    for tensor, begin, end in (*runs, (ZEROS, 0, piece_numel * count - sum(e - b for _, b, e in runs))):
        first = begin
        while first < end:
            take = min(piece_numel - at % piece_numel, end - first)
            found[at // piece_numel].append((tensor, first, first + take))
            first += take
            at += take
    return found
