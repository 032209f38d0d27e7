"""Wire models: what crosses the API, the CLI's `--json` and the worker's pipe. Frozen, versioned.

Units are in the names (`_bytes`, `_s`); URLs are strings because `s3://bucket/key` is no path.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from reshard.choices import (
    JobKind as JobKind,
    JobState as JobState,
    NameScheme as NameScheme,
    OpaquePolicy as OpaquePolicy,
    OverflowPolicy as OverflowPolicy,
    ReplicaPolicy as ReplicaPolicy,
    RngPolicy as RngPolicy,
    ServerCopyPolicy as ServerCopyPolicy,
    TargetFormat as TargetFormat,
    VerifyLevel as VerifyLevel,
    WeightDtype as WeightDtype,
    ZeroStage as ZeroStage,
)

SCHEMA_VERSION = 1
DEFAULT_MEMORY_LIMIT_BYTES = 1 << 30
DEFAULT_PART_BYTES = 64 << 20
MOST_BYTES = 1 << 62
"""No size is larger: what is added to one must still fit into 64 bits."""


class WireModel(BaseModel):
    """Base of all wire models: frozen, unknown fields refused."""

    # A command uses few of the models: each is built when it is first used, which is 50 ms of any start less.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class SourceSpec(WireModel):
    """Which checkpoint to read."""

    url: str = Field(min_length=1, max_length=4096)
    tag: str | None = Field(default=None, max_length=512)
    profile: str | None = Field(default=None, max_length=128)
    """Name of a storage profile that the operator configured; never credentials."""


class NativeLayout(WireModel):
    """The layout of a native target; what is None is as in the source, or else the framework's default."""

    zero_stage: ZeroStage | None = None
    dp: int = Field(ge=1, le=1 << 20)
    """Data-parallel ranks (with sequence parallelism: both together)."""
    tp: int = Field(default=1, ge=1, le=1 << 12)
    pp: int = Field(default=1, ge=1, le=1 << 12)
    ep: int = Field(default=1, ge=1, le=1 << 12)
    partition_method: str | None = Field(default=None, max_length=4096)
    """Of pipeline stages: `uniform`, `parameters`, `type:REGEX`, or the first layer of each stage: `0,3,6`."""
    pipeline_layers: int | None = Field(default=None, ge=1, le=4096)
    """Layers of the pipeline in all, those without parameters included; `uniform` needs it."""
    vocab_divisor: int | None = Field(default=None, ge=1, le=1 << 20)
    """`make_vocab_size_divisible_by`: vocabularies are padded to a multiple of it times the tensor-parallel ranks."""
    round_robin_gradients: bool | None = None
    parameter_alignment: bool | None = None
    sub_group_size: int | None = Field(default=None, ge=1, le=MOST_BYTES)
    """Stage 3: elements of one rank's partition after which a sub-group is closed."""
    rng: RngPolicy = RngPolicy.KEEP


