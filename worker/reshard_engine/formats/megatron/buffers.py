"""Where parameters lie in the buffers of Megatron-core's distributed optimizer: pure arithmetic, no files.

One buffer holds the parameters of one model chunk of one model-parallel rank that share their types and their group of
data-parallel ranks. They lie in reverse order of their registration, and each begins at a multiple of 64 elements. A
buffer is cut into buckets, whose ends are padded so that data-parallel ranks get equal parts. What is stored are the
masters and moments of each bucket without that padding; the gaps between parameters are stored.

Nothing here searches. The order and the lengths of parameters go in, and so do the lengths that the files say; what
does not fit is an error with both numbers.

Source: megatron-core 0.16.1 `distributed/param_and_grad_buffer.py` (`_ParamAndGradBuffer`),
`distributed/distributed_data_parallel.py` (bucket sizes), `optimizer/distrib_optimizer.py`
(`sharded_param_state_dp_reshardable`: one chunk for each parameter and each gap of each data-parallel rank,
`get_parameter_state_dp_zero`: buckets one after another); 0.19.2 makes the same layout; verified by running both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements: each parameter begins at a multiple within its buffer."""
BUCKET_ALIGNMENT = 128
"""Elements: each bucket ends at a multiple, which the number of data-parallel ranks divides as well."""
DEFAULT_BUCKET, DEFAULT_BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Elements at which a bucket closes where the run does not say it: the larger of both, the latter for each rank."""


class LayoutError(ValueError):
    """The error for parameters that do not lie as the files say; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of one buffer."""

    name: str
    numel: int
    """Elements that the model-parallel rank holds."""
    alone: bool = False
    """True for an embedding that two pipeline stages share: it has a bucket of its own."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The lengths of one bucket, in elements."""

    numel: int
    """With the padding behind its last parameter, which is not stored."""
    unpadded: int
    """What is stored."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a parameter: elements `[begin, end)` of its bucket."""

    name: str
    bucket: int
    begin: int
    end: int


def aligned(length: int, unit: int) -> int:
    """The next multiple of a unit."""
    return -(-length // unit) * unit


def closed_buckets(members: Sequence[Member], most: int | None) -> list[int]:
    """The stored lengths of the buckets, by the rule of the run that makes them.

    Args:
        members: The parameters of a buffer in the order of their registration.
        most: A bucket closes when it has so many elements; None for one bucket.
    """
    found: list[int] = []
    end, held = 0, False
    for member in reversed(members):
        begin = aligned(end, ALIGNMENT)
        if member.alone and held:
            # The run pads the begin of this parameter first, and closes the bucket behind that gap.
            found.append(begin)
            begin = 0
        end, held = begin + member.numel, True
        if member.alone or (most is not None and end >= most):
            found.append(end)
            end, held = 0, False
    return [*found, end] if held else found


def slots_of(members: Sequence[Member], buckets: Sequence[Bucket]) -> list[Slot]:
    """The places of parameters in buckets whose lengths are known; all of them are filled exactly.

    Args:
        members: The parameters of a buffer in the order of their registration.
        buckets: The lengths of all buckets of the buffer.

    Raises:
        LayoutError: A bucket ends within a parameter, or they do not end together.
    """
    for number, bucket in enumerate(buckets):
        if not 0 < bucket.unpadded <= bucket.numel or bucket.numel % BUCKET_ALIGNMENT:
            raise LayoutError(
                f"bucket {number} has {bucket.unpadded} elements, and {bucket.numel} with its padding, which is no "
                f"multiple of {BUCKET_ALIGNMENT} behind them"
            )
    found: list[Slot] = []
    number, end = -1, 0
    for member in reversed(members):
        begin = aligned(end, ALIGNMENT)
        # The gap before an embedding with a bucket of its own is of the bucket before it, unless that closed by size.
        full = {end, begin} if member.alone else {end}
        if number < 0 or buckets[number].unpadded in full:
            number, begin = number + 1, 0
            if number == len(buckets):
                raise LayoutError(
                    f"{member.name} has {member.numel} elements, and all {len(buckets)} buckets are full before it"
                )
        end = begin + member.numel
        if end > buckets[number].unpadded or (member.alone and (begin, end) != (0, buckets[number].unpadded)):
            raise LayoutError(
                f"{member.name} has {member.numel} elements and begins at {begin} of bucket {number}, which has "
                f"{buckets[number].unpadded}"
            )
        found.append(Slot(member.name, number, begin, end))
    held = 0 if number < 0 else number + 1
    if held != len(buckets) or (buckets and end != buckets[-1].unpadded):
        raise LayoutError(
            f"the parameters end at {end} of bucket {number}, and there are {len(buckets)} buckets with "
            f"{', '.join(str(b.unpadded) for b in buckets[:8])} elements"
        )
    return found


def slots_in_vector(members: Sequence[Member], sizes: Iterable[int | None], stored: int) -> list[Slot]:
    """The places in a vector that holds all buckets of a buffer one after another, as if it were one bucket.

    Args:
        members: The parameters of a buffer in the order of their registration.
        sizes: The numbers of elements at which buckets may close: those of `closed_buckets`.
        stored: Elements of the vector.

    Raises:
        LayoutError: None of the sizes gives a vector of this length, or two of them give different places.
    """
    found: list[list[Slot]] = []
    lengths: list[int] = []
    for most in dict.fromkeys(sizes):
        closed = closed_buckets(members, most)
        lengths.append(sum(closed))
        if lengths[-1] != stored:
            continue
        first = [sum(closed[:number]) for number in range(len(closed))]
        buckets = [Bucket(aligned(length, BUCKET_ALIGNMENT), length) for length in closed]
        slots = [
            Slot(s.name, 0, first[s.bucket] + s.begin, first[s.bucket] + s.end) for s in slots_of(members, buckets)
        ]
        if slots not in found:
            found.append(slots)
    if len(found) != 1:
        made = ", ".join(map(str, dict.fromkeys(lengths)))
        raise LayoutError(
            f"{len(members)} parameters make a buffer of {made} elements, and {stored} are stored"
            if not found
            else f"{len(members)} parameters fill {stored} elements in {len(found)} ways, by the size of buckets"
        )
    return found[0]


def check_cuts(slots: Sequence[Slot], bucket: Bucket, cuts: Sequence[int], ranks: int | None) -> None:
    """Compare places in one bucket with the chunks in which it was saved.

    A chunk is a parameter or a gap, or a data-parallel rank's part of one. So each parameter begins and ends where a
    chunk does, and chunks begin nowhere else but at equal parts of the padded bucket.

    Args:
        slots: The places in this bucket.
        bucket: Its lengths.
        cuts: Where chunks begin, in order, and the end of the last one.
        ranks: The number of data-parallel ranks; None if nothing says it.

    Raises:
        LayoutError: The chunks are those of other parameters.
    """
    known = frozenset(cuts)
    for slot in slots:
        if (away := next((edge for edge in (slot.begin, slot.end) if edge not in known), None)) is not None:
            raise LayoutError(f"{slot.name} would have an edge at element {away}, and no chunk begins or ends there")
    edges = {0, bucket.unpadded, *(edge for s in slots for edge in (s.begin, s.end))}
    for cut in known - edges:
        if ranks is None or cut * ranks % bucket.numel:
            raise LayoutError(
                f"a chunk begins at element {cut}, where no parameter does, nor the part of a data-parallel rank: "
                f"{ranks or 'an unknown number of'} ranks share {bucket.numel} elements"
            )
