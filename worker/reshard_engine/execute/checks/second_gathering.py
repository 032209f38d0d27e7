"""The second gathering of `--verify full`: every tensor is read from the source again and compared by its digest.

The units of the plan are gathered again in their order, and nothing is written. Their order follows the files of the
source, so a step reads one long run of each file. Tensor by tensor, 5,000 tensors on 64 ranks would take 1.3 million
short reads.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from reshard.errors import IntegrityError
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.casts.kernels import default_kernel
from reshard_engine.execute.checks.block_digests import BlockDigests
from reshard_engine.execute.gather.concurrent_reads import CALLS_AT_ONCE
from reshard_engine.execute.gather.fill import fill
from reshard_engine.execute.gather.tensor_reader import TensorReader
from reshard_engine.integrity.digests import BlockRun, TensorDigests
from reshard_engine.integrity.manifest import Manifest, ManifestTensor
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.plan.model import Unit
from reshard_engine.plan.write_items import CACHED_BYTES, steps_of
from reshard_engine.storage.local import kept_open
from reshard_engine.tensors.layout import ZEROS, TargetFile


class SecondGathering:
    """Gathers each unit of a plan again and digests it. It uses no result of the first gathering."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        files: Sequence[TargetFile],
        should_stop: Callable[[], None],
        *,
        saturate: bool = False,
    ) -> None:
        """`should_stop` raises when the caller wants the run to end; `saturate` as in `TensorReader`."""
        self._checkpoint = checkpoint
        self._files = files
        self._should_stop = should_stop
        self._saturate = saturate
        self._kernel = default_kernel()
        self._digests = TensorDigests()
        self._torn: set[int] = set()
        """Tensors that stand in two files of the target and were gathered with different contents."""
        self._calls: ThreadPoolExecutor | None = None

    def run(self, units: Iterable[Unit], threads: int) -> None:
        """Gather the units on `threads` threads.

        Raises:
            SourceError: `source.changed`, or an error of the storage.
        """
        with self.calling(threads), ThreadPoolExecutor(threads) as pool:
            for runs in pool.map(self.digest, units):
                self._should_stop()
                self.absorb(runs)

    @contextmanager
    def calling(self, threads: int) -> Generator[None]:
        """Provide a pool for concurrent calls of a unit."""
        with ThreadPoolExecutor(CALLS_AT_ONCE) as calls:
            # Local reads do not become faster by concurrent calls.
            self._calls = None if self._checkpoint.is_local or threads == 1 else calls
            yield
        self._calls = None

    def digest(self, unit: Unit) -> Sequence[BlockRun]:
        """The digests of the blocks that begin in a unit, gathered again. Any thread may call it."""
        reader = TensorReader(self._checkpoint, self._kernel, saturate=self._saturate, pool=self._calls)
        digests = BlockDigests(self._checkpoint.shard_map, reader)
        most_bytes = CACHED_BYTES if self._checkpoint.is_local else READ_BATCH_BYTES
        with kept_open():
            for step in steps_of(unit, self._files, most_bytes):
                self._should_stop()
                memory = np.empty(step[-1].at + step[-1].length_bytes, dtype=np.uint8)
                fill(reader, step, memory)
                for item in step:
                    digests.add(item, memory[item.at : item.at + item.length_bytes])
        return digests.runs

    def absorb(self, runs: Iterable[BlockRun]) -> None:
        """Take the digests of a unit, whoever gathered it again."""
        for run in runs:
            try:
                self._digests.add(run)
            except IntegrityError:
                self._torn.add(run.tensor)

    def differing(self, manifest: Manifest) -> list[ManifestTensor]:
        """The tensors of a manifest that were now gathered with another digest, or with two different contents."""
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
