"""The one seam between the slim package and the engine: an entry point, looked up when it is needed.

The package without extras brings no engine. With the `worker` extra's dependencies the entry point
`reshard.engine` loads; without them the user is told what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from reshard.errors import RequestError

if TYPE_CHECKING:
    from reshard.diffs import DiffOptions, DiffReport
    from reshard.models import (
        CleanReport,
        ConvertRequest,
        ConvertResult,
        Inspection,
        PlanSummary,
        Progress,
        SlimResult,
        SourceSpec,
        VerifyReport,
        WeightDtype,
    )
    from reshard.pictures import LayoutPicture

ENTRY_POINT_GROUP = "reshard.engine"


class StateDicts(Protocol):
    """Weights of checkpoints as torch tensors, which have no type here: the slim package knows no torch."""

    def lazy(self, source: SourceSpec, *, exclude_frozen: bool) -> dict[str, Any]:
        """The fp32 weights by name, as objects that read their bytes on `contiguous()`."""
        ...

    def whole(self, tensors: Mapping[str, Any], *, dtype: WeightDtype | None = None, empty: bool = False) -> Any:
        """All of them, read; floating ones cast if a type is given, or only allocated."""
        ...

    def load(self, model: Any, tensors: Mapping[str, Any]) -> None:
        """Load them into a model on the CPU, a bounded part at a time."""
        ...

    def cloned(self, item: Any, device: Any) -> Any:
        """A copy of nested containers whose tensors have storages of their own."""
        ...


class Engine(Protocol):
    """What the engine offers in this process. All calls are synchronous and raise `ReshardError`s."""

    def inspect(self, source: SourceSpec) -> Inspection:
        """What the checkpoint is, from metadata only."""
        ...

    def picture(self, source: SourceSpec, tensor: str | None = None) -> LayoutPicture:
        """Which file holds what; of one tensor, `NAME` or `NAME/STATE`, which part of it. From metadata only."""
        ...

    def plan(self, request: ConvertRequest) -> PlanSummary:
        """What `convert` would do; nothing is written."""
        ...

    def convert(
        self,
        request: ConvertRequest,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> ConvertResult:
        """Run the conversion to its commit; resumes what an interrupted run left.

        `on_progress` is called from one thread at a time; `should_stop` is polled between units and
        ends the run with `job.cancelled`, leaving the journal for a later resume.
        """
        ...

    def convert_into(
        self,
        request: ConvertRequest,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> ConvertResult:
        """The same; files of the same names in a local directory that exists are replaced, the rest is kept."""
        ...

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
        ...

    def state_dicts(self) -> StateDicts:
        """Weights as torch tensors.

        Raises:
            RequestError: `request.engine_missing` without torch.
        """
        ...

    def verify(self, target: str, *, profile: str | None = None, sample: float | None = None) -> VerifyReport:
        """Re-read a target against its manifest; with `sample` only a random fraction of its bytes."""
        ...

    def diff(
        self,
        a: SourceSpec,
        b: SourceSpec,
        options: DiffOptions,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> DiffReport:
        """Compare two checkpoints by logical tensor, whatever their layouts and formats; nothing is written."""
        ...

    def clean(
        self, target: str, *, profile: str | None = None, dry_run: bool = False, idle: bool = False
    ) -> CleanReport:
        """Remove what unfinished conversions into a target left, unless a process is at work on it."""
        ...

    def discard(self, request: ConvertRequest) -> None:
        """Remove what an unfinished conversion of this request left (staging, uploads, journal)."""
        ...


def load_engine() -> Engine:
    """The installed engine.

    Raises:
        RequestError: `request.engine_missing` when the engine's dependencies are not installed.
    """
    # Commands that only say what they can do import this module too, and pay for no package's metadata.
    from importlib.metadata import entry_points

    found = tuple(entry_points(group=ENTRY_POINT_GROUP))
    fix = "pip install 'reshard[worker]', or use a service: export RESHARD_URL=http://host:8000 and `reshard submit`"
    if not found:
        raise RequestError("request.engine_missing", "the conversion engine is not installed", fix=fix)
    try:
        return cast("Engine", found[0].load())
    except ModuleNotFoundError as error:
        raise RequestError(
            "request.engine_missing", f"the conversion engine needs {error.name!r}, which is not installed", fix=fix
        ) from error