class ConvertRequest(WireModel):
    """One conversion: the body of `POST /v1/jobs`, the flags of `reshard convert`."""

    source: SourceSpec
    target: str = Field(min_length=1, max_length=4096)
    to: TargetFormat
    target_profile: str | None = Field(default=None, max_length=128)
    dtype: WeightDtype | None = None
    """Consolidated weights: default fp32 from the masters, or as stored where a source has none. Native targets: the
    model's type, default the source's."""
    layout: NativeLayout | None = None
    """Native targets only, and needed there."""
    rules: str | None = Field(default=None, max_length=1 << 16)
    """How parameters are cut over tensor-parallel ranks where the source does not say: YAML, see docs/rules.md."""
    family: str | None = Field(default=None, max_length=64)
    """A named pack of such rules, such as `gpt-megatron`."""
    names: NameScheme | None = None
    """Other names for the parameters of Megatron-DeepSpeed's GPT and Llama models; None keeps the source's."""
    replicas: ReplicaPolicy = ReplicaPolicy.ERROR
    max_shard_bytes: int | None = Field(default=None, ge=1, le=MOST_BYTES)
    """Consolidated weights only: largest size of one weights file; default one file per 5 GB."""
    exclude_frozen: bool = False
    merge_adapter: bool = False
    """Consolidated weights only: the model without PEFT, with an adapter merged into its weights."""
    adapter: str | None = Field(default=None, min_length=1, max_length=256)
    """Which LoRA adapter to write or to merge, where there are several."""
    lora_alpha: float | None = Field(default=None, gt=0, lt=1e9)
    """The scale of an adapter without `adapter_config.json`."""
    base: str | None = Field(default=None, min_length=1, max_length=4096)
    """For `merge_adapter` and a checkpoint without its frozen parameters: a directory with the base model's weights, or
    its directory in the hub's cache. The source's storage profile serves it."""
    model_files: str | None = Field(default=None, min_length=1, max_length=4096)
    """Consolidated weights: a directory whose configuration, tokenizer and generation files go beside them, so that
    `from_pretrained` opens the target. PEFT: one with `adapter_config.json`, by default looked for beside the source.
    The source's storage profile serves it."""
    opaque: OpaquePolicy = OpaquePolicy.REFUSE
    overwrite: bool = False
    on_overflow: OverflowPolicy = OverflowPolicy.INF
    """Finite elements that a narrower type cannot hold; what was lost is counted whatever it says."""
    verify: VerifyLevel = VerifyLevel.DEFAULT
    memory_limit_bytes: int = Field(default=DEFAULT_MEMORY_LIMIT_BYTES, ge=1, le=MOST_BYTES)
    part_bytes: int = Field(default=DEFAULT_PART_BYTES, ge=1 << 10, le=MOST_BYTES)
    """Grain of work: bytes of one unit and of one multipart part."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    server_copy: ServerCopyPolicy = Field(
        default=ServerCopyPolicy.AUTO, validation_alias=AliasChoices("server_copy", "offload")
    )
    """Ranges that move unchanged within one object store are copied there and do not pass through the worker."""


class Progress(WireModel):
    """How far a conversion is; bytes are of the output and never decrease within an attempt."""

    phase: Literal["planning", "running", "verifying", "committing", "done"]
    bytes_done: int = 0
    bytes_total: int = 0
    units_done: int = 0
    units_total: int = 0
    rate_bytes_per_s: float = 0.0
    eta_s: float | None = None


class FileEntry(WireModel):
    """One file of a target, path relative to the target's directory."""

    path: str
    size_bytes: int


class NotCarried(WireModel):
    """Something of the source that the target does not hold, or holds only as one rank had it."""

    path: str
    """The keys that lead to it, joined by dots: of model states from their top, of optimizer files from
    `optimizer_state_dict`, `param_groups`, ...; or the name of a file."""
    file: str = ""
    """The source file that holds it, the first of several; empty where it is no one file's."""
    files: int = 1
    """Source files that hold it."""
    reason: str


class PlanSummary(WireModel):
    """What a conversion would do, before it does it."""

    schema_version: int = SCHEMA_VERSION
    digest: str
    source_format: str
    source_url: str
    tag: str | None
    target: str
    to: TargetFormat
    tensors: int
    files: tuple[FileEntry, ...]
    units: int
    read_bytes: int
    write_bytes: int
    peak_memory_bytes: int
    warnings: tuple[str, ...] = ()
    not_carried: tuple[NotCarried, ...] = ()
    """As in the result of the conversion."""


class TensorInfo(WireModel):
    """One logical tensor as inspection shows it."""

    fqn: str
    states: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    frozen: bool = False
    shared_with: str | None = None


class PossibleTarget(WireModel):
    """A target, and whether a checkpoint can become it."""

    name: str
    """As on the command line: `universal`, `zero --tp`, ..."""
    possible: bool
    detail: str
    """What is possible, or what stands in the way."""
    example: str = ""
    """Flags of `reshard convert SRC DST` that would work, in upper case what only the user knows; empty if none do."""


class Inspection(WireModel):
    """What a checkpoint is, found without reading tensor data."""

    schema_version: int = SCHEMA_VERSION
    url: str
    tag: str | None
    format: str
    framework_version: str | None
    zero_stage: int | None
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
    """Keys of the files that no target would hold, whatever it is."""
    targets: tuple[PossibleTarget, ...] = ()
    tensors: tuple[TensorInfo, ...]


