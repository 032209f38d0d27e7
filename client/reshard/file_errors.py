"""Codes of the operating system's errors: one table for what the client and the engine write and read."""

from __future__ import annotations

import errno


def storage_code(error: OSError) -> str:
    """The code of an error of the file system: `storage.denied`, `storage.no_space` or `storage.unavailable`."""
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return "storage.denied"
    return "storage.no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "storage.unavailable"
