"""Digests of the logical tensors, and CRC-32s of the records, that a unit writes."""

from __future__ import annotations

import numpy as np

from reshard_engine.execute.casts.rows import ByteArray
from reshard_engine.execute.gather import TensorReader
from reshard_engine.execute.journal import RecordSpan
from reshard_engine.integrity.checksums import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    BlockRun,
    CrcBoard,
    block_digest,
    blocks_beginning_in,
)
from reshard_engine.plan.model import WriteItem
from reshard_engine.storage.crc32 import crc32
from reshard_engine.tensors.layout import ZEROS, Body
from reshard_engine.tensors.shard_map import ShardMap


class BlockDigests:
    """Digests every block that begins in an item. If a block ends behind the item, the rest of it is read again.

    So the digests of a unit depend on no other unit, in any order and after any crash. The price is that at most one
    block per tensor and unit is read twice.
    """

    def __init__(self, shard_map: ShardMap, reader: TensorReader) -> None:
        """Begin with no digests. One object serves the items of one unit."""
        self._tensors = shard_map.tensors
        self._reader = reader
        self.runs: list[BlockRun] = []
        """The digests so far; adjacent runs of one tensor are joined."""

    def add(self, item: WriteItem, data: ByteArray) -> None:
        """Digest the blocks that begin in a finished item."""
        begin, end = item.begin, item.begin + item.length_bytes
        for body in item.file.template.bodies_in(begin, end):
            tensor = item.file.tensors[body.slot]
            if tensor == ZEROS:
                continue
            low, high = max(body.offset, begin), min(body.offset + body.length_bytes, end)
            shift = body.begin * body.dtype.itemsize_bytes - body.offset
            self._add_body(tensor, body, low + shift, data[low - begin : high - begin])

    def _add_body(self, tensor: int, body: Body, begin: int, data: ByteArray) -> None:
        """Digest the blocks that begin in `data`, the tensor's bytes from `begin` on."""
        end = begin + len(data)
        numbers = blocks_beginning_in(begin, end)
        if not numbers:
            return
        total = self._tensors[tensor].numel * body.dtype.itemsize_bytes
        digests: list[bytes] = []
        for number in numbers:
            low, high = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, total)
            block = data[low - begin : high - begin]
            if high > end:
                block = np.concatenate((block, self._rest(tensor, body, end, high)))
            digests.append(block_digest(block.data))
        self._append(BlockRun(tensor, body.dtype.name, numbers.start, b"".join(digests)))

    def _append(self, run: BlockRun) -> None:
        last = self.runs[-1] if self.runs else None
        follows = last is not None and last.first + len(last.digests) // DIGEST_BYTES == run.first
        if last is not None and follows and (last.tensor, last.dtype) == (run.tensor, run.dtype):
            self.runs[-1] = BlockRun(run.tensor, run.dtype, last.first, last.digests + run.digests)
        else:
            self.runs.append(run)

    def _rest(self, tensor: int, body: Body, begin: int, end: int) -> ByteArray:
        """The bytes `[begin, end)` of a tensor; `begin` may lie inside an element. Cast losses are not counted here."""
        size = body.dtype.itemsize_bytes
        first = begin // size
        return self._reader.elements(tensor, body.dtype, first, end // size, counted=False)[begin - first * size :]


# CRC-32s of the records of target files: computed from items, and written to the CRC slots of the files.


class AbandonedError(Exception):
    """Another unit failed, so a CRC that this unit waits for will never come."""


class RecordCrcs:
    """Computes the CRC-32s of records in the items of one unit, and puts them on the board for other units."""

    def __init__(self, board: CrcBoard, *, proven: bool) -> None:
        """`proven` is true if the CRC-32s of the unit's records are already known from the source."""
        self._board = board
        self._proven = proven
        self.spans: dict[tuple[int, int], RecordSpan] = {}
        """The summed spans by file and record; the part of a record in one unit is contiguous."""

    def add(self, item: WriteItem, data: ByteArray) -> None:
        """Sum the records in an item and fill its CRC slots. The items of a file must be added in order.

        Raises:
            AbandonedError: The unit cannot be finished.
        """
        if not self._proven and item.length_bytes == item.file.size_bytes:
            self._add_file(item, data)
            return
        if not self._proven:
            self._add_records(item, data)
        self._fill_slots(item, data)

    def _add_file(self, item: WriteItem, data: ByteArray) -> None:
        """Sum the records of a whole file and fill its CRC slots. No other unit needs or provides these sums."""
        template, bytes_, file = item.file.template, data.data, item.chunk.file
        sums = [crc32(bytes_[offset : offset + length]) for offset, length in template.records]
        for offset, record in template.crc_slots:
            bytes_[offset : offset + 4] = sums[record].to_bytes(4, "little")
        for number, (record, crc) in enumerate(zip(template.records, sums, strict=True)):
            self.spans[file, number] = (file, number, 0, record[1], crc)

    def _add_records(self, item: WriteItem, data: ByteArray) -> None:
        begin, end, file = item.begin, item.begin + item.length_bytes, item.chunk.file
        template = item.file.template
        for number in template.records_in(begin, end):
            offset, length = template.records[number]
            low, high = max(offset, begin), min(offset + length, end)
            _, _, first, held, crc = self.spans.get((file, number), (file, number, low - offset, 0, 0))
            crc = crc32(data.data[low - begin : high - begin], crc)
            self.spans[file, number] = (file, number, first, held + high - low, crc)
            self._board.put(file, number, [(first, held + high - low, crc)])

    def _fill_slots(self, item: WriteItem, data: ByteArray) -> None:
        begin, end, template = item.begin, item.begin + item.length_bytes, item.file.template
        for offset, record in template.slots_in(begin, end):
            crc = self._board.wait_for(item.chunk.file, record, template.records[record][1])
            if crc is None:
                raise AbandonedError
            low, high = max(offset, begin), min(offset + 4, end)
            data.data[low - begin : high - begin] = crc.to_bytes(4, "little")[low - offset : high - offset]
