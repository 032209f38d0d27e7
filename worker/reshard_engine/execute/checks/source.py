"""The check of a source by `--verify full`: every byte is read, and records are compared with their CRC-32s."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import checksummed_spans
from reshard_engine.storage.checksums import crc32
from reshard_engine.storage.pieces import pieces_of

SOURCE_THREADS = 4
"""Number of files to read at a time."""
MAX_UNCOVERED = 10_000
"""Number of uncovered ranges that are listed for one file. Their total length is always given."""


@dataclass(frozen=True, slots=True)
class SourceSums:
    """The results of reading a whole source file."""

    sha256: tuple[str, ...]
    """SHA-256 of each object that the file consists of."""
    uncovered_bytes: int
    uncovered: tuple[tuple[int, int], ...]
    """(offset, length) of the first `MAX_UNCOVERED` ranges that no CRC-32 covers."""


SourceOutcome = tuple[SourceSums, list[str]]


def check_source(checkpoint: Checkpoint, should_stop: Callable[[], None]) -> dict[str, SourceSums]:
    """Read every file of a source and compare its records with their checksums; returns the results by file name.

    Raises:
        SourceError: `zip.crc`, which lists the damaged records.
    """
    with ThreadPoolExecutor(SOURCE_THREADS) as pool:
        return judge_source(checkpoint, list(pool.map(partial(check_file, should_stop=should_stop), checkpoint.files)))


def judge_source(checkpoint: Checkpoint, outcomes: Sequence[SourceOutcome]) -> dict[str, SourceSums]:
    """The results by file name, made of those that `check_file` gave for all files in order.

    Raises:
        SourceError: `zip.crc`, which lists the damaged records.
    """
    damaged = [name for _, names in outcomes for name in names]
    if damaged:
        listed = ", ".join(damaged[:8]) + (", ..." if len(damaged) > 8 else "")
        raise SourceError(
            "zip.crc",
            f"{len(damaged)} records of the source do not match their CRC-32: {listed}",
            fix="copy the checkpoint again; if the original is damaged too, use an older one",
        )
    return {f.name: sums for f, (sums, _) in zip(checkpoint.files, outcomes, strict=True)}


def check_file(file: SourceFile, should_stop: Callable[[], None]) -> SourceOutcome:
    """Read one file of a source; returns its sums, and the names of its records that do not match their CRC-32s."""
    spans = checksummed_spans(file)
    digests = [hashlib.sha256() for _ in file.objects]
    sums = [0] * len(spans)
    first = 0
    # The file is read piece by piece: 20,000 small records read one by one would be 20,000 requests.
    for at, view in pieces_of(file.read_into, 0, file.size_bytes):
        should_stop()
        end = at + len(view)
        for digest, start, info in zip(digests, file.starts, file.objects, strict=True):
            low, high = max(at, start), min(end, start + info.size_bytes)
            if low < high:
                digest.update(view[low - at : high - at])
        for number in range(first, len(spans)):
            offset, length, _ = spans[number]
            if offset >= end:
                break
            low, high = max(at, offset), min(end, offset + length)
            sums[number] = crc32(view[low - at : high - at], sums[number])
            first = number + (offset + length <= end)
    damaged = [
        f"{printable(file.name)} bytes {offset}+{length}"
        for (offset, length, expected), found in zip(spans, sums, strict=True)
        if found != expected
    ]
    gaps = _between(spans, file.size_bytes)
    uncovered_bytes = sum(length for _, length in gaps)
    return SourceSums(tuple(d.hexdigest() for d in digests), uncovered_bytes, tuple(gaps[:MAX_UNCOVERED])), damaged


def _between(spans: Sequence[tuple[int, int, int]], size_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of each range that no span covers."""
    gaps: list[tuple[int, int]] = []
    position = 0
    for offset, length, _ in (*spans, (size_bytes, 0, 0)):
        if offset > position:
            gaps.append((position, offset - position))
        position = offset + length
    return gaps
