"""Digests of the logical tensors whose bytes pass in a chunk, and the same once more for `--verify full`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.digests import BLOCK_BYTES, BlockRun, TensorStream, block_digest, blocks_beginning_in
from reshard_engine.execute.cast import CastKernel
from reshard_engine.execute.gather import ChunkFiller
from reshard_engine.execute.kernels import default_kernel
from reshard_engine.execute.rows import Buffer
from reshard_engine.layout import ZEROS, Body, TargetFile
from reshard_engine.manifest import Manifest, ManifestTensor
from reshard_engine.plan.model import Chunk

_THREADS = 4
_AGAIN_BYTES = 4 << 20
"""Read at once where tensors are gathered a second time."""


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


def differing_tensors(
    checkpoint: Checkpoint,
    files: Sequence[TargetFile],
    manifest: Manifest,
    should_stop: Callable[[], None],
    *,
    saturate: bool,
) -> list[ManifestTensor]:
    """The tensors of a manifest that have another digest when they are gathered from the source once more."""
    numbers = {
        (number, body.offset): (file.tensors[body.slot], body)
        for number, file in enumerate(files)
        for body in file.template.bodies
        if file.tensors[body.slot] != ZEROS
    }
    kernel = default_kernel()

    def differs(entry: ManifestTensor) -> bool:
        file, offset, _, _ = entry.extents[0]
        tensor, body = numbers[file, offset]
        filler, stream, size = (
            ChunkFiller(checkpoint, kernel, saturate=saturate),
            TensorStream(),
            body.dtype.itemsize_bytes,
        )
        numel = checkpoint.shard_map.tensors[tensor].numel
        step = max(1, _AGAIN_BYTES // size)
        for first in range(0, numel, step):
            should_stop()
            data = filler.elements(tensor, body.dtype, first, min(first + step, numel))
            stream.feed(0, body.dtype.name, numel * size, begin=first * size, data=data.data)
        return stream.digests.digest(0, body.dtype.name, numel * size) != entry.xxh3

    unique = list({(t.xxh3, numbers[t.extents[0][0], t.extents[0][1]][0]): t for t in manifest.tensors}.values())
    with ThreadPoolExecutor(_THREADS) as pool:
        return [t for t, wrong in zip(unique, pool.map(differs, unique), strict=True) if wrong]
