"""Laws of the shard map: every way of cutting a checkpoint gathers back to the same tensors.

The oracle is numpy: build the global tensors, cut them as the format says with plain slicing, register
the pieces, and gather through the map.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reshard.errors import ReshardError
from reshard_engine.formats.deepspeed.stage0 import assign_names
from reshard_engine.formats.deepspeed.zero3 import add_sharded_params
from reshard_engine.formats.deepspeed.zero12 import Partition, add_flat_group
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import ShardMap, ShardMapBuilder, is_packed, packed_stride

FLOAT = BY_NAME["float32"]
shapes = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)
models = st.lists(shapes, min_size=1, max_size=9)
worlds = st.integers(1, 9)


def _tensors(model: list[tuple[int, ...]]) -> list[np.ndarray]:
    start = 0
    found: list[np.ndarray] = []
    for shape in model:
        found.append(np.arange(start, start + prod(shape), dtype=np.float32))
        start += prod(shape)
    return found


def _gather(shard_map: ShardMap, files: list[np.ndarray], tensor: int, begin: int, end: int) -> list[float]:
    pieces = shard_map.pieces(tensor, begin, end)
    found: list[float] = []
    for low, high, file, offset in zip(pieces.begin, pieces.end, pieces.file, pieces.offset, strict=True):
        assert offset % 4 == 0
        found += files[file][offset // 4 : offset // 4 + high - low].tolist()
    return found


def _check_gather(shard_map: ShardMap, files: list[np.ndarray], tensors: list[np.ndarray], data: st.DataObject) -> None:
    for index, expected in enumerate(tensors):
        assert _gather(shard_map, files, index, 0, len(expected)) == expected.tolist()
        low = data.draw(st.integers(0, len(expected)))
        high = data.draw(st.integers(low, len(expected)))
        assert _gather(shard_map, files, index, low, high) == expected[low:high].tolist()


@given(models, worlds, st.booleans(), st.booleans(), st.data())
@settings(max_examples=200, deadline=None)
def test_flat_groups_gather_back(
    model: list[tuple[int, ...]], world: int, stripped: bool, aligned: bool, data: st.DataObject
) -> None:
    """ZeRO-1/2: concatenated, padded at the end, cut evenly; padding stripped from trailing ranks or not."""
    tensors = _tensors(model)
    flat: list[np.ndarray] = []
    pads: list[int] = []
    offset = 0
    for index, tensor in enumerate(tensors):
        pad = -(offset + len(tensor)) % 4 if aligned and index + 1 < len(tensors) else 0
        flat += [tensor, np.full(pad, -1, np.float32)]
        pads.append(pad)
        offset += len(tensor) + pad
    whole = np.concatenate(flat)
    share = 2 * -(-len(whole) // (2 * world))
    padded = np.concatenate([whole, np.full(share * world - len(whole), np.nan, np.float32)])
    files = [padded[r * share : (r + 1) * share] for r in range(world)]
    if stripped:
        files = [f[: max(0, min(share, len(whole) - r * share))] for r, f in enumerate(files)]
    builder = ShardMapBuilder()
    named = tuple((f"p{i}", shape) for i, shape in enumerate(model))
    ids = [builder.tensor(name, "fp32", FLOAT, shape) for name, shape in named]
    add_flat_group(
        builder,
        ids,
        named,
        partitions=[Partition(r, 0, len(f)) for r, f in enumerate(files)],
        paddings=pads if aligned else (),
        itemsize_bytes=4,
        what="test",
    )
    _check_gather(builder.build(), files, tensors, data)


@given(models, worlds, st.integers(1, 4), st.data())
@settings(max_examples=200, deadline=None)
def test_sharded_params_gather_back(
    model: list[tuple[int, ...]], world: int, group_size: int, data: st.DataObject
) -> None:
    """ZeRO-3: each parameter cut evenly, rank by rank concatenated, in sub-groups; tails are garbage."""
    tensors = _tensors(model)
    files: list[np.ndarray] = []
    partitions: list[list[Partition]] = []
    for rank in range(world):
        mine: list[Partition] = []
        for first in range(0, len(tensors), group_size):
            shares: list[np.ndarray] = []
            for tensor in tensors[first : first + group_size]:
                share = -(-len(tensor) // world)
                part = tensor[rank * share : (rank + 1) * share]
                shares.append(np.concatenate([part, np.full(share - len(part), np.nan, np.float32)]))
            files.append(np.concatenate(shares))
            mine.append(Partition(len(files) - 1, 0, len(files[-1])))
        partitions.append(mine)
    builder = ShardMapBuilder()
    named = tuple((f"p{i}", shape) for i, shape in enumerate(model))
    ids = [builder.tensor(name, "fp32", FLOAT, shape) for name, shape in named]
    add_sharded_params(builder, ids, named, partitions=partitions, itemsize_bytes=4, what="test")
    _check_gather(builder.build(), files, tensors, data)


@given(models, worlds, st.integers(-9, 40).filter(bool))
@settings(max_examples=100, deadline=None)
def test_partitions_that_do_not_add_up_are_refused(model: list[tuple[int, ...]], world: int, wrong: int) -> None:
    """Too little is always refused; too much from the padding bound on."""
    total = sum(prod(s) for s in model)
    share = 2 * -(-total // (2 * world))
    room = share * world - total + wrong * world
    builder = ShardMapBuilder()
    named = tuple((f"p{i}", shape) for i, shape in enumerate(model))
    ids = [builder.tensor(name, "fp32", FLOAT, shape) for name, shape in named]
    partitions = [Partition(r, 0, max(0, share + wrong)) for r in range(world)]
    if 0 <= room < 4 * world:
        return
    with pytest.raises(ReshardError) as caught:
        add_flat_group(builder, ids, named, partitions=partitions, paddings=(), itemsize_bytes=4, what="test")
    assert caught.value.code == "checkpoint.coverage"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_a_map_exists_only_if_it_covers_exactly_once(cuts: list[tuple[int, int]], numel: int) -> None:
    pieces = [(b, e) for b, e in cuts if b < e]
    builder = ShardMapBuilder()
    builder.tensor("before", "fp32", FLOAT, (0,))
    builder.tensor("x", "fp32", FLOAT, (numel,))
    column = lambda values: np.array(values, dtype=np.int64)  # noqa: E731
    builder.pieces(
        column([1] * len(pieces)),
        column([b for b, _ in pieces]),
        column([e for _, e in pieces]),
        file=column([0] * len(pieces)),
        offset=column([0] * len(pieces)),
    )
    written = [sum(b <= i < e for b, e in pieces) for i in range(max([numel, *(e for _, e in pieces)]))]
    exact = len(written) == numel and set(written) == {1}
    if exact:
        assert builder.build().piece_count == len(pieces)
    else:
        with pytest.raises(ReshardError) as caught:
            builder.build()
        assert caught.value.code == "checkpoint.coverage"


@given(shapes, st.permutations(range(3)))
@settings(max_examples=100, deadline=None)
def test_packed_means_what_numpy_means(shape: tuple[int, ...], order: list[int]) -> None:
    array = np.zeros(shape, dtype=np.float32)
    axes = [a for a in order if a < len(shape)]
    turned = array.transpose(axes)
    stride = tuple(s // 4 for s in turned.strides)
    assert is_packed(turned.shape, stride) == turned.flags.c_contiguous
    assert is_packed(shape, packed_stride(shape))


@given(st.lists(shapes, min_size=1, max_size=7), st.data())
@settings(max_examples=200, deadline=None)
def test_names_are_assigned_only_when_there_is_one_way(model: list[tuple[int, ...]], data: st.DataObject) -> None:
    """Against brute force over all ways of giving candidates to two groups or to none."""
    choices = data.draw(st.lists(st.integers(-1, 1), min_size=len(model), max_size=len(model)))
    groups = [[s for s, c in zip(model, choices, strict=True) if c == g] for g in range(2)]
    candidates = [(f"p{i}", s) for i, s in enumerate(model)]
    ways: set[tuple[int, ...]] = set()
    for code in range(3 ** len(model)):
        assignment = tuple(code // 3**i % 3 - 1 for i in range(len(model)))
        if [[s for s, c in zip(model, assignment, strict=True) if c == g] for g in range(2)] == groups:
            ways.add(assignment)
    if len(ways) == 1:
        expected = [[n for (n, _), c in zip(candidates, choices, strict=True) if c == g] for g in range(2)]
        assert assign_names(candidates, groups) == expected
    else:
        assert assign_names(candidates, groups) is None
