"""The source's metadata is read by one of the workers that share a conversion; the others take it from its pack.

Workers that begin at the same time elect the one that reads. Under a service, others join a job after its owner has
planned, if it is large: the owner keeps what it read, and publishes it for them then.

All of them parse and plan. The pack only serves ranges of the very versions of objects that a worker has listed itself,
and the plan's digest, which names the place where the workers meet, tells if they planned alike.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from reshard.errors import IntegrityError, ReshardError, SourceError, StorageError
from reshard.models import ConvertRequest
from reshard.shared_work import SharedWork
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.distributed.coordination import CoordinationStore, SystemClock
from reshard_engine.distributed.file_coordination import FileCoordination
from reshard_engine.distributed.first_reader import FirstReader, Turn
from reshard_engine.distributed.members import Members, Timing, new_worker
from reshard_engine.distributed.object_coordination import ObjectCoordination
from reshard_engine.execute.executor import StoppedError
from reshard_engine.execute.sinks.local import LocalSink
from reshard_engine.execute.sinks.object_store import ObjectSink
from reshard_engine.operations.requested import requested_checkpoint
from reshard_engine.storage.locations import Location, seen_through
from reshard_engine.storage.packed_store import PackedStore, ReadRecorder
from reshard_engine.storage.protocol import Store
from reshard_engine.storage.read_pack import MAX_PACK_BYTES, Ranges, ReadPack, body_bytes, from_part
from reshard_engine.storage.urls import canonical_url

_PATIENCE_S = 10.0
"""A first reader that shows nothing for so long counts as dead: a wrong guess costs only reads."""
_BEAT_S = 1.0
_REMOVE_TRIES = 3
_DO_NOT_MATTER = {
    "source": {"url"},
    "target": True,
    "target_profile": True,
    "overwrite": True,
    "verify": True,
    "memory_limit_bytes": True,
    "part_bytes": True,
    "threads": True,
    "server_copy": True,
}
"""The fields of a request that do not decide which metadata is read."""


def coordination_at(sink: LocalSink | ObjectSink, root: str) -> CoordinationStore:
    """The texts of workers below a path beside a target."""
    return FileCoordination(root) if isinstance(sink, LocalSink) else ObjectCoordination(sink.store, root)


def _key(request: ConvertRequest) -> str:
    read = f"{canonical_url(request.source.url)}\n{request.model_dump_json(exclude=_DO_NOT_MATTER)}"
    return hashlib.sha256(read.encode()).hexdigest()[:16]


class SharedMetadata:
    """One worker's use of packs. `close` it when its conversion has ended, however it ended."""

    def __init__(self, work: SharedWork, check: Callable[[], None], *, helps: bool = False) -> None:
        """Prepare; nothing is read or written yet.

        Args:
            work: The worker's place among the others.
            check: Raises if the caller wants to stop.
            helps: True for a worker that joins others, which have planned.
        """
        self._work = work
        self._check = check
        self._helps = helps
        self._wrote = False
        """True if texts of this worker may lie at the place of packs."""
        self._kept: Sequence[bytes] = ()
        self._turn: Turn | None = None
        self._reader: FirstReader | None = None
        self._pack: ReadPack | None = None
        self._recorder: ReadRecorder | None = None
        self._views: list[PackedStore] = []
        self._until_read = ExitStack()
        self._sink: LocalSink | ObjectSink | None = None
        self.seconds: dict[str, float] = {}
        """`publish`: what it took to leave the metadata to others; `pack`: to wait for theirs, and to fetch it."""
        self.pack_bytes = 0
        """Compressed bytes of the pack that was published or fetched."""

    def read(self, request: ConvertRequest, source: Location, sink: LocalSink | ObjectSink) -> Checkpoint:
        """The checkpoint that a request names, by reads of its metadata or from the pack of another worker.

        Raises:
            ReshardError: As `requested_checkpoint`; the caller wants to stop.
        """

        def view(store: Store, profile: str | None) -> Store:
            if store.scheme == "file":
                return store
            if self._turn is None:
                self._begin(request, sink)
            if self._pack is None and self._recorder is None:
                return store
            self._views.append(PackedStore(store, f"{profile}\0{store.scheme}", self._pack, self._recorder))
            return self._views[-1]

        with self._until_read, seen_through(view):
            seen = replace(source, store=view(source.store, request.source.profile))
            checkpoint = requested_checkpoint(request, seen)
            if self._recorder is not None and not self._recorder.too_large:
                began = time.monotonic()
                self._kept = self._recorder.parts()
                if self._turn is not None and self._turn.publishes:
                    self._publish(began)
        for packed in self._views:
            packed.release()
        self._pack = self._recorder = None
        files = tuple(
            replace(f, store=f.store.inner) if isinstance(f.store, PackedStore) else f for f in checkpoint.files
        )
        return replace(checkpoint, files=files)

    def _begin(self, request: ConvertRequest, sink: LocalSink | ObjectSink) -> None:
        """Fetch a pack, or become the one that publishes it. Where packs fail, the worker reads for itself."""
        began = time.monotonic()
        self._turn = Turn()
        lease_s = min(_PATIENCE_S, self._work.lease_s)
        timing = Timing(beat_s=min(_BEAT_S, lease_s / 6), lease_s=lease_s, poll_s=0.1, slow_poll_s=1.0)
        try:
            if isinstance(sink, LocalSink):
                sink.make_parent()
            store, clock, key = coordination_at(sink, sink.packs_root), SystemClock(), _key(request)
            members = Members(store, clock, timing)
            self._reader = FirstReader(store, clock, members, new_worker(), key=key, timing=timing, check=self._check)
            self._sink = sink
            self._take_turn(self._reader, claims=self._work.least_bytes == 0)
            if self._turn.published:
                self._pack = self._fetched(self._reader, self._turn)
            elif self._turn.publishes or (self._work.least_bytes and not self._helps):
                self._recorder = recorder = ReadRecorder()
                if self._turn.publishes:
                    self._until_read.enter_context(self._reader.alive(self._turn, lambda: recorder.too_large))
        except StoppedError:
            self._wrote = False  # it waited
            raise
        except ReshardError:
            self._turn = Turn()
        if self._pack is not None:
            self.seconds["pack"] = time.monotonic() - began

    def _take_turn(self, reader: FirstReader, *, claims: bool) -> None:
        self._wrote = claims  # also if it fails: the acknowledgement of a claim may be lost
        self._turn = reader.take_turn(claims=claims)
        self._wrote = bool(self._turn.publishes)

    def offer(self) -> None:
        """Publish what this worker read, unless it has done so: from now on others may join."""
        if self._reader is None or not self._kept:
            return
        began = time.monotonic()
        with suppress(StorageError, IntegrityError, SourceError):
            self._take_turn(self._reader, claims=True)
            if self._turn is not None and self._turn.publishes:
                self._publish(began)

    def _fetched(self, reader: FirstReader, turn: Turn) -> ReadPack | None:
        found: list[Ranges] = []
        room = MAX_PACK_BYTES
        for part in reader.parts(turn):
            self.pack_bytes += len(part)
            room -= body_bytes(part)
            if room < 0:
                return None
            if (ranges := from_part(part)) is not None:
                found.append(ranges)
        return ReadPack(found) if found else None

    def _publish(self, began: float) -> None:
        with suppress(ReshardError):
            if self._reader is not None and self._turn is not None:
                self._reader.publish(self._turn, self._kept)
                self.pack_bytes = sum(map(len, self._kept))
                self.seconds["publish"] = time.monotonic() - began
        self._kept = ()

    def close(self) -> None:
        """Remove what this worker published. The one that commits removes all packs, but may have done so before."""
        if self._sink is None or not self._wrote:
            return
        for _ in range(_REMOVE_TRIES):
            with suppress(ReshardError):
                self._sink.forget_packs()
                return
