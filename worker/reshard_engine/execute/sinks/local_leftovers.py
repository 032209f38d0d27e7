"""What conversions leave beside a local target, whose it is, and how it goes: a process at work holds a lock."""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import time
from contextlib import suppress

from reshard.errors import RequestError, printable
from reshard.models import Leftover
from reshard_engine.execute.sinks.free_space import allocated_bytes

_TRIES = 5
_LOOK_S = 0.01
"""How long someone else looks whether a journal is locked, at most."""


def busy(target: str) -> RequestError:
    """The error for a target that a process is at work on."""
    return RequestError(
        "request.target_busy",
        f"another process is converting into {printable(target)}",
        fix=f"wait for it to finish, or choose another target; what is left of processes that are gone: "
        f"reshard clean {shlex.quote(target)} --dry-run",
    )


def held_by_others(target: str, *, but: str) -> str | None:
    """The plan of a conversion into this target that a process is at work on, but not this one."""
    for digest in sorted(plans_beside(target)):
        if digest != but and is_held(journal_of(target, digest)):
            return digest
    return None


def plans_beside(target: str) -> set[str]:
    """Digests, cut short, of the plans that have a journal or a staging directory beside a target."""
    parent, name = os.path.split(target)
    pattern = re.compile(re.escape(f".{name}.reshard-") + "([0-9a-f]{16})([.]journal)?")
    names = os.listdir(parent) if os.path.isdir(parent) else []
    return {match[1] for name in names if (match := pattern.fullmatch(name))}


def journal_of(target: str, digest: str) -> str:
    """The journal of a plan beside a target."""
    return f"{_stem(target)}{digest}.journal"


def _stem(target: str) -> str:
    parent, name = os.path.split(target)
    return os.path.join(parent, f".{name}.reshard-")


def leftovers_of(target: str) -> list[Leftover]:
    """What conversions into a local target left beside it."""
    found: list[Leftover] = []
    held = False
    for digest in sorted(plans_beside(target)):
        staging, journal = f"{_stem(target)}{digest}", journal_of(target, digest)
        used = is_held(journal)
        held = held or used
        if os.path.isdir(staging):
            size = allocated_bytes(staging)
            found.append(Leftover(path=staging, kind="staging", size_bytes=size, in_use=used))
        if os.path.exists(journal):
            size = os.path.getsize(journal)
            found.append(Leftover(path=journal, kind="journal", size_bytes=size, in_use=used))
    aside = f"{_stem(target)}old"
    if os.path.lexists(aside):
        size = allocated_bytes(aside)
        found.append(Leftover(path=aside, kind="old target", size_bytes=size, in_use=held))
    return found


def abandoned_bytes(target: str, *, but: str) -> int:
    """Bytes on the disk beside a target that no process is at work on, and that are not of this plan."""
    others = [f for f in leftovers_of(target) if f.kind == "staging" and not f.in_use]
    return sum(f.size_bytes for f in others if not f.path.endswith(but))


def is_held(journal: str) -> bool:
    """Whether a process has the lock on a journal that is there; nothing is made."""
    try:
        descriptor = os.open(journal, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def locked(path: str) -> int:
    """A descriptor of a journal, made if need be and locked; -1 if another process has the lock."""
    tries = 0
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        ours = False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had the lock may have removed the file: a lock on a file without a name protects nothing.
            ours = os.fstat(descriptor).st_nlink > 0
        except BlockingIOError:
            # Perhaps by one who only looks.
            tries += 1
            if tries == _TRIES:
                return -1
            time.sleep(_LOOK_S)
        finally:
            if not ours:
                os.close(descriptor)
        if ours:
            return descriptor


def remove_unless_held(staging: str) -> bool:
    """Remove a staging directory and its journal, unless a process holds them: then False."""
    journal = staging + ".journal"
    descriptor = locked(journal)
    if descriptor < 0:
        return False
    try:
        shutil.rmtree(staging, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.unlink(journal)
    finally:
        os.close(descriptor)
    return True
