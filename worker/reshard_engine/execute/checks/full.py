"""The second level of checking, `--verify full`: it reads the whole source and the whole output before the commit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from reshard.choices import OverflowPolicy
from reshard.errors import IntegrityError, printable
from reshard.models.jobs import VerifyProblem
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.casts.placing import default_kernel
from reshard_engine.execute.checks.commit import name_in_manifest, with_full_checks
from reshard_engine.execute.checks.source import SourceSums, check_source
from reshard_engine.execute.checks.unit_sums import BlockDigests
from reshard_engine.execute.gather import CALLS_AT_ONCE, TensorReader, fill
from reshard_engine.execute.sinks.protocol import Sink
from reshard_engine.integrity.checksums import BlockRun, TensorDigests
from reshard_engine.integrity.file_check import TargetCheck
from reshard_engine.integrity.manifest import Manifest, ManifestTensor
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.plan.model import CACHED_BYTES, Plan, Unit, steps_of
from reshard_engine.storage.local import kept_open
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.tensors.layout import ZEROS, TargetFile, TargetLayout

# The second gathering of `--verify full`: every tensor is read from the source again and compared by its digest.
#
# The units of the plan are gathered again in their order, and nothing is written. Their order follows the files of the
# source, so a step reads one long run of each file. Tensor by tensor, 5,000 tensors on 64 ranks would take 1.3 million
# short reads.


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
        # A tensor without elements begins where the next tensor does.
        places = {
            (number, body.offset, body.begin < body.end): (file.tensors[body.slot], body.dtype)
            for number, file in enumerate(self._files)
            for body in file.template.bodies
            if file.tensors[body.slot] != ZEROS
        }
        wrong: list[ManifestTensor] = []
        for entry in manifest.tensors:
            filled = [extent for extent in entry.extents if extent[2] < extent[3]]
            file, offset, _, _ = (filled or entry.extents)[0]
            tensor, dtype = places[file, offset, bool(filled)]
            size_bytes = self._checkpoint.shard_map.tensors[tensor].numel * dtype.itemsize_bytes
            if tensor in self._torn or self._digests.digest(tensor, dtype.name, size_bytes) != entry.xxh3:
                wrong.append(entry)
        return wrong


# All checks of `--verify full`, in their order.


class FullVerification:
    """Reads source and output once more. Its methods are called in this order."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: TargetLayout,
        plan: Plan,
        sink: Sink,
        *,
        should_stop: Callable[[], None],
    ) -> None:
        """`should_stop` raises when the caller wants the run to end."""
        self.checkpoint = checkpoint
        self.plan = plan
        self._layout = layout
        self._sink = sink
        self._should_stop = should_stop
        saturate = plan.on_overflow is OverflowPolicy.SATURATE
        self.again = SecondGathering(checkpoint, layout.files, should_stop, saturate=saturate)
        self._sums: dict[str, SourceSums] = {}
        self._check: TargetCheck | None = None

    def before_publishing(self, manifest_now: Callable[[], Manifest]) -> None:
        """Check the source, then all files but the commit files. `manifest_now` makes the manifest of the units so far.

        Raises:
            SourceError: `zip.crc`.
            IntegrityError: As `_read_back`.
        """
        self._read_source()
        self._read_back(manifest_now(), commit=False)

    def after_publishing(self, manifest: Manifest, threads: int) -> Manifest:
        """Check the commit files, and gather every tensor again; returns the manifest with the results of all checks.

        Raises:
            IntegrityError: As `_read_back` and `_digest_again`.
        """
        self._read_back(manifest, commit=True)
        self._digest_again(threads, manifest)
        return self._certify(manifest)

    # -- what workers that share a conversion read together ---------------------------------------------

    def _source_sums(self) -> dict[str, SourceSums]:
        """Read the whole source."""
        return check_source(self.checkpoint, self._should_stop)

    def _read_files(self, check: TargetCheck, *, commit: bool) -> None:
        """Read final files: the commit files if `commit`, else all other files."""
        where = self._sink.written
        check.read(where.store, where.files(), self.files_of(commit=commit))

    def _gather_again(self, threads: int) -> None:
        """Gather the units again."""
        self.again.run(self.plan.units, threads)

    @property
    def written(self) -> Location:
        """The location of the files before the commit."""
        return self._sink.written

    def written_files(self) -> Mapping[str, ObjectInfo]:
        """See `Sink`."""
        return self._sink.written_files()

    def files_of(self, *, commit: bool) -> list[int]:
        """The numbers of the commit files, or of all other files."""
        return [i for i, f in enumerate(self._layout.files) if f.commit == commit]

    # -- judgements -------------------------------------------------------------------------------------

    def _read_source(self) -> None:
        sums = self._source_sums()
        self._sums = {name_in_manifest(f): sums[f.name] for f in self.checkpoint.files}

    def _read_back(self, manifest: Manifest, *, commit: bool) -> None:
        """Compare final files with the manifest.

        Raises:
            IntegrityError: `integrity.mismatch`. The damaged files were removed, and the next run writes them anew.
        """
        if self._check is None:
            self._check = TargetCheck(manifest, self._should_stop)
        check = self._check
        check.manifest = manifest
        self._read_files(check, commit=commit)
        if commit or check.damaged:
            check.conclude()
        if check.problems:
            self._sink.withdraw(sorted({p.path for p in check.problems}))
            raise _damaged(check.problems)

    def _digest_again(self, threads: int, manifest: Manifest) -> None:
        """Gather every tensor from the source again: bytes that were read wrongly the first time have another digest.

        Raises:
            IntegrityError: `integrity.mismatch`. The files that hold such tensors were removed.
        """
        whole = self._with_digests(manifest)
        self._gather_again(threads)
        if wrong := self.again.differing(whole):
            paths = {manifest.files[file].path for tensor in wrong for file, _, _, _ in tensor.extents}
            self._sink.withdraw(sorted(paths))
            raise IntegrityError(
                "integrity.mismatch",
                f"{len(wrong)} tensors had other bytes when they were read again, such as {printable(wrong[0].fqn)}",
                fix="check this machine's memory and the store, then run the same command again: it writes them anew",
            )

    def _certify(self, manifest: Manifest) -> Manifest:
        """The manifest with the results of all checks."""
        assert self._check is not None
        return with_full_checks(self._with_digests(manifest), self._sums, self._check.sha256)

    def _with_digests(self, manifest: Manifest) -> Manifest:
        """The manifest with the digests of tensors that the store copied, which are known after they were read back."""
        assert self._check is not None
        check = self._check
        tensors = [
            t if t.xxh3 else t.model_copy(update={"xxh3": check.digest_of(n) or ""})
            for n, t in enumerate(manifest.tensors)
        ]
        return manifest.model_copy(update={"tensors": tuple(tensors)})


def _damaged(problems: list[VerifyProblem]) -> IntegrityError:
    first = problems[0]
    where = (
        printable(first.path)
        if first.offset is None
        else f"{printable(first.path)} bytes {first.offset}+{first.length_bytes}"
    )
    tensor = f" of {first.tensor}" if first.tensor else ""
    return IntegrityError(
        "integrity.mismatch",
        f"{where}{tensor}: {first.problem} ({len(problems)} problems)",
        fix="check the disk and memory of this machine, then run the same command again: it writes them anew",
    )
