"""Checks of a conversion that several workers run: how each is made and written down, and who judges.

The elected worker opens checks and judges, and all workers make them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from reshard.choices import ReplicaPolicy
from reshard.errors import IntegrityError
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.distributed.checks import (
    AGREEMENTS,
    COMMIT_FILES,
    FILES,
    GATHERING,
    SOURCE,
    CheckItem,
    Checks,
    CheckWaves,
    CheckWork,
    cut_checks,
)
from reshard_engine.distributed.runs import CALL_BYTES
from reshard_engine.distributed.session import AGREEING, PUBLISHED, SEALED
from reshard_engine.distributed.worker import DistributedWorker
from reshard_engine.execute.checks.full import FullVerification
from reshard_engine.execute.checks.source import (
    SourceOutcome,
    SourceSums,
    agreement_threads,
    check_file,
    compared_bytes,
    difference,
    judge_agreements,
    judge_source,
)
from reshard_engine.execute.sinks.protocol import Sink
from reshard_engine.integrity.checksums import DIGEST_BYTES, BlockRun, block_count
from reshard_engine.integrity.file_check import FileReading, TargetCheck
from reshard_engine.integrity.manifest import Manifest, parse_manifest
from reshard_engine.plan.model import Plan
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.layout import TargetLayout


class AgreementChecks(Checks):
    """Comparisons of tensors that must agree in the source."""

    def __init__(self, checkpoint: Checkpoint, plan: Plan, should_stop: Callable[[], None]) -> None:
        """`should_stop` raises when the worker is to stop."""
        self._checkpoint = checkpoint
        self._digest = plan.digest
        self._should_stop = should_stop
        costs = [(n, 2 * (compared_bytes(checkpoint, a) + CALL_BYTES)) for n, a in enumerate(checkpoint.agreements)]
        self.waves = cut_checks({AGREEMENTS: costs})

    def tie_of(self, wave: int) -> str:
        """The plan's digest, which covers the pins of the source."""
        return self._digest

    def perform(self, item: CheckItem) -> Any:
        """Compare one pair of tensors."""
        self._should_stop()
        return {"differs": difference(self._checkpoint, self._checkpoint.agreements[item.index])}

    def understood(self, wave: int, index: int, result: Any) -> str | None:
        """The text that says what differs."""
        text = result["differs"]
        if not isinstance(text, str | None):
            raise TypeError
        return text

    def take_part(self, worker: DistributedWorker) -> CheckWork:
        """Compare until all are compared."""
        work = CheckWork(worker, self)
        work.take_part([((AGREEMENTS,), agreement_threads(self._checkpoint))])
        return work

    def spread(self, worker: DistributedWorker, policy: ReplicaPolicy) -> list[str]:
        """Compare all with the help of other workers; returns the warnings.

        Raises:
            SourceError: As `judge_agreements`.
        """
        worker.member.open_checks(AGREEING, b"{}")
        found = self.take_part(worker).results()[AGREEMENTS]
        return judge_agreements(self._checkpoint, [found[n] for n in range(len(found))], policy)


class FullChecks(Checks):
    """The checks of `--verify full` that are open after all units were written, or after the commit files were."""

    def __init__(self, full: FullVerification, manifest: Manifest, name: str, should_stop: Callable[[], None]) -> None:
        """`name` is `SEALED` or `PUBLISHED`; the files are compared with the manifest."""
        self._full = full
        self._manifest = manifest
        self._should_stop = should_stop
        self._check = TargetCheck(manifest, should_stop)
        self.waves = _full_waves(full, commit=name == PUBLISHED)

    def take_part(self, worker: DistributedWorker, threads: int) -> CheckWork:
        """Check until all is checked; `threads` is the number of units that are gathered at a time."""
        work = CheckWork(worker, self)
        groups = [((SOURCE, FILES), 4), ((GATHERING,), threads)] if self.waves.runs[GATHERING] else []
        with self._full.again.calling(threads):
            work.take_part(groups or [((COMMIT_FILES,), 4)])
        return work

    def tie_of(self, wave: int) -> str:
        """The digest of the plan, and for files that of the manifest."""
        return self._tie if wave in {FILES, COMMIT_FILES} else self._full.plan.digest

    @cached_property
    def _tie(self) -> str:
        return hashlib.sha256(self._manifest.model_dump_json(exclude={"created_at", "read_bytes"}).encode()).hexdigest()

    @cached_property
    def _there(self) -> Mapping[str, ObjectInfo]:
        return self._full.written_files()

    def perform(self, item: CheckItem) -> Any:
        """Read a file of the source or of the target, or gather a unit again."""
        self._should_stop()
        if item.wave == SOURCE:
            outcome = check_file(self._full.checkpoint.files[item.index], self._should_stop)
            return _SOURCE.dump_python(outcome, mode="json")
        if item.wave == GATHERING:
            blocks = list(self._full.again.digest(self._full.plan.units[item.index]))
            return _BLOCKS.dump_python(blocks, mode="json")
        reading = self._check.read_alone(self._full.written.store, self._there, item.index)
        return _READING.dump_python(reading, mode="json")

    def understood(self, wave: int, index: int, result: Any) -> SourceOutcome | FileReading | list[BlockRun]:
        """The result of a check, by its wave."""
        if wave == SOURCE:
            return _SOURCE.validate_python(result)
        if wave == GATHERING:
            stored, blocks = self._full.checkpoint.shard_map.tensors, _BLOCKS.validate_python(result)
            _prove_blocks(blocks, lambda r: stored[r.tensor].numel * BY_NAME[r.dtype].itemsize_bytes)
            return blocks
        reading = _READING.validate_python(result)
        if {reading.file, *(d.file for d in reading.damaged)} != {index}:
            raise ValueError
        _prove_blocks(reading.blocks, lambda r: self._check.size_bytes(r.tensor, r.dtype))
        return reading


