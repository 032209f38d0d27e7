"""Uploads to the Hugging Face hub: a conversion that is written nowhere else, and a finished directory.

The hub wants the SHA-256 of a large file before its bytes. So a conversion makes all bytes twice: once to digest them,
as a conversion to a disk does, and once to send them. Neither memory nor a disk holds a file. All files appear in one
commit; what an interrupted upload has sent is not sent again, for the hub knows it by its digest.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor as Pool
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, BinaryIO, cast

from huggingface_hub import CommitOperationAdd

from reshard.choices import VerifyLevel
from reshard.errors import IntegrityError, RequestError, SourceError, listed, printable
from reshard.installed_formats import takes_card
from reshard.models.jobs import ConvertRequest, ConvertResult, FileEntry, Progress, SourceCheck
from reshard.models.reports import PushResult
from reshard_engine.execute.casts.placing import default_kernel
from reshard_engine.execute.checks.commit import build_manifest, prove_complete, prove_structure, with_pins
from reshard_engine.execute.checks.source import complete_records, source_check
from reshard_engine.execute.checks.unit_sums import AbandonedError
from reshard_engine.execute.executor import Executor, stop_check
from reshard_engine.execute.journal import ChunkRecord, UnitRecord
from reshard_engine.execute.sinks.protocol import CopyRead, Made, write_streamed
from reshard_engine.formats.registry import known_files
from reshard_engine.integrity.manifest import MANIFEST_NAME, Manifest, read_manifest
from reshard_engine.operations.conversion import overflow_warnings, units_at_once
from reshard_engine.operations.saved_plans import refuse_other_plan
from reshard_engine.operations.virtual.checkpoint import VirtualCheckpoint
from reshard_engine.plan.budget import peak_bytes
from reshard_engine.plan.model import Chunk, Plan
from reshard_engine.storage.hub import HubPath, HubStore, KnownFile, is_commit, pin_of
from reshard_engine.storage.locations import Location, open_location
from reshard_engine.storage.protocol import ObjectInfo, read_bytes
from reshard_engine.tensors.layout import PlannedStore

_SAMPLE_BYTES = 512
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
"""Files that a loader may take for the weights in place of others: transformers 5.23.0 looks for `model.safetensors`,
then for its index, then for `pytorch_model.bin` (`modeling_utils.py`, `_get_resolved_checkpoint_files`)."""


# What may be written to the hub, and where.


def _branch(url: str) -> tuple[Location, HubStore]:
    """The place of an upload.

    Raises:
        RequestError: `request.invalid` for what is no branch of a repository.
    """
    location = open_location(url)
    named = HubPath.of(location.path) if isinstance(location.store, HubStore) else None
    if named is None or not isinstance(location.store, HubStore) or named.path or is_commit(named.revision):
        raise RequestError(
            "request.invalid",
            f"{printable(url)} is no branch of a repository of the hub",
            fix="write hf://ORG/NAME or hf://ORG/NAME@BRANCH: files lie at the top of the repository",
        )
    return location, location.store


def _there(location: Location, store: HubStore) -> dict[str, ObjectInfo]:
    """The files that the branch has, or will have if it is created."""
    for path in dict.fromkeys((location.path, HubPath.of(location.path).repository)):
        if store.commit_if_any(path) is not None:
            place = Location(store, path, f"hf://{path}")
            return place.files()
    return {}


def _is_fresh(location: Location, store: HubStore) -> bool:
    """True if a branch is not there yet, or is where `main` is: then `main` keeps all that this one loses."""
    named, known = HubPath.of(location.path), store.commit_if_any(location.path)
    return known is None or (location.path != named.repository and known == store.commit_if_any(named.repository))


def _refuse_existing(url: str, there: Mapping[str, ObjectInfo], names: Sequence[str], *, overwrite: bool) -> list[str]:
    """The files of an earlier model that must go with the commit.

    Raises:
        RequestError: `request.target_exists` if a file would be replaced or removed, and `overwrite` is False.
    """
    stale = sorted(name for name in there if name not in names and _WEIGHTS.fullmatch(name))
    replaced = sorted(set(there) & set(names))
    if overwrite or not (stale or replaced or known_files().holds_checkpoint(there)):
        return stale
    raise RequestError(
        "request.target_exists",
        f"{printable(url)} holds {listed([*replaced, *stale] or list(there))}, of other content",
        fix="name another branch, as in hf://ORG/NAME@BRANCH, or add --overwrite: one commit replaces the weights, "
        "and the history keeps the old ones",
    )


# The first time that the bytes are made: digests of files, chunks and tensors.


class _Digests:
    """Takes the place of a sink for the executor: digests each file from its beginning to its end.

    Units start in order, so a chunk that waits for the one before it waits for a unit that runs.
    """

    streams = True

    def __init__(self, plan: Plan) -> None:
        self.sha256 = [hashlib.sha256() for _ in plan.files]
        self.samples = [b""] * len(plan.files)
        self._at = [0] * len(plan.files)
        self._turn = threading.Condition()
        self._failed = False

    def write_made(self, made: Made, _copy_read: CopyRead | None, _pool: Pool | None) -> list[ChunkRecord]:
        """Digest the items of a unit, each when it is its turn."""
        try:
            return write_streamed(lambda chunk: _Turn(self, chunk), made)
        except BaseException:
            with self._turn:
                self._failed = True
                self._turn.notify_all()
            raise

    def put(self, file: int, offset: int, data: memoryview) -> None:
        """Digest bytes of a file when all before them are.

        Raises:
            AbandonedError: Another unit failed.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._failed or self._at[file] == offset)
            if self._failed:
                raise AbandonedError
        if offset < _SAMPLE_BYTES:
            self.samples[file] += bytes(data[: _SAMPLE_BYTES - offset])
        self.sha256[file].update(data)
        with self._turn:
            self._at[file] += len(data)
            self._turn.notify_all()

    def record(self, record: UnitRecord) -> None:
        """Keep no journal: nothing is written yet."""


