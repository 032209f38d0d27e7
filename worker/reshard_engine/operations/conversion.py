"""One conversion from request to commit: read, lay out, plan, execute, verify, publish."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from reshard.choices import RECORDS, OverflowPolicy, ServerCopyPolicy, VerifyLevel
from reshard.errors import (
    IntegrityError,
    JobError,
    RequestError,
    ReshardError,
    SourceError,
    StorageError,
    counted,
    printable,
)
from reshard.models.jobs import (
    ConvertRequest,
    ConvertResult,
    FileEntry,
    Progress,
    SourceCheck,
)
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.distributed.segments import FormerWork
from reshard_engine.execute.casts.placing import default_kernel
from reshard_engine.execute.checks.commit import (
    build_manifest,
    casts_of,
    prove_complete,
    prove_source_unchanged,
    prove_structure,
    with_pins,
)
from reshard_engine.execute.checks.full import FullVerification
from reshard_engine.execute.checks.source import check_agreements, check_source, complete_records, source_check
from reshard_engine.execute.executor import Executor, stop_check
from reshard_engine.execute.journal import UnitRecord
from reshard_engine.execute.server_copy import ServerCopier
from reshard_engine.execute.sinks import sink_at
from reshard_engine.execute.sinks.protocol import Sink
from reshard_engine.formats.registry import check_request, known_files, laid_out
from reshard_engine.integrity.manifest import MANIFEST_NAME, Manifest, read_manifest
from reshard_engine.operations.pointers import PointerMove, has_save_directory, pointer_move, refuse_earlier
from reshard_engine.operations.requested import requested_checkpoint
from reshard_engine.operations.saved_plans import explained, refuse_other_plan
from reshard_engine.operations.verification import verify_target
from reshard_engine.pickles.nodes import collector_paused
from reshard_engine.plan.budget import peak_bytes, threads_within
from reshard_engine.plan.model import Plan
from reshard_engine.plan.planner import plan_conversion
from reshard_engine.spans import begin_span
from reshard_engine.storage.locations import WRITABLE_URLS, Location, open_location
from reshard_engine.storage.protocol import parent_and_name, save_directory
from reshard_engine.storage.urls import is_within, refuse_writing_outside, scheme_of
from reshard_engine.tensors.layout import Pointer, TargetLayout

# Recognises a target that an earlier run of the same conversion has finished.


def finished_manifest(target: Location, plan: Plan) -> Manifest | None:
    """The manifest of the target if it is this plan's result, unchanged since its commit, with the pins of its files.

    They are those of the commit, or those of files that were read now and have the same bytes.
    """
    try:
        manifest = read_manifest(target)
    except IntegrityError:
        return None  # the target is not an output of reshard, or is damaged: `--overwrite` decides
    if manifest is None or manifest.content_digest != plan.content_digest:
        return None
    listing = target.files()
    listing.pop(MANIFEST_NAME, None)
    sizes = {path: info.size_bytes for path, info in listing.items()}
    if sizes != {f.path: f.size_bytes for f in manifest.files}:
        return None
    if all(listing[f.path].pin == f.pin for f in manifest.files):
        return manifest
    # A worker that was paused and lost its run may have written the same bytes once more, after the commit.
    if not verify_target(target).ok:
        return None
    files = tuple(f.model_copy(update={"pin": listing[f.path].pin}) for f in manifest.files)
    return manifest.model_copy(update={"files": files})


# Conversions of a service: it records which plans its jobs may have begun to write, and gives some of them up.


@dataclass(frozen=True)
class Ownership:
    """Facts about the plans that write a target, between a conversion and its caller.

    Attributes:
        on_plan: Called with the digest of the plan and the bytes that it writes, before anything is written. It raises
            to stop the conversion.
        abandoned: Digests of plans whose conversions have ended without a result and will not go on.
        on_commit: Called with the manifest of the finished target: a caller that signs the target compares it.
    """

    on_plan: Callable[[str, int], None] | None = None
    abandoned: frozenset[str] = frozenset()
    on_commit: Callable[[Manifest], None] | None = None

    @property
    def is_recorded(self) -> bool:
        """True if the caller keeps a record of the plan, and removes by it what the conversion leaves."""
        return self.on_plan is not None

    def take(self, plan: Plan, sink: Sink) -> None:
        """Have the plan recorded, then remove what abandoned conversions of other plans left."""
        if self.on_plan is not None:
            self.on_plan(plan.digest, plan.write_bytes)
        others = self.abandoned - {plan.digest}
        if others:
            sink.discard(others)

    def report(self, manifest: Manifest) -> None:
        """Hand the manifest of the finished target to the caller."""
        if self.on_commit is not None:
            self.on_commit(manifest)


# One conversion, from its plan to its commit.

REMOTE_THREADS = 8
"""Units in flight if they wait for latency and not for the processor."""


def sink_for(target: Location) -> Sink | None:
    """The sink for a target's location; None for stores that are read-only."""
    if not all(parent_and_name(target.path)):
        raise RequestError(
            "request.invalid",
            f"{printable(target.url)} is not a directory that can be created",
            fix="name one below it",
        )
    return sink_at(target, known=known_files())


