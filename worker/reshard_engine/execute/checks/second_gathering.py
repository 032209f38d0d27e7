"""The tensors of a target gathered from the source a second time, to be compared with their digests: `--verify full`.

The units of the plan are worked through again and nothing is written. Their order is that of the source's files, so a
window takes one long run from each of them. Tensor by tensor, 5,000 tensors on 64 ranks are 1.3 million short reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from reshard.errors import IntegrityError
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.casts.kernels import default_kernel
from reshard_engine.execute.checks.tensor_digests import PassingDigests
from reshard_engine.execute.gather.chunks import ChunkFiller
from reshard_engine.execute.gather.concurrent_reads import CALLS_AT_ONCE
from reshard_engine.execute.gather.windows import CACHED_BYTES, steps_of
from reshard_engine.integrity.digests import TensorDigests
from reshard_engine.integrity.manifest import Manifest, ManifestTensor
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.plan.model import Chunk, Unit
from reshard_engine.storage.local import kept_open
from reshard_engine.tensors.layout import ZEROS, TargetFile


class SecondGathering:
    """Digests what each unit of a plan gathers. Nothing of the first time is used again."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        files: Sequence[TargetFile],
        should_stop: Callable[[], None],
        *,
        saturate: bool = False,
    ) -> None:
        """`should_stop` raises when the caller wants the run to end; `saturate` as in `ChunkFiller`."""
        self._checkpoint = checkpoint
        self._files = files
        self._should_stop = should_stop
        self._saturate = saturate
        self._kernel = default_kernel()
        self._digests = TensorDigests()
        self._torn: set[int] = set()
        """Tensors that two files hold, and that were gathered with two contents."""

    def run(self, units: Iterable[Unit], threads: int) -> None:
        """Gather the units, so many at a time.

        Raises:
            SourceError: `source.changed`, or what the storage says.
        """
        local = self._checkpoint.is_local
        with ThreadPoolExecutor(CALLS_AT_ONCE) as calls, ThreadPoolExecutor(threads) as pool:
            # Local reads gain nothing from calls that run beside one another.
            several = None if local or threads == 1 else calls
            for _ in pool.map(partial(self._gather, calls=several), units):
                self._should_stop()

    def _gather(self, unit: Unit, *, calls: ThreadPoolExecutor | None) -> None:
        filler = ChunkFiller(self._checkpoint, self._kernel, saturate=self._saturate, pool=calls)
        passing = PassingDigests(self._checkpoint, self._kernel, saturate=self._saturate)
        window_bytes = CACHED_BYTES if self._checkpoint.is_local else READ_BATCH_BYTES
        with kept_open():
            for step in steps_of(unit, self._files, window_bytes):
                self._should_stop()
                memory = np.empty(step[-1].part.at + step[-1].part.length_bytes, dtype=np.uint8)
                filler.fill_parts([w.part for w in step], memory)
                for window in step:
                    part = window.part
                    chunk = Chunk(unit.chunks[window.chunk].file, part.begin, part.length_bytes)
                    for run in passing.of_chunk(part.file, chunk, memory[part.at : part.at + part.length_bytes]):
                        try:
                            self._digests.add(run)
                        except IntegrityError:
                            self._torn.add(run.tensor)

    def differing(self, manifest: Manifest) -> list[ManifestTensor]:
        """The tensors of a manifest that had another digest, or two contents, when they were gathered."""
        places = {
            (number, body.offset): (file.tensors[body.slot], body.dtype)
            for number, file in enumerate(self._files)
            for body in file.template.bodies
            if file.tensors[body.slot] != ZEROS
        }
        wrong: list[ManifestTensor] = []
        for entry in manifest.tensors:
            file, offset, _, _ = entry.extents[0]
            tensor, dtype = places[file, offset]
            size_bytes = self._checkpoint.shard_map.tensors[tensor].numel * dtype.itemsize_bytes
            if tensor in self._torn or self._digests.digest(tensor, dtype.name, size_bytes) != entry.xxh3:
                wrong.append(entry)
        return wrong
