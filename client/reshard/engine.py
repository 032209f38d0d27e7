"""The engine as the slim client sees it: its operations, how it is loaded, and what a user does without it.

The package without extras brings no engine. With the `worker` extra's dependencies the entry point
`reshard.engine` loads; without them the user is told what to install.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, Self, cast

from reshard.errors import RequestError
from reshard.extras import install_line

if TYPE_CHECKING:
    from threading import Event

    from reshard.api.client import Client
    from reshard.choices import WeightDtype
    from reshard.doctor import Finding
    from reshard.errors import ReshardError
    from reshard.models.jobs import (
        CleanReport,
        ConvertRequest,
        ConvertResult,
        FileEntry,
        Inspection,
        NotCarried,
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


class Loading(Protocol):
    """Loads virtual checkpoints with frameworks. Their objects are typed `Any`: the slim package imports none."""

    def layout_of(self, engine: Any) -> dict[str, Any]:
        """The options of the native target that an engine of DeepSpeed loads."""
        ...

    def load_into_deepspeed(
        self, engine: Any, request: ConvertRequest, arguments: Mapping[str, Any], *, compare: bool
    ) -> tuple[Any, Any]:
        """Call the `load_checkpoint` of an engine of DeepSpeed on a target that is never written."""
        ...

    def stubs(self, request: ConvertRequest, *, compare: bool) -> Any:
        """Make a directory of stubs, which stand for the files of the request's target, at the target."""
        ...

    def stub_home(self) -> AbstractContextManager[str]:
        """A temporary directory for stubs; those that killed processes left are removed first."""
        ...

    def serving(self, made: Sequence[Any]) -> AbstractContextManager[None]:
        """Let frameworks of this process load stubs as if they were files."""
        ...


class VirtualCheckpoint(Protocol):
    """The files of a target that is never written. Each is computed from the source when it is read.

    Any thread may read. Errors are those of a conversion; `source.changed` if the source is not what was planned with.
    """

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files of the target, by paths relative to it."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings that a conversion would give."""
        ...

    @property
    def not_carried(self) -> tuple[NotCarried, ...]:
        """Everything that the source holds and these files do not."""
        ...

    @property
    def compared(self) -> int | None:
        """Number of comparisons of copies and rounded masters in the source; None if they were left out."""
        ...

    @property
    def content_digest(self) -> str:
        """Digest of everything that decides the bytes: the source as it was pinned, and the layout."""
        ...

    @property
    def source_digest(self) -> str:
        """Digest of the source's files, each with its pin."""
        ...

    @property
    def source_format(self) -> str:
        """The format of the source, as `inspect` names it."""
        ...

    @property
    def tag(self) -> str | None:
        """The tag of the source."""
        ...

    @property
    def read_bytes(self) -> int:
        """Bytes of tensors that were read from the source so far."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes `[offset, offset + length)` of a file; to its end by default."""
        ...

    def read_into(
        self, path: str, offset: int, buffer: memoryview, *, should_stop: Callable[[], bool] | None = None
    ) -> None:
        """Fill `buffer` with the bytes of a file from `offset` on; `job.cancelled` if `should_stop` is true."""
        ...

    def open(self, path: str) -> BinaryIO:
        """A file as an open file, for `torch.load` and others that read files."""
        ...

    def filesystem(self) -> Any:
        """The files as a read-only file system of fsspec."""
        ...

    def prove_unchanged(self) -> None:
        """Compare every file of the source with its pin: `source.changed`."""
        ...

    def close(self) -> None:
        """End the threads of this object."""
        ...

    def __enter__(self) -> Self:
        """The object itself."""
        ...

    def __exit__(self, *error: object) -> None:
        """Close it."""
        ...


class Mount(Protocol):
    """The files of a target that is never written, below a directory, until `close` or the death of this process."""

    @property
    def layout(self) -> VirtualCheckpoint:
        """The files."""
        ...

    @property
    def directory(self) -> str:
        """Absolute path of the directory that was mounted on."""
        ...

    @property
    def target(self) -> str:
        """Path of the directory with the files of the target: the tag directory, or the mount itself."""
        ...

    @property
    def pointer(self) -> str | None:
        """Name of the pointer in the mount, such as `latest`; None if the target has none."""
        ...

    def wait(self, stop: Event) -> None:
        """Wait until `stop` is set, or until somebody else has unmounted the directory."""
        ...

    def close(self) -> None:
        """Unmount."""
        ...

    def __enter__(self) -> Self:
        """The object itself."""
        ...

    def __exit__(self, *error: object) -> None:
        """Unmount."""
        ...


