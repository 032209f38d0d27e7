"""Filling a chunk: literals, bodies from source extents, CRC sums of what other units passed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.dtypes import Dtype
from reshard_engine.execute.cast import CastKernel, overflowed
from reshard_engine.layout import ZEROS, Body, TargetFile
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.shardmap import Strides

GAP_BYTES = 64 << 10
"""Unwanted bytes between two extents that are still cheaper to read than to skip."""
Buffer = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Copy:
    """One packed source extent and the bytes of the chunk that it fills."""

    file: int
    offset: int
    length_bytes: int
    target: Buffer
    source_dtype: Dtype
    target_dtype: Dtype
    tensor: int


@dataclass
class Gathered:
    """What filling reported."""

    read_bytes: int = 0
    overflows: dict[str, int] = field(default_factory=dict[str, int])


def fill_chunk(
    checkpoint: Checkpoint, file: TargetFile, *, begin: int, buffer: Buffer, kernel: CastKernel, report: Gathered
) -> None:
    """Fill `buffer` with the bytes of the target file from `begin` on, except CRC slots (left zero).

    Raises:
        SourceError: `source.changed`, or what the storage says.
    """
    end = begin + len(buffer)
    for offset, data in file.template.literals:
        low, high = max(offset, begin), min(offset + len(data), end)
        if low < high:
            buffer[low - begin : high - begin] = np.frombuffer(data, dtype=np.uint8)[low - offset : high - offset]
    copies: list[Copy] = []
    for body in file.template.bodies_in(begin, end):
        _body_copies(checkpoint, file, body, begin=begin, buffer=buffer, copies=copies, kernel=kernel, report=report)
    run_copies(checkpoint.files, checkpoint, copies, kernel, report)


def _body_copies(
    checkpoint: Checkpoint,
    file: TargetFile,
    body: Body,
    *,
    begin: int,
    buffer: Buffer,
    copies: list[Copy],
    kernel: CastKernel,
    report: Gathered,
) -> None:
    """The extents behind the part of one body that lies in the chunk.

    A chunk may begin or end inside an element; such an element is fetched whole into scratch memory.
    """
    size = body.dtype.itemsize_bytes
    low = max(body.offset, begin) - body.offset
    high = min(body.offset + body.length_bytes, begin + len(buffer)) - body.offset
    at = body.offset + low - begin
    number = file.tensors[body.slot]
    if number == ZEROS:
        buffer[at : at + high - low] = 0
        return
    first, last = low // size, -(-high // size)
    aligned = low % size == 0 and high % size == 0
    window = buffer[at : at + high - low] if aligned else np.empty((last - first) * size, dtype=np.uint8)
    mine = copies if aligned else []
    _extents(checkpoint, number, body, first, window, mine, kernel, report)
    if not aligned:
        run_copies(checkpoint.files, checkpoint, mine, kernel, report)
        skip = low - first * size
        buffer[at : at + high - low] = window[skip : skip + high - low]


def _extents(
    checkpoint: Checkpoint,
    number: int,
    body: Body,
    first: int,
    window: Buffer,
    copies: list[Copy],
    kernel: CastKernel,
    report: Gathered,
) -> None:
    stored = checkpoint.shard_map.tensors[number]
    size = body.dtype.itemsize_bytes
    begin = body.begin + first
    pieces = checkpoint.shard_map.pieces(number, begin, begin + len(window) // size)
    for row in range(len(pieces.begin)):
        low, high = int(pieces.begin[row]), int(pieces.end[row])
        file, offset, strides = int(pieces.file[row]), int(pieces.offset[row]), int(pieces.strides[row])
        target = window[(low - begin) * size : (high - begin) * size]
        if strides >= 0:
            layout = checkpoint.shard_map.strides[strides]
            data = read_strided(checkpoint.files[file], offset, layout, low, high, stored.dtype.itemsize_bytes)
            report.read_bytes += data.nbytes
            if stored.dtype is body.dtype:
                target[:] = data
            else:
                _cast_into(data, target, stored.dtype, body.dtype, stored.fqn, kernel, report)
            continue
        copies.append(
            Copy(file, offset, (high - low) * stored.dtype.itemsize_bytes, target, stored.dtype, body.dtype, number)
        )


def run_copies(
    files: Sequence[SourceFile], checkpoint: Checkpoint, copies: list[Copy], kernel: CastKernel, report: Gathered
) -> None:
    """Read the extents in file order, near ones together, and put each where it belongs."""
    batch: list[Copy] = []
    for copy in _bounded(sorted(copies, key=lambda c: (c.file, c.offset))):
        if batch and not _joins(batch, copy):
            _run_batch(files, checkpoint, batch, kernel, report)
            batch = []
        batch.append(copy)
    if batch:
        _run_batch(files, checkpoint, batch, kernel, report)


def _bounded(copies: list[Copy]) -> list[Copy]:
    """Copies cut so that none that needs staging is larger than a read batch."""
    result: list[Copy] = []
    for copy in copies:
        if copy.source_dtype is copy.target_dtype or copy.length_bytes <= READ_BATCH_BYTES:
            result.append(copy)
            continue
        step = READ_BATCH_BYTES // copy.source_dtype.itemsize_bytes
        for first in range(0, copy.length_bytes // copy.source_dtype.itemsize_bytes, step):
            at = first * copy.source_dtype.itemsize_bytes
            count = min(step * copy.source_dtype.itemsize_bytes, copy.length_bytes - at)
            low = first * copy.target_dtype.itemsize_bytes
            high = low + count // copy.source_dtype.itemsize_bytes * copy.target_dtype.itemsize_bytes
            result.append(
                Copy(
                    copy.file,
                    copy.offset + at,
                    count,
                    copy.target[low:high],
                    copy.source_dtype,
                    copy.target_dtype,
                    copy.tensor,
                )
            )
    return result


def _joins(batch: list[Copy], copy: Copy) -> bool:
    start = batch[0].offset
    end = max(batch[-1].offset + batch[-1].length_bytes, copy.offset + copy.length_bytes)
    near = copy.offset - (batch[-1].offset + batch[-1].length_bytes) <= GAP_BYTES
    return copy.file == batch[0].file and near and end - start <= READ_BATCH_BYTES


def _run_batch(
    files: Sequence[SourceFile], checkpoint: Checkpoint, batch: list[Copy], kernel: CastKernel, report: Gathered
) -> None:
    first = batch[0]
    if len(batch) == 1 and first.source_dtype is first.target_dtype:
        files[first.file].read_into(first.offset, first.target.data)
        report.read_bytes += first.length_bytes
        return
    start = first.offset
    end = max(c.offset + c.length_bytes for c in batch)
    staging = np.empty(end - start, dtype=np.uint8)
    files[first.file].read_into(start, staging.data)
    report.read_bytes += len(staging)
    for copy in batch:
        data = staging[copy.offset - start : copy.offset - start + copy.length_bytes]
        if copy.source_dtype is copy.target_dtype:
            copy.target[:] = data
        else:
            name = checkpoint.shard_map.tensors[copy.tensor].fqn
            _cast_into(data, copy.target, copy.source_dtype, copy.target_dtype, name, kernel, report)


def _cast_into(
    data: Buffer, target: Buffer, source: Dtype, wanted: Dtype, fqn: str, kernel: CastKernel, report: Gathered
) -> None:
    if data.ctypes.data % source.itemsize_bytes:
        data = data.copy()
    result = kernel.cast(data, source, wanted)
    target[:] = result
    if lost := overflowed(data, result, source, wanted):
        report.overflows[fqn] = report.overflows.get(fqn, 0) + lost


def read_strided(file: SourceFile, offset: int, layout: Strides, low: int, high: int, itemsize_bytes: int) -> Buffer:
    """The elements `[low, high)` in row-major order of a tensor that lies strided in its file, packed."""
    ids = np.arange(low, high, dtype=np.int64)
    places = np.zeros_like(ids)
    for length, stride in zip(reversed(layout.shape), reversed(layout.stride), strict=True):
        places += ids % length * stride
        ids //= length
    first, last = int(places.min()), int(places.max())
    raw = np.empty((last - first + 1) * itemsize_bytes, dtype=np.uint8)
    file.read_into(offset + first * itemsize_bytes, raw.data)
    return raw.reshape(-1, itemsize_bytes)[places - first].reshape(-1)
