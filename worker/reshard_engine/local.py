"""The engine's operations for the client package: inspect, plan, convert, verify, diff, clean and others.

The entry point `reshard.engine` loads the object `engine`. Each method imports the modules that it needs, so that
`reshard inspect` does not wait for the executor, the journal and the comparison.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from reshard.choices import OpaquePolicy, ReplicaPolicy, TargetFormat
from reshard.doctor import Finding
from reshard.engine import Engine, Loading, Mount, StateDicts
from reshard.errors import RequestError, ReshardError, SourceError, printable
from reshard.extras import install_line
from reshard.models.jobs import (
    CleanReport,
    ConvertRequest,
    ConvertResult,
    FileEntry,
    Inspection,
    PlanSummary,
    Progress,
    SlimResult,
    VerifyReport,
    WorkShare,
)
from reshard.models.reports import (
    DiffOptions,
    DiffReport,
    FingerprintOptions,
    FingerprintReport,
    LayoutPair,
    LayoutPicture,
    PrunePolicy,
    PruneReport,
    PushResult,
    RunListing,
    SealCheck,
    SealReport,
    Signing,
)
from reshard.models.resume import RunLaunch
from reshard.options import Options, SourceSpec
from reshard.shared_work import SharedWork
from reshard.wire_model import invalid
from reshard_engine.formats.registry import rules_of
from reshard_engine.formats.sources import find_checkpoint, recognised
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.operations.inspection import describe
from reshard_engine.operations.runs.pruning import prune
from reshard_engine.operations.runs.steps import (
    RunDirectoryError,
    named_checkpoint,
    naming_newest,
    run_around,
    steps_of,
)
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import WRITABLE_URLS, open_location, service_store
from reshard_engine.storage.texts import write_text
from reshard_engine.storage.urls import refuse_upload, scheme_of

if TYPE_CHECKING:
    from reshard_engine.integrity.manifest import Manifest
    from reshard_engine.operations.conversion import Conversion
    from reshard_engine.operations.uploading import Upload
    from reshard_engine.operations.virtual.checkpoint import VirtualCheckpoint


@contextmanager
def _torch_wanted() -> Generator[None]:
    """Name what installs torch, for an import that lacks it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise RequestError(
            "request.engine_missing",
            f"tensors need {error.name!r}, which is not installed",
            fix=install_line("worker"),
        ) from None


def _sealing() -> ModuleType:
    """The module of signed statements."""
    from reshard_engine.operations.proof import sealing

    return sealing


def _configured_signing() -> Signing | None:
    """The key with which every conversion of this process is signed; None if its environment names none."""
    key = os.environ.get("RESHARD_SIGNING_KEY")
    return Signing(key=key, public_key=os.environ.get("RESHARD_SIGNING_PUBLIC_KEY")) if key else None


def _uploading() -> ModuleType:
    """The module of uploads to the hub.

    Raises:
        RequestError: `request.unknown_scheme` without the hub's client.
    """
    service_store("hf")
    from reshard_engine.operations import uploading

    return uploading


def _is_hub(url: str) -> bool:
    return scheme_of(url) == "hf"


def _planned(request: ConvertRequest) -> Conversion | Upload:
    """A conversion, read and planned, into wherever its target is."""
    if _is_hub(request.target):
        return _uploading().Upload.prepare(request)
    from reshard_engine.operations.conversion import Conversion

    return Conversion.prepare(request)


