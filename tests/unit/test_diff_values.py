"""How `reshard diff` compares elements and trees."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from house.expected import some
from reshard_engine.checkpoint import ParamGroup
from reshard_engine.operations.diff import compare_elements, hyper_parameters
from reshard_engine.pickles.nodes import PDict, PList, PTuple
from reshard_engine.pickles.trees import TreeDifference, compare_trees, text_of
from reshard_engine.tensors.dtypes import BY_NAME, FLOAT32


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.float32).view(np.uint8)


def test_distances_of_floats() -> None:
    a, b = floats(1, 2, -3, float("inf"), 0), floats(1, 2.5, 3, 4, 0)
    difference = some(compare_elements(a, b, FLOAT32, first=100))
    assert (difference.count, difference.nonfinite, difference.first) == (3, 1, 101)
    assert (difference.max_abs, difference.max_rel) == (6.0, 2.0)
    assert (difference.first_a, difference.first_b) == ("2", "2.5")
    assert compare_elements(a, a.copy(), FLOAT32, first=0) is None


@pytest.mark.parametrize(
    ("a", "b"), [(0x7FC00001, 0x7FC00002), (0x00000000, 0x80000000), (0x7F800001, 0x7FC00001)], ids=hex
)
def test_bits_count_where_numbers_do_not_tell(a: int, b: int) -> None:
    left, right = (np.frombuffer(struct.pack("<I", v), dtype=np.uint8) for v in (a, b))
    difference = some(compare_elements(left, right, FLOAT32, first=0))
    assert difference.count == 1
    assert f"{a:08x}" in difference.first_a or f"{difference.first_a}" == "0"
    assert difference.first_a != difference.first_b


@pytest.mark.parametrize("name", BY_NAME)
def test_every_element_type_is_compared(name: str) -> None:
    dtype = BY_NAME[name]
    a = np.zeros(9 * dtype.itemsize_bytes, dtype=np.uint8)
    b = a.copy()
    b[7 * dtype.itemsize_bytes] = 1
    difference = some(compare_elements(a, b, dtype, first=0))
    assert (difference.count, difference.first) == (1, 7)
    assert (difference.max_abs is None) == name.startswith(("float8", "float4", "complex32"))


# -- trees ----------------------------------------------------------------------------------------------


def test_trees_with_cycles_end() -> None:
    def loop(last: int) -> PList:
        inner = PList([1, last])
        inner.items.append(PDict(["again", inner]))
        return inner

    assert list(compare_trees(loop(2), loop(2), "x")) == []
    assert list(compare_trees(loop(2), loop(3), "x")) == [TreeDifference("x[1]", "2", "3")]


def test_leaves() -> None:
    same = [(3, 3.0), (float("nan"), float("nan")), (PList([1, 2]), PTuple((1, 2))), (None, None), ("a", "a")]
    other = [(True, 1), ("1", 1), (b"a", "a"), (None, 0), (PList([1]), PList([1, 2])), (PDict(["k", 1]), PList([]))]
    assert [list(compare_trees(a, b, "")) for a, b in same] == [[]] * len(same)
    assert all(len(list(compare_trees(a, b, ""))) == 1 for a, b in other)
    assert text_of("a\x1b[31m") == "'a\\x1b[31m'"


def test_the_name_of_a_group_of_experts_says_a_layout_and_no_value() -> None:
    values: dict[str | int, Any] = {"lr": 0.1, "moe": True}
    assert hyper_parameters(ParamGroup({**values, "name": "ep_size_2"})) == values
    others: list[dict[str | int, Any]] = [{**values, "name": "ep_size"}, {"lr": 0.1, "name": "ep_size_2"}]
    for group in others:
        assert hyper_parameters(ParamGroup(group)) == group
