"""Room for a local target: what its file system and the user's quota still give, compared with the plan before it runs.

Source: Linux 6.6 `quotactl_fd(2)` (since 5.14, one number on all architectures) and `sys/quota.h` (`struct dqblk`).
"""

from __future__ import annotations

import ctypes
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from reshard.errors import StorageError, format_size, printable

_QUOTACTL_FD = 443
_GET_QUOTA = 0x800007
_OF_USER, _OF_GROUP = 0, 1
_QUOTA_BLOCK_BYTES = 1024
_BLOCK_BYTES = 4096
_RECORD_BYTES = 512
# Looked up once, at import: nothing is loaded into a process that has begun to read a checkpoint.
_SYSCALL = getattr(ctypes.CDLL(None, use_errno=True), "syscall", None)
_PER_RECORD_BYTES = 4 << 20


class _Quota(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("hard", "soft", "used_bytes", "inodes_hard", "inodes_soft", "inodes")),
        *((name, ctypes.c_uint64) for name in ("grace_until", "inodes_grace_until")),
        ("valid", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Room:
    """Bytes that the user may still write at a place, and what limits them."""

    free_bytes: int
    limit: str


def room_at(path: str) -> Room | None:
    """The room at a path that need not exist yet; None where the system does not say."""
    place = path
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    found = os.statvfs(place)
    if found.f_blocks == 0:
        return None  # some network and user-space file systems do not count
    blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    quotas = _quota_bytes(place)
    free = blocks * found.f_frsize
    if quotas and min(quotas) < free:
        return Room(max(0, min(quotas)), "quota")
    return Room(free, "file system")


def _quota_bytes(place: str) -> list[int]:
    """What the quotas of the user and the group leave; nothing where there are none, or the system does not say."""
    if os.uname().sysname != "Linux" or _SYSCALL is None:
        return []
    found: list[int] = []
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for kind, number in ((_OF_USER, os.geteuid()), (_OF_GROUP, os.getegid())):
            quota = _Quota()
            command = ctypes.c_uint32((_GET_QUOTA << 8) | kind)
            if _SYSCALL(_QUOTACTL_FD, descriptor, command, number, ctypes.byref(quota)) == 0 and quota.hard:
                found.append(quota.hard * _QUOTA_BLOCK_BYTES - quota.used_bytes)
    finally:
        os.close(descriptor)
    return found


def allocated_bytes(directory: str) -> int:
    """Bytes on the disk of what an earlier attempt left."""
    found = 0
    for root, _, names in os.walk(directory):
        for name in names:
            found += os.lstat(os.path.join(root, name)).st_blocks * 512
    return found


def require_room(target: str, sizes: Iterable[int], *, staging: str, replaces: bool, abandoned_bytes: int = 0) -> None:
    """Refuse a target that its file system has no room for.

    Args:
        target: Where it will be; the nearest directory above it that exists is asked.
        sizes: Bytes of its files.
        staging: What an earlier attempt has written, which is not written again.
        replaces: Whether an old target stays until the new one is whole.
        abandoned_bytes: What conversions with other options left beside it.

    Raises:
        StorageError: `storage.no_room`.
    """
    room = room_at(target)
    if room is None:
        return
    files = [-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes]
    # Journal and manifest have a record of each file, and of each part of large ones.
    beside = _BLOCK_BYTES * 2 + len(files) * _RECORD_BYTES + sum(files) // _PER_RECORD_BYTES * _RECORD_BYTES
    needed = sum(files) + beside - allocated_bytes(staging)
    if needed <= room.free_bytes:
        return
    place = printable(os.path.dirname(target))
    where = f"by the user's quota in {place}" if room.limit == "quota" else f"in {place}"
    more = format_size(needed - room.free_bytes)
    fix = f"free {more} there, or choose a target elsewhere"
    if replaces:
        fix += "; --overwrite keeps the old target until the new one is whole: remove it first if you can do without"
    if abandoned_bytes:
        held = format_size(abandoned_bytes)
        fix += f"; conversions that nobody goes on with hold {held}: reshard clean {shlex.quote(target)}"
    raise StorageError(
        "storage.no_room",
        f"{printable(target)} needs {format_size(needed)}, {format_size(room.free_bytes)} are free {where}",
        fix=fix,
        details={"needed_bytes": needed, "free_bytes": room.free_bytes, "limit": room.limit},
    )