class _Turn:
    """One chunk of a file that is digested."""

    def __init__(self, digests: _Digests, chunk: Chunk) -> None:
        self._digests, self._file = digests, chunk.file

    def put(self, offset: int, data: memoryview) -> None:
        self._digests.put(self._file, offset, data)

    def close(self) -> None:
        pass


class _Files(PlannedStore):
    """The files of a layout, as they will be sent."""

    def __init__(self, layout: VirtualCheckpoint) -> None:
        super().__init__("/", layout.layout)
        self._layout = layout

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        self._layout.read_into(info.path[1:], offset, buffer)


# A conversion into a repository.


class Upload:
    """A planned conversion whose target is a branch of a repository. See `upload`."""

    def __init__(self, request: ConvertRequest, layout: VirtualCheckpoint) -> None:
        self.request = request
        self.layout = layout.layout
        self._made = layout
        self.plan = layout.plan
        self.checkpoint = layout.checkpoint
        self.target, self._store = _branch(request.target)
        self._on_progress: Callable[[Progress], None] | None = None
        self._should_stop: Callable[[], bool] | None = None
        self._lock = threading.Lock()
        self._sent_bytes = 0
        self._seconds: dict[str, float] = {}
        self._source_check: SourceCheck | None = None

    @classmethod
    def prepare(cls, request: ConvertRequest) -> Upload:
        """Read the source's metadata and plan; no request is sent to the hub.

        Raises:
            RequestError: `request.unsatisfiable` for what is no model, `request.invalid`.
            ReshardError: Any problem of the source.
        """
        _branch(request.target)
        if request.verify is VerifyLevel.FULL:
            raise RequestError(
                "request.invalid",
                "--verify full reads a target before its commit, and the hub shows no file before it",
                fix="leave --verify out, and verify the repository afterwards",
            )
        request = request.for_hub()
        layout = VirtualCheckpoint.prepare(request, exact_crcs=True, compare=False)
        refuse_other_plan(request.plan, layout.plan)
        return cls(request, layout)

    @property
    def peak_bytes(self) -> int:
        """Largest memory of the run in bytes, without the interpreter."""
        return peak_bytes(self.plan.metadata_bytes, self._threads, [u.length_bytes for u in self.plan.units])

    @property
    def _threads(self) -> int:
        return units_at_once(self.request, self.plan, waits=not self.checkpoint.is_local)

    def pointer_warnings(self) -> tuple[str, ...]:
        """None: no pointer lies beside a repository."""
        return ()

    def run(
        self, on_progress: Callable[[Progress], None] | None, should_stop: Callable[[], bool] | None
    ) -> ConvertResult:
        """Digest all files, send them, and commit; a branch that holds the result already is left alone."""
        self._on_progress, self._should_stop = on_progress, should_stop
        with self._made:
            return self._run()

    def _run(self) -> ConvertResult:
        there, names = _there(self.target, self._store), [*(f.path for f in self.plan.files), MANIFEST_NAME]
        exists = self._store.commit_if_any(self.target.path) is not None
        if exists and (done := self._finished(there)) is not None:
            return self._result(done, already_done=True)
        overwrite = self.request.overwrite or _is_fresh(self.target, self._store)
        gone = _refuse_existing(self.target.url, there, names, overwrite=overwrite)
        clock = time.monotonic()
        self._made.compare()
        manifest, digests = self._digested()
        self._seconds["run"], clock = time.monotonic() - clock, time.monotonic()
        self._store.publish(
            self.target.path, self._additions(manifest, digests), gone, f"Upload {self.request.to} with reshard"
        )
        self._seconds["commit"] = time.monotonic() - clock
        self._report("done", self.plan.write_bytes)
        return self._result(manifest)

    def _finished(self, there: Mapping[str, ObjectInfo]) -> Manifest | None:
        """The manifest of the branch, if it is this plan's and all files have the content that it names."""
        found = _manifest_of(self.target, there)
        if found is None or found.content_digest != self.plan.content_digest:
            return None
        for file in found.files:
            info = there.get(file.path)
            if info is None or info.size_bytes != file.size_bytes:
                return None
            # Of a file that is no large one, the hub tells another digest.
            large = info.pin.startswith("sha256:")
            held = info.pin[7:] if large else hashlib.sha256(read_bytes(self._store, info)).hexdigest()
            if held != file.sha256:
                return None
        return found

    def _digested(self) -> tuple[Manifest, _Digests]:
        plan, made, digests = self.plan, self._made, _Digests(self.plan)
        executor = Executor(
            self.checkpoint,
            self.layout,
            plan,
            cast("Any", digests),  # an executor calls no other method of a sink
            done={},
            on_progress=None if self._on_progress is None else self._first_half,
            should_stop=self._should_stop,
        )
        for commit in (False, True):
            executor.run([u for u in plan.units if u.commit is commit], self._threads, phase="running")
            prove_structure(Location(_Files(made), "/", "/"), self.layout.files, executor.records, commit=commit)
        prove_complete(plan, executor.records)
        complete_records(self.checkpoint, executor.source_reads, stop_check(self._should_stop), every=False)
        self._source_check = source_check(executor.source_reads)
        made.prove_unchanged()
        manifest = build_manifest(
            self.checkpoint,
            plan,
            self.layout.files,
            executor.records,
            pointer=None,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            warnings=(*made.warnings, *overflow_warnings(plan, executor.records)),
        )
        sums = {f.path: h.hexdigest() for f, h in zip(plan.files, digests.sha256, strict=True)}
        manifest = with_pins(manifest, {path: f"sha256:{digest}" for path, digest in sums.items()})
        files = tuple(f.model_copy(update={"sha256": sums[f.path]}) for f in manifest.files)
        return manifest.model_copy(update={"files": files}), digests

    def _additions(self, manifest: Manifest, digests: _Digests) -> list[CommitOperationAdd]:
        """The files in the form of the hub's client. Their bytes are made again when they are sent."""
        found: list[CommitOperationAdd] = []
        for number, file in enumerate(self.plan.files):
            found.append(
                KnownFile(
                    file.path,
                    self._sent(file.path),
                    size_bytes=file.size_bytes,
                    sha256=digests.sha256[number].digest(),
                    sample=digests.samples[number],
                )
            )
        return [*found, CommitOperationAdd(MANIFEST_NAME, manifest.to_bytes())]

    def _sent(self, path: str) -> BinaryIO:
        raw = self._made.open_raw(path, lambda offset, buffer: self._send(path, offset, buffer))
        return cast("BinaryIO", io.BufferedReader(raw, 1 << 20))

    def _send(self, path: str, offset: int, buffer: memoryview) -> None:
        stop_check(self._should_stop)()
        self._made.read_into(path, offset, buffer)
        with self._lock:
            # What is sent once more, after a failure, counts once more.
            self._sent_bytes = min(self._sent_bytes + len(buffer), self.plan.write_bytes)
            self._report("committing", (self.plan.write_bytes + self._sent_bytes) // 2)

    def _first_half(self, progress: Progress) -> None:
        """Report the bytes that are digested: they are made a second time."""
        if self._on_progress is not None:
            self._on_progress(progress.model_copy(update={"bytes_done": progress.bytes_done // 2, "eta_s": None}))

    def _report(self, phase: Any, done_bytes: int) -> None:
        if self._on_progress is not None:
            units = len(self.plan.units)
            total = self.plan.write_bytes
            self._on_progress(
                Progress(phase=phase, bytes_done=done_bytes, bytes_total=total, units_done=units, units_total=units)
            )

    def _result(self, manifest: Manifest, *, already_done: bool = False) -> ConvertResult:
        return ConvertResult(
            target=self.target.url,
            to=self.request.to,
            files=tuple(FileEntry(path=f.path, size_bytes=f.size_bytes) for f in manifest.files),
            read_bytes=0 if already_done else manifest.read_bytes,
            write_bytes=0 if already_done else self.plan.write_bytes,
            seconds=self._seconds,
            plan_digest=self.plan.digest,
            already_done=already_done,
            warnings=(*manifest.warnings, *default_kernel().take_warnings()),
            not_carried=manifest.not_carried,
            casts=manifest.casts,
            verification=manifest.verification,
            source_check=self._source_check,
        )


def upload(
    request: ConvertRequest,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> ConvertResult:
    """Convert into a branch of a repository, by one commit with a model card and a manifest.

    A repository that does not exist is created, private. A branch that holds this conversion's result is left alone.

    Raises:
        RequestError: `request.target_exists` if the branch holds another model; see also `Upload.prepare`.
        StorageError: `storage.conflict` if the branch has moved meanwhile. Nothing of this conversion is in it.
        ReshardError: Any problem of the source.
    """
    started = time.monotonic()
    planned = Upload.prepare(request)
    planning = time.monotonic() - started
    result = planned.run(on_progress, should_stop)
    return result.model_copy(update={"seconds": {"plan": planning, **result.seconds}})


# A finished directory.


def push(directory: str, url: str, *, overwrite: bool = False) -> PushResult:
    """Upload a local directory that a conversion wrote, by one commit. What is there already is not sent again.

    Args:
        directory: The directory, with its manifest.
        url: `hf://ORG/NAME[@BRANCH]`. A repository that does not exist is created, private.
        overwrite: True to replace other files of these names, and to remove weights under other names.

    Raises:
        SourceError: `source.not_found` if the directory is no finished output of weights.
        RequestError: `request.target_exists` if the branch holds another model.
        StorageError: `storage.conflict` if the branch has moved meanwhile.
    """
    source = open_location(directory)
    location, store = _branch(url)
    manifest = read_manifest(source) if source.store.scheme == "file" else None
    if manifest is None:
        raise SourceError(
            "source.not_found",
            f"{printable(directory)} is no local directory with {MANIFEST_NAME}",
            fix="name the directory that a conversion wrote",
        )
    if not takes_card(manifest.target.get("to")):
        raise RequestError(
            "request.unsatisfiable",
            f"the hub takes models and adapters, and {printable(directory)} holds {manifest.target.get('to')}",
            fix="convert it to weights first: --to safetensors",
        )
    names = [*(f.path for f in manifest.files), MANIFEST_NAME]
    sizes = {name: info.size_bytes for name, info in source.files().items()}
    if wrong := [f.path for f in manifest.files if sizes.get(f.path) != f.size_bytes]:
        raise IntegrityError(
            "integrity.mismatch",
            f"{printable(directory)} has changed since it was written: {listed(wrong)}",
            fix="convert again with --overwrite",
        )
    entries = tuple(FileEntry(path=name, size_bytes=sizes[name]) for name in names)
    additions = [CommitOperationAdd(name, os.path.join(source.path, name)) for name in names]
    there = _there(location, store)
    known = store.commit_if_any(location.path)
    if known is not None and _is_there(location, there, manifest, additions):
        return PushResult(url=location.url, commit=known, files=entries, already_done=True)
    gone = _refuse_existing(location.url, there, names, overwrite=overwrite or _is_fresh(location, store))
    commit = store.publish(location.path, additions, gone, f"Upload {manifest.target['to']} with reshard")
    return PushResult(url=location.url, commit=commit, files=entries)


def _is_there(
    location: Location, there: Mapping[str, ObjectInfo], manifest: Manifest, additions: Sequence[CommitOperationAdd]
) -> bool:
    """True if a branch holds all files, and a manifest of this conversion, which another run may have written."""
    held = _manifest_of(location, there)
    if held is None or held.content_digest != manifest.content_digest:
        return False
    files = [a for a in additions if a.path_in_repo != MANIFEST_NAME]
    return all((i := there.get(a.path_in_repo)) is not None and pin_of(a, i) == i.pin for a in files)


def _manifest_of(location: Location, there: Mapping[str, ObjectInfo]) -> Manifest | None:
    """The manifest of a branch; None if it has none that is sound."""
    if MANIFEST_NAME in there:
        with suppress(IntegrityError):
            return read_manifest(location)
    return None
