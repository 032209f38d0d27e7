"""Laws of what moves bytes: items tile a unit, rows land where they belong, open files are still compared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from house.expected import raised, some
from reshard.errors import SourceError
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.execute.casts.cast import NumpyCast
from reshard_engine.execute.casts.rows import INDEXED_BYTES, copy_rows
from reshard_engine.execute.gather import STRAIGHT_BYTES, TensorReader, fill
from reshard_engine.integrity.checksums import BLOCK_BYTES
from reshard_engine.plan.model import Chunk, Unit, WriteItem, steps_of
from reshard_engine.storage.crc32 import crc32
from reshard_engine.storage.local import LocalStore, kept_open
from reshard_engine.tensors.dtypes import BY_NAME, FLOAT32
from reshard_engine.tensors.layout import Body, FileTemplate, TargetFile
from reshard_engine.tensors.shard_map import ShardMapBuilder


def _file(header: int, elems: int, begin: int) -> TargetFile:
    """A header, a body that begins somewhere in its tensor, and a trailer."""
    body = Body(header, 0, begin, begin + elems, FLOAT32, None)
    size = header + body.length_bytes
    literals = tuple(x for x in ((0, bytes(header)), (size, b"end")) if x[1])
    return TargetFile("f", FileTemplate(size + 3, literals, (body,)), (0,))


@given(
    files=st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, 5 * BLOCK_BYTES), st.integers(0, 3 * BLOCK_BYTES)),
        min_size=1,
        max_size=4,
    ),
    window=st.integers(1, 4).map(lambda n: n * 2 * BLOCK_BYTES),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_items_tile_their_chunks(files: list[tuple[int, int, int]], window: int, data: Any) -> None:
    """In order, within the memory, each chunk to its end; inside a tensor they end with a block of its digest."""
    made = [_file(*f) for f in files]
    chunks: list[Chunk] = []
    for number, file in enumerate(made):
        low = data.draw(st.integers(0, file.size_bytes - 1))
        chunks.append(Chunk(number, low, data.draw(st.integers(1, file.size_bytes - low))))
    unit = Unit(0, tuple(chunks), commit=False)
    at: dict[int, int] = {n: c.offset for n, c in enumerate(chunks)}
    order: list[int] = []
    for step in steps_of(unit, made, window):
        assert sum(i.length_bytes for i in step) <= window
        end = 0
        for one in step:
            assert one.at == end, "items follow one another in memory"
            end += one.length_bytes
            assert one.begin == at[one.chunk.file]
            at[one.chunk.file] += one.length_bytes
            chunk = one.chunk
            stop = at[one.chunk.file]
            ends = stop == chunk.offset + chunk.length_bytes
            body = made[one.chunk.file].template.bodies[0]
            if not ends and body.offset < stop < body.offset + body.length_bytes:
                assert (stop - body.offset + body.begin * 4) % BLOCK_BYTES == 0
            order.append(one.chunk.file)
    assert order == sorted(order)
    assert all(at[n] == c.offset + c.length_bytes for n, c in enumerate(chunks))


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=50),
    grain=st.sampled_from([1, 2, 3, 4, 8]),
    shift=st.integers(0, 5),
    long=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=150, deadline=None)
def test_rows_land_where_they_belong(lengths: list[int], grain: int, shift: int, long: bool, seed: int) -> None:
    """By index where they are short and by copies where they are long, aligned or not."""
    chance = np.random.default_rng(seed)
    sizes = np.array(lengths, dtype=np.int64) * grain * (INDEXED_BYTES if long else 1)
    source = chance.integers(0, 256, int(sizes.sum()) + shift + 7, dtype=np.uint8)
    begin = np.cumsum(sizes) - sizes + shift
    order = chance.permutation(len(sizes))
    at = np.empty_like(sizes)
    at[order] = np.cumsum(sizes[order]) - sizes[order]
    target = np.full(int(sizes.sum()) + 3, 0xEE, dtype=np.uint8)
    copy_rows(source, begin, target, at, sizes)
    expected = np.full_like(target, 0xEE)
    for low, to, size in zip(begin.tolist(), at.tolist(), sizes.tolist(), strict=True):
        expected[to : to + size] = source[low : low + size]
    assert (target == expected).all()


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 70), st.integers(0, 40), st.integers(0, 40)),
        min_size=1,
        max_size=6,
    ),
    backwards=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=300, deadline=None)
def test_slices_of_matrices_land_where_they_belong(
    groups: list[tuple[int, int, int, int]], backwards: bool, seed: int
) -> None:
    """Groups of rows of one length at equal steps, one behind another, in ascending order or not."""
    begin: list[int] = []
    at: list[int] = []
    length: list[int] = []
    low = to = 0
    for rows, size, gap, space in groups:
        for _ in range(rows):
            begin.append(low)
            at.append(to)
            length.append(size)
            low += size + gap
            to += size + space
    order = slice(None, None, -1) if backwards else slice(None)
    columns = [np.array(c, dtype=np.int64)[order] for c in (begin, at, length)]
    source = np.random.default_rng(seed).integers(0, 256, low, dtype=np.uint8)
    target, expected = np.full(to, 0xEE, dtype=np.uint8), np.full(to, 0xEE, dtype=np.uint8)
    copy_rows(source, columns[0], target, columns[1], columns[2])
    for first, place, size in zip(begin, at, length, strict=True):
        expected[place : place + size] = source[first : first + size]
    assert (target == expected).all()


def test_a_matrix_beyond_its_memory_is_refused() -> None:
    rows = np.arange(20, dtype=np.int64) * 8
    size = np.full(20, 8, dtype=np.int64)
    with pytest.raises((TypeError, ValueError)):
        copy_rows(np.zeros(19 * 8 + 4, dtype=np.uint8), rows, np.zeros(400, dtype=np.uint8), rows * 2, size)


class _Memory:
    """A source file in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]
        self.reads += 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_small_tensors_are_read_together(dtype: str) -> None:
    """A hundred tensors over three files: one read each, in whatever type they are wanted."""
    chance = np.random.default_rng(7)
    values = [chance.standard_normal(3 + n % 5).astype(np.float32) for n in range(100)]
    builder, files = ShardMapBuilder(), [bytearray(b"head") for _ in range(3)]
    for number, value in enumerate(values):
        tensor = builder.tensor(f"w{number}", "fp32", FLOAT32, value.shape)
        builder.whole(tensor, file=number % 3, offset=len(files[number % 3]))
        files[number % 3] += value.tobytes()
    memories = [_Memory(bytes(f)) for f in files]
    source: Any = type("Source", (), {"shard_map": builder.build(), "files": memories})()
    kernel = NumpyCast()
    reader, target = TensorReader(source, kernel), BY_NAME[dtype]
    at, bodies = 0, []
    for number, value in enumerate(values):
        bodies.append(Body(at, number, 0, len(value), target, None))
        at += bodies[-1].length_bytes
    file = TargetFile("f", FileTemplate(at, (), tuple(bodies)), tuple(range(100)))
    buffer = np.zeros(at, dtype=np.uint8)
    fill(reader, [WriteItem(Chunk(0, 0, at), file, 0, 0, at)], buffer)
    expected = b"".join(kernel.cast(v.view(np.uint8), FLOAT32, target).tobytes() for v in values)
    assert buffer.tobytes() == expected
    assert [m.reads for m in memories] == [1, 1, 1]
    assert reader.counts.read_bytes == sum(v.nbytes for v in values)


