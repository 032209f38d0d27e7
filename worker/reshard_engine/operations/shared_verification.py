"""`--verify full` by several workers: the elected worker opens checks and judges, and all workers make the checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from reshard.errors import IntegrityError
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.distributed.check_waves import COMMIT_FILES, FILES, GATHERING, SOURCE
from reshard_engine.distributed.epoch import PUBLISHED, SEALED
from reshard_engine.distributed.worker import DistributedWorker
from reshard_engine.execute.checks.full import FullVerification
from reshard_engine.execute.checks.source import SourceSums, judge_source
from reshard_engine.execute.sinks.protocol import Sink
from reshard_engine.integrity.file_check import TargetCheck
from reshard_engine.integrity.manifest import Manifest, parse_manifest
from reshard_engine.operations.shared_checks import FullChecks
from reshard_engine.plan.model import Plan
from reshard_engine.tensors.layout import TargetLayout


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
        checks = FullChecks(self, manifest, name, self._worker.check)
        if not checks.waves.is_worth_sharing:
            return
        self._worker.open_checks(name, manifest.to_bytes())
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
            EpochLostError: The epoch has ended.
            ReshardError: A check could not be made, or the conversion cannot succeed.
        """
        for name in (SEALED, PUBLISHED):
            if name in self._helped:
                continue
            manifest = self._manifest(self._worker.opened(name))
            if manifest is None:
                continue
            self._helped.add(name)
            FullChecks(self._full, manifest, name, self._worker.check).take_part(self._worker, self._threads)
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
            EpochLostError: The epoch has ended.
            ReshardError: As `help`.
        """
        turns, seen_at = 0, time.monotonic()
        while not self.is_done:
            self._worker.check()
            if self._worker.is_committed_by_another():
                seen_at = time.monotonic()
            if self.help():
                turns, seen_at = 0, time.monotonic()
            elif time.monotonic() - seen_at > lease_s:
                return
            self._worker.wait(turns)
            turns += 1
