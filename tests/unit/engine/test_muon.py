"""Muon's momentum at ZeRO-1 and 2: which matrices a rank keeps whole, and how the files show it."""

from __future__ import annotations

import random

import pytest

from reshard.errors import SourceError
from reshard_engine.formats.deepspeed.optimizer import muons_order
from reshard_engine.formats.deepspeed.partitioning import concatenate
from reshard_engine.formats.deepspeed.zero12 import Matrices, matrices_of


def in_partition(numels: list[int], paddings: tuple[int, ...], partition_numel: int, rank: int) -> list[int]:
    """The parameters of a partition, as deepspeed 0.19.8 `stage_1_and_2.py` (`get_partition_info`) lists them."""
    start, end, at = partition_numel * rank, partition_numel * (rank + 1), 0
    found: list[int] = []
    for index, (numel, padding) in enumerate(zip(numels, paddings, strict=True)):
        if start <= at < end or at < start < at + numel:
            found.append(index)
        at += numel + padding
    return found


def test_a_rank_keeps_the_matrices_of_which_its_partition_holds_elements() -> None:
    draw = random.Random(7)
    shared = 0
    for _ in range(400):
        ranks = draw.randint(1, 6)
        numels = [draw.randint(1, 40) for _ in range(draw.randint(1, 9))]
        layout = concatenate(numels, ranks, alignment=draw.choice((1, 4, 8)))
        found = matrices_of(layout.starts, numels, layout.partition_numel, ranks)
        assert found == [in_partition(numels, layout.paddings, layout.partition_numel, r) for r in range(ranks)]
        shapes = tuple((f"m{i}", (n, 1)) for i, n in enumerate(numels))
        masters = [layout.partition_numel - layout.padding_of(r) for r in range(ranks)]
        read = Matrices.of(shapes, layout.paddings, masters)
        assert [list(held) for held in read.by_rank] == found
        shared += len([i for held in found for i in held]) > len(numels)
    assert shared > 200


def _matrices(numels: list[int], ranks: int) -> tuple[Matrices, int]:
    layout = concatenate(numels, ranks)
    masters = [layout.partition_numel - layout.padding_of(r) for r in range(ranks)]
    shapes = tuple((f"m{i}", (n, 1)) for i, n in enumerate(numels))
    return Matrices.of(shapes, layout.paddings, masters), layout.partition_numel


def test_the_config_says_the_layout_and_the_lengths_must_be_its() -> None:
    matrices, partition = _matrices([30, 30], 3)
    whole, cut = [30, 60, 30], [partition] * 3
    assert matrices.are_kept(whole, offloads=False, what="")
    assert not matrices.are_kept(cut, offloads=True, what="")
    with pytest.raises(SourceError) as caught:
        matrices.are_kept(cut, offloads=False, what="group 0")
    assert caught.value.code == "checkpoint.coverage"
    # Where the config is a path, lengths of one layout alone decide it.
    assert matrices.are_kept(whole, offloads=None, what="")
    assert not matrices.are_kept(cut, offloads=None, what="")


def test_lengths_that_fit_both_layouts_are_asked_about() -> None:
    # Two elements of padding on the last rank, and two of the second matrix on the first: both ranks hold 12 elements.
    matrices = Matrices(((0, 1), (1,)), (2, 10))
    assert matrices.fit([12, 10])
    matrices = Matrices(((0, 1), (1, 2)), (2, 10, 2))
    assert matrices.fit([12, 12])
    assert not matrices.are_partitions(12)
    with pytest.raises(SourceError) as caught:
        matrices.are_kept([12, 12], offloads=None, what="group 0")
    assert caught.value.code == "checkpoint.ambiguous"
    same = Matrices(((0,), (1,)), (12, 12))
    assert same.are_kept([12, 12], offloads=None, what="")


def test_muon_sorts_by_shape_and_keeps_the_models_order_of_equal_ones() -> None:
    shapes = [("d0", (11, 17)), ("u1", (17, 11)), ("u0", (17, 11)), ("w", (17, 12))]
    assert muons_order(shapes, ["u0", "d0", "u1", "w"]) == ["w", "u0", "u1", "d0"]
