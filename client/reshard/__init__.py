"""Reshard rewrites training checkpoints for another number of GPUs or another framework, bit for bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.async_client import AsyncClient
    from reshard.client import Client
    from reshard.converting import convert, plan
    from reshard.diffs import DiffOptions, DiffReport
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
    from reshard.examining import diff, inspect, picture, verify
    from reshard.layout_svg import Picture
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
    from reshard.pictures import LayoutPair, LayoutPicture

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
    "RequestError",
    "ReshardError",
    "SourceError",
    "SourceSpec",
    "StorageError",
    "TargetFormat",
    "VerifyReport",
    "WeightDtype",
    "__version__",
    "convert",
    "diff",
    "ensure",
    "inspect",
    "picture",
    "plan",
    "verify",
]

_HOME = {
    **dict.fromkeys(("convert", "plan"), "reshard.converting"),
    **dict.fromkeys(("diff", "inspect", "picture", "verify"), "reshard.examining"),
    **dict.fromkeys(("DiffOptions", "DiffReport"), "reshard.diffs"),
    **dict.fromkeys(("LayoutPair", "LayoutPicture"), "reshard.pictures"),
    **dict.fromkeys(
        (
            *("CODES", "ExitCode", "IntegrityError", "JobError", "RequestError", "ReshardError", "SourceError"),
            "StorageError",
        ),
        "reshard.errors",
    ),
    "AsyncClient": "reshard.async_client",
    "Client": "reshard.client",
    "Picture": "reshard.layout_svg",
    "ensure": "reshard.ensuring",
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
