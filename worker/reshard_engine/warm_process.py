"""What processes of the engine share: they end with their parent, have a memory limit, and one kind stays.

A process that stays imports the engine once, forks a child for each command, and ends with its parent.

A job of a few hundred kilobytes takes 30 ms; the imports of the engine take 600. The process that stays reads no
checkpoint and imports nothing that a checkpoint names, so each child begins as clean as a new process. Commands and
answers pass through the same pipes as those of a process for one command, so a wrapper of the command line wraps all.
If a child does not end well, the process that stays ends in the same way: its parent sees the status of the child, and
starts anew.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest

# Ties the life of a process to that of its parent.

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


# Limits the memory of the engine's process, in addition to the limit that the engine keeps itself.

_BESIDE_BUFFERS_BYTES = 3 << 30
"""Bytes for the interpreter, libraries and the metadata of a large checkpoint; measured: below 1 GiB."""
_RESERVE_BYTES = 64 << 20
"""Bytes kept free to report an engine that ran into its limit: the frames of the error still hold the memory."""
_STACK_BYTES = 8 << 20
"""Bytes of one thread, as the kernel counts them."""
_GPU = Path("/dev/nvidiactl")


def engine_memory_bytes(request: ConvertRequest, chosen_bytes: int | None) -> int:
    """Bytes of memory that the engine process may use for this request; 0 means no limit.

    Args:
        request: The request of the engine.
        chosen_bytes: The operator's limit; None derives one from the request's own limit.
    """
    if chosen_bytes is not None:
        return chosen_bytes
    return request.memory_limit_bytes + _BESIDE_BUFFERS_BYTES + (request.threads or 0) * _STACK_BYTES


def limit_memory(size_bytes: int) -> None:
    """Limit the memory of this process. 0 means no limit, and there is none if a GPU may be used."""
    if size_bytes <= 0 or _uses_gpu():
        return
    # RLIMIT_AS would count memory that is only mapped, and a CUDA build of torch maps more than a checkpoint needs.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    whole_bytes = size_bytes + _RESERVE_BYTES
    whole_bytes = whole_bytes if most == resource.RLIM_INFINITY else min(whole_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (min(size_bytes, whole_bytes), whole_bytes))


def open_reserve() -> None:
    """Raise the limit by the reserve, so that the process can report that the memory ran out."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _uses_gpu() -> bool:
    device = os.environ.get("RESHARD_DEVICE", "")
    return device.startswith("cuda") or (device != "cpu" and _GPU.exists())


# The process that stays.

_MODULES = (
    "reshard_engine.formats.torch_archive",
    "reshard_engine.operations.conversion",
    "reshard_engine.operations.shared_conversion",
    "reshard_engine.storage.s3",
)
"""The modules that load the rest of the engine, beside the formats' writers. A command imports what is missing here."""


def next_command(commands: BinaryIO, tell_idle: Callable[[], None], stop: list[int] | None = None) -> bytes:
    """Return the command of this process, which is a child of the process that called this; that one never returns.

    Args:
        commands: The commands, one in a line.
        tell_idle: Tells the parent that the next command may come.
        stop: Gets the number of each SIGTERM of a child; None for a child that a SIGTERM ends.
    """
    busy = False

    def on_terminate(number: int, _frame: FrameType | None) -> None:
        if stop is not None:
            stop.append(number)
        if stop is None or not busy:
            raise SystemExit(0)

    signal.signal(signal.SIGTERM, on_terminate)
    import_engine()
    tell_idle()
    while line := commands.readline():
        busy = True
        if (child := _fork()) == 0:
            return line
        _, status = os.waitpid(child, 0)
        if status or stop:
            _end_as(status)
        busy = False
        tell_idle()
    raise SystemExit(0)


def import_engine() -> None:
    """Import the engine ahead of the first request. What cannot be imported fails when a request needs it."""
    # A child reports what cannot be imported, as a process for one command does.
    with suppress(ImportError, ReshardError):
        load_engine()
        from reshard_engine.formats.registry import formats  # a process for one command imports it when it needs it

        for name in _MODULES:
            importlib.import_module(name)
        for known in formats():
            for target in known.targets:
                known.writer(target)
    # Collections in children would copy the pages that they share with this process.
    gc.collect()
    gc.freeze()


def _fork() -> int:
    parent = os.getpid()
    with warnings.catch_warnings():
        # numpy's OpenBLAS has threads, which it stops and starts again around a fork; this process has no others.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        # By `kill -9`, too.
        die_with_parent()
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
    return child


def _end_as(status: int) -> None:
    """End this process as a child of it ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        # The child has left the core, if one is wanted.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))
