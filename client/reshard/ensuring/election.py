"""One of many processes does the work, on one host or on several that share a file system.

The claim is a file that only one can create. Its owner touches it as long as it lives. Others take it over when the
owner's process is gone (same host), or when nobody has touched it for `STALE_S` by their own clock: a killed owner
blocks nobody for ever. A claim is politeness, not safety: if two owners ever meet, the engine's own lock and its rename
that does not replace decide, and both would write the same bytes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

STALE_S = 60.0
"""Longer than file systems of several hosts cache what they know of a file (NFS: 60 s at most)."""
BEAT_S = 5.0


def _namespace() -> str:
    """Where process ids mean something: this host, and this container's table of processes."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} -"


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


class _Facts(BaseModel):
    """What a claim says."""

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
    """A claim as it was read."""

    text: str
    touched_ns: int

    @property
    def owner_gone(self) -> bool:
        """Whether its owner is a process of this host that has ended."""
        facts = _facts(self.text)
        # One that is being written, or not ours: only its age tells.
        return facts is not None and facts.where == _namespace() and _gone(facts.pid)


class Claim:
    """A claim that is held until the block ends."""

    def __init__(self, path: str, descriptor: int, text: str) -> None:
        """See `Election.claim`."""
        self._path, self._descriptor, self._text = path, descriptor, text
        facts = _facts(text)
        self.nonce = "" if facts is None else facts.nonce
        """Names this claim among all that were ever made."""
        self._ended = threading.Event()
        self._beat = threading.Thread(target=self._touch, name="reshard-claim", daemon=True)

    def __enter__(self) -> Self:
        """Start to touch the file."""
        self._beat.start()
        return self

    def _touch(self) -> None:
        while not self._ended.wait(BEAT_S):
            # By descriptor: if the claim was taken over, the path is another's.
            with suppress(OSError):
                os.utime(self._descriptor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the others go on."""
        self._ended.set()
        self._beat.join()
        os.close(self._descriptor)
        seen = _read(self._path)
        if seen is not None and seen.text == self._text:
            with suppress(FileNotFoundError):
                os.unlink(self._path)


class Election:
    """Tries for a claim again and again, and watches whoever has it."""

    def __init__(self, path: str, *, stale_s: float = STALE_S) -> None:
        """`path` is the claim; its directory exists."""
        self._path, self._stale_s = path, stale_s
        self._last: _Seen | None = None
        self._since = time.monotonic()
        self.watched: set[str] = set()
        """Nonces of the claims of others that this one has waited for."""

    def claim(self) -> Claim | None:
        """The claim, or None while another has it.

        Raises:
            OSError: The directory cannot be written.
        """
        text = _Facts(where=_namespace(), pid=os.getpid(), nonce=uuid.uuid4().hex).model_dump_json()
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            self._watch()
            return None
        os.write(descriptor, text.encode())
        return Claim(self._path, descriptor, text)

    def _watch(self) -> None:
        seen = _read(self._path)
        if seen is None:
            return
        if seen != self._last:
            self._last, self._since = seen, time.monotonic()
            if (facts := _facts(seen.text)) is not None:
                self.watched.add(facts.nonce)
        if seen.owner_gone or time.monotonic() - self._since > self._stale_s:
            self._remove(seen)

    def _remove(self, stale: _Seen) -> None:
        """Remove a claim, and no other: of those who try, the one whose rename succeeds has done it."""
        aside = f"{self._path}.{uuid.uuid4().hex[:8]}.stale"
        with suppress(FileNotFoundError):
            os.rename(self._path, aside)
            moved = _read(aside)
            if moved is not None and moved.text != stale.text:
                # Another one was faster, and has claimed anew: put it back unless there is a newer one still.
                with suppress(OSError):
                    os.link(aside, self._path)
            os.unlink(aside)


def _read(path: str) -> _Seen | None:
    # Opened, not only looked at: NFS asks the server anew when a file is opened.
    with suppress(FileNotFoundError), open(path, "rb") as file:
        return _Seen(file.read(4_096).decode("utf-8", "replace"), os.fstat(file.fileno()).st_mtime_ns)
    return None
