"""The engine as the slim package sees it: inspect, plan, convert, verify, discard.

`engine` is what the entry point `reshard.engine` loads. Each method imports what it needs: looking at a checkpoint
needs neither the executor nor the journal nor the comparison, and `reshard inspect` is to answer at once.
"""

from __future__ import annotations

from collections.abc import Callable

from reshard._wire import ConvertOptions, convert_request
from reshard.diffs import DiffOptions, DiffReport
from reshard.errors import RequestError, SourceError, printable
from reshard.local import StateDicts
from reshard.models import (
    CleanReport,
    ConvertRequest,
    ConvertResult,
    FileEntry,
    Inspection,
    OpaquePolicy,
    PlanSummary,
    Progress,
    SlimResult,
    SourceSpec,
    TargetFormat,
    VerifyReport,
)
from reshard.pictures import LayoutPicture
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location


class LocalEngine:
    """Works in this process. See `reshard.local.Engine`."""

    def inspect(self, source: SourceSpec) -> Inspection:
        """What the checkpoint is. Foreign objects are listed, never refused: nothing is written."""
        from reshard_engine.operations.inspection import describe

        ledger = OpaqueLedger(OpaquePolicy.KEEP)
        return describe(read_checkpoint(open_location(source.url, source.profile), source.tag, ledger), source)

    def picture(self, source: SourceSpec, tensor: str | None = None) -> LayoutPicture:
        """Which file holds what; of one tensor, `NAME` or `NAME/STATE`, which part."""
        from reshard_engine.operations.layout_map import picture_of

        ledger = OpaqueLedger(OpaquePolicy.KEEP)
        return picture_of(read_checkpoint(open_location(source.url, source.profile), source.tag, ledger), tensor)

    def plan(self, request: ConvertRequest) -> PlanSummary:
        """What `convert` would do."""
        from reshard_engine.operations.conversion import Conversion

        conversion = Conversion.prepare(request)
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
            warnings=plan.warnings,
            not_carried=plan.not_carried,
        )

    def convert(
        self,
        request: ConvertRequest,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> ConvertResult:
        """Run the conversion to its commit, resuming what an interrupted run left."""
        from reshard_engine.operations.conversion import Conversion

        if on_progress is not None:
            on_progress(Progress(phase="planning"))
        return Conversion.prepare(request).run(on_progress=on_progress, should_stop=should_stop)

    def convert_into(
        self,
        request: ConvertRequest,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> ConvertResult:
        """Convert; files of the same names in a local directory that exists are replaced."""
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
        """Write a torch file, or all files of a directory, anew, each storage as long as its tensors."""
        from reshard_engine.operations.slimming import slim

        # Whoever has the file has its objects: they stay what they are, data that is never executed.
        options: ConvertOptions = {"overwrite": overwrite, "opaque": OpaquePolicy.KEEP}
        if target_profile is not None:
            options["target_profile"] = target_profile
        request = convert_request(source, target, TargetFormat.SLIM, options, flags={"target": "DST", "url": "SRC"})
        return slim(request, on_progress=on_progress, should_stop=should_stop)

    def state_dicts(self) -> StateDicts:
        """Weights as torch tensors."""
        try:
            from reshard_engine.operations import state_dicts
        except ModuleNotFoundError as error:
            raise RequestError(
                "request.engine_missing",
                f"tensors need {error.name!r}, which is not installed",
                fix="pip install torch",
            ) from error
        return state_dicts

    def verify(self, target: str, *, profile: str | None = None, sample: float | None = None) -> VerifyReport:
        """Re-read a target against its manifest; with `sample` only a random fraction of its bytes.

        A directory without a manifest means the checkpoint that its `latest` names, as it does to `inspect` and `diff`.
        """
        from reshard_engine.formats.sources import find_checkpoint
        from reshard_engine.integrity.manifest import MANIFEST_NAME
        from reshard_engine.operations.verification import verify_target

        location = open_location(target, profile)
        if location.store.stat(location.child(MANIFEST_NAME).path) is None:
            try:
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
        """Compare two checkpoints by logical tensor. Foreign objects are compared as data, never refused."""
        from reshard_engine.formats.registry import rules_of
        from reshard_engine.operations.diff.comparison import diff_checkpoints

        if on_progress is not None:
            on_progress(Progress(phase="planning"))
        rules = rules_of(options)
        left, right = (
            read_checkpoint(open_location(s.url, s.profile), s.tag, OpaqueLedger(OpaquePolicy.KEEP), rules)
            for s in (a, b)
        )
        return diff_checkpoints(left, right, options, on_progress=on_progress, should_stop=should_stop)

    def clean(
        self, target: str, *, profile: str | None = None, dry_run: bool = False, idle: bool = False
    ) -> CleanReport:
        """Remove what unfinished conversions into a target left; `idle`: the caller knows that nobody is at work."""
        from reshard_engine.operations.cleaning import IDLE_S, clean_target

        idle_s = 0.0 if idle else IDLE_S
        return clean_target(open_location(target, profile), dry_run=dry_run, idle_s=idle_s)

    def discard(self, request: ConvertRequest) -> None:
        """Remove what an unfinished conversion into this target left."""
        from reshard_engine.operations.conversion import sink_for

        sink = sink_for(open_location(request.target, request.target_profile))
        if sink is None:
            raise RequestError("request.unknown_scheme", f"nothing can be written to {printable(request.target)}")
        sink.discard_all()


engine = LocalEngine()
