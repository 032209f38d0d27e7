"""Wire models of the API, of the CLI's `--json` and of the worker's pipe. They are frozen and versioned.

Units are in the names (`_bytes`, `_s`); URLs are strings because `s3://bucket/key` is not a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import InitErrorDetails, PydanticCustomError, to_jsonable_python

from reshard.choices import JobKind, JobState, VerifyLevel, ZeroStage
from reshard.errors import RequestError, counted, printable
from reshard.installed_formats import (
    OfInstalledFormats,
    TargetName,
    default_options,
    option_fields,
    present_places,
    takes_card,
)
from reshard.models.resume import ResumeLayout, RunLaunch
from reshard.option import option_of
from reshard.options import (
    ConversionOptions,
    Options,
    RunLayout,
    SourceSpec,
    WeightsOptions,
    former_place,
    is_none,
)
from reshard.wire_model import MOST_BYTES, SCHEMA_VERSION, RequestModel, ShownModel, WireModel


def _is_empty(value: object) -> bool:
    return not value


def _is_plain_layout(value: object) -> bool:
    return value == RunLayout()


def _place(source: object) -> object:
    """A source that is only a place, as a text, is that place without a tag or choices."""
    return {"url": source} if isinstance(source, str) else source


Place = Annotated[str, Field(min_length=1, max_length=4096)]
"""A directory or a URL."""


@dataclass(frozen=True)
class DigestedOption:
    """The value of an option as digests of a request have it."""

    value: Any
    """As JSON."""
    given: bool
    """True if it is not the default."""
    info: FieldInfo


class _Conversion(ConversionOptions):
    """The fields that a conversion and a virtual layout share."""

    source: Annotated[SourceSpec, BeforeValidator(_place, json_schema_input_type=SourceSpec | Place)]
    """The checkpoint to read. A text is short for a source that has nothing but this `url`."""
    to: TargetName
    layout: RunLayout = Field(default_factory=RunLayout, exclude_if=_is_plain_layout)
    """The parallel layout of the run that will load the target. It is left out of the JSON where nothing is given, so
    that older programs can read it."""
    options: Annotated[Options, OfInstalledFormats()] = Field(default_factory=default_options)
    """Options of single formats, by format."""

    @model_validator(mode="before")
    @classmethod
    def _at_present_places(cls, fields: Any) -> Any:
        """Take options at their places of 0.1.0, and say the places of those that stand beside the fields."""
        if not isinstance(fields, dict):
            return fields
        given = cast("dict[str, Any]", fields)
        _refuse_options_beside(cls, given)
        return present_places(given)[0]

    def digested_options(self) -> dict[str, dict[str, DigestedOption]]:
        """The options that digests of requests have, by format: all but those of a later format that gives none.

        Digests have every option at the place and under the name that it had first.
        """
        found: dict[str, dict[str, DigestedOption]] = {}
        later: set[str] = set()
        for format_name, options in self.options.by_format():
            fields, given = type(options).model_fields, options.given()
            found[format_name] = {
                option_of(fields[name]).digested or name: DigestedOption(value, name in given, fields[name])
                for name, value in options.model_dump(mode="json").items()
            }
            if options.joined_later:
                later.add(format_name)
        for model in (self.layout, self):
            for name, info in type(model).model_fields.items():
                if (place := former_place(info)) is not None:
                    value = getattr(model, name)
                    given = value != info.get_default()
                    found.setdefault(place[0], {})[place[1]] = DigestedOption(to_jsonable_python(value), given, info)
        return {n: values for n, values in found.items() if n not in later or any(v.given for v in values.values())}


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_MOST_PINNED = 1 << 18
_MOST_SENT = 2_000
"""Files that a plan names when it goes to a service, whose requests have at most 1 MiB."""


class PinnedFile(RequestModel):
    """One object of a source as a plan pins it."""

    name: str = Field(min_length=1, max_length=4096)
    """The file, relative to the checkpoint's directory."""
    part: int = Field(default=0, ge=0, le=1 << 20)
    """Number of the object within a file that is stored in several."""
    size_bytes: int = Field(ge=0, le=MOST_BYTES)
    pin: str = Field(max_length=1024)
    """A text that changes with the content: the ETag, or the time of the last write and the size."""


