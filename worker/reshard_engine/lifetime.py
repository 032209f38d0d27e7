"""Ties the life of a process to that of its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(sign: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel for `sign` when the parent dies, even by `kill -9`. Linux only; elsewhere a no-op.

    The kernel watches the *thread* that started this process: start children from threads that live
    as long as the process does.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(sign), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the call. Then init, or a subreaper, is the parent already.
    if os.getppid() == 1 and not _first_process_is_ours():
        os.kill(os.getpid(), sign)


def _first_process_is_ours() -> bool:
    """True if process 1 runs this Python: in a container without an init it is the worker itself."""
    try:
        return os.path.samefile("/proc/1/exe", "/proc/self/exe")
    except OSError:
        return False
