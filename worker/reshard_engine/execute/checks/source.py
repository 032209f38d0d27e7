"""Checks of a source: records against their CRC-32s, and tensors that must agree."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from reshard.choices import ReplicaPolicy
from reshard.errors import SourceError, counted, printable
from reshard.installed_formats import known_targets
from reshard.models.jobs import SourceCheck
from reshard_engine.checkpoint import Agreement, Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import checksummed_spans
from reshard_engine.execute.casts.cast import are_nan
from reshard_engine.execute.casts.placing import default_kernel
from reshard_engine.execute.gather import TensorReader
from reshard_engine.integrity.checksums import RecordReads, Sha256
from reshard_engine.storage.crc32 import crc32, pieces_of

SOURCE_THREADS = 4
"""Number of files to read at a time."""
MAX_UNCOVERED = 10_000
"""Number of uncovered ranges that are listed for one file. Their total length is always given."""


@dataclass(frozen=True, slots=True)
class SourceSums:
    """The results of reading a whole source file."""

    sha256: tuple[Sha256, ...]
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
    _refuse([name for _, names in outcomes for name in names])
    return {f.name: sums for f, (sums, _) in zip(checkpoint.files, outcomes, strict=True)}


def _refuse(damaged: Sequence[str]) -> None:
    if damaged:
        raise _mismatch(damaged)


def _mismatch(damaged: Sequence[str]) -> SourceError:
    listed = ", ".join(damaged[:8]) + (", ..." if len(damaged) > 8 else "")
    count = counted(len(damaged), "record of the source does", "records of the source do")
    return SourceError(
        "zip.crc",
        f"{count} not match the CRC-32 in the archive: {listed}",
        fix="copy the checkpoint again; if the original is damaged too, use an older one",
    )


def record_reads(checkpoint: Checkpoint, *, to: str | None = None) -> RecordReads:
    """An object that compares the records of a source with their CRC-32s while they are read.

    Args:
        checkpoint: The source.
        to: The target; None for no target. Weights take no small record that was read with the metadata, such as a
            step of Adam, so that it may be damaged.
    """
    sums, target = [f.sums for f in checkpoint.files], known_targets().get(to or "")
    damaged = () if target is not None and target.is_weights else [s.damaged for s in sums]
    return RecordReads([s.table for s in sums], [s.matching for s in sums], damaged)


def refuse_damaged(checkpoint: Checkpoint, reads: RecordReads) -> None:
    """Refuse a source with a record that a run has read and that does not match its CRC-32.

    Raises:
        SourceError: `zip.crc`, which lists the damaged records.
    """
    _refuse(_damaged(checkpoint, reads))


def damage_note(checkpoint: Checkpoint, reads: RecordReads) -> str | None:
    """A note that names the records which were read and do not match their CRC-32s; None if there are none."""
    damaged = _damaged(checkpoint, reads)
    return f"{_mismatch(damaged).message}: these are the digests of damaged bytes" if damaged else None


def _damaged(checkpoint: Checkpoint, reads: RecordReads) -> list[str]:
    return [f"{printable(checkpoint.files[f].name)} bytes {offset}+{length}" for f, offset, length in reads.damaged]


COMPLETED_BYTES = 64 << 10
COMPLETED_SHARE = 64
"""A record is read to its end if at most this many bytes, or this share of it, are missing."""


def complete_records(
    checkpoint: Checkpoint, reads: RecordReads, should_stop: Callable[[], None], *, every: bool, refuse: bool = True
) -> None:
    """Read what is missing of records that a run has read in part, and compare them.

    ZeRO pads a partition, and no target takes its padding, so a run reads nearly all of such a record.

    Args:
        checkpoint: The source.
        reads: The records that the run has read.
        should_stop: Raises to stop.
        every: True to complete all records that were read in part, and not only those of which little is missing.
        refuse: False to leave the records that do not match to `damage_note`.

    Raises:
        SourceError: `zip.crc`, which lists the damaged records.
    """

    def most_bytes(length: int) -> int:
        return length if every else max(COMPLETED_BYTES, length // COMPLETED_SHARE)

    for file, begin, end in list(reads.unread(most_bytes=most_bytes)):
        for at, view in pieces_of(checkpoint.files[file].read_into, begin, end):
            should_stop()
            reads.add(file, at, view)
    if refuse:
        refuse_damaged(checkpoint, reads)


def source_check(reads: RecordReads) -> SourceCheck:
    """What a run has compared of its source, for its result."""
    return SourceCheck(
        records=reads.records,
        matching=reads.matching,
        in_part=reads.in_part,
        read_bytes=reads.matching_bytes + reads.in_part_bytes + reads.other_bytes,
        matching_bytes=reads.matching_bytes,
        without_crc_bytes=reads.other_bytes,
    )


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


# Comparison of tensors that must agree in a source, before the run: copies, and weights with rounded masters.
#
# It finds a wrong rule, a wrong order and a mixed-up file: then parts that should be copies differ, or the weights in
# the model's dtype are not the rounded masters. All elements of copies are compared. Of weights, all elements are
# compared if the weight is small, and `SAMPLED_BLOCKS` blocks if it is large.

_THREADS = 4
_BLOCK_ELEMS = 1 << 20
_MOST_NAMES = 1 << 12
SAMPLED_BLOCKS = 16
"""Number of blocks of a large weight that are compared with its master: evenly spread, with the first and last."""


def check_agreements(checkpoint: Checkpoint, policy: ReplicaPolicy, should_stop: Callable[[], None]) -> list[str]:
    """Compare all tensors that must agree; returns a warning for each difference that the policy accepts.

    Raises:
        SourceError: As `judge_agreements`.
    """

    def compare(agreement: Agreement) -> str | None:
        should_stop()
        return difference(checkpoint, agreement)

    with ThreadPoolExecutor(agreement_threads(checkpoint)) as pool:
        found = list(pool.map(compare, checkpoint.agreements))
    return judge_agreements(checkpoint, found, policy)


def agreement_threads(checkpoint: Checkpoint) -> int:
    """Number of tensors to compare at a time."""
    # Local reads do not wait, so more threads than cores only pass Python's lock around: 2.2 s instead of 1.9.
    return min(_THREADS, os.cpu_count() or 1) if checkpoint.is_local else _THREADS


def judge_agreements(checkpoint: Checkpoint, texts: Sequence[str | None], policy: ReplicaPolicy) -> list[str]:
    """The warnings of all comparisons, which `difference` gave, in the order of the agreements.

    Raises:
        SourceError: `checkpoint.disagreement`, or the agreement's own code, under the policy `error`, and under any
            policy if a weight differs from its rounded master: then the parts were put together wrongly.
    """
    found = list(zip(checkpoint.agreements, texts, strict=True))
    wrong = [(a, text) for a, text in found if text is not None]
    if not wrong:
        return []
    fatal = [(a, text) for a, text in wrong if a.rounded or (policy is ReplicaPolicy.ERROR and not a.advisory)]
    if fatal:
        agreement, text = fatal[0]
        names = sorted({printable(a.fqn) for a, _ in fatal})
        because, known_fix = checkpoint.facts.cause(checkpoint, [a for a, _ in fatal]) or ("", "")
        raise SourceError(
            agreement.code,
            f"of {counted(len(found), 'tensor')} that must agree, {counted(len(fatal), 'differs', 'differ')}, "
            f"in {counted(len(names), 'parameter')}: {text}{because}",
            fix=known_fix or agreement.fix or "the rules of tensor parallelism or the files are wrong: see --rules"
            if agreement.rounded
            else "--replicas first takes the lowest rank's copy; wrong rules of tensor parallelism look like this too",
            details={"parameters": names[:_MOST_NAMES], "count": len(names)},
        )
    return [f"{text}; the first copy was taken" for _, text in wrong]


def _blocks(agreement: Agreement, numel: int) -> Iterator[tuple[int, int]]:
    count = -(-numel // _BLOCK_ELEMS)
    chosen = range(count)
    if agreement.rounded and not agreement.every and count > SAMPLED_BLOCKS:
        chosen = sorted({i * (count - 1) // (SAMPLED_BLOCKS - 1) for i in range(SAMPLED_BLOCKS)})
    for block in chosen:
        yield block * _BLOCK_ELEMS, min((block + 1) * _BLOCK_ELEMS, numel)


def compared_bytes(checkpoint: Checkpoint, agreement: Agreement) -> int:
    """The number of bytes that `difference` compares with as many others."""
    other = checkpoint.shard_map.tensors[agreement.other]
    return other.dtype.itemsize_bytes * sum(end - begin for begin, end in _blocks(agreement, other.numel))


def difference(checkpoint: Checkpoint, agreement: Agreement) -> str | None:
    """A text that says what differs, with numbers; None if all compared elements are equal."""
    tensors = checkpoint.shard_map.tensors
    first, other = tensors[agreement.first], tensors[agreement.other]
    what = f"{printable(agreement.state)} of {printable(agreement.fqn)} and {agreement.where}"
    if first.shape != other.shape or (first.dtype is not other.dtype and not agreement.rounded):
        return f"{what}: {first.dtype.name} {first.shape} and {other.dtype.name} {other.shape}"
    reader = TensorReader(checkpoint, default_kernel())
    size, differing, at = other.dtype.itemsize_bytes, 0, -1
    for begin, end in _blocks(agreement, other.numel):
        ours = reader.elements(agreement.first, other.dtype, begin, end)
        theirs = reader.elements(agreement.other, other.dtype, begin, end)
        wide = np.uint64 if len(ours) % 8 == 0 else np.uint8
        if np.array_equal(ours.view(wide), theirs.view(wide)):
            continue
        rows = np.flatnonzero((ours.reshape(-1, size) != theirs.reshape(-1, size)).any(axis=1))
        if agreement.rounded:
            # A 16-bit NaN changes when it is widened and rounded again: its quiet bit is set then.
            rows = rows[~(are_nan(ours, other.dtype) & are_nan(theirs, other.dtype))[rows]]
        if len(rows) and at < 0:
            at = begin + int(rows[0])
        differing += len(rows)
    return (
        f"{what}: of {counted(other.numel, 'element')}, {counted(differing, 'differs', 'differ')}, the first is {at}"
        if differing
        else None
    )
