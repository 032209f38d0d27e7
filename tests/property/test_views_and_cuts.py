"""Laws of views, cuts and flat layouts: against element maps by brute force, and against DeepSpeed's loops, retold."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from reshard_engine.formats.deepspeed.files import round_robin_order
from reshard_engine.formats.deepspeed.partitioning import (
    Run,
    alignment_elems,
    clipped,
    concatenate,
    pieces,
    sub_groups,
)
from reshard_engine.tensors.cuts import Cut, CutError, joined, local_grid, parts, taken, whole_shape
from reshard_engine.tensors.layout import ZEROS
from reshard_engine.tensors.views import Box, View, composed

Places = npt.NDArray[np.int64]
"""Per element (tensor, element of it)."""
settings.register_profile("geometry", deadline=None, database=None, max_examples=100)
_SETTINGS = settings(settings.get_profile("geometry"))
_RANKS = st.integers(1, 6)


def _by_hand(view: View) -> Places:
    """Where each element of a view comes from, element by element."""
    found = np.full((prod(view.grid), 2), -1, dtype=np.int64)
    for box in view.boxes:
        for step in product(*map(range, box.lengths)):
            here = np.ravel_multi_index(
                [o + s for o, s in zip(box.offset, step, strict=True)] or [0], view.grid or (1,)
            )
            there = np.ravel_multi_index(
                [o + s for o, s in zip(box.source, step, strict=True)] or [0], box.grid or (1,)
            )
            assert found[here, 0] == -1, "two boxes hold one element"
            found[here] = box.tensor, there
    assert (found >= 0).all()
    return found


def _by_runs(view: View, begin: int, end: int) -> Places:
    found = np.full((end - begin, 2), -1, dtype=np.int64)
    runs = view.runs(begin, end)
    assert list(runs.begin) == sorted(runs.begin)
    for first, tensor, source, length in zip(runs.begin, runs.tensor, runs.source, runs.length, strict=True):
        assert length > 0
        rows = slice(first - begin, first - begin + length)
        assert (found[rows] == -1).all()
        found[rows, 0] = tensor
        found[rows, 1] = np.arange(source, source + length)
    assert (found >= 0).all()
    return found


@st.composite
def _cuts(draw: st.DrawFn, ranks: tuple[int, ...]) -> tuple[Cut, tuple[int, ...]]:
    """A cut and the shape of a parameter that all these numbers of ranks can cut."""
    unit = int(np.lcm.reduce(ranks))
    dims = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 4)) for _ in range(dims)]
    kind = draw(st.sampled_from(["whole", "plain", "sections", "grid", "near"]))
    if kind == "whole":
        return Cut(), tuple(shape)
    dim = draw(st.integers(0, dims - 1))
    if kind == "near":
        shape[dim] = draw(st.integers(1, 13))
        units = draw(st.sampled_from([None, *(n for n in range(max(ranks), shape[dim] + 1) if shape[dim] % n == 0)]))
        return Cut(dim, near_even=True, units=units), tuple(shape)
    if kind == "plain":
        shape[dim] = unit * draw(st.integers(1, 3))
        return Cut(dim), tuple(shape)
    sections = tuple(unit * draw(st.integers(1, 3)) for _ in range(draw(st.integers(2, 4))))
    if kind == "sections":
        shape[dim] = sum(sections)
        return Cut(dim, sections), tuple(shape)
    fine = (draw(st.integers(1, 3)), sum(sections), *shape[1:])
    return Cut(1, sections, fine), (fine[0] * fine[1], *shape[1:])


@st.composite
def _cut_and_ranks(draw: st.DrawFn, count: int) -> tuple[Cut, tuple[int, ...], tuple[int, ...]]:
    ranks = tuple(draw(_RANKS) for _ in range(count))
    cut, shape = draw(_cuts(ranks))
    return cut, shape, ranks


def _interval(draw: Any, numel: int) -> tuple[int, int]:
    begin = draw(st.integers(0, numel))
    return begin, draw(st.integers(begin, numel))


# -- views ------------------------------------------------------------------------------------------------------------


@_SETTINGS
@given(case=_cut_and_ranks(1), data=st.data())
def test_runs_are_the_element_map(case: tuple[Cut, tuple[int, ...], tuple[int, ...]], data: st.DataObject) -> None:
    cut, shape, (ranks,) = case
    views = [joined(cut, shape, range(ranks)), *(taken(cut, shape, 9, ranks, r) for r in range(ranks))]
    view = data.draw(st.sampled_from(views))
    begin, end = _interval(data.draw, prod(view.grid))
    assert (_by_runs(view, begin, end) == _by_hand(view)[begin:end]).all()


@_SETTINGS
@given(case=_cut_and_ranks(2))
def test_parts_joined_and_taken_are_the_parts(case: tuple[Cut, tuple[int, ...], tuple[int, ...]]) -> None:
    """What ranks hold, joined and cut for others, joined again: every element is where it was."""
    cut, shape, (here, there) = case
    whole = joined(cut, shape, range(here))
    between = {100 + r: composed(taken(cut, shape, 50, there, r), {50: whole}) for r in range(there)}
    again = composed(joined(cut, shape, list(between)), between)
    assert (_by_hand(again) == _by_hand(whole)).all()
    for rank in range(here):
        back = composed(taken(cut, shape, 50, here, rank), {50: again})
        places = _by_hand(back)
        assert (places[:, 1] == np.arange(len(places))).all()
        # Of copies the first counts.
        assert (places[:, 0] == (rank if cut.dim is not None else 0)).all()


@_SETTINGS
@given(case=_cut_and_ranks(3))
def test_composition_is_associative(case: tuple[Cut, tuple[int, ...], tuple[int, ...]]) -> None:
    cut, shape, (a, b, c) = case
    first = {50: joined(cut, shape, range(a))}
    second = {100 + r: taken(cut, shape, 50, b, r) for r in range(b)}
    third = {60: joined(cut, shape, list(second))}
    last = taken(cut, shape, 60, c, c - 1)
    left = composed(composed(composed(last, third), second), first)
    inner = {k: composed(v, first) for k, v in second.items()}
    right = composed(last, {k: composed(v, inner) for k, v in third.items()})
    assert (_by_hand(left) == _by_hand(right)).all()


@_SETTINGS
@given(case=_cut_and_ranks(1), data=st.data())
def test_boxes_that_do_not_tile_are_refused(
    case: tuple[Cut, tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    cut, shape, (ranks,) = case
    view = joined(cut, shape, range(ranks))
    box = data.draw(st.sampled_from(view.boxes))
    others = [b for b in view.boxes if b is not box]
    with pytest.raises(ValueError, match=r"the boxes hold \d+ elements of \d+"):
        View(view.grid, tuple(others))
    with pytest.raises(ValueError, match=r"the boxes hold \d+ elements of \d+"):
        View(view.grid, (*view.boxes, box))
    for dim in range(len(view.grid)):
        shift = data.draw(st.sampled_from([-1, 1]))
        offset = tuple(o + shift * (d == dim) for d, o in enumerate(box.offset))
        with pytest.raises(ValueError, match=r"two boxes overlap|leaves its tensor"):
            View(view.grid, (*others, Box(box.tensor, box.grid, box.source, offset, box.lengths)))


def test_a_view_of_no_elements() -> None:
    view = View((0, 3), (Box(0, (0, 3), (0, 0), (0, 0), (0, 3)),))
    assert view.boxes == ()
    assert len(view.runs(0, 0).begin) == 0


def test_grids_must_be_the_same() -> None:
    inner = View((4,), (Box(7, (4,), (0,), (0,), (4,)),))
    outer = View((2, 2), (Box(0, (2, 2), (0, 0), (0, 0), (2, 2)),))
    with pytest.raises(ValueError, match=r"a box sees \(4,\) as \(2, 2\)"):
        composed(outer, {0: inner})


# -- cuts -------------------------------------------------------------------------------------------------------------


@_SETTINGS
@given(case=_cut_and_ranks(1))
def test_ranks_hold_everything_once(case: tuple[Cut, tuple[int, ...], tuple[int, ...]]) -> None:
    cut, shape, (ranks,) = case
    locals_ = [local_grid(cut, shape, ranks, r) for r in range(ranks)]
    for rank, grid in enumerate(locals_):
        assert taken(cut, shape, 0, ranks, rank).grid == grid
    if cut.dim is None:
        assert set(locals_) == {shape}
        return
    numels = [prod(g) for g in locals_]
    assert sum(numels) == prod(shape)
    if not cut.near_even:
        assert len(set(numels)) == 1
    if cut.grid is None:
        assert whole_shape(cut, locals_) == shape
    else:
        rest = shape[1:]
        assert whole_shape(cut, [(n // prod(rest), *rest) for n in numels]) == shape


@_SETTINGS
@given(units=st.integers(1, 12), size=st.integers(1, 4), ranks=st.integers(1, 9))
def test_uneven_parts_are_those_of_autotp(units: int, size: int, ranks: int) -> None:
    """`get_shard_size_list`: the first ranks hold one more (deepspeed 0.19.8, `module_inject/tp_shard.py`)."""
    cut = Cut(0, near_even=True, units=units)
    widths = [parts(cut, units * size, ranks, r)[0].width for r in range(ranks)]
    assert widths == [(units // ranks + (r < units % ranks)) * size for r in range(ranks)]


@_SETTINGS
@given(data=st.data(), times=st.integers(0, 4), ranks=st.integers(2, 9))
def test_lengths_that_do_not_divide_are_refused(data: st.DataObject, times: int, ranks: int) -> None:
    length = times * ranks + data.draw(st.integers(1, ranks - 1))
    for cut in (Cut(0), Cut(0, (length, ranks)), Cut(0, (ranks, length))):
        with pytest.raises(CutError, match=f"{length} does not divide by {ranks}"):
            parts(cut, sum(cut.sections or (length,)), ranks, 0)
    with pytest.raises(CutError, match=f"{length} heads do not divide by {ranks}"):
        taken(Cut(0, units=length), (length * ranks,), 0, ranks, 0)
    with pytest.raises(CutError, match=f"{ranks - 1} heads are fewer than {ranks} ranks"):
        taken(Cut(0, units=ranks - 1, near_even=True), (length * ranks,), 0, ranks, 0)


# -- flat tensors -----------------------------------------------------------------------------------------------------

_NUMELS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def _flattened(numels: list[int], ranks: int, alignment: int) -> tuple[list[int], list[int], int, list[int]]:
    """`DeepSpeedZeroOptimizer.__init__` retold with lists: (starts, paddings, elements, padding of each rank).

    Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py`, `flatten_dense_tensors_aligned`.
    """
    flat: list[int] = []
    starts: list[int] = []
    paddings: list[int] = []
    for index, numel in enumerate(numels):
        starts.append(len(flat))
        flat += [index] * numel
        paddings.append(0)
        while alignment > 1 and index < len(numels) - 1 and len(flat) % alignment:
            flat.append(-1)
            paddings[-1] += 1
    used = len(flat)
    while len(flat) % (2 * ranks):
        flat.append(-1)
    share = len(flat) // ranks
    behind = [sum(at >= used for at in range(r * share, (r + 1) * share)) for r in range(ranks)]
    return starts, paddings, used, [*behind, share]


@_SETTINGS
@given(numels=_NUMELS, ranks=st.integers(1, 9), alignment=st.sampled_from([1, 4, 8]))
def test_flat_groups_are_deepspeeds(numels: list[int], ranks: int, alignment: int) -> None:
    starts, paddings, used, (*behind, share) = _flattened(numels, ranks, alignment)
    found = concatenate(numels, ranks, alignment=alignment)
    assert (list(found.starts), list(found.paddings), found.numel) == (starts, paddings, used)
    assert found.partition_numel == share
    assert [found.padding_of(rank) for rank in range(ranks)] == behind


@pytest.mark.parametrize(("itemsize", "elems"), [(1, 16), (2, 8), (4, 4), (8, 2)])
def test_alignment_is_16_bytes(itemsize: int, elems: int) -> None:
    assert alignment_elems(itemsize) == elems


@_SETTINGS
@given(count=st.integers(0, 40), ranks=st.integers(1, 12))
def test_round_robin_is_deepspeeds(count: int, ranks: int) -> None:
    """`_round_robin_reorder` (deepspeed 0.19.8, `runtime/zero/stage_1_and_2.py`)."""
    dealt: dict[int, list[int]] = {}
    for index in range(count):
        dealt.setdefault(index % ranks, []).append(index)
    assert round_robin_order(count, ranks) == [index for rank in sorted(dealt) for index in dealt[rank]]


@_SETTINGS
@given(numels=_NUMELS, ranks=st.integers(1, 9), size=st.integers(1, 60))
def test_sub_groups_are_deepspeeds(numels: list[int], ranks: int, size: int) -> None:
    """`_create_fp16_sub_groups` (deepspeed 0.19.8, `runtime/zero/stage3.py`), retold."""
    shares = [-(-n // ranks) for n in numels]
    wanted: list[list[int]] = []
    if size >= sum(shares):
        wanted = [list(range(len(numels)))]
    else:
        group: list[int] = []
        held = 0
        for index, share in enumerate(shares):
            group.append(index)
            held += share
            if held >= size or index == len(shares) - 1:
                wanted.append(group)
                group, held = [], 0
    assert [list(r) for r in sub_groups(numels, ranks, sub_group_size=size)] == wanted


def _elements(runs: list[Run]) -> list[tuple[int, int]]:
    return [(t, e if t != ZEROS else 0) for t, begin, end in runs for e in range(begin, end)]


@_SETTINGS
@given(data=st.data(), lengths=st.lists(st.integers(0, 12), max_size=6))
def test_clips_and_pieces_are_slices(data: st.DataObject, lengths: list[int]) -> None:
    runs: list[Run] = []
    for tensor, length in enumerate(lengths):
        first = data.draw(st.integers(0, 5))
        runs.append((data.draw(st.sampled_from([tensor, tensor, ZEROS])), first, first + length))
    everything = _elements(runs)
    begin = data.draw(st.integers(0, len(everything) + 3))
    end = data.draw(st.integers(begin, len(everything) + 9))
    zeros = [(ZEROS, 0)] * (end + 99)
    assert _elements(clipped(runs, begin, end)) == (everything + zeros)[begin:end]
    count = data.draw(st.integers(1, 5))
    share = -(-len(everything) // count) + data.draw(st.integers(0, 3))
    cut = pieces(runs, share, count)
    assert [_elements(piece) for piece in cut] == [
        (everything + zeros * count)[i * share : (i + 1) * share] for i in range(count)
    ]
