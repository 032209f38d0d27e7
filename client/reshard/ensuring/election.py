"""Elects one of many processes as the owner of a work, by small files in the save directory's hidden folder.

The claim is a file that only one process can create. Its owner touches it as long as it lives. Others take it over
when the owner's process is gone (same host), or when nobody has touched it for `STALE_S` by their own clock, so that
a killed owner blocks nobody for ever. A claim saves work; it is not needed for safety. If two processes hold one
claim, the engine's lock and its rename that does not replace decide, and both would write the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from reshard.choices import RECORDS
from reshard.ensuring.local_checkpoints import writing
from reshard.errors import ReshardError, from_problem
from reshard.models.resume import ResumeLayout
from reshard.shared_work import Lease, process_ended, process_name, repeated

STALE_S = 60.0
"""Seconds after which an untouched claim is stale: longer than network file systems cache attributes (NFS: 60 s)."""
BEAT_S = 5.0


@dataclass(frozen=True)
class _Seen:
    """A claim file as it was read."""

    owner: str
    """The name of its process; another text while it is being written, or if it is not one of ours."""
    touched_ns: int


class ElectionClaim:
    """A claim that this process holds until the `with` block ends."""

    def __init__(self, path: str, descriptor: int, name: str) -> None:
        """See `Election.claim`."""
        self._path, self._descriptor = path, descriptor
        self.nonce = name
        """The name of its owner, which no other claim has."""
        self._beats = repeated(self._touch, every_s=BEAT_S, name="reshard-claim")

    def __enter__(self) -> Self:
        """Start the thread that touches the file."""
        self._beats.__enter__()
        return self

    def _touch(self) -> None:
        # By descriptor: after a takeover the path belongs to another process's claim.
        with suppress(OSError):
            os.utime(self._descriptor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the claim, so that the other processes go on."""
        self._beats.__exit__(None, None, None)
        os.close(self._descriptor)
        _unlink_that_of(self._path, self.nonce)


class _Watched:
    """A file that its owner is to touch or to remove."""

    def __init__(self, path: str, stale_s: float) -> None:
        self._path = path
        self._last: _Seen | None = None
        self._lease = Lease(stale_s)

    def seen(self) -> _Seen | None:
        """The file as it is now; None if it is gone."""
        self._last = _read(self._path)
        self._lease.saw(self._last)
        return self._last

    def stale(self) -> bool:
        """True if the file as last seen belongs to a process that has ended or does not touch it."""
        return self._last is not None and (process_ended(self._last.owner) or self._lease.is_over)


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
        name = process_name()
        descriptor = _create(self._path, name)
        if descriptor is None:
            self._watch()
            return None
        return ElectionClaim(self._path, descriptor, name)

    def _watch(self) -> None:
        seen = self._claim.seen()
        if seen is None:
            return
        self.watched.add(seen.owner)
        if self._claim.stale():
            self._remove(seen)

    def _remove(self, stale: _Seen) -> None:
        """Remove this stale claim and no newer one."""
        descriptor = _create(self._takeover_path, process_name())
        if descriptor is None:
            self._takeover.seen()
            if self._takeover.stale():
                # Its process was killed between two system calls.
                _unlink(self._takeover_path)
            return
        os.close(descriptor)
        try:
            _unlink_that_of(self._path, stale.owner)
        finally:
            _unlink(self._takeover_path)


def _create(path: str, text: str) -> int | None:
    """Create a file with this content and return its descriptor; None if it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return None
    os.write(descriptor, text.encode())
    return descriptor


def _unlink_that_of(path: str, owner: str) -> None:
    seen = _read(path)
    if seen is not None and seen.owner == owner:
        _unlink(path)


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _read(path: str) -> _Seen | None:
    # Open the file and do not only `stat` it: NFS asks the server again when a file is opened.
    with suppress(FileNotFoundError), open(path, "rb") as file:
        return _Seen(file.read(4_096).decode("utf-8", "replace"), os.fstat(file.fileno()).st_mtime_ns)
    return None


# Records that processes leave for one another: small files in the save directory's hidden folder.


class _Text(BaseModel):
    """The contents of a record."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Record(_Text):
    """The state of one call: the source fits, a conversion runs, or its result exists."""

    schema_version: Literal[1] = 1
    finished: bool
    path: str | None
    """Save directory of the result, relative to the one that holds the record; None where the source fits."""


class Invitation(_Text):
    """The conversion that the owner of a claim runs, for those who wait and may help."""

    nonce: str
    """The owner's claim."""
    node: str
    """The owner's node."""
    path: str
    """Save directory of the result, relative to the one that holds the invitation."""
    wanted: ResumeLayout

    def same_work(self, other: Invitation | None) -> bool:
        """True if another owner goes on with the same conversion."""
        return other is not None and (other.path, other.wanted) == (self.path, self.wanted)


class _Failure(_Text):
    """The error with which the owner of a claim gave up."""

    nonce: str
    problem: dict[str, Any]


_TextT = TypeVar("_TextT", bound=_Text)


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

    def _read(self, kind: type[_TextT], path: str) -> _TextT | None:
        with suppress(FileNotFoundError, ValidationError), open(path, "rb") as file:
            return kind.model_validate_json(file.read())
        return None

    def read(self, key: str) -> Record | None:
        """Read the record of a key; None if it does not exist or cannot be read."""
        return self._read(Record, self._path(key, "json"))

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
        return self._read(Invitation, self._path(key, "shared"))

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
        told = self._read(_Failure, self._path(key, "failed"))
        if told is not None and told.nonce in nonces:
            raise from_problem(told.problem)


def _write_whole(path: str, text: str) -> None:
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.part"
    with writing(path):
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
