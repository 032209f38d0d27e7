"""Tells on stderr of every open for writing in this process, and of every new name in a file system.

Installed as `sitecustomize` into a worker and everything that it starts. Only what Python code does is
seen; the tests look into the directories too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CREATING = frozenset({"os.mkdir", "os.rename", "os.link", "os.symlink", "os.truncate", "os.mkfifo"})


def _tell(text: str) -> None:
    os.write(2, f"\n{text}\n".encode(errors="replace"))


def _audit(name: str, arguments: tuple[Any, ...]) -> None:
    if name == "open":
        path, mode, flags = arguments
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & _WRITING)
        # A number is a file that is open already: a pipe, a log that was inherited.
        if writes and not isinstance(path, int) and os.fsdecode(path) != os.devnull:
            _tell(f"AUDIT-WRITE {os.getpid()} {os.fsdecode(path)} {mode} {flags}")
    elif name in _CREATING:
        _tell(f"AUDIT-WRITE {os.getpid()} {name} {arguments!r}")


sys.addaudithook(_audit)
_tell(f"AUDIT-ACTIVE {os.getpid()} {' '.join(sys.orig_argv[1:])}")
