"""Block digests of the logical tensors that a unit writes."""

from __future__ import annotations

import numpy as np

from reshard_engine.execute.casts.rows import ByteArray
from reshard_engine.execute.gather.tensor_reader import TensorReader
from reshard_engine.integrity.digests import BLOCK_BYTES, DIGEST_BYTES, BlockRun, block_digest, blocks_beginning_in
from reshard_engine.plan.write_items import WriteItem
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
