"""Tells processes apart: the scope of their ids, and if one has ended."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def process_scope() -> str:
    """The scope of process ids: this host, and the PID namespace of this container."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} -"


def process_gone(pid: int) -> bool:
    """True if no process of this scope has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