class SavedPlan(RequestModel):
    """What a plan was made from, and digests of what it makes: whoever plans again knows by it if all is the same."""

    reshard_version: str = Field(max_length=64)
    """The release that made the plan."""
    source_format: str = Field(max_length=64)
    source_digest: _Digest
    """Digest of the source's files, each with its pin."""
    layout_digest: _Digest
    """Digest of the target's files and of the options that decide their bytes."""
    content_digest: _Digest
    """Digest of everything that decides the bytes of the target."""
    digest: _Digest
    """Digest of the whole plan, with its units, which follow from memory and sizes of parts."""
    files: tuple[PinnedFile, ...] = Field(default=(), max_length=_MOST_PINNED)
    """The files of `source_digest`. Without them a changed source is noticed, too, but not which of its files."""

    def without_files(self) -> SavedPlan:
        """This plan without its files: for lists of jobs, and for a service if there are many files."""
        return self.model_copy(update={"files": ()})


class ConvertRequest(_Conversion):
    """One conversion: the body of `POST /v1/jobs`, the flags of `reshard convert`, the contents of a plan file."""

    target: str = Field(min_length=1, max_length=4096)
    plan: SavedPlan | None = Field(default=None, exclude_if=is_none)
    """The plan that this request must lead to, from a file of `reshard plan --out`. A conversion that would be another
    one is refused (`request.plan_changed`)."""

    def sent(self) -> Self:
        """The request as it goes to a service: a plan of many files goes by its digests alone, for its length."""
        if self.plan is None or len(self.plan.files) <= _MOST_SENT:
            return self
        return self.model_copy(update={"plan": self.plan.without_files()})

    def for_hub(self) -> Self:
        """The request with a model card, as what goes to the Hugging Face hub has one.

        Raises:
            RequestError: `request.unsatisfiable` for what is no model.
        """
        if not takes_card(self.to):
            raise RequestError(
                "request.unsatisfiable",
                f"the hub takes models and adapters, and {printable(self.to)} is for training",
                fix="write weights: --to safetensors; or write to a bucket or a directory",
            )
        weights = self.options.of(WeightsOptions).model_copy(update={"card": True})
        return self.model_copy(update={"options": self.options.model_copy(update={"weights": weights})})

    def digested(self) -> dict[str, Any]:
        """The whole request as JSON, for a digest: with every option at the place that it had first."""
        said = self.model_dump(mode="json", exclude={"layout", *_MOVED})
        options = {n: {k: v.value for k, v in of.items()} for n, of in self.digested_options().items()}
        return {**said, "options": {**{n: said["options"][n] for n in self.options.unknown()}, **options}}


_MOVED = frozenset(name for name, info in ConversionOptions.model_fields.items() if former_place(info) is not None)


def _refuse_options_beside(model: type[RequestModel], given: Mapping[str, Any]) -> None:
    """Say the place of options of formats that stand beside the fields of a request."""
    known = option_fields() if given.keys() - model.model_fields.keys() else {}
    wrong = [
        InitErrorDetails(
            type=PydanticCustomError("extra_forbidden", "its place is {place}", {"place": ".".join((*known[n][0], n))}),
            loc=(n,),
            input=value,
        )
        for n, value in given.items()
        if n in known
    ]
    if wrong:
        raise ValidationError.from_exception_data(model.__name__, wrong)


class Progress(WireModel):
    """The progress of a conversion. Bytes are bytes of the output and never decrease within an attempt."""

    phase: Literal["planning", "running", "verifying", "committing", "done"]
    bytes_done: int = 0
    bytes_total: int = 0
    bytes_kept: int = 0
    """Those of `bytes_done` that an earlier, interrupted attempt wrote and that were kept."""
    units_done: int = 0
    units_total: int = 0
    rate_bytes_per_s: float = 0.0
    eta_s: float | None = None
    takes_workers: bool = False
    """True while other workers can join the conversion."""


class WorkShare(WireModel):
    """The part of one worker in a conversion that several workers run together."""

    runs: int = 0
    """Runs of units that it claimed."""
    takeovers: int = 0
    """Those runs that it took over from a worker that had died."""
    splits: int = 0
    """Runs of which it gave a part to a worker that had nothing to do."""
    epochs_lost: int = 0
    """Times that the conversion ended, or began again, while this worker still worked for it."""
    units: int = 0
    write_bytes: int = 0


