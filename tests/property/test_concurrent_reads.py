"""Laws of reads that are on their way together: the same bytes, within bounds, and none after a failure."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from reshard.errors import StorageError
from reshard_engine.execute import gather
from reshard_engine.execute.casts.cast import NumpyCast
from reshard_engine.execute.gather import READS_OF_A_UNIT, ConcurrentReads, TensorReader
from reshard_engine.tensors.dtypes import BY_NAME, FLOAT32
from reshard_engine.tensors.shard_map import ShardMapBuilder


class _Remote:
    """A source file whose reads take a moment; knows how many there were at once, and of how many bytes."""

    flying = most = flying_bytes = most_bytes = 0
    lock = threading.Lock()

    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def reset(cls) -> None:
        cls.flying = cls.most = cls.flying_bytes = cls.most_bytes = 0

    @classmethod
    def _count(cls, sign: int, size: int) -> None:
        with cls.lock:
            cls.flying += sign
            cls.flying_bytes += sign * size
            cls.most, cls.most_bytes = max(cls.most, cls.flying), max(cls.most_bytes, cls.flying_bytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._count(1, len(buffer))
        time.sleep(0.001)
        buffer[:] = self.data[offset : offset + len(buffer)]
        self._count(-1, len(buffer))


@given(
    cuts=st.lists(st.integers(1, 4_000), min_size=1, max_size=30),
    files=st.integers(1, 8),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    batch=st.sampled_from([1 << 10, 1 << 14, 1 << 20]),
    window=st.tuples(st.integers(0, 500), st.integers(0, 500)),
)
@settings(max_examples=40, deadline=None)
def test_reads_together_give_the_bytes_of_reads_in_turn(
    cuts: list[int], files: int, dtype: str, batch: int, window: tuple[int, int]
) -> None:
    """A tensor in pieces over many files; what is staged at once stays within a read batch, but for one alone."""
    values = np.random.default_rng(1).standard_normal(sum(cuts)).astype(np.float32)
    builder, held = ShardMapBuilder(), [bytearray(b"head") for _ in range(files)]
    tensor = builder.tensor("w", "fp32", FLOAT32, values.shape)
    ends = np.cumsum(np.array(cuts, dtype=np.int64))
    begins = ends - cuts
    places: list[int] = []
    for number, (low, high) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        places.append(len(held[number % files]))
        held[number % files] += values[low:high].tobytes() + bytes(number % 3 * 70_000)
    owner = np.arange(len(cuts), dtype=np.int64) % files
    builder.pieces(np.full(len(cuts), tensor, dtype=np.int64), begins, ends, file=owner, offset=np.array(places))
    source: Any = type("Source", (), {"shard_map": builder.build(), "files": [_Remote(bytes(f)) for f in held]})()
    begin, end = min(window[0], len(values) - 1), max(len(values) - window[1], 1)
    begin, end = min(begin, end - 1), max(begin + 1, end)
    target = BY_NAME[dtype]
    expected = NumpyCast().cast(values[begin:end].view(np.uint8), FLOAT32, target).tobytes()
    _Remote.reset()
    before = gather.READ_BATCH_BYTES
    gather.READ_BATCH_BYTES = batch
    try:
        with ThreadPoolExecutor(32) as pool:
            reader = TensorReader(source, NumpyCast(), pool=pool)
            assert reader.elements(tensor, target, begin, end).tobytes() == expected
    finally:
        gather.READ_BATCH_BYTES = before
    assert reader.counts.read_bytes >= (end - begin) * 4
    assert _Remote.most <= READS_OF_A_UNIT
    if dtype != "float32":
        assert _Remote.most_bytes <= max(batch, 4 * max(cuts)), "every read is staged for its cast"


def test_reads_overlap() -> None:
    """Eight reads that each wait for all others: in turn they would never end."""
    gate, found = threading.Barrier(8, timeout=20), bytearray(8)

    def read(number: int) -> None:
        gate.wait()
        found[number] = number

    finished: list[int] = []
    with ThreadPoolExecutor(8) as pool, ConcurrentReads(pool, 8) as reads:
        for number in range(8):
            reads.start(lambda n=number: read(n), lambda n=number: finished.append(n), staged_bytes=1)
    assert finished == list(range(8))
    assert found == bytes(range(8))


def test_nothing_writes_after_a_failure() -> None:
    """The memory is used again: who leaves with an error has waited for the reads that were still on their way."""
    memory, slow, begun = bytearray(4), threading.Event(), threading.Event()

    def late() -> None:
        begun.set()
        slow.wait(20)
        memory[1] = 1

    def fails() -> None:
        begun.wait(20)
        threading.Timer(0.2, slow.set).start()
        raise StorageError("storage.unavailable", "gone")

    finished: list[str] = []

    def both(pool: ThreadPoolExecutor) -> None:
        with ConcurrentReads(pool, 100) as reads:
            reads.start(fails, lambda: finished.append("fails"), staged_bytes=1)
            reads.start(late, lambda: finished.append("late"), staged_bytes=1)

    with ThreadPoolExecutor(4) as pool:
        with pytest.raises(StorageError):
            both(pool)
        held = bytes(memory)
        time.sleep(0.1)
    assert bytes(memory) == held == b"\0\1\0\0"
    assert finished == []
