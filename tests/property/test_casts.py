"""Laws of casts: every pair of types against numpy's own conversions and the rule for NaNs, wherever elements lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from house.casts import BITS, EDGES, PAIRS, elements, hold
from reshard_engine.execute.casts.cast import TILE_ELEMS, NumpyCast
from reshard_engine.tensors.dtypes import BY_NAME, Dtype


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda d: d.name)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_every_pair_follows_the_rule(source: Dtype, target: Dtype, data: st.DataObject) -> None:
    values = np.array(data.draw(elements(source)), dtype=BITS[source.itemsize_bytes]).view(np.uint8)
    hold(NumpyCast(), values, source, target, shift=data.draw(st.integers(0, 7)))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda d: d.name)
def test_elements_across_tiles(source: Dtype, target: Dtype) -> None:
    """Ordinary ones with single special ones at the edges of tiles."""
    rng = np.random.default_rng(7)
    count = 2 * TILE_ELEMS + 3
    size = source.itemsize_bytes
    plain = rng.standard_normal(count) * np.exp(rng.uniform(-25, 2, count))
    if source.name == "bfloat16":
        bits = (plain.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        bits = plain.astype(source.name).view(BITS[size])
    for number, edge in enumerate(EDGES[source.name]):
        end = TILE_ELEMS * (1 + number % 2)
        bits[[end - 1 - number, end - number // 2 + 1]] = edge
    hold(NumpyCast(), bits.view(np.uint8), source, target, shift=0)


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_every_element_of_sixteen_bits(source: str, target: str) -> None:
    if source != target:
        hold(NumpyCast(), np.arange(1 << 16, dtype=np.uint16).view(np.uint8), BY_NAME[source], BY_NAME[target], shift=0)
