"""Processes that must not outlive the one that started them."""

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
    # The parent may have died before the call: then init, or a subreaper, is the parent already.
    if os.getppid() == 1:
        os.kill(os.getpid(), sign)