class FileEntry(WireModel):
    """One file of a target; its path is relative to the target's directory."""

    path: str
    size_bytes: int


class NotCarried(WireModel):
    """A value of the source that the target does not hold, or holds only for one rank."""

    path: str
    """The keys that lead to the value, joined by dots: from the top of a model states file, or from
    `optimizer_state_dict`, `param_groups`, ... of an optimizer file. It may also be the name of a file."""
    file: str = ""
    """The first source file that holds the value; empty if it belongs to no single file."""
    files: int = 1
    """Number of source files that hold the value."""
    reason: str


class PlanSummary(ShownModel):
    """A plan in short: the reads, writes and memory of a conversion that has not run."""

    schema_version: int = SCHEMA_VERSION
    digest: str
    source_format: str
    source_url: str
    tag: str | None
    target: str
    to: TargetName
    tensors: int
    files: tuple[FileEntry, ...]
    units: int
    read_bytes: int
    write_bytes: int
    peak_memory_bytes: int
    warnings: tuple[str, ...] = ()
    not_carried: tuple[NotCarried, ...] = ()
    """As in `ConvertResult`."""
    left_out: dict[str, int] = Field(default_factory=dict, exclude_if=_is_empty)
    """As in `ConvertResult`."""
    reshard_version: str = ""
    """The release that made the plan. This field and those below are empty in plans of earlier releases."""
    source_digest: str = ""
    layout_digest: str = ""
    content_digest: str = ""
    """As in `SavedPlan`."""
    source_files: tuple[PinnedFile, ...] = ()
    """The files of the source that are read, as the plan pins them."""

    @property
    def files_count(self) -> int:
        """The number of files, also where a list of jobs leaves them out."""
        return len(self.files) or self.left_out.get("files", 0)


class TensorInfo(WireModel):
    """One logical tensor as inspection shows it."""

    fqn: str
    states: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    frozen: bool = False
    shared_with: str | None = None


class PossibleTarget(WireModel):
    """A target, and True if a checkpoint can be converted to it."""

    name: str
    """The target as on the command line: `universal`, `zero --tp`, ..."""
    possible: bool
    detail: str
    """A note on the target, or the reason why it is not possible."""
    example: str = ""
    """Flags of `reshard convert SRC DST` that would work, with upper-case placeholders for values that only the user
    knows; empty if the target is not possible."""


class Inspection(ShownModel):
    """The description of a checkpoint, found without reading tensor data."""

    schema_version: int = SCHEMA_VERSION
    url: str
    tag: str | None
    format: str
    """The format in words for people; programs compare `family`."""
    family: str = ""
    """The name of the format, as requests nest its options: `deepspeed`, `dcp`."""
    framework_version: str | None
    zero_stage: int | None
    stage: ZeroStage | None = None
    """The ZeRO stage as `zero_stage` of a request names it: `bf16` for BF16_Optimizer, whose `zero_stage` here is 1."""
    world: dict[str, int]
    step: int | None
    param_groups: int
    parameters: int
    parameter_elems: int
    optimizer_states: tuple[str, ...]
    dtypes: tuple[str, ...]
    files: int
    total_bytes: int
    foreign_globals: tuple[str, ...]
    warnings: tuple[str, ...]
    not_carried: tuple[NotCarried, ...] = ()
    """Keys of the source's files that no target can hold."""
    targets: tuple[PossibleTarget, ...] = ()
    tensors: tuple[TensorInfo, ...]
    compared: int | None = Field(default=None, exclude_if=is_none)
    """Pairs of tensors that must agree, and do: copies, and masters with weights; None if they were not compared."""
    newest: str | None = Field(default=None, exclude_if=is_none)
    """If the source is the directory of a run: the URL of its newest complete checkpoint, which is described."""
    resume: ResumeLayout | None = Field(default=None, exclude_if=is_none)
    """The checkpoint that the launch of the request loads; None if the request names no launch."""


class CastLoss(WireModel):
    """The losses of one parameter's cast to a narrower type, in elements."""

    fqn: str
    overflowed: int = 0
    """Finite elements that were too large: now infinite, or the largest finite number (`on_overflow: saturate`)."""
    underflowed: int = 0
    """Elements that were not zero and are zero now."""
    nan: int = 0
    infinite: int = 0
    """Elements that were infinite in the source."""
    largest_error: float | None = Field(default=None, exclude_if=is_none)
    """The largest distance of a number of a quantized matrix, as readers compute it, from that of the source."""
    relative_rms_error: float | None = Field(default=None, exclude_if=is_none)
    """The root of the sum of squared distances in a quantized matrix, relative to that of the squared numbers."""