class LocalEngine(Engine):
    """The engine in this process. `reshard.engine.Engine` says what its operations do."""

    def inspect(self, source: SourceSpec, *, compare: bool = False, launch: RunLaunch | None = None) -> Inspection:
        ledger = OpaqueLedger(OpaquePolicy.KEEP)
        place = open_location(source.url, source.profile)
        try:
            checkpoint = named_checkpoint(place, source, ledger)
        except RunDirectoryError as error:
            step = source.model_copy(update={"url": error.newest_url})
            described = self.inspect(step, compare=compare, launch=launch)
            warning = f"{error.message}: this describes it"
            return described.model_copy(update={"warnings": (warning, *described.warnings), "newest": step.url})
        if compare:
            from reshard_engine.execute.checks.source import check_agreements

            check_agreements(checkpoint, ReplicaPolicy.ERROR, lambda: None)
        found = describe(checkpoint, source, launch)
        return found.model_copy(update={"compared": len(checkpoint.agreements)}) if compare else found

    def format_at(self, directory: str) -> str | None:
        found = recognised(open_location(directory, None))
        return None if found is None else found.name

    def picture(self, source: SourceSpec, tensor: str | None = None) -> LayoutPicture:
        from reshard_engine.operations.layout_map import picture_of

        ledger = OpaqueLedger(OpaquePolicy.KEEP)
        return picture_of(named_checkpoint(open_location(source.url, source.profile), source, ledger), tensor)

    def planned_pictures(self, request: ConvertRequest, tensor: str | None = None) -> LayoutPair:
        from reshard_engine.operations.layout_map import planned_pictures

        return planned_pictures(_planned(request), tensor)

    def plan(self, request: ConvertRequest) -> PlanSummary:
        from reshard_engine.operations.saved_plans import pinned_files

        conversion = _planned(request)
        plan, checkpoint = conversion.plan, conversion.checkpoint
        return PlanSummary(
            digest=plan.digest,
            source_format=checkpoint.format,
            source_url=checkpoint.url,
            tag=checkpoint.tag,
            target=conversion.target.url,
            to=request.to,
            tensors=len(checkpoint.shard_map.tensors),
            files=tuple(FileEntry(path=f.path, size_bytes=f.size_bytes) for f in plan.files),
            units=len(plan.units),
            read_bytes=plan.read_bytes,
            write_bytes=plan.write_bytes,
            peak_memory_bytes=conversion.peak_bytes,
            warnings=(*plan.warnings, *conversion.pointer_warnings()),
            not_carried=plan.not_carried,
            reshard_version=version("reshard"),
            source_digest=plan.source_digest,
            layout_digest=plan.layout_digest,
            content_digest=plan.content_digest,
            source_files=pinned_files(plan),
        )

    def open_layout(self, request: ConvertRequest, *, exact_crcs: bool, compare: bool) -> VirtualCheckpoint:
        from reshard_engine.operations.virtual.checkpoint import VirtualCheckpoint

        return VirtualCheckpoint.prepare(request, exact_crcs=exact_crcs, compare=compare)

    def mount(
        self,
        layout: Any,
        directory: str,
        *,
        allow_other: bool = False,
        on_error: Callable[[ReshardError], None],
    ) -> Mount:
        from reshard_engine.operations.virtual.mounting import mount

        # Layouts are those that `open_layout` of this engine made.
        return mount(layout, directory, allow_other=allow_other, on_error=on_error)

    def convert(
        self,
        request: ConvertRequest,
        *,
        work: SharedWork | None = None,
        signing: Signing | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_plan: Callable[[str, int], None] | None = None,
        abandoned: Collection[str] = (),
    ) -> ConvertResult:
        from reshard_engine.operations.conversion import Conversion, Ownership

        if on_progress is not None:
            on_progress(Progress(phase="planning"))
        signing = signing or _configured_signing()
        if _is_hub(request.target):
            if work is not None or on_plan is not None:
                refuse_upload(request.target)
            if signing is not None:
                raise RequestError(
                    "request.invalid",
                    "certificates lie beside a target, and nothing lies beside a repository of the hub",
                    fix="convert to a directory that is signed, and add --push",
                )
            return _uploading().upload(request, on_progress=on_progress, should_stop=should_stop)

        def convert(on_commit: Callable[[Manifest], None] | None = None) -> ConvertResult:
            ownership = Ownership(on_plan, frozenset(abandoned), on_commit)
            if work is None:
                conversion = Conversion.prepare(request, ownership=ownership)
                return conversion.run(on_progress=on_progress, should_stop=should_stop)
            from reshard_engine.operations.shared_conversion import convert_shared

            return convert_shared(request, work, on_progress=on_progress, should_stop=should_stop, ownership=ownership)

        # Of workers that share a conversion, the first one signs for all.
        if signing is None or (work is not None and work.number):
            return convert()
        return _sealing().convert_sealed(request, signing, convert, on_progress=on_progress, should_stop=should_stop)

    def help(
        self,
        request: ConvertRequest,
        work: SharedWork,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> WorkShare:
        from reshard_engine.operations.shared_conversion import help_convert

        if on_progress is not None:
            on_progress(Progress(phase="planning"))
        return help_convert(request, work, on_progress=on_progress, should_stop=should_stop)

    def convert_into(
        self,
        request: ConvertRequest,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> ConvertResult:
        from reshard_engine.operations.into_directory import convert_into

        return convert_into(request, on_progress=on_progress, should_stop=should_stop)

    def slim(
        self,
        source: SourceSpec,
        target: str,
        *,
        overwrite: bool = False,
        target_profile: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> SlimResult:
        from reshard_engine.operations.cleaning import slim

        # Foreign objects are kept as data and never executed: the source contains them already.
        try:
            request = ConvertRequest(
                source=source,
                target=target,
                to=TargetFormat.SLIM,
                overwrite=overwrite,
                opaque=OpaquePolicy.KEEP,
                target_profile=target_profile,
            )
        except ValidationError as error:
            raise invalid(error, {"target": "DST", "url": "SRC"}) from None
        return slim(request, on_progress=on_progress, should_stop=should_stop)

    def state_dicts(self) -> StateDicts:
        with _torch_wanted():
            from reshard_engine.operations import state_dicts
        return state_dicts

    def storage_reader(self, request: ConvertRequest, *, compare: bool) -> Any:
        with _torch_wanted():
            from reshard_engine.operations.virtual.dcp_reader import reader
        return reader(request, compare=compare)

    def loading(self) -> Loading:
        with _torch_wanted():
            from reshard_engine.operations.virtual import loading
        return loading

    def verify(self, target: str, *, profile: str | None = None, sample: float | None = None) -> VerifyReport:
        from reshard_engine.operations.verification import verify_target

        location = open_location(target, profile)
        if location.store.stat(location.child(MANIFEST_NAME).path) is None:
            try:
                with naming_newest(location, None):
                    location = find_checkpoint(location, None).location
            except SourceError as error:
                if error.code in ("source.not_found", "checkpoint.bad_latest"):
                    raise
        return verify_target(location, sample=sample)

    def diff(
        self,
        a: SourceSpec,
        b: SourceSpec,
        options: DiffOptions,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> DiffReport:
        from reshard_engine.operations.diff import diff_checkpoints

        rules = rules_of(options.options)
        left, right = (
            named_checkpoint(open_location(s.url, s.profile), s, OpaqueLedger(OpaquePolicy.KEEP), rules) for s in (a, b)
        )
        return diff_checkpoints(left, right, options, on_progress=on_progress, should_stop=should_stop)

    def fingerprint(
        self,
        source: SourceSpec,
        options: FingerprintOptions,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FingerprintReport:
        from reshard_engine.operations.proof.fingerprint import fingerprint_of

        place, ledger = open_location(source.url, source.profile), OpaqueLedger(OpaquePolicy.KEEP)
        checkpoint = named_checkpoint(place, source, ledger, rules_of(options.options))
        return fingerprint_of(checkpoint, options, on_progress=on_progress, should_stop=should_stop)

    def seal(
        self,
        source: SourceSpec,
        signing: Signing,
        options: Options,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> SealReport:
        return _sealing().seal(source, signing, options, on_progress=on_progress, should_stop=should_stop)

    def push(self, directory: str, url: str, *, overwrite: bool = False) -> PushResult:
        return _uploading().push(directory, url, overwrite=overwrite)

    def verify_sealed(self, source: SourceSpec, certificates: Sequence[str], keys: Sequence[str]) -> SealCheck:
        return _sealing().verify_sealed(source, certificates, keys)

    def clean(
        self, target: str, *, profile: str | None = None, dry_run: bool = False, idle: bool = False
    ) -> CleanReport:
        from reshard_engine.operations.cleaning import IDLE_S, clean_target

        idle_s = 0.0 if idle else IDLE_S
        return clean_target(open_location(target, profile), dry_run=dry_run, idle_s=idle_s)

    def steps(self, run: str, *, profile: str | None = None) -> RunListing:
        return steps_of(open_location(run, profile))

    def run_around(self, place: str, tag: str | None) -> RunListing | None:
        return run_around(open_location(place, None), tag)

    def prune(
        self,
        run: str,
        *,
        keep_last: int,
        keep_every: int | None = None,
        keep_sealed: bool = False,
        weights_only: bool = False,
        profile: str | None = None,
        only: Collection[str] | None = None,
    ) -> PruneReport:
        policy = PrunePolicy(
            keep_last=keep_last, keep_every=keep_every, keep_sealed=keep_sealed, weights_only=weights_only
        )
        return prune(open_location(run, profile), policy, only=only)

    def checkup(self, places: Sequence[str], profile: str | None = None) -> Iterator[Finding]:
        from reshard_engine.operations.checkup import checkup

        return checkup(places, profile)

    def put_text(self, url: str, text: str) -> None:
        write_text(open_location(url), text.encode())

    def discard(
        self,
        request: ConvertRequest,
        *,
        plans: Collection[str] | None = None,
        idle_s: float = 0.0,
        keep_unfinished: bool = False,
    ) -> None:
        from reshard_engine.operations.conversion import sink_for

        sink = sink_for(open_location(request.target, request.target_profile))
        if sink is None:
            raise RequestError(
                "request.unknown_scheme",
                f"nothing can be written to {printable(request.target)}",
                fix=f"give {WRITABLE_URLS}",
            )
        if plans is None:
            sink.discard_all()
        else:
            sink.discard(plans, idle_s=idle_s, keep_unfinished=keep_unfinished)


engine = LocalEngine()
