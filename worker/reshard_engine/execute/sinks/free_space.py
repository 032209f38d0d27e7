"""Free space for a local target: the file system and the user's quota are compared with the plan before the run.

Source: Linux 6.6 `quotactl_fd(2)` (since 5.14, one number on all architectures) and `sys/quota.h` (`struct dqblk`).
"""

from __future__ import annotations

import ctypes
import os
import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from reshard.errors import StorageError, format_size, printable

_QUOTACTL_FD = 443
_GET_QUOTA = 0x800007
_OF_USER, _OF_GROUP = 0, 1
_QUOTA_BLOCK_BYTES = 1024
_BLOCK_BYTES = 4096
_RECORD_BYTES = 512
# Looked up at import, because no library is loaded after a process has begun to read a checkpoint.
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
    """Bytes that the user may still write at a path, and the limit: `quota` or `file system`."""

    free_bytes: int
    limit: str


def room_at(path: str) -> Room | None:
    """The room at a path, which need not exist yet; None if the system does not report it."""
    place = path
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    found = os.statvfs(place)
    if found.f_blocks == 0:
        return None  # some network and user-space file systems report no block counts
    blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    quotas = _quota_bytes(place)
    free = blocks * found.f_frsize
    if quotas and min(quotas) < free:
        return Room(max(0, min(quotas)), "quota")
    return Room(free, "file system")


def _quota_bytes(place: str) -> list[int]:
    """Bytes left by the quotas of the user and of the group; empty if there are none or the system reports none."""
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
    """Bytes that the files below a directory take on the disk."""
    found = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # workers replace and remove their texts at any moment
                found += os.lstat(os.path.join(root, name)).st_blocks * 512
    return found


def require_room(target: str, sizes: Iterable[int], *, staging: str, replaces: bool, abandoned_bytes: int = 0) -> None:
    """Refuse a target that is larger than the free space of its file system.

    Args:
        target: Path of the target; the free space of its nearest existing parent directory counts.
        sizes: Sizes of its files in bytes.
        staging: Staging directory of an earlier attempt, whose files are not written again.
        replaces: True if an old target stays until the new one is complete.
        abandoned_bytes: Bytes that conversions with other options left beside the target.

    Raises:
        StorageError: `storage.no_room`.
    """
    room = room_at(target)
    if room is None:
        return
    files = [-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes]
    # The journal and the manifest hold one record for each file, and one for each part of a large file.
    beside = _BLOCK_BYTES * 2 + len(files) * _RECORD_BYTES + sum(files) // _PER_RECORD_BYTES * _RECORD_BYTES
    needed = sum(files) + beside - allocated_bytes(staging)
    if needed <= room.free_bytes:
        return
    place = printable(os.path.dirname(target))
    where = f"by the user's quota in {place}" if room.limit == "quota" else f"in {place}"
    more = format_size(needed - room.free_bytes)
    fix = f"free {more} there, or choose a target elsewhere"
    if replaces:
        fix += "; --overwrite keeps the old target until the new one is complete: remove it first if you do not need it"
    if abandoned_bytes:
        held = format_size(abandoned_bytes)
        fix += f"; abandoned conversions hold {held}: reshard clean {shlex.quote(target)}"
    raise StorageError(
        "storage.no_room",
        f"{printable(target)} needs {format_size(needed)}, but {format_size(room.free_bytes)} are free {where}",
        fix=fix,
        details={"needed_bytes": needed, "free_bytes": room.free_bytes, "limit": room.limit},
    )