class SourceCheck(WireModel):
    """The comparison of a source with the CRC-32s that its archives (files of `torch.save`) store, record by record."""

    records: int | None = None
    """Records of tensors that have a CRC-32; None if `verify: full` compared every record of every file."""
    matching: int = 0
    """Records that the conversion read whole and that match. A record that does not match ends the conversion."""
    in_part: int = 0
    """Records that were read in part, so that they could not be compared. The others were not read at all."""
    read_bytes: int
    matching_bytes: int
    """Bytes of the matching records."""
    without_crc_bytes: int = 0
    """Bytes that were read outside of such records, such as those of safetensors; bytes read twice count twice."""

    def __str__(self) -> str:
        """The comparison in one line, with what was not compared."""
        share = _percent(self.matching_bytes, self.read_bytes)
        if self.records is None:
            return f"source: every record with a CRC-32 matches ({share} of the bytes; nothing else has one)"
        if not self.records:
            return "source: not checked, its files store no CRC-32"
        unread, other = self.records - self.matching - self.in_part, self.without_crc_bytes
        notes = (
            (self.in_part, f"{self.in_part:,} read in part"),
            (unread, f"{unread:,} not read"),
            (other, f"{_percent(other, self.read_bytes)} of the bytes, which lie outside of such records"),
        )
        left = ", ".join(text for number, text in notes if number)
        verb = "was" if self.matching == 1 else "were"
        what = f"{self.matching:,} of {counted(self.records, 'record')} {verb} compared with the CRC-32 in the archive"
        what += f" ({share} of the bytes read)" + (": all match" if self.matching else "")
        return f"source: {what}" + (f"; not checked: {left}" if left else "")


def _percent(part: int, whole: int) -> str:
    """A share of bytes, rounded down: 100 % means all of them."""
    return f"{100 * part // max(whole, 1)} %"


class ConvertResult(ShownModel):
    """The result of a finished conversion."""

    schema_version: int = SCHEMA_VERSION
    target: str
    to: TargetName
    files: tuple[FileEntry, ...]
    read_bytes: int
    write_bytes: int
    server_copied_bytes: int = 0
    """Bytes of the output that the object store copied itself (server-side copies)."""
    resumed_bytes: int = 0
    """Bytes that an earlier, interrupted attempt had already written."""
    seconds: dict[str, float]
    """Seconds by phase."""
    plan_digest: str
    already_done: bool = False
    verification: VerifyLevel = VerifyLevel.DEFAULT
    source_check: SourceCheck | None = Field(default=None, exclude_if=is_none)
    """The comparison of the source with its own checksums; absent if the target was finished before."""
    warnings: tuple[str, ...] = ()
    not_carried: tuple[NotCarried, ...] = ()
    """Every key of the source that the target neither holds nor replaces by a value of its own."""
    casts: tuple[CastLoss, ...] = ()
    """Parameters whose casts lost values, those with NaNs or infinities, and quantized ones. Others are left out."""
    share: WorkShare | None = None
    """The part of this worker, if several could run the conversion together."""
    certificates: tuple[str, ...] = Field(default=(), exclude_if=_is_empty)
    """URLs of the signed statements about the target and its source, that of the target first; empty without a key."""
    left_out: dict[str, int] = Field(default_factory=dict, exclude_if=_is_empty)
    """In a list of jobs, long lists such as `files` are empty, and their lengths are here. The job itself has them."""

    @property
    def files_count(self) -> int:
        """The number of files, also where a list of jobs leaves them out."""
        return len(self.files) or self.left_out.get("files", 0)


class SlimResult(WireModel):
    """The result of `reshard slim`: sizes before and after."""

    schema_version: int = SCHEMA_VERSION
    target: str
    files: int
    source_bytes: int
    target_bytes: int
    already_done: bool = False


class Leftover(WireModel):
    """One thing that an unfinished conversion left in or beside its target."""

    path: str
    kind: Literal["staging", "journal", "old target", "claim", "upload", "object"]
    size_bytes: int
    in_use: bool
    """True if a process uses it now, or used it a short while ago; it is then not removed."""


