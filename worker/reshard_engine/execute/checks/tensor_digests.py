"""Digests of the logical tensors whose bytes pass in a chunk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.execute.casts.rows import Buffer
from reshard_engine.execute.gather.chunks import ChunkFiller
from reshard_engine.integrity.digests import BLOCK_BYTES, BlockRun, block_digest, blocks_beginning_in
from reshard_engine.plan.model import Chunk
from reshard_engine.tensors.layout import ZEROS, Body, TargetFile


class PassingDigests:
    """Digests every block that begins in a chunk; what of it lies behind the chunk's end is fetched.

    So that each unit's digests are its own, in any order and after any crash. The price is at most one
    block per tensor and unit read twice.
    """

    def __init__(self, checkpoint: Checkpoint, kernel: CastKernel, *, saturate: bool = False) -> None:
        """For the chunks of one unit."""
        self._checkpoint = checkpoint
        # A filler of its own: what it fetches again must not be counted as lost in casts again.
        self._beyond = ChunkFiller(checkpoint, kernel, saturate=saturate)

    @property
    def read_bytes(self) -> int:
        """Bytes that were read twice."""
        return self._beyond.read_bytes

    def of_chunk(self, file: TargetFile, chunk: Chunk, buffer: Buffer) -> Iterator[BlockRun]:
        """The digests of the blocks that begin in a filled chunk."""
        begin, end = chunk.offset, chunk.offset + chunk.length_bytes
        for body in file.template.bodies_in(begin, end):
            tensor = file.tensors[body.slot]
            if tensor == ZEROS:
                continue
            low, high = max(body.offset, begin), min(body.offset + body.length_bytes, end)
            shift = body.begin * body.dtype.itemsize_bytes - body.offset
            run = self._of_body(tensor, body, low + shift, buffer[low - begin : high - begin])
            if run is not None:
                yield run

    def _of_body(self, tensor: int, body: Body, begin: int, data: Buffer) -> BlockRun | None:
        """The digests of the blocks that begin in `data`, the tensor's bytes from `begin` on."""
        end = begin + len(data)
        numbers = blocks_beginning_in(begin, end)
        if not numbers:
            return None
        total = self._checkpoint.shard_map.tensors[tensor].numel * body.dtype.itemsize_bytes
        digests: list[bytes] = []
        for number in numbers:
            low, high = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, total)
            block = data[low - begin : high - begin]
            if high > end:
                block = np.concatenate((block, self._rest(tensor, body, end, high)))
            digests.append(block_digest(block.data))
        return BlockRun(tensor, body.dtype.name, numbers.start, b"".join(digests))

    def _rest(self, tensor: int, body: Body, begin: int, end: int) -> Buffer:
        """The bytes `[begin, end)` of a tensor; `begin` may lie inside an element."""
        size = body.dtype.itemsize_bytes
        first = begin // size
        return self._beyond.elements(tensor, body.dtype, first, end // size)[begin - first * size :]
