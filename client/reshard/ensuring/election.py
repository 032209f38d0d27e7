"""Elects one of many processes as the owner of a work, on one host or on several that share a file system.

The claim is a file that only one process can create. Its owner touches it as long as it lives. Others take it over
when the owner's process is gone (same host), or when nobody has touched it for `STALE_S` by their own clock, so that
a killed owner blocks nobody for ever. A claim saves work; it is not needed for safety. If two processes hold one
claim, the engine's lock and its rename that does not replace decide, and both would write the same bytes.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from reshard.process_identity import process_gone, process_scope

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
