"""Leftovers of conversions beside a local target: finding and removing them. A running process locks its journal."""

from __future__ import annotations

import fcntl
import os
import random
import re
import shlex
import shutil
import time
from contextlib import suppress

from reshard.errors import RequestError, printable
from reshard.models import Leftover
from reshard_engine.execute.sinks.free_space import allocated_bytes

WORKERS = ".workers"
"""The end of the name of the directory in which the workers that share a conversion meet."""
_TRIES = 5
_LOOK_S = 0.01
"""Longest time, in seconds, for which a mere test of a lock (`is_held`) keeps a journal locked."""


def busy(target: str) -> RequestError:
    """The error for a target that another process is writing."""
    return RequestError(
        "request.target_busy",
        f"another process is converting into {printable(target)}",
        fix=f"wait for it to finish, or choose another target; to list leftovers of ended processes: "
        f"reshard clean {shlex.quote(target)} --dry-run",
    )


def held_by_others(target: str, *, but: str) -> str | None:
    """The digest (cut short) of another plan that a process is writing into this target; None if there is none.

    `but` is the digest of the caller's own plan.
    """
    for digest in sorted(plans_beside(target)):
        if digest != but and is_held(journal_of(target, digest)):
            return digest
    return None


def plans_beside(target: str) -> set[str]:
    """Digests (cut short) of all plans with a journal or a staging directory beside a target."""
    parent, name = os.path.split(target)
    pattern = re.compile(re.escape(f".{name}.reshard-") + "([0-9a-f]{16})([.](journal|workers))?")
    names = os.listdir(parent) if os.path.isdir(parent) else []
    return {match[1] for name in names if (match := pattern.fullmatch(name))}


_OF_A_TARGET = re.compile(r"[.](.+)[.]reshard-([0-9a-f]{16}([.](journal|workers))?|old)")


def targets_below(directory: str) -> list[str]:
    """The paths of targets directly below a directory of which conversions left files."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    found = {match[1] for name in names if (match := _OF_A_TARGET.fullmatch(name))}
    return [os.path.join(directory, name) for name in sorted(found)]


def journal_of(target: str, digest: str) -> str:
    """The path of a plan's journal beside a target."""
    return f"{_stem(target)}{digest}.journal"


def _stem(target: str) -> str:
    parent, name = os.path.split(target)
    return os.path.join(parent, f".{name}.reshard-")


def leftovers_of(target: str) -> list[Leftover]:
    """All leftovers that conversions into a local target left beside it."""
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
        if os.path.isdir(workers := staging + WORKERS):
            found.append(Leftover(path=workers, kind="journal", size_bytes=allocated_bytes(workers), in_use=used))
    aside = f"{_stem(target)}old"
    if os.path.lexists(aside):
        size = allocated_bytes(aside)
        found.append(Leftover(path=aside, kind="old target", size_bytes=size, in_use=held))
    return found


def abandoned_bytes(target: str, *, but: str) -> int:
    """Bytes on the disk of the staging directories of other plans beside a target that no process uses."""
    others = [f for f in leftovers_of(target) if f.kind == "staging" and not f.in_use]
    return sum(f.size_bytes for f in others if not f.path.endswith(but))


def is_held(journal: str) -> bool:
    """True if a process has the lock on a journal, alone or with others. The journal is not created."""
    try:
        descriptor = os.open(journal, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Workers that share a conversion all hold the lock, so only an exclusive one tells that there are none.
        return not _flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def locked(path: str, *, shared: bool = False) -> int:
    """Open a journal, which is created if necessary, and lock it; -1 if another process has the lock.

    Processes that lock it `shared` have the lock together.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        ours = False
        try:
            if not _flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
                return -1
            # The process that had the lock may have removed the file, and a lock on a removed file protects nothing.
            ours = os.fstat(descriptor).st_nlink > 0
        finally:
            if not ours:
                os.close(descriptor)
        if ours:
            return descriptor


def _flock(descriptor: int, kind: int) -> bool:
    """Lock a journal; False if another process has the lock. A process that only tests it (`is_held`) releases it."""
    for number in range(_TRIES):
        if number:
            # Two processes that test at the same time must not do so in step.
            time.sleep(random.uniform(0.5, 1.5) * _LOOK_S)  # noqa: S311 - no secret depends on it
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
    return False


def remove_unless_held(staging: str) -> bool:
    """Remove a staging directory and its journal; False, and nothing is removed, if a process holds the journal."""
    journal = staging + ".journal"
    descriptor = locked(journal)
    if descriptor < 0:
        return False
    try:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(staging + WORKERS, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.unlink(journal)
    finally:
        os.close(descriptor)
    return True