@contextmanager
def damage_discarded(target: Location, plan: Plan) -> Generator[None]:
    """Remove what a conversion has written if a record of its source does not match its CRC-32.

    Finished units may have bytes of the record, and no journal records which: the next attempt must keep none of them.
    """
    try:
        yield
    except SourceError as error:
        if error.code == "zip.crc" and (sink := sink_for(target)) is not None:
            with suppress(ReshardError):  # the caller already gets the first failure
                sink.discard({plan.digest})
        raise


def _refuse_overlap(target: Location, sink: Sink, checkpoint: Checkpoint, *, wanted: str) -> None:
    """Refuse a target that equals, contains, or lies in the checkpoint; local links are resolved on both sides.

    Results of `ensure` lie in a hidden folder of the checkpoint's directory, so that they are removed with it.
    """
    places = {checkpoint.url}
    single = len(checkpoint.files) == 1 and checkpoint.url == checkpoint.files[0].objects[0].path
    if not single:
        # A base model's files lie elsewhere than the checkpoint.
        there = [f for f in checkpoint.files if f.store.scheme == target.store.scheme]
        places |= sink.places_of(i.path for f in there for i in f.objects)
    for place in places:
        if is_within(target.url, f"{place}/{RECORDS}"):
            continue
        if is_within(target.url, place) or is_within(place, target.url):
            raise RequestError(
                "request.overlap",
                f"the target {printable(target.url)} overlaps the checkpoint {printable(place)}",
                fix=f"write beside it, such as {printable(checkpoint.url)}_{wanted}",
            )


def _copied_from(sink: Sink, checkpoint: Checkpoint, request: ConvertRequest) -> set[int]:
    """The numbers of the source files that the target's store can copy itself."""
    if request.server_copy is ServerCopyPolicy.NEVER:
        return set()
    return {number for number, file in enumerate(checkpoint.files) if sink.copies_from(file.store)}


