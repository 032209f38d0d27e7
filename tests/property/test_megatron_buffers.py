"""Laws of the buffers of Megatron-core's distributed optimizer, against its own loop (`house.megatron_runs`)."""

from __future__ import annotations

from itertools import pairwise
from math import lcm

import pytest
from hypothesis import given, settings, strategies as st

from reshard_engine.formats.megatron.buffers import (
    ALIGNMENT,
    Bucket,
    LayoutError,
    Member,
    aligned,
    check_cuts,
    closed_buckets,
    slots_in_vector,
    slots_of,
)

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=12)
SIZES = st.one_of(st.none(), st.integers(1, 900))


def members_of(lengths: list[int], alone: frozenset[int] = frozenset()) -> list[Member]:
    return [Member(f"p{at}", length, at in alone) for at, length in enumerate(lengths)]


def padded(lengths: list[int], ranks: int) -> list[Bucket]:
    return [Bucket(aligned(n, lcm(ranks, 128)), n) for n in lengths]


@given(LENGTHS, SIZES, st.integers(1, 6), st.sets(st.integers(0, 11), max_size=2))
@settings(max_examples=300, deadline=None)
def test_parameters_lie_in_reverse_without_overlap(
    lengths: list[int], most: int | None, ranks: int, alone: set[int]
) -> None:
    members = members_of(lengths, frozenset(alone))
    buckets = padded(closed_buckets(members, most), ranks)
    slots = slots_of(members, buckets)
    assert [s.name for s in slots] == [m.name for m in reversed(members)]
    assert [s.end - s.begin for s in slots] == lengths[::-1]
    assert all(s.begin % ALIGNMENT == 0 for s in slots)
    for one, other in pairwise(slots):
        if one.bucket == other.bucket:
            assert other.begin == aligned(one.end, ALIGNMENT)
        else:
            assert (other.bucket, other.begin) == (one.bucket + 1, 0)
            assert buckets[one.bucket].unpadded in (one.end, aligned(one.end, ALIGNMENT))
    assert slots[-1].end == buckets[-1].unpadded
    for member, slot in zip(reversed(members), slots, strict=True):
        if member.alone:
            assert [s for s in slots if s.bucket == slot.bucket] == [slot]


@given(LENGTHS, SIZES)
@settings(max_examples=200, deadline=None)
def test_a_vector_is_its_buckets_one_after_another(lengths: list[int], most: int | None) -> None:
    members = members_of(lengths)
    closed = closed_buckets(members, most)
    slots = slots_in_vector(members, [most], sum(closed))
    for bucket, within in zip(slots_of(members, padded(closed, 1)), slots, strict=True):
        assert within.begin == sum(closed[: bucket.bucket]) + bucket.begin
    with pytest.raises(LayoutError, match=f"and {sum(closed) + 1} are stored"):
        slots_in_vector(members, [most], sum(closed) + 1)


@given(LENGTHS, st.data())
@settings(max_examples=200, deadline=None)
def test_buckets_of_other_lengths_are_refused(lengths: list[int], data: st.DataObject) -> None:
    members = members_of(lengths)
    closed = closed_buckets(members, data.draw(SIZES))
    at = data.draw(st.integers(0, len(closed) - 1))
    length = data.draw(st.integers(max(1, closed[at] - 300), closed[at] + 300).filter(closed[at].__ne__))
    other = [*closed[:at], length, *closed[at + 1 :]]
    with pytest.raises(LayoutError):
        slots_of(members, padded(other, 1))
    with pytest.raises(LayoutError):
        slots_of(members, padded([*closed, 64], 1))


@given(LENGTHS, st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_chunks_are_parameters_gaps_and_parts_of_ranks(lengths: list[int], ranks: int) -> None:
    members = members_of(lengths)
    (bucket,) = padded(closed_buckets(members, None), ranks)
    slots = slots_of(members, [bucket])
    part = bucket.numel // ranks
    edges = {0, bucket.unpadded, *(e for s in slots for e in (s.begin, s.end)), *range(0, bucket.unpadded, part)}
    check_cuts(slots, bucket, sorted(edges), ranks)
    for lost in sorted({e for s in slots for e in (s.begin, s.end)}):
        with pytest.raises(LayoutError, match=f"element {lost}"):
            check_cuts(slots, bucket, sorted(edges - {lost}), ranks)
    foreign = next(n for n in range(bucket.numel) if n not in edges and n * ranks % bucket.numel)
    with pytest.raises(LayoutError, match=f"begins at element {foreign}"):
        check_cuts(slots, bucket, sorted(edges | {foreign}), ranks)


def test_two_layouts_of_one_length_are_refused() -> None:
    members = members_of([64, 64, 100, 64])
    assert sum(closed_buckets(members, None)) == 64 + 128 + 64 + 64
    one, other = closed_buckets(members, None), closed_buckets(members, 164)
    assert (sum(one), sum(other)) == (320, 292)
    with pytest.raises(LayoutError, match="320, 292 elements"):
        slots_in_vector(members, [None, 164], 300)
    assert slots_in_vector(members, [None, 164], 292) != slots_in_vector(members, [None, 164], 320)


def test_a_bucket_that_is_no_multiple_is_refused() -> None:
    with pytest.raises(LayoutError, match="no multiple of 128"):
        slots_of(members_of([64]), [Bucket(100, 64)])
    with pytest.raises(LayoutError, match="buckets are full"):
        slots_of(members_of([64, 64]), [Bucket(128, 64)])
