"""One conversion from request to commit: read, lay out, plan, execute, verify, publish."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from reshard.errors import IntegrityError, RequestError, StorageError, printable
from reshard.models import (
    ConvertRequest,
    ConvertResult,
    FileEntry,
    OverflowPolicy,
    Progress,
    ServerCopyPolicy,
    TargetFormat,
    VerifyLevel,
)
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.execute.casts.kernels import default_kernel
from reshard_engine.execute.checks.agreements import check_agreements
from reshard_engine.execute.checks.before_commit import prove_complete, prove_source_unchanged, prove_structure
from reshard_engine.execute.checks.full import FullVerification
from reshard_engine.execute.checks.receipt import build_manifest, casts_of, with_pins
from reshard_engine.execute.checks.source import check_source
from reshard_engine.execute.executor import Executor, stop_check
from reshard_engine.execute.server_copy.copier import CopyingSink, ServerCopier
from reshard_engine.execute.sinks.local import LocalSink
from reshard_engine.execute.sinks.object_store import ObjectSink
from reshard_engine.formats.registry import known_files, writer_of
from reshard_engine.integrity.manifest import MANIFEST_NAME, Manifest, read_manifest
from reshard_engine.operations.requested import requested_checkpoint
from reshard_engine.operations.verification import verify_target
from reshard_engine.pickles.collector import collector_paused
from reshard_engine.plan.budget import peak_bytes, threads_within
from reshard_engine.plan.model import Plan
from reshard_engine.plan.planner import plan_conversion
from reshard_engine.storage.locations import Location, open_location
from reshard_engine.storage.protocol import CopyingStore, ObjectStore, parent_and_name
from reshard_engine.storage.urls import is_within, scheme_of
from reshard_engine.tensors.layout import TargetLayout

REMOTE_THREADS = 8
"""Units in flight where latency, not the processor, is what they wait for."""


def sink_for(target: Location) -> LocalSink | ObjectSink | None:
    """Where a conversion into this location writes; None for stores that can only be read."""
    if not all(parent_and_name(target.path)):
        raise RequestError(
            "request.invalid", f"{printable(target.url)} is no directory that can be created", fix="name one below it"
        )
    if target.store.scheme == "file":
        return LocalSink(target.path, known=known_files())
    if isinstance(target.store, ObjectStore):
        return ObjectSink(target.store, target.path, known=known_files())
    return None


def _refuse_overlap(target: Location, checkpoint: Checkpoint, *, wanted: str) -> None:
    """Refuse a target that is, holds, or lies in the checkpoint; local links are resolved on both sides."""
    places = {checkpoint.url}
    single = len(checkpoint.files) == 1 and checkpoint.url == checkpoint.files[0].objects[0].path
    if target.store.scheme == "file" and not single:
        paths = [i.path for f in checkpoint.files if f.store.scheme == "file" for i in f.objects]
        places |= {os.path.realpath(os.path.dirname(p)) for p in paths} | {
            os.path.dirname(os.path.realpath(p)) for p in paths
        }
    if target.store.scheme != "file":
        # A base model's files lie elsewhere than the checkpoint.
        there = [f for f in checkpoint.files if f.store.scheme == target.store.scheme]
        places |= {f"{f.store.scheme}://{parent_and_name(i.path)[0]}" for f in there for i in f.objects}
    for place in places:
        if is_within(target.url, place) or is_within(place, target.url):
            raise RequestError(
                "request.overlap",
                f"the target {printable(target.url)} overlaps the checkpoint {printable(place)}",
                fix=f"write beside it, such as {printable(checkpoint.url)}_{wanted}",
            )


def _copied_from(target: Location, checkpoint: Checkpoint, request: ConvertRequest) -> set[int]:
    """Numbers of the source files that the target's store can copy from itself."""
    store = target.store
    if request.server_copy is ServerCopyPolicy.NEVER or not isinstance(store, CopyingStore):
        return set()
    return {number for number, file in enumerate(checkpoint.files) if store.reaches(file.store)}