_SOURCE = TypeAdapter[SourceOutcome](SourceOutcome)
_READING = TypeAdapter(FileReading)
_BLOCKS = TypeAdapter(list[BlockRun])


def _prove_blocks(runs: Iterable[BlockRun], size_bytes: Callable[[BlockRun], int]) -> None:
    """Refuse digests of blocks that a tensor does not have; `size_bytes` gives the size of the tensor of a run."""
    for run in runs:
        if min(run.tensor, run.first) < 0 or len(run.digests) % DIGEST_BYTES or run.end > block_count(size_bytes(run)):
            raise ValueError


def _full_waves(full: FullVerification, *, commit: bool) -> CheckWaves:
    plan = full.plan
    sizes = {n: plan.files[n].size_bytes + CALL_BYTES for n in full.files_of(commit=commit)}
    if commit:
        return cut_checks({COMMIT_FILES: list(sizes.items())})
    return cut_checks(
        {
            SOURCE: [(n, f.size_bytes + CALL_BYTES) for n, f in enumerate(full.checkpoint.files)],
            FILES: list(sizes.items()),
            GATHERING: [(u.index, u.length_bytes + CALL_BYTES) for u in plan.units if not u.commit],
        }
    )


# Who makes the checks, and who judges them.


class SharedVerification(FullVerification):
    """The verification by the elected worker, which judges what all workers found."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: TargetLayout,
        plan: Plan,
        sink: Sink,
        *,
        should_stop: Callable[[], None],
        worker: DistributedWorker,
        threads: int,
    ) -> None:
        """`threads` is the number of units that a worker gathers at a time."""
        super().__init__(checkpoint, layout, plan, sink, should_stop=should_stop)
        self._worker = worker
        self._threads = threads
        self._results: dict[int, Mapping[int, Any]] = {}

    def before_publishing(self, manifest_now: Callable[[], Manifest]) -> None:
        """See `FullVerification`."""
        try:
            manifest = manifest_now()
        except IntegrityError:
            # A damaged source is the better explanation, if it is one.
            self._sums = super()._source_sums()
            raise
        self._spread(manifest, SEALED)
        super().before_publishing(lambda: manifest)

    def after_publishing(self, manifest: Manifest, threads: int) -> Manifest:
        """See `FullVerification`."""
        self._spread(manifest, PUBLISHED)
        return super().after_publishing(manifest, threads)

    def _spread(self, manifest: Manifest, name: str) -> None:
        """Open checks, take part in them, and collect the results."""
        checks = FullChecks(self, manifest, name, self._worker.member.check)
        if not checks.waves.is_worth_sharing:
            return
        self._worker.member.open_checks(name, manifest.to_bytes())
        found = checks.take_part(self._worker, self._threads).results()
        self._results |= {wave: of for wave, of in found.items() if of}

    def _source_sums(self) -> dict[str, SourceSums]:
        found = self._results.get(SOURCE)
        if found is None:
            return super()._source_sums()
        return judge_source(self.checkpoint, [found[n] for n in range(len(self.checkpoint.files))])

    def _read_files(self, check: TargetCheck, *, commit: bool) -> None:
        found = self._results.get(COMMIT_FILES if commit else FILES)
        if found is None:
            super()._read_files(check, commit=commit)
        else:
            for number in self.files_of(commit=commit):
                check.absorb(found[number])
                check.problems += found[number].problems
        if commit:
            where = self.written
            check.read_missing(where.store, where.files())

    def _gather_again(self, threads: int) -> None:
        found = self._results.get(GATHERING, {})
        for runs in found.values():
            self.again.absorb(runs)
        self.again.run([u for u in self.plan.units if u.index not in found], threads)


class CheckHelper:
    """The part of a worker that another one was elected before: it makes checks when they are open."""

    def __init__(self, full: FullVerification, worker: DistributedWorker, threads: int) -> None:
        """`full` is used for its readers of source and target; the elected worker judges."""
        self._full = full
        self._worker = worker
        self._threads = threads
        self._helped: set[str] = set()

    @property
    def is_done(self) -> bool:
        """True if no more checks will be opened."""
        return PUBLISHED in self._helped

    def help(self) -> bool:
        """Make the checks that the last look found open; False if none are.

        Raises:
            SessionLostError: The session has ended.
            ReshardError: A check could not be made, or the conversion cannot succeed.
        """
        for name in (SEALED, PUBLISHED):
            if name in self._helped:
                continue
            manifest = self._manifest(self._worker.member.opened(name))
            if manifest is None:
                continue
            self._helped.add(name)
            FullChecks(self._full, manifest, name, self._worker.member.check).take_part(self._worker, self._threads)
            return True
        return False

    def _manifest(self, text: bytes | None) -> Manifest | None:
        """The manifest in the text that opened checks; None if it is not one of this plan."""
        try:
            manifest = None if text is None else parse_manifest(text)
        except IntegrityError:
            return None
        plan = self._full.plan
        if manifest is None or manifest.plan_digest != plan.digest:
            return None
        return manifest if [f.path for f in manifest.files] == [f.path for f in plan.files] else None

    def follow(self, lease_s: float) -> None:
        """Help until the commit files were checked, or until no worker has had the commit for a lease.

        Raises:
            SessionLostError: The session has ended.
            ReshardError: As `help`.
        """
        turns, seen_at = 0, time.monotonic()
        while not self.is_done:
            self._worker.member.check()
            if self._worker.is_committed_by_another():
                seen_at = time.monotonic()
            if self.help():
                turns, seen_at = 0, time.monotonic()
            elif time.monotonic() - seen_at > lease_s:
                return
            self._worker.member.wait(turns)
            turns += 1
