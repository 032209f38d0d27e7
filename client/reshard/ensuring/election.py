"""Elects one of many processes as the owner of a work, by small files in the save directory's hidden folder.

The claim is a file that only one process can create. Its owner touches it as long as it lives. Others take it over
when the owner's process is gone (same host), or when nobody has touched it for `STALE_S` by their own clock, so that
a killed owner blocks nobody for ever. A claim saves work; it is not needed for safety. If two processes hold one
claim, the engine's lock and its rename that does not replace decide, and both would write the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from reshard.choices import RECORDS
from reshard.ensuring.local_checkpoints import writing
from reshard.ensuring.world import Layout
from reshard.errors import ReshardError, from_problem
from reshard.shared_work import process_gone, process_scope

STALE_S = 60.0
"""Seconds after which an untouched claim is stale: longer than network file systems cache attributes (NFS: 60 s)."""
BEAT_S = 5.0


class _Facts(BaseModel):
    """The contents of a claim file."""

    model_config = ConfigDict(defer_build=True)

    where: str
    pid: int
    nonce: str


def _facts(text: str) -> _Facts | None:
    with suppress(ValidationError):
        return _Facts.model_validate_json(text)
    return None


@dataclass(frozen=True)
class _Seen:
    """A claim file as it was read."""

    text: str
    touched_ns: int

    @property
    def owner_gone(self) -> bool:
        """True if the owner is a process of this host that has ended."""
        facts = _facts(self.text)
        # The file is being written, or is not one of ours: only its age counts.
        return facts is not None and facts.where == process_scope() and process_gone(facts.pid)


class ElectionClaim:
    """A claim that this process holds until the `with` block ends."""

    def __init__(self, path: str, descriptor: int, text: str) -> None:
        """See `Election.claim`."""
        self._path, self._descriptor, self._text = path, descriptor, text
        facts = _facts(text)
        self.nonce = "" if facts is None else facts.nonce
        """A random name that no other claim has."""
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._touch, name="reshard-claim", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread that touches the file."""
        self._beat.start()
        return self

    def _touch(self) -> None:
        while not self._ended.wait(BEAT_S):
            # By descriptor: after a takeover the path belongs to another process's claim.
            with suppress(OSError):
                os.utime(self._descriptor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the claim, so that the other processes go on."""
        self._ended.set()
        self._beat.join()
        os.close(self._descriptor)
        seen = _read(self._path)
        if seen is not None and seen.text == self._text:
            _unlink(self._path)


class _Watched:
    """A file that its owner is to touch or to remove, and the time since which it has not changed."""

    def __init__(self, path: str, stale_s: float) -> None:
        self._path, self._stale_s = path, stale_s
        self._last: _Seen | None = None
        self._since = time.monotonic()

    def seen(self) -> _Seen | None:
        """The file as it is now; None if it is gone."""
        seen = _read(self._path)
        if seen != self._last:
            self._last, self._since = seen, time.monotonic()
        return seen

    def stale(self) -> bool:
        """True if the file as last seen belongs to a process that has ended or does not touch it."""
        return self._last is not None and (self._last.owner_gone or time.monotonic() - self._since > self._stale_s)


class Election:
    """Tries to get a claim, and watches its present owner."""

    def __init__(self, path: str, *, stale_s: float = STALE_S) -> None:
        """Prepare for the claim file `path`, whose directory exists."""
        self._path = path
        self._claim = _Watched(path, stale_s)
        # Whoever removes a stale claim holds this second file meanwhile: two that see the same stale claim would
        # otherwise remove it one after the other, and the second would remove the claim that follows it.
        self._takeover_path = f"{path}.takeover"
        self._takeover = _Watched(self._takeover_path, stale_s)
        self.watched: set[str] = set()
        """Nonces of the claims of other processes that this one has waited for."""

    def claim(self) -> ElectionClaim | None:
        """Get the claim; None while another process holds it.

        Raises:
            OSError: The directory cannot be written.
        """
        text = _new_facts()
        descriptor = _create(self._path, text)
        if descriptor is None:
            self._watch()
            return None
        return ElectionClaim(self._path, descriptor, text)

    def _watch(self) -> None:
        seen = self._claim.seen()
        if seen is None:
            return
        if (facts := _facts(seen.text)) is not None:
            self.watched.add(facts.nonce)
        if self._claim.stale():
            self._remove(seen)

    def _remove(self, stale: _Seen) -> None:
        """Remove this stale claim and no newer one."""
        descriptor = _create(self._takeover_path, _new_facts())
        if descriptor is None:
            self._takeover.seen()
            if self._takeover.stale():
                # Its process was killed between two system calls.
                _unlink(self._takeover_path)
            return
        os.close(descriptor)
        try:
            now = _read(self._path)
            if now is not None and now.text == stale.text:
                _unlink(self._path)
        finally:
            _unlink(self._takeover_path)


def _new_facts() -> str:
    return _Facts(where=process_scope(), pid=os.getpid(), nonce=uuid.uuid4().hex).model_dump_json()


def _create(path: str, text: str) -> int | None:
    """Create a file with this content and return its descriptor; None if it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return None
    os.write(descriptor, text.encode())
    return descriptor


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _read(path: str) -> _Seen | None:
    # Open the file and do not only `stat` it: NFS asks the server again when a file is opened.
    with suppress(FileNotFoundError), open(path, "rb") as file:
        return _Seen(file.read(4_096).decode("utf-8", "replace"), os.fstat(file.fileno()).st_mtime_ns)
    return None


# Records that processes leave for one another: small files in the save directory's hidden folder.


class Record(BaseModel):
    """The state of one call: the source fits, a conversion runs, or its result exists."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    schema_version: Literal[1] = 1
    finished: bool
    path: str | None
    """Save directory of the result, relative to the one that holds the record; None where the source fits."""


class Invitation(BaseModel):
    """The conversion that the owner of a claim runs, for those who wait and may help."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    nonce: str
    """The owner's claim."""
    node: str
    """The owner's node."""
    path: str
    """Save directory of the result, relative to the one that holds the invitation."""
    layout: Layout

    def same_work(self, other: Invitation | None) -> bool:
        """True if another owner goes on with the same conversion."""
        return other is not None and (other.path, other.layout) == (self.path, self.layout)


class _Failure(BaseModel):
    """The error with which the owner of a claim gave up."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    nonce: str
    problem: dict[str, Any]


class Records:
    """The records of one save directory, by key."""

    def __init__(self, home: str) -> None:
        """Open the records of the save directory `home`."""
        self._home = home
        self.folder = os.path.join(home, RECORDS)

    def prepare(self) -> None:
        """Create the folder.

        Raises:
            OSError: The save directory cannot be written.
        """
        os.makedirs(self.folder, exist_ok=True)

    def claim(self, key: str) -> str:
        """The path of the claim file for a key."""
        return self._path(key, "claim")

    def _path(self, key: str, kind: str) -> str:
        return os.path.join(self.folder, f"{key[:32]}.{kind}")

    def read(self, key: str) -> Record | None:
        """Read the record of a key; None if it does not exist or cannot be read."""
        with suppress(FileNotFoundError, ValidationError), open(self._path(key, "json"), "rb") as file:
            return Record.model_validate_json(file.read())
        return None

    def place(self, record: Record) -> str | None:
        """The path of a record's result on this host; other hosts may see the directory under another path."""
        return None if record.path is None else self.absolute(record.path)

    def absolute(self, path: str) -> str:
        """The path on this host of one that `relative` returned."""
        return os.path.normpath(os.path.join(self._home, path))

    def write(self, key: str, place: str | None, *, finished: bool) -> None:
        """Record a result; `place` is None if the result is the source itself."""
        path = None if place is None else self.relative(place)
        _write_whole(self._path(key, "json"), Record(finished=finished, path=path).model_dump_json())

    def helper_claim(self, key: str, node: str) -> str:
        """The path of the claim file of the one process of a node that helps."""
        return self._path(key, f"{hashlib.sha256(node.encode()).hexdigest()[:8]}.helper")

    def invite(self, key: str, invitation: Invitation) -> None:
        """Ask those who wait for this key to help."""
        _write_whole(self._path(key, "shared"), invitation.model_dump_json())

    def invitation(self, key: str) -> Invitation | None:
        """The invitation to help, if there is one."""
        with suppress(FileNotFoundError, ValidationError), open(self._path(key, "shared"), "rb") as file:
            return Invitation.model_validate_json(file.read())
        return None

    def withdraw(self, key: str) -> None:
        """Remove the invitation, and the claims of helpers that were killed: the conversion has ended."""
        with suppress(OSError):
            os.unlink(self._path(key, "shared"))
            for name in os.listdir(self.folder):
                if name.startswith(f"{key[:32]}.") and name.endswith(".helper"):
                    os.unlink(os.path.join(self.folder, name))

    def relative(self, place: str) -> str:
        """A path as others find it, who may see the save directory elsewhere."""
        return os.path.relpath(place, self._home)

    def tell_failure(self, key: str, nonce: str, error: ReshardError) -> None:
        """Record an error for the processes that wait for a claim, so that they do not all try the same in turn."""
        with suppress(ReshardError):
            _write_whole(self._path(key, "failed"), _Failure(nonce=nonce, problem=error.to_problem()).model_dump_json())

    def forget_failure(self, key: str) -> None:
        """Remove the recorded error after a success."""
        with suppress(OSError):
            os.unlink(self._path(key, "failed"))

    def raise_told(self, key: str, nonces: Set[str]) -> None:
        """Raise the recorded error of a claim that this process has waited for.

        Raises:
            ReshardError: That error.
        """
        with suppress(FileNotFoundError, ValidationError), open(self._path(key, "failed"), "rb") as file:
            told = _Failure.model_validate_json(file.read())
            if told.nonce in nonces:
                raise from_problem(told.problem)


def _write_whole(path: str, text: str) -> None:
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.part"
    with writing(path):
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