@dataclass(frozen=True)
class Conversion:
    """A planned conversion, ready to run."""

    request: ConvertRequest
    checkpoint: Checkpoint
    layout: TargetLayout
    plan: Plan
    target: Location
    sink: Sink
    planning: Mapping[str, float]
    """Seconds of `plan`."""
    ownership: Ownership = field(default_factory=Ownership)
    _decided: list[Pointer | None] = field(default_factory=list[Pointer | None], init=False)
    """The pointer to write, once that is decided."""

    @classmethod
    @collector_paused()
    def prepare(cls, request: ConvertRequest, *, ownership: Ownership | None = None) -> Conversion:
        """Read the source's metadata and plan; the target is not touched.

        Raises:
            ReshardError: Any problem of the request or of the source.
        """
        started = time.monotonic()
        check_request(request)
        source = open_location(request.source.url, request.source.profile)
        target = open_location(request.target, request.target_profile, beside=source)
        sink = sink_for(target)
        if sink is None:
            raise RequestError(
                "request.unknown_scheme",
                f"{scheme_of(request.target)}:// can only be read",
                fix=f"write to {WRITABLE_URLS}",
            )
        try:
            checkpoint = requested_checkpoint(request, source)
        except SourceError as error:
            raise explained(error, request, source) from None
        _refuse_overlap(target, sink, checkpoint, wanted=request.to)
        layout = laid_out(checkpoint, request, name=save_directory(target.path, checkpoint.tag)[1])
        if layout.pointer is not None and request.pointer is not False:
            why = "the target ends with the source's tag, so `latest` stands in its save directory"
            refuse_writing_outside(layout.pointer.directory(target.url), why)
        checkpoint = replace(checkpoint, shard_map=layout.map_over(checkpoint.shard_map))
        copied_from = _copied_from(sink, checkpoint, request)
        plan = plan_conversion(checkpoint, layout, request, min_part_bytes=sink.min_part_bytes, copied_from=copied_from)
        refuse_other_plan(request.plan, plan)
        planning = {"plan": time.monotonic() - started}
        return cls(request, checkpoint, layout, plan, target, sink, planning, ownership or Ownership())

    @property
    def pointer(self) -> Pointer | None:
        """The pointer to write after the commit: if the request asks for it, or the target has a save directory.

        It is decided once, before anything is written. It is not part of the plan: the same target may be finished, or
        resumed, when other things lie beside it.
        """
        # No `cached_property`: under Python 3.11 all conversions of a process would share its lock.
        if not self._decided:
            found, asked = self.layout.pointer, self.request.pointer
            wanted = found is not None and (has_save_directory(self.target, found) if asked is None else asked)
            self._decided.append(found if wanted else None)
        return self._decided[0]

    @property
    def threads(self) -> int:
        """Number of units that run in parallel."""
        return units_at_once(self.request, self.plan, waits=self.sink.calls_wait or not self.checkpoint.is_local)

    @property
    def peak_bytes(self) -> int:
        """Largest memory of the run in bytes, without the interpreter."""
        return peak_bytes(self.plan.metadata_bytes, self.threads, [u.length_bytes for u in self.plan.units])

    def run(
        self, *, on_progress: Callable[[Progress], None] | None, should_stop: Callable[[], bool] | None
    ) -> ConvertResult:
        """Execute, verify and commit; a finished, unchanged target is recognised and left alone.

        Raises:
            ReshardError: The conversion failed. The journal stays, so that the same request resumes.
        """
        if (done := self.finished_before(on_progress, should_stop)) is not None:
            return done
        with damage_discarded(self.target, self.plan):
            try:
                return self._run(on_progress, should_stop)
            except StorageError as error:
                if error.code != "storage.no_space" or self.ownership.is_recorded:
                    raise
                raise StorageError(
                    error.code,
                    f"{error.message}; finished work is kept, and nothing exists at {printable(self.target.url)} yet"
                    if not self.request.overwrite
                    else f"{error.message}; finished work is kept",
                    fix=error.fix + f"; to give it up: reshard clean {shlex.quote(self.target.url)}",
                ) from error
            except RequestError as error:
                # Another process may have finished this conversion since the last check.
                if error.code in {"request.target_exists", "request.target_busy"} and (
                    done := self.finished_by_others()
                ):
                    return done
                raise
            except JobError:
                # The caller may have stopped this process because another one owns the conversion, and has ended it.
                self.sink.suspect()
                raise
            finally:
                self.sink.close()

    def examine(self) -> None:
        """Refuse a target that exists, that another process is writing, or that would move `latest` back.

        Raises:
            RequestError: `request.target_exists`, `request.target_busy`.
        """
        self.sink.examine(self.plan, overwrite=self.request.overwrite)
        refuse_earlier(self._pointer_move(), overwrite=self.request.overwrite)

    def pointer_warnings(self) -> tuple[str, ...]:
        """Warnings about the file beside the target, such as `latest`. They tell what is there before the commit.

        Whoever plans need not be allowed to read the target: then there are none.
        """
        try:
            move = self._pointer_move()
        except StorageError:
            return ()
        return () if move is None else (str(move),)

    def _pointer_move(self) -> PointerMove | None:
        return pointer_move(self.target, self.pointer, self.checkpoint)

    def finished_before(
        self, on_progress: Callable[[Progress], None] | None, should_stop: Callable[[], bool] | None
    ) -> ConvertResult | None:
        """The result if the target is already this conversion's; it is checked as the request asks."""
        if self.request.overwrite:
            self.sink.look(self.plan)
        finished = finished_manifest(self.target, self.plan)
        if finished is not None and self._still_holds(finished, on_progress, should_stop):
            return self._already_done(finished)
        return None

    def finished_by_others(self, *, tidy: bool = True) -> ConvertResult | None:
        """The result if another process has committed this conversion meanwhile.

        Args:
            tidy: Also do what follows a commit, in case that the process died before it.
        """
        finished = finished_manifest(self.target, self.plan)
        return None if finished is None else self._already_done(finished, tidy=tidy)

    def _run(
        self, on_progress: Callable[[Progress], None] | None, should_stop: Callable[[], bool] | None
    ) -> ConvertResult:
        plan, seconds = self.plan, dict(self.planning)
        clock = time.monotonic()
        self.ownership.take(plan, self.sink)
        self.examine()
        end_span = begin_span("agreements")
        disagreements = check_agreements(self.checkpoint, self.request.replicas, stop_check(should_stop))
        end_span()
        clock = _lap(seconds, "agreement", clock)
        if on_progress is not None:
            # The output of an earlier attempt is read again now, which is not a part of planning.
            on_progress(Progress(phase="running", bytes_total=plan.write_bytes, units_total=len(plan.units)))
        former = FormerWork(self.sink.meeting_place(plan))
        done = self.sink.begin(plan, overwrite=self.request.overwrite, earlier=former)
        executor = self.executor(done, on_progress, should_stop)
        executor.progress.report("running", force=True)
        executor.run([u for u in plan.units if not u.commit], self.threads, phase="running")
        _lap(seconds, "run", clock)
        return self.conclude(executor, set(done), disagreements, seconds, should_stop)

    def executor(
        self,
        done: Mapping[int, UnitRecord],
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> Executor:
        """The executor of the plan's units, without those that are done."""
        plan, sink = self.plan, self.sink
        return Executor(
            self.checkpoint,
            self.layout,
            plan,
            sink,
            done=done,
            on_progress=on_progress,
            should_stop=should_stop,
            copier=ServerCopier(self.checkpoint, plan, sink) if plan.server_copies else None,
        )

    def conclude(
        self,
        executor: Executor,
        done: Container[int],
        disagreements: Sequence[str],
        seconds: dict[str, float],
        should_stop: Callable[[], bool] | None,
        *,
        alone: bool = True,
        verifying: Callable[..., FullVerification] = FullVerification,
    ) -> ConvertResult:
        """Run what no worker has run yet, verify, and commit.

        Args:
            executor: The executor, which has the records of all units that were run.
            done: The units that an earlier attempt ran.
            disagreements: Between the replicas of the source.
            seconds: The time that each phase took so far.
            should_stop: As in `run`.
            alone: True if no other worker ran units of this attempt.
            verifying: Makes what verifies source and output with `--verify full`.

        Raises:
            ReshardError: The target is not what was planned, or it cannot be committed.
        """
        plan, threads, clock = self.plan, self.threads, time.monotonic()
        executor.run([u for u in plan.units if not u.commit], threads, phase="running")
        executor.progress.report("verifying", force=True)
        self.sink.seal(executor.records)
        full = None
        if self.request.verify is VerifyLevel.FULL:
            full = verifying(self.checkpoint, self.layout, plan, self.sink, should_stop=stop_check(should_stop))
            full.before_publishing(lambda: self._manifest(executor, disagreements))
        self._prove_structure(executor, commit=False)
        prove_source_unchanged(self.checkpoint)
        clock = _lap(seconds, "verify", clock)
        executor.progress.report("committing", force=True)
        executor.run([u for u in plan.units if u.commit], threads, phase="committing")
        prove_complete(plan, executor.records)
        if full is None:
            # Units that were run last may complete a record, too. What an earlier attempt has read of a record is not
            # read again, so that the rest of it is read here.
            every = alone and executor.progress.resumed_bytes > 0
            complete_records(self.checkpoint, executor.source_reads, stop_check(should_stop), every=every)
        with collector_paused():
            there = self.sink.publish(executor.records)
            self._prove_structure(executor, commit=True)
            manifest = with_pins(self._manifest(executor, disagreements), {i.path: i.pin for i in there})
        if full is not None:
            manifest = full.after_publishing(manifest, threads)
        beside = self.pointer_warnings()
        self.sink.commit(manifest.to_bytes(), self.pointer)
        self.ownership.report(manifest)
        _lap(seconds, "commit", clock)
        executor.progress.report("done", force=True)
        return ConvertResult(
            target=self.target.url,
            to=self.request.to,
            files=tuple(FileEntry(path=f.path, size_bytes=f.size_bytes) for f in plan.files),
            read_bytes=sum(r.read_bytes for k, r in executor.records.items() if k not in done),
            write_bytes=plan.write_bytes,
            server_copied_bytes=executor.copied_bytes,
            resumed_bytes=executor.progress.resumed_bytes,
            seconds=seconds,
            plan_digest=plan.digest,
            # Notes on devices and on files beside the target do not describe it, so they are not in the manifest.
            warnings=(*manifest.warnings, *beside, *default_kernel().take_warnings()),
            not_carried=manifest.not_carried,
            casts=manifest.casts,
            verification=manifest.verification,
            source_check=source_check(executor.source_reads) if full is None else _full_check(manifest),
        )

    def _prove_structure(self, executor: Executor, *, commit: bool) -> None:
        try:
            prove_structure(self.sink.written, self.layout.files, executor.records, commit=commit)
        except IntegrityError as error:
            self.sink.withdraw(error.details["paths"])
            raise

    def _manifest(self, executor: Executor, disagreements: Sequence[str]) -> Manifest:
        return build_manifest(
            self.checkpoint,
            self.plan,
            self.layout.files,
            executor.records,
            pointer=None if self.pointer is None else self.pointer.name,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            warnings=(*self.plan.warnings, *disagreements, *overflow_warnings(self.plan, executor.records)),
        )

    def _still_holds(
        self,
        manifest: Manifest,
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> bool:
        """True if a finished target can be kept as it is.

        Its files still have the pins of its commit. `--overwrite` also reads them, to repair a damaged target, and
        `--verify full` reads them and the source.

        Raises:
            IntegrityError: `integrity.mismatch` if the target is damaged and may not be overwritten.
        """
        full = self.request.verify is VerifyLevel.FULL and manifest.verification is not VerifyLevel.FULL
        if not full and not self.request.overwrite:
            return True
        if on_progress is not None:
            on_progress(Progress(phase="verifying"))
        if full:
            check_source(self.checkpoint, stop_check(should_stop))
            prove_source_unchanged(self.checkpoint)
        report = verify_target(self.target, should_stop=stop_check(should_stop))
        if not report.ok and not self.request.overwrite:
            raise IntegrityError(
                "integrity.mismatch",
                f"{printable(self.target.url)} is finished, but damaged: {report.problems[0].problem}",
                fix="convert again with --overwrite",
            )
        return report.ok

    def _already_done(self, manifest: Manifest, *, tidy: bool = True) -> ConvertResult:
        if tidy:
            wanted = manifest.pointer is not None or self.request.pointer
            self.sink.finish_after_crash(self.plan, self.layout.pointer if wanted else None)
        self.ownership.report(manifest)
        return ConvertResult(
            target=self.target.url,
            to=self.request.to,
            files=tuple(FileEntry(path=f.path, size_bytes=f.size_bytes) for f in manifest.files),
            read_bytes=0,
            write_bytes=0,
            seconds=dict(self.planning),
            plan_digest=self.plan.digest,
            already_done=True,
            warnings=manifest.warnings,
            not_carried=manifest.not_carried,
            casts=manifest.casts,
            verification=self.request.verify if self.request.verify is VerifyLevel.FULL else manifest.verification,
        )


def units_at_once(request: ConvertRequest, plan: Plan, *, waits: bool) -> int:
    """Number of units to run in parallel, as far as memory allows. `waits`: calls wait for a network."""
    wanted = request.threads
    if wanted is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = max(cores, REMOTE_THREADS) if waits else cores
    return threads_within(request.memory_limit_bytes, plan.metadata_bytes, plan.chunk_bytes, wanted)


def overflow_warnings(plan: Plan, records: Mapping[int, UnitRecord]) -> list[str]:
    """A warning for each parameter of which elements were too large for the target's type."""
    became = "the largest number of" if plan.on_overflow is OverflowPolicy.SATURATE else "infinite in"
    lost = {c.fqn: c.overflowed for c in casts_of(records) if c.overflowed}
    return [f"{counted(count, 'element')} of {fqn} became {became} the narrower type" for fqn, count in lost.items()]


def _full_check(manifest: Manifest) -> SourceCheck:
    """The comparison of `--verify full`."""
    total = sum(s.size_bytes for s in manifest.sources)
    other = sum(s.uncovered_bytes or 0 for s in manifest.sources)
    return SourceCheck(read_bytes=total, matching_bytes=total - other)


def _lap(seconds: dict[str, float], phase: str, clock: float) -> float:
    now = time.monotonic()
    seconds[phase] = now - clock
    return now
