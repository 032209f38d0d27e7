"""The only place where the slim client package finds the engine: an entry point, looked up when it is needed.

The package without extras brings no engine. With the `worker` extra's dependencies the entry point
`reshard.engine` loads; without them the user is told what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from reshard.errors import RequestError
from reshard.install import install_line

if TYPE_CHECKING:
    from reshard.checkups import Finding
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
        WorkShare,
    )
    from reshard.pictures import LayoutPair, LayoutPicture
    from reshard.shared_work import SharedWork

ENTRY_POINT_GROUP = "reshard.engine"


class StateDicts(Protocol):
    """Loads weights as torch tensors, which are typed `Any` here: the slim package does not import torch."""

    def lazy(self, source: SourceSpec, *, exclude_frozen: bool) -> dict[str, Any]:
        """The fp32 weights by name, as objects that read their bytes on `contiguous()`."""
        ...

    def whole(self, tensors: Mapping[str, Any], *, dtype: WeightDtype | None = None, empty: bool = False) -> Any:
        """Read lazy tensors. `dtype` casts the floating-point ones; with `empty` tensors are only allocated."""
        ...

    def load(self, model: Any, tensors: Mapping[str, Any]) -> None:
        """Load tensors into a model on the CPU, in bounded memory."""
        ...

    def cloned(self, item: Any, device: Any) -> Any:
        """Copy nested containers so that each tensor has a storage of its own."""
        ...


class Engine(Protocol):
    """The operations of the engine in this process. All calls are synchronous and raise `ReshardError`s."""

    def inspect(self, source: SourceSpec) -> Inspection:
        """Describe a checkpoint, from its metadata only."""
        ...

    def picture(self, source: SourceSpec, tensor: str | None = None) -> LayoutPicture:
        """List what each file holds, or the files of one tensor (`NAME` or `NAME/STATE`). Reads only metadata."""
        ...

    def planned_pictures(self, request: ConvertRequest, tensor: str | None = None) -> LayoutPair:
        """List what the files of the source hold, and what those of the target that `convert` would write will hold.

        Both have the parts of one tensor; without a name, of the largest one that the most files share. Nothing is
        written.
        """
        ...

    def plan(self, request: ConvertRequest) -> PlanSummary:
        """Plan the conversion that `convert` would run; nothing is written."""
        ...

    def convert(
        self,
        request: ConvertRequest,
        *,
        work: SharedWork | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_plan: Callable[[str, int], None] | None = None,
        abandoned: Collection[str] = (),
    ) -> ConvertResult:
        """Run the conversion to its commit. Resumes an interrupted run of the same conversion.

        With `work`, other processes that are given the same request run it too, and each does a part.
        `on_progress` is called from one thread at a time; `should_stop` is polled between units and
        ends the run with `job.cancelled`, leaving the journal for a later resume.
        `on_plan` is called with the digest of the plan and the bytes that it writes before anything is written, and may
        raise. `abandoned` are digests of plans whose unfinished conversions into the target have ended: this one
        removes what they left.
        """
        ...

    def help(
        self,
        request: ConvertRequest,
        work: SharedWork,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> WorkShare:
        """Run a part of a conversion that another process runs with `convert` and `work`, and that it commits.

        Returns when no part is left. A helper that is stopped leaves what it finished to the others.
        """
        ...

    def convert_into(
        self,
        request: ConvertRequest,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> ConvertResult:
        """Convert into a local directory that may exist: files of the same names are replaced, other files stay."""
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
        """Rewrite a torch file, or all files of a directory, so that each storage is only as long as its tensors."""
        ...

    def state_dicts(self) -> StateDicts:
        """Return the loader of weights as torch tensors.

        Raises:
            RequestError: `request.engine_missing` without torch.
        """
        ...

    def verify(self, target: str, *, profile: str | None = None, sample: float | None = None) -> VerifyReport:
        """Read a target again and compare it with its manifest; with `sample`, only a random fraction of its bytes."""
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
        """Remove files that unfinished conversions into a target left, unless a process still uses them."""
        ...

    def checkup(self, places: Sequence[str], profile: str | None = None) -> Iterator[Finding]:
        """Check libraries, credentials, GPU and places, one after the other; nothing is written."""
        ...

    def discard(
        self,
        request: ConvertRequest,
        *,
        plans: Collection[str] | None = None,
        idle_s: float = 0.0,
        keep_unfinished: bool = False,
    ) -> None:
        """Remove the staging directories, uploads and journals that unfinished conversions into the target left.

        With `plans`, only conversions of these plans lose files. In an object store, one that has written in the last
        `idle_s` seconds counts as running, and the call fails. `keep_unfinished` keeps one that has the claim.
        """
        ...


@cache
def load_engine() -> Engine:
    """Load the installed engine. A process looks for it once: reading what all packages offer takes 20 ms.

    Raises:
        RequestError: `request.engine_missing` when the engine's dependencies are not installed.
    """
    # `--help` imports this module, too, and must not wait for the metadata of installed packages.
    from importlib.metadata import entry_points

    found = tuple(entry_points(group=ENTRY_POINT_GROUP))
    if not found:
        raise RequestError("request.engine_missing", "the conversion engine is not installed", fix=_without_engine())
    try:
        return cast("Engine", found[0].load())
    except ModuleNotFoundError as error:
        raise RequestError(
            "request.engine_missing",
            f"the conversion engine needs {error.name!r}, which is not installed",
            fix=_without_engine(),
        ) from None


def _without_engine() -> str:
    return f"{install_line('worker')}; or use a service: export RESHARD_URL=http://host:8000 and `reshard submit`"
