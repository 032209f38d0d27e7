"""The second level of checking, `--verify full`: the whole source and the whole output read before the commit."""

from __future__ import annotations

from collections.abc import Callable

from reshard.errors import IntegrityError, printable
from reshard.models import VerifyProblem
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.checks.receipt import name_in_manifest, with_full_checks
from reshard_engine.execute.checks.second_gathering import SecondGathering
from reshard_engine.execute.checks.source import SourceSums, check_source
from reshard_engine.execute.sinks.protocol import Sink
from reshard_engine.integrity.file_check import TargetCheck
from reshard_engine.integrity.manifest import Manifest
from reshard_engine.plan.model import Plan
from reshard_engine.tensors.layout import TargetLayout


class FullVerification:
    """Reads everything once more. Methods are called in the order in which they stand here."""

    def __init__(
        self, layout: TargetLayout, sink: Sink, should_stop: Callable[[], None], *, saturate: bool = False
    ) -> None:
        """`should_stop` raises when the caller wants the run to end; `saturate` as in `ChunkFiller`."""
        self._saturate = saturate
        self._layout = layout
        self._sink = sink
        self._should_stop = should_stop
        self._sums: dict[str, SourceSums] = {}
        self._check: TargetCheck | None = None

    def read_source(self, checkpoint: Checkpoint) -> None:
        """Compare the source with the checksums of its containers.

        Raises:
            SourceError: `zip.crc`.
        """
        sums = check_source(checkpoint, self._should_stop)
        self._sums = {name_in_manifest(f): sums[f.name] for f in checkpoint.files}

    def read_back(self, manifest: Manifest, *, commit: bool) -> None:
        """Compare the files that are final by now, those that are published last or all others.

        Raises:
            IntegrityError: `integrity.mismatch`; what is damaged was withdrawn, and the next run writes it anew.
        """
        if self._check is None:
            self._check = TargetCheck(manifest, self._should_stop)
        check = self._check
        check.manifest = manifest
        where = self._sink.written
        numbers = [i for i, f in enumerate(self._layout.files) if f.commit == commit]
        check.read(where.store, where.files(), numbers)
        if commit or check.damaged:
            check.conclude()
        if check.problems:
            self._sink.withdraw(sorted({p.path for p in check.problems}))
            raise _damaged(check.problems)

    def digest_again(self, checkpoint: Checkpoint, plan: Plan, threads: int, manifest: Manifest) -> None:
        """Gather every tensor from the source once more: bytes that were read wrong once have another digest.

        Raises:
            IntegrityError: `integrity.mismatch`; the files that hold such tensors were withdrawn.
        """
        whole = self._with_digests(manifest)
        again = SecondGathering(checkpoint, self._layout.files, self._should_stop, saturate=self._saturate)
        again.run(plan.units, threads)
        if wrong := again.differing(whole):
            paths = {manifest.files[file].path for tensor in wrong for file, _, _, _ in tensor.extents}
            self._sink.withdraw(sorted(paths))
            raise IntegrityError(
                "integrity.mismatch",
                f"{len(wrong)} tensors are other ones when they are read again, such as {printable(wrong[0].fqn)}",
                fix="check memory of this machine and the store, then run the same command again: it writes them anew",
            )

    def certify(self, manifest: Manifest) -> Manifest:
        """The manifest with what was found."""
        assert self._check is not None
        return with_full_checks(self._with_digests(manifest), self._sums, self._check.sha256)

    def _with_digests(self, manifest: Manifest) -> Manifest:
        """The manifest with the digests of tensors that the store copied: they have been read by now."""
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
        fix="check disk and memory of this machine, then run the same command again: it writes them anew",
    )
