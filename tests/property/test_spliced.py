"""Laws of spliced tensors: any interval, of any type, is that of the runs one after another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from reshard_engine.execute.casts.cast import NumpyCast
from reshard_engine.execute.gather import TensorReader
from reshard_engine.tensors.dtypes import BY_NAME, FLOAT32
from reshard_engine.tensors.shard_map import LogicalTensor, ShardMap, ShardMapBuilder
from reshard_engine.tensors.views import Box, Splice, Spliced, View

_HALF = BY_NAME["float16"]


@dataclass(frozen=True)
class _Memory:
    data: bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]


@dataclass(frozen=True)
class _Source:
    shard_map: ShardMap
    files: tuple[_Memory, ...]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_interval_is_that_of_the_runs(data: Any) -> None:
    """Runs come from stored tensors, from views, and from halves that are widened; some are zeros."""
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(2, 7))
    wide = np.arange(1, 1 + rows * columns, dtype=np.float32).reshape(rows, columns)
    half = -np.arange(1, 1 + rows * columns, dtype=np.float16).reshape(rows, columns)
    builder = ShardMapBuilder()
    numbers = [builder.tensor("w", "fp32", t, (rows, columns)) for t in (FLOAT32, _HALF)]
    for file, number in enumerate(numbers):
        builder.whole(number, file=file, offset=3)
    width = data.draw(st.integers(1, columns))
    right = View((rows, width), (Box(numbers[0], (rows, columns), (0, columns - width), (0, 0), (rows, width)),))
    numbers.append(builder.view("w", "fp32", right, (rows, width)))
    values = [wide.reshape(-1), half.reshape(-1).astype(np.float32), wide[:, columns - width :].reshape(-1)]
    splices: list[Splice] = []
    expected: list[np.ndarray[Any, Any]] = []
    for _ in range(data.draw(st.integers(1, 6))):
        which = data.draw(st.sampled_from([None, 0, 1, 2]))
        if which is None:
            splices.append(Splice(data.draw(st.integers(0, 9)), None))
            expected.append(np.zeros(splices[-1].length, dtype=np.float32))
            continue
        first = data.draw(st.integers(0, len(values[which])))
        last = data.draw(st.integers(first, len(values[which])))
        splices.append(Splice(last - first, numbers[which], first))
        expected.append(values[which][first:last])
    whole = np.concatenate(expected)
    spliced = Spliced(tuple(splices))
    assert spliced.ends == tuple(accumulate(s.length for s in splices))
    shard_map = builder.build().with_derived([(LogicalTensor("w", "fp32", FLOAT32, (len(whole),)), spliced)])
    number = len(shard_map.tensors) - 1
    assert shard_map.is_computed(number)
    source: Any = _Source(shard_map, (_Memory(b"pad" + wide.tobytes()), _Memory(b"pad" + half.tobytes())))
    reader = TensorReader(source, NumpyCast())
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    assert np.array_equal(reader.elements(number, FLOAT32, begin, end).view(np.float32), whole[begin:end])
    narrow = reader.elements(number, _HALF, begin, end).view(np.float16)
    assert np.array_equal(narrow, whole[begin:end].astype(np.float16))