class CleanReport(WireModel):
    """The files that unfinished conversions left beside one target, and whether they were removed."""

    schema_version: int = SCHEMA_VERSION
    target: str
    removed: bool
    """True if everything that is not in use was removed; false for a dry run."""
    leftovers: tuple[Leftover, ...]
    below: tuple[str, ...] = ()
    """Targets directly below a local directory of which conversions left files. Those stay: each is cleaned by name."""


class VerifyProblem(WireModel):
    """One deviation of a target from its manifest."""

    path: str
    offset: int | None
    length_bytes: int | None
    tensor: str | None = None
    """Name of the tensor that the damaged bytes belong to, if any."""
    problem: str


class VerifyReport(ShownModel):
    """The outcome of comparing a target with its manifest."""

    schema_version: int = SCHEMA_VERSION
    target: str
    files: int
    tensors: int = 0
    """Number of tensors whose digests were compared."""
    read_bytes: int
    sampled: float | None = None
    """The requested fraction of the bytes; None if everything was read."""
    ok: bool
    problems: tuple[VerifyProblem, ...]
    seconds: float


class Problem(WireModel):
    """An RFC 9457 problem object with additional members of Reshard."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str
    title: str
    status: int
    detail: str
    code: str
    fix: str = ""
    retryable: bool = False
    details: dict[str, Any] = Field(default_factory=dict)


class JobWorker(WireModel):
    """A worker that runs, or ran, a job."""

    worker: str
    role: Literal["owner", "helper"]
    """The owner answers for an attempt and commits. Helpers join a running job and leave it."""
    attempt: int
    joined_at: datetime
    left_at: datetime | None = None
    share: WorkShare | None = None
    """None while it works, and if it ended without a report."""


class Job(ShownModel):
    """A job as the API shows it."""

    schema_version: int = SCHEMA_VERSION
    id: str
    kind: JobKind = JobKind.CONVERT
    state: JobState
    done: bool
    attempt: int
    max_attempts: int
    retries: int = 0
    """How often the job was sent back to the queue after it had FAILED."""
    request: ConvertRequest
    labels: dict[str, str] = Field(default_factory=dict)
    progress: Progress | None = None
    plan_digest: str | None = None
    worker: str | None = None
    """The owner of the running attempt."""
    workers: tuple[JobWorker, ...] = ()
    """All workers of all attempts, in the order in which they joined."""
    max_workers: int = 0
    """The number of workers that may run the job at once; 0 is the service's default."""
    priority: int = 0
    checked: bool = True
    """False as long as nobody has planned the conversion: no process of the service was free for it, or it took too
    long. The worker plans it then, and the job fails with the error that would have refused it."""
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    leftovers_until: datetime | None = None
    """Files of the ended job's attempts are kept until then. Until then, a retry goes on where the job stopped."""
    error: Problem | None = None
    result: ConvertResult | None = None
    plan: PlanSummary | None = None
    """The outcome of a job of kind `plan`."""
    links: dict[str, str] = Field(default_factory=dict)


class WorkerNode(WireModel):
    """A live worker of a service."""

    name: str
    state: Literal["idle", "working", "quarantined"]
    """`quarantined`: several jobs in a row failed there as they do on a bad host, and it claims nothing for a while."""
    job_id: str | None = None
    """The job that it runs or helps."""
    started_at: datetime
    seen_at: datetime
    quarantined_until: datetime | None = None
    problem: Problem | None = None
    """The problem of the job that led to the quarantine."""


class WorkerNodeList(WireModel):
    """The live workers of a service, by name."""

    workers: tuple[WorkerNode, ...]


class JobList(ShownModel):
    """One page of jobs, newest first.

    Results in it are short: of lists with more than 20 entries, such as `files`, `left_out` has the length only.
    """

    jobs: tuple[Job, ...]
    next_page_token: str = ""


_LabelName = Annotated[str, Field(max_length=128)]
_LabelValue = Annotated[str, Field(max_length=512)]


