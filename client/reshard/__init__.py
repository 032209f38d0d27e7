"""Reshard rewrites training checkpoints for another number of GPUs or another framework, bit for bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.api.async_client import AsyncClient
    from reshard.api.client import Client
    from reshard.api.plan_files import read_plan
    from reshard.choices import JobState, OpaquePolicy, TargetFormat, WeightDtype
    from reshard.draw.layout import Picture
    from reshard.engine import VirtualCheckpoint
    from reshard.ensuring.call import direct, ensure
    from reshard.errors import (
        CODES,
        ExitCode,
        IntegrityError,
        JobError,
        RequestError,
        ReshardError,
        SourceError,
        StorageError,
    )
    from reshard.functions import (
        convert,
        diff,
        fingerprint,
        inspect,
        open_layout,
        picture,
        plan,
        push,
        seal,
        verify,
        verify_sealed,
    )
    from reshard.models.jobs import (
        ConvertRequest,
        ConvertResult,
        Inspection,
        Job,
        JobEvent,
        JobList,
        PlanSummary,
        Progress,
        VerifyReport,
    )
    from reshard.models.reports import (
        DiffOptions,
        DiffReport,
        FingerprintReport,
        LayoutPair,
        LayoutPicture,
        PushResult,
        SealCheck,
        SealReport,
    )
    from reshard.options import SourceSpec

    __version__: str

__all__ = [
    "CODES",
    "AsyncClient",
    "Client",
    "ConvertRequest",
    "ConvertResult",
    "DiffOptions",
    "DiffReport",
    "ExitCode",
    "FingerprintReport",
    "Inspection",
    "IntegrityError",
    "Job",
    "JobError",
    "JobEvent",
    "JobList",
    "JobState",
    "LayoutPair",
    "LayoutPicture",
    "OpaquePolicy",
    "Picture",
    "PlanSummary",
    "Progress",
    "PushResult",
    "RequestError",
    "ReshardError",
    "SealCheck",
    "SealReport",
    "SourceError",
    "SourceSpec",
    "StorageError",
    "TargetFormat",
    "VerifyReport",
    "VirtualCheckpoint",
    "WeightDtype",
    "__version__",
    "convert",
    "diff",
    "direct",
    "ensure",
    "fingerprint",
    "inspect",
    "open_layout",
    "picture",
    "plan",
    "push",
    "read_plan",
    "seal",
    "verify",
    "verify_sealed",
]

_HOME = {
    **dict.fromkeys(("convert", "open_layout", "plan"), "reshard.functions"),
    **dict.fromkeys(
        ("diff", "fingerprint", "inspect", "picture", "push", "seal", "verify", "verify_sealed"), "reshard.functions"
    ),
    **dict.fromkeys(
        ("DiffOptions", "DiffReport", "FingerprintReport", "PushResult", "SealCheck", "SealReport"),
        "reshard.models.reports",
    ),
    **dict.fromkeys(("LayoutPair", "LayoutPicture"), "reshard.models.reports"),
    **dict.fromkeys(
        (
            *("CODES", "ExitCode", "IntegrityError", "JobError", "RequestError", "ReshardError", "SourceError"),
            "StorageError",
        ),
        "reshard.errors",
    ),
    "AsyncClient": "reshard.api.async_client",
    "Client": "reshard.api.client",
    "Picture": "reshard.draw.layout",
    "VirtualCheckpoint": "reshard.engine",
    "direct": "reshard.ensuring",
    "ensure": "reshard.ensuring",
    "read_plan": "reshard.api.plan_files",
}
"""The module of each public name; names that are not here are models."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import reshard` itself loads almost nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib.metadata import version

        found: Any = version("reshard")
    else:
        found = getattr(import_module(_HOME.get(name, "reshard.models")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names of the package."""
    return sorted(__all__)