def test_an_item_of_a_large_tensor_is_read_straight() -> None:
    """From the piece that holds it, also when the next one is in another piece."""
    data = np.arange(3 * STRAIGHT_BYTES, dtype=np.uint32)
    builder = ShardMapBuilder()
    tensor = builder.tensor("w", "fp32", FLOAT32, data.shape)
    half = len(data) // 2
    columns = [np.array(c, dtype=np.int64) for c in ([0, half], [half, len(data)], [1, 0], [0, 8])]
    builder.pieces(np.full(2, tensor, dtype=np.int64), columns[0], columns[1], file=columns[2], offset=columns[3])
    memories = [_Memory(bytes(8) + data[half:].tobytes()), _Memory(data[:half].tobytes())]
    source: Any = type("Source", (), {"shard_map": builder.build(), "files": memories})()
    reader, step = TensorReader(source, NumpyCast()), STRAIGHT_BYTES // 4
    for begin in (0, step, half - 5, half, len(data) - step):
        assert reader.elements(tensor, FLOAT32, begin, begin + step).tobytes() == data[begin : begin + step].tobytes()


def test_files_that_stay_open_are_still_compared_with_their_pin(tmp_path: Path) -> None:
    path, store = tmp_path / "f", LocalStore()
    path.write_bytes(b"0123456789")
    info = some(store.stat(str(path)))
    file, buffer = SourceFile(store, "f", (info,)), bytearray(4)
    before = len(os.listdir("/proc/self/fd"))
    with kept_open():
        file.read_into(2, memoryview(buffer))
        assert len(os.listdir("/proc/self/fd")) == before + 1
        file.read_into(6, memoryview(buffer))
        assert buffer == b"6789"
        assert len(os.listdir("/proc/self/fd")) == before + 1, "opened once"
        path.write_bytes(b"something else")
        assert raised(SourceError, file.read_into, 0, memoryview(buffer)).code == "source.changed"
    assert len(os.listdir("/proc/self/fd")) == before


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_are_those_of_zlib(first: bytes, second: bytes) -> None:
    import zlib

    assert crc32(second, crc32(first)) == zlib.crc32(first + second)
    assert crc32(memoryview(first)) == zlib.crc32(first)


def test_a_small_file_is_one_image() -> None:
    file = _file(40, 10, 0)
    image = some(file.template.image)
    assert image[-3:] == b"end"
    assert len(image) == file.size_bytes
    assert _file(40, 1 << 20, 0).template.image is None


def test_the_fixture_of_this_module_is_what_gathering_looks_at() -> None:
    """The stand-ins above have the names that a checkpoint has."""
    assert {"shard_map", "files"} <= set(Checkpoint.__dataclass_fields__)