@dataclass(frozen=True)
class Conversion:
    """A planned conversion, ready to run."""

    request: ConvertRequest
    checkpoint: Checkpoint
    layout: TargetLayout
    plan: Plan
    target: Location
    sink: LocalSink | ObjectSink
    planning_s: float

    @classmethod
    @collector_paused()
    def prepare(cls, request: ConvertRequest) -> Conversion:
        """Read the source's metadata and plan; nothing is written.

        Raises:
            ReshardError: Everything that can be wrong with request and source.
        """
        started = time.monotonic()
        if request.layout is not None and request.to is not TargetFormat.ZERO:
            raise RequestError("request.invalid", f"--to {request.to.value} has no layout", fix="--to zero")
        source = open_location(request.source.url, request.source.profile)
        target = open_location(request.target, request.target_profile, beside=source)
        sink = sink_for(target)
        if sink is None:
            raise RequestError(
                "request.unknown_scheme",
                f"{scheme_of(request.target)}:// can be read, not written",
                fix="write to a local path or to s3://",
            )
        checkpoint = requested_checkpoint(request, source)
        _refuse_overlap(target, checkpoint, wanted=request.to.value)
        name = parent_and_name(target.path)[1]
        layout = writer_of(request.to).lay_out(checkpoint, request, name=name)
        checkpoint = replace(checkpoint, shard_map=layout.map_over(checkpoint.shard_map))
        least = target.store.min_part_bytes if isinstance(target.store, ObjectStore) else None
        copied_from = _copied_from(target, checkpoint, request)
        plan = plan_conversion(checkpoint, layout, request, min_part_bytes=least, copied_from=copied_from)
        return cls(request, checkpoint, layout, plan, target, sink, time.monotonic() - started)

    @property
    def wanted_threads(self) -> int:
        """Units to run at once if memory allows."""
        if self.request.threads is not None:
            return self.request.threads
        local = self.target.store.scheme == "file" and self.checkpoint.is_local
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return cores if local else max(cores, REMOTE_THREADS)

    @property
    def threads(self) -> int:
        """Units that run at once."""
        plan = self.plan
        limit_bytes = self.request.memory_limit_bytes
        return threads_within(limit_bytes, plan.metadata_bytes, plan.chunk_bytes, self.wanted_threads)

    @property
    def peak_bytes(self) -> int:
        """Memory that the run will take at most, beside the interpreter."""
        return peak_bytes(self.plan.metadata_bytes, self.threads, [u.length_bytes for u in self.plan.units])

    def run(
        self, *, on_progress: Callable[[Progress], None] | None, should_stop: Callable[[], bool] | None
    ) -> ConvertResult:
        """Execute, verify and commit; a finished, unchanged target is recognised and left alone.

        Raises:
            ReshardError: The journal stays, so that the same request resumes.
        """
        finished = self._finished()
        if finished is not None and self._still_holds(finished, on_progress, should_stop):
            return self._already_done(finished)
        try:
            return self._run(on_progress, should_stop)
        except StorageError as error:
            if error.code != "storage.no_space":
                raise
            raise StorageError(
                error.code,
                f"{error.message}; what is written so far is kept, and nothing is at {printable(self.target.url)} yet"
                if not self.request.overwrite
                else f"{error.message}; what is written so far is kept",
                fix=error.fix + f"; to give it up: reshard clean {shlex.quote(self.target.url)}",
            ) from error
        except RequestError as error:
            # Another process may have finished this very conversion since we looked.
            if error.code in {"request.target_exists", "request.target_busy"} and (finished := self._finished()):
                return self._already_done(finished)
            raise
        finally:
            self.sink.close()

    def _run(
        self, on_progress: Callable[[Progress], None] | None, should_stop: Callable[[], bool] | None
    ) -> ConvertResult:
        plan, seconds = self.plan, {"plan": self.planning_s}
        clock = time.monotonic()
        self.sink.examine(plan, overwrite=self.request.overwrite)
        disagreements = check_agreements(self.checkpoint, self.request.replicas, stop_check(should_stop))
        clock = _lap(seconds, "agreement", clock)
        if on_progress is not None:
            # What an earlier attempt left is read again now: that is no planning any more.
            on_progress(Progress(phase="running", bytes_total=plan.write_bytes, units_total=len(plan.units)))
        done = self.sink.begin(plan, overwrite=self.request.overwrite)
        sink = self.sink
        copier = (
            ServerCopier(self.checkpoint, plan, sink) if plan.server_copies and isinstance(sink, CopyingSink) else None
        )
        executor = Executor(
            self.checkpoint,
            self.layout,
            plan,
            self.sink,
            done=done,
            on_progress=on_progress,
            should_stop=should_stop,
            copier=copier,
        )
        executor.report("running", force=True)
        threads = self.threads
        executor.run([u for u in plan.units if not u.commit], threads, phase="running")
        clock = _lap(seconds, "run", clock)
        executor.report("verifying", force=True)
        self.sink.seal(executor.records)
        full = None
        if self.request.verify is VerifyLevel.FULL:
            saturate = plan.on_overflow is OverflowPolicy.SATURATE
            full = FullVerification(self.layout, self.sink, stop_check(should_stop), saturate=saturate)
            full.read_source(self.checkpoint)
            full.read_back(self._manifest(executor, disagreements), commit=False)
        self._prove_structure(executor, commit=False)
        prove_source_unchanged(self.checkpoint)
        clock = _lap(seconds, "verify", clock)
        executor.report("committing", force=True)
        executor.run([u for u in plan.units if u.commit], threads, phase="committing")
        prove_complete(plan, executor.records)
        with collector_paused():
            there = self.sink.publish(executor.records)
            self._prove_structure(executor, commit=True)
            manifest = with_pins(self._manifest(executor, disagreements), {i.path: i.pin for i in there})
        if full is not None:
            full.read_back(manifest, commit=True)
            full.digest_again(self.checkpoint, plan, threads, manifest)
            manifest = full.certify(manifest)
        self.sink.commit(manifest.to_bytes(), self.layout.pointer)
        _lap(seconds, "commit", clock)
        executor.report("done", force=True)
        return ConvertResult(
            target=self.target.url,
            to=self.request.to,
            files=tuple(FileEntry(path=f.path, size_bytes=f.size_bytes) for f in plan.files),
            read_bytes=sum(r.read_bytes for k, r in executor.records.items() if k not in done),
            write_bytes=plan.write_bytes,
            server_copied_bytes=copier.copied_bytes if copier else 0,
            resumed_bytes=executor.resumed_bytes,
            seconds=seconds,
            plan_digest=plan.digest,
            # What a device could not do is no property of the target, so it is not in the manifest.
            warnings=(*manifest.warnings, *default_kernel().take_warnings()),
            not_carried=manifest.not_carried,
            casts=manifest.casts,
            verification=manifest.verification,
        )

    def _prove_structure(self, executor: Executor, *, commit: bool) -> None:
        try:
            prove_structure(self.sink.written, self.layout.files, executor.records, commit=commit)
        except IntegrityError as error:
            self.sink.withdraw(error.details["paths"])
            raise

    def _overflows(self, executor: Executor) -> list[str]:
        became = "the largest number of" if self.plan.on_overflow is OverflowPolicy.SATURATE else "infinite in"
        lost = {c.fqn: c.overflowed for c in casts_of(executor.records) if c.overflowed}
        return [f"{count} elements of {fqn} became {became} the narrower type" for fqn, count in lost.items()]

    def _manifest(self, executor: Executor, disagreements: Sequence[str]) -> Manifest:
        return build_manifest(
            self.checkpoint,
            self.plan,
            self.layout.files,
            executor.records,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            warnings=(*self.plan.warnings, *disagreements, *self._overflows(executor)),
        )

    def _finished(self) -> Manifest | None:
        """The manifest of the target if it is this plan's result, unchanged since its commit."""
        try:
            manifest = read_manifest(self.target)
        except IntegrityError:
            return None  # what is there is not ours, or damaged: `--overwrite` decides
        if manifest is None or manifest.content_digest != self.plan.content_digest:
            return None
        there = self.target.files()
        there.pop(MANIFEST_NAME, None)
        same = len(there) == len(manifest.files) and all(
            f.path in there and (there[f.path].size_bytes, there[f.path].pin) == (f.size_bytes, f.pin)
            for f in manifest.files
        )
        return manifest if same else None

    def _still_holds(
        self,
        manifest: Manifest,
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> bool:
        """Whether a finished target may be left alone.

        Its files are those of its commit. They are read where more is asked for: by `--overwrite`, which repairs
        what is damaged, and by `--verify full`, which reads the source too.

        Raises:
            IntegrityError: `integrity.mismatch` if it is damaged and may not be overwritten.
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

    def _already_done(self, manifest: Manifest) -> ConvertResult:
        self.sink.finish_after_crash(self.plan, self.layout.pointer)
        return ConvertResult(
            target=self.target.url,
            to=self.request.to,
            files=tuple(FileEntry(path=f.path, size_bytes=f.size_bytes) for f in manifest.files),
            read_bytes=0,
            write_bytes=0,
            seconds={"plan": self.planning_s},
            plan_digest=self.plan.digest,
            already_done=True,
            warnings=manifest.warnings,
            not_carried=manifest.not_carried,
            casts=manifest.casts,
            verification=self.request.verify if self.request.verify is VerifyLevel.FULL else manifest.verification,
        )


def _lap(seconds: dict[str, float], phase: str, clock: float) -> float:
    now = time.monotonic()
    seconds[phase] = now - clock
    return now