class Engine(Protocol):
    """The operations of the engine in this process. All calls are synchronous and raise `ReshardError`s."""

    def inspect(self, source: SourceSpec, *, compare: bool = False, launch: RunLaunch | None = None) -> Inspection:
        """Describe a checkpoint, from its metadata only; with `compare`, after comparing what must agree in it.

        With `launch`, it also says what that run loads: the checkpoint as it is, or which conversion of it. Foreign
        objects are listed and never refused, because nothing is written.

        Raises:
            RequestError: `request.invalid` for a launch that no run is.
            SourceError: With `compare`, `checkpoint.disagreement`, or what a format knows of the cause.
        """
        ...

    def format_at(self, directory: str) -> str | None:
        """The name of the format that recognises a directory by its names; None if no format does."""
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

    def open_layout(self, request: ConvertRequest, *, exact_crcs: bool, compare: bool) -> VirtualCheckpoint:
        """Lay out the target that `convert` would write, and serve its files from the source."""
        ...

    def mount(
        self,
        layout: VirtualCheckpoint,
        directory: str,
        *,
        allow_other: bool = False,
        on_error: Callable[[ReshardError], None],
    ) -> Mount:
        """Show the files of a layout below a directory. `on_error` is called where readers get `EIO`."""
        ...

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
        """Run the conversion to its commit. Resumes an interrupted run of the same conversion.

        With `work`, other processes that are given the same request run it too, and each does a part.
        With `signing`, or a key in RESHARD_SIGNING_KEY, certificates of target and source are written beside the
        target; of workers that run it together, the first one does so.
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

    def storage_reader(self, request: ConvertRequest, *, compare: bool) -> Any:
        """Return a `StorageReader` of torch over the distributed checkpoint that the request asks for.

        Raises:
            RequestError: `request.engine_missing` without torch.
        """
        ...

    def loading(self) -> Loading:
        """Return what loads virtual checkpoints with frameworks.

        Raises:
            RequestError: `request.engine_missing` without torch.
        """
        ...

    def verify(self, target: str, *, profile: str | None = None, sample: float | None = None) -> VerifyReport:
        """Read a target again and compare it with its manifest; with `sample`, only a random fraction of its bytes.

        A directory without a manifest stands for the checkpoint that its `latest` names, as in `inspect` and `diff`.
        """
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
        """Compare two checkpoints by logical tensor, whatever their layouts and formats; nothing is written.

        Foreign objects are compared as data, never refused.
        """
        ...

    def fingerprint(
        self,
        source: SourceSpec,
        options: FingerprintOptions,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> FingerprintReport:
        """Digest the state of a checkpoint, whatever its layout and format; nothing is written.

        Foreign objects are digested as data, never refused.
        """
        ...

    def seal(
        self,
        source: SourceSpec,
        signing: Signing,
        options: Options,
        *,
        on_progress: Callable[[Progress], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> SealReport:
        """Sign a statement about a checkpoint: its files and its state; nothing is written."""
        ...

    def push(self, directory: str, url: str, *, overwrite: bool = False) -> PushResult:
        """Upload a local directory that a conversion wrote to the hub, by one commit."""
        ...

    def verify_sealed(self, source: SourceSpec, certificates: Sequence[str], keys: Sequence[str]) -> SealCheck:
        """Compare a checkpoint with its certificate: signature, chain, files and state."""
        ...

    def clean(
        self, target: str, *, profile: str | None = None, dry_run: bool = False, idle: bool = False
    ) -> CleanReport:
        """Remove files that unfinished conversions into a target left, unless a process still uses them.

        With `idle` the caller knows that none does.
        """
        ...

    def steps(self, run: str, *, profile: str | None = None) -> RunListing:
        """List the checkpoints of a run, from their metadata."""
        ...

    def run_around(self, place: str, tag: str | None) -> RunListing | None:
        """List the run around a local checkpoint that cannot be used, if it has another complete checkpoint."""
        ...

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
        """Decide what goes of a run's checkpoints, and remove those that are in `only`; without it, remove nothing."""
        ...

    def checkup(self, places: Sequence[str], profile: str | None = None) -> Iterator[Finding]:
        """Check libraries, credentials, GPU and places, one after the other; nothing is written."""
        ...

    def put_text(self, url: str, text: str) -> None:
        """Write a small text, whole, as a file or into an object store, such as one that names a run's last step."""
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


def load_client() -> type[Client]:
    """The class of a service's client, imported at its first use: its httpx takes a third of the time of `--help`."""
    from reshard.api.client import Client

    return Client


def _without_engine() -> str:
    return f"{install_line('worker')}; or use a service: export RESHARD_URL=http://host:8000 and `reshard submit`"
