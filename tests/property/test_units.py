"""The cuts of large files that are sequences of archives: a thread that writes one part waits for no other thread."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from reshard_engine.distributed.runs import CrcParts
from reshard_engine.plan.model import Chunk, Unit
from reshard_engine.plan.planner import chunks_of
from reshard_engine.tensors.layout import FileTemplate, TargetFile

_HEAD, _SLOT = 3, 4


def _file(records: list[int]) -> TargetFile:
    """Archives of one record each: a header, the record, and its CRC-32."""
    literals: list[tuple[int, bytes]] = []
    spans: list[tuple[int, int]] = []
    slots: list[tuple[int, int]] = []
    archives: list[tuple[int, int]] = []
    at = 0
    for number, length in enumerate(records):
        size = _HEAD + length + _SLOT
        literals.append((at, bytes(size)))
        spans.append((at + _HEAD, length))
        slots.append((at + _HEAD + length, number))
        archives.append((at, size))
        at += size
    template = FileTemplate(at, tuple(literals), (), tuple(spans), tuple(slots))
    return TargetFile("__0_0.distcp", template, (), archives=tuple(archives))


@given(records=st.lists(st.integers(1, 60), min_size=1, max_size=40), chunk_bytes=st.integers(8, 200))
def test_chunks_tile_the_file_and_begin_at_archives(records: list[int], chunk_bytes: int) -> None:
    file = _file(records)
    chunks = chunks_of(file.size_bytes, chunk_bytes, file.archives)
    assert chunks[0][0] == 0
    assert all(offset + length == after for (offset, length), (after, _) in pairwise(chunks))
    assert sum(chunks[-1]) == file.size_bytes
    assert all(0 < length <= chunk_bytes for _, length in chunks)
    begins = {offset for offset, _ in file.archives}
    for offset, length in chunks[:-1]:
        end = offset + length
        if end not in begins:
            assert length == chunk_bytes
            assert not any(offset + chunk_bytes // 2 < begin <= end for begin in begins)


@given(
    records=st.lists(st.integers(1, 60), min_size=2, max_size=40),
    chunk_bytes=st.integers(2 * (60 + _HEAD + _SLOT), 400),
)
def test_no_crc_needs_the_bytes_of_another_unit(records: list[int], chunk_bytes: int) -> None:
    file = _file(records)
    chunks = chunks_of(file.size_bytes, chunk_bytes, file.archives)
    units = [Unit(n, (Chunk(0, *chunk),), commit=False) for n, chunk in enumerate(chunks)]
    parts = CrcParts(units, [file])
    assert [list(parts.parts_of(place)) for place in range(len(units))] == [[]] * len(units)


def test_a_file_that_is_no_sequence_of_archives_has_chunks_of_one_length() -> None:
    assert chunks_of(100, 48, ()) == [(0, 48), (48, 48), (96, 4)]