class CastLoss(WireModel):
    """What the cast of one parameter to a narrower type lost, in elements."""

    fqn: str
    overflowed: int = 0
    """Finite, and too large: infinite now, or the largest finite number under `on_overflow: saturate`."""
    underflowed: int = 0
    """Not zero before, zero now."""
    nan: int = 0
    infinite: int = 0
    """Infinite before."""


class ConvertResult(WireModel):
    """What a finished conversion did."""

    schema_version: int = SCHEMA_VERSION
    target: str
    to: TargetFormat
    files: tuple[FileEntry, ...]
    read_bytes: int
    write_bytes: int
    server_copied_bytes: int = Field(default=0, validation_alias=AliasChoices("server_copied_bytes", "offloaded_bytes"))
    """Bytes of the output that the object store copied itself: the worker did not send them."""
    resumed_bytes: int = 0
    """Bytes that an earlier, interrupted attempt had already written."""
    seconds: dict[str, float]
    plan_digest: str
    already_done: bool = False
    verification: VerifyLevel = VerifyLevel.DEFAULT
    warnings: tuple[str, ...] = ()
    not_carried: tuple[NotCarried, ...] = ()
    """Every key of the source that the target neither holds nor states anew."""
    casts: tuple[CastLoss, ...] = ()
    """Parameters of which casts lost something, or that held NaNs or infinities; the others are left out."""


class SlimResult(WireModel):
    """What writing torch files anew saved."""

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
    """Whether a process is at work on it, or was a short while ago: it stays."""


class CleanReport(WireModel):
    """What unfinished conversions left of one target, and whether it was removed."""

    schema_version: int = SCHEMA_VERSION
    target: str
    removed: bool
    """Whether everything that is not in use was removed; false for a look only."""
    leftovers: tuple[Leftover, ...]


class VerifyProblem(WireModel):
    """One thing that is not as the manifest says."""

    path: str
    offset: int | None
    length_bytes: int | None
    tensor: str | None = None
    """Name of the tensor whose bytes they are, where they are a tensor's."""
    problem: str


class VerifyReport(WireModel):
    """Outcome of re-reading a target against its manifest."""

    schema_version: int = SCHEMA_VERSION
    target: str
    files: int
    tensors: int = 0
    """Tensors whose digests were compared."""
    read_bytes: int
    sampled: float | None = None
    """Fraction of the bytes that was asked for; None if everything was read."""
    ok: bool
    problems: tuple[VerifyProblem, ...]
    seconds: float


class Problem(WireModel):
    """RFC 9457 problem object with Reshard's members."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str
    title: str
    status: int
    detail: str
    code: str
    fix: str = ""
    retryable: bool = False
    details: dict[str, Any] = Field(default_factory=dict)


class Job(WireModel):
    """A job as the API shows it."""

    schema_version: int = SCHEMA_VERSION
    id: str
    kind: JobKind = JobKind.CONVERT
    state: JobState
    done: bool
    attempt: int
    max_attempts: int
    request: ConvertRequest
    labels: dict[str, str] = Field(default_factory=dict)
    progress: Progress | None = None
    plan_digest: str | None = None
    worker: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error: Problem | None = None
    result: ConvertResult | None = None
    plan: PlanSummary | None = None
    """The outcome of a job of kind `plan`."""
    links: dict[str, str] = Field(default_factory=dict)


class JobList(WireModel):
    """One page of jobs, newest first."""

    jobs: tuple[Job, ...]
    next_page_token: str = ""


_LabelName = Annotated[str, Field(max_length=128)]
_LabelValue = Annotated[str, Field(max_length=512)]


class SubmitRequest(ConvertRequest):
    """Body of `POST /v1/jobs`: a conversion with the job's own fields."""

    labels: dict[_LabelName, _LabelValue] = Field(default_factory=dict, max_length=32)
    max_attempts: int = Field(default=3, ge=1, le=20)


class JobEvent(WireModel):
    """One entry of a job's event log; `seq` grows by one within a job."""

    seq: int
    job_id: str
    at: datetime
    kind: Literal["state", "progress"]
    state: JobState
    progress: Progress | None = None


class JobEventPage(WireModel):
    """Events after a sequence number: the polling form of a job's event stream."""

    events: tuple[JobEvent, ...]
    done: bool
    """Whether the job has ended and `events` reaches its last event."""