class SubmitRequest(ConvertRequest):
    """Body of `POST /v1/jobs`: a conversion request, and the job's own fields."""

    labels: dict[_LabelName, _LabelValue] = Field(default_factory=dict, max_length=32)
    max_attempts: int = Field(default=3, ge=1, le=20)
    max_workers: int = Field(default=0, ge=0, le=1024)
    """The number of workers that may run the job at once; 0 is the service's default, 1 forbids helpers."""
    priority: int = Field(default=0, ge=-100, le=100)
    """Jobs with a higher priority begin, and get helpers, before others. Running jobs are not interrupted."""

    def conversion(self) -> ConvertRequest:
        """The conversion that is asked for, without the job's own fields."""
        own = SubmitRequest.model_fields.keys() - ConvertRequest.model_fields.keys()
        return ConvertRequest.model_validate(self.model_dump(exclude=own))


class JobEvent(WireModel):
    """One entry of a job's event log; `seq` grows by one within a job."""

    seq: int
    job_id: str
    at: datetime
    kind: Literal["state", "progress", "worker"]
    """`worker`: a helper has joined or left."""
    state: JobState
    progress: Progress | None = None
    worker: JobWorker | None = None
    """The helper that has joined or left."""

    @property
    def ends_job(self) -> bool:
        """True for the last event of a job."""
        return self.kind == "state" and self.state.terminal


class JobEventPage(WireModel):
    """Events after a sequence number: the polling form of a job's event stream."""

    events: tuple[JobEvent, ...]
    done: bool
    """True if the job has ended and `events` includes its last event."""


class InspectRequest(SourceSpec):
    """Body of `POST /v1/inspections`: a checkpoint, and a run that is about to resume from it."""

    launch: RunLaunch | None = Field(default=None, exclude_if=is_none)
    """With it, the answer's `resume` says what the run loads."""


# Virtual layouts of a service: targets whose files are computed from the source when they are read.


class LayoutRequest(_Conversion):
    """Body of `POST /v1/layouts`: a conversion whose target is never written.

    It has the options that decide the bytes of the target, and none of those that say how a conversion runs.
    """

    name: str | None = Field(default=None, min_length=1, max_length=255, pattern=r"^[^/\\]*[^/\\.][^/\\]*$")
    """The last name of the target's directory; by default the tag of the source."""
    compare: bool = True
    """Compare the copies and rounded masters of the source before the answer, as a conversion does. It reads them."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_options_of_run(cls, fields: Any) -> Any:
        given = cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}
        if runs := sorted(_OF_RUN & given.keys()):
            wrong = [InitErrorDetails(type="extra_forbidden", loc=(name,), input=given[name]) for name in runs]
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return cast("Any", fields)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The fields that are taken."""
        shown = handler(schema)
        fields: dict[str, Any] = handler.resolve_ref_schema(shown)["properties"]
        for name in _OF_RUN & fields.keys():
            del fields[name]
        return shown

    def conversion(self) -> ConvertRequest:
        """The conversion that would write the files."""
        fields = self.model_dump(exclude={"name", "compare", *_OF_RUN})
        return ConvertRequest.model_validate({**fields, "target": self.name or "-"})


_OF_RUN = frozenset(name for name, info in ConversionOptions.model_fields.items() if option_of(info).of_run)


class LayoutSummary(WireModel):
    """One virtual layout of a service, in short."""

    schema_version: int = SCHEMA_VERSION
    id: str
    to: TargetName
    source_url: str
    source_format: str
    tag: str | None
    files_count: int
    total_bytes: int
    created_at: datetime
    expires_at: datetime
    """It is gone then, unless it is used before: each use moves the time."""
    links: dict[str, str] = Field(default_factory=dict)
    """Paths of the service: `self`, and `files`, below which each file is at its own path."""


class Layout(LayoutSummary):
    """One virtual layout of a service: the files of a target that nobody writes."""

    digest: str
    """Digest of everything that decides the bytes: the source as it was pinned, and the layout."""
    compared: int | None
    """Number of comparisons of copies and rounded masters in the source; None if they were left out."""
    warnings: tuple[str, ...] = ()
    not_carried: tuple[NotCarried, ...] = ()
    """As in `ConvertResult`."""
    files: tuple[FileEntry, ...]


class LayoutList(WireModel):
    """The virtual layouts of a tenant, the newest first."""

    layouts: tuple[LayoutSummary, ...]


class LayoutFiles(WireModel):
    """The files of a virtual layout."""

    files: tuple[FileEntry, ...]
