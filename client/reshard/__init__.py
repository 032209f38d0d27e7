"""Reshard: any sharding of a training checkpoint into any other, bit for bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.client import Client
    from reshard.ensuring import ensure
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
    from reshard.models import (
        ConvertRequest,
        ConvertResult,
        Inspection,
        Job,
        JobEvent,
        JobList,
        JobState,
        OpaquePolicy,
        PlanSummary,
        Progress,
        SourceSpec,
        TargetFormat,
        VerifyReport,
        WeightDtype,
    )

__all__ = [
    "CODES",
    "Client",
    "ConvertRequest",
    "ConvertResult",
    "ExitCode",
    "Inspection",
    "IntegrityError",
    "Job",
    "JobError",
    "JobEvent",
    "JobList",
    "JobState",
    "OpaquePolicy",
    "PlanSummary",
    "Progress",
    "RequestError",
    "ReshardError",
    "SourceError",
    "SourceSpec",
    "StorageError",
    "TargetFormat",
    "VerifyReport",
    "WeightDtype",
    "ensure",
]

_MODULES = ("reshard.client", "reshard.ensuring", "reshard.errors", "reshard.models")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import reshard` itself loads almost nothing."""
    if name in __all__:
        # The client is looked up last: it imports httpx, which models and errors do not need.
        for module in reversed(_MODULES):
            found = getattr(import_module(module), name, None)
            if found is not None:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names of the package."""
    return sorted(__all__)
