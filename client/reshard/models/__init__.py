"""Wire models: requests, jobs, results, pictures, comparisons. They are frozen and versioned."""

from __future__ import annotations

from typing import Any

from reshard.choices import (
    EmptyWeights as EmptyWeights,
    JobKind as JobKind,
    JobState as JobState,
    NameScheme as NameScheme,
    OpaquePolicy as OpaquePolicy,
    OverflowPolicy as OverflowPolicy,
    ParamOrder as ParamOrder,
    ReplicaPolicy as ReplicaPolicy,
    RngPolicy as RngPolicy,
    ServerCopyPolicy as ServerCopyPolicy,
    TargetFormat as TargetFormat,
    VerifyLevel as VerifyLevel,
    WeightDtype as WeightDtype,
    ZeroStage as ZeroStage,
)
from reshard.installed_formats import TargetName as TargetName, known_target as known_target
from reshard.models.access import (
    DEFAULT_TOKEN_S as DEFAULT_TOKEN_S,
    ENDINGS as ENDINGS,
    MOST_COUNT as MOST_COUNT,
    MOST_TOKEN_S as MOST_TOKEN_S,
    TENANT_PATTERN as TENANT_PATTERN,
    AuditEntry as AuditEntry,
    AuditPage as AuditPage,
    CreatedToken as CreatedToken,
    Delivery as Delivery,
    DeliveryList as DeliveryList,
    DeliveryState as DeliveryState,
    EventType as EventType,
    NewTenant as NewTenant,
    NewToken as NewToken,
    Redelivered as Redelivered,
    RedeliverRequest as RedeliverRequest,
    RotateRequest as RotateRequest,
    Tenant as Tenant,
    TenantList as TenantList,
    TenantName as TenantName,
    TenantSettings as TenantSettings,
    Token as Token,
    TokenList as TokenList,
    Webhook as Webhook,
    WebhookList as WebhookList,
    WebhookRequest as WebhookRequest,
)
from reshard.models.jobs import (
    CastLoss as CastLoss,
    CleanReport as CleanReport,
    ConvertRequest as ConvertRequest,
    ConvertResult as ConvertResult,
    FileEntry as FileEntry,
    Inspection as Inspection,
    InspectRequest as InspectRequest,
    Job as Job,
    JobEvent as JobEvent,
    JobEventPage as JobEventPage,
    JobList as JobList,
    JobWorker as JobWorker,
    Layout as Layout,
    LayoutFiles as LayoutFiles,
    LayoutList as LayoutList,
    LayoutRequest as LayoutRequest,
    LayoutSummary as LayoutSummary,
    Leftover as Leftover,
    NotCarried as NotCarried,
    PinnedFile as PinnedFile,
    Place as Place,
    PlanSummary as PlanSummary,
    PossibleTarget as PossibleTarget,
    Problem as Problem,
    Progress as Progress,
    SavedPlan as SavedPlan,
    SlimResult as SlimResult,
    SubmitRequest as SubmitRequest,
    TensorInfo as TensorInfo,
    VerifyProblem as VerifyProblem,
    VerifyReport as VerifyReport,
    WorkerNode as WorkerNode,
    WorkerNodeList as WorkerNodeList,
    WorkShare as WorkShare,
)
from reshard.models.reports import (
    Difference as Difference,
    DifferenceKind as DifferenceKind,
    DiffOptions as DiffOptions,
    DiffReport as DiffReport,
    DiffSide as DiffSide,
    FileShare as FileShare,
    LayoutPair as LayoutPair,
    LayoutPicture as LayoutPicture,
    Region as Region,
    TensorPicture as TensorPicture,
)
from reshard.options import (
    DEFAULT_MEMORY_LIMIT_BYTES as DEFAULT_MEMORY_LIMIT_BYTES,
    DEFAULT_PART_BYTES as DEFAULT_PART_BYTES,
    Options as Options,
    RunLayout as RunLayout,
    SourceChoices as SourceChoices,
    SourceSpec as SourceSpec,
)
from reshard.wire_model import SCHEMA_VERSION as SCHEMA_VERSION, WireModel as WireModel


def __getattr__(name: str) -> Any:
    """`NativeLayout`, which 0.1.0 had in place of `RunLayout`, for one more release."""
    if name != "NativeLayout":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reshard.installed_formats import former_layout
    from reshard.option import warn_of_former

    warn_of_former("NativeLayout is now RunLayout; its other fields are keyword arguments")
    return former_layout()
