"""Processes that share a work: how launchers number them, what they are called, and when they count as dead."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

from pydantic import Field, ValidationError, model_validator

from reshard.errors import RequestError, printable
from reshard.wire_model import WireModel

_T = TypeVar("_T", int, float)

LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("JOB_COMPLETION_INDEX", ""),
)
"""The variables with a process's number and the number of processes: Open MPI and MPICH (`mpirun`), torchrun, Slurm
(`srun`) and an indexed Job of Kubernetes, which does not tell its number of completions. mpirun and torchrun come
first, because they may run inside an allocation of Slurm or in a Job."""
LEASE_VARIABLE = "RESHARD_LEASE_S"
DEFAULT_LEASE_S = 60.0
_FIX = "give both: --workers N --worker I, with I from 0 to N-1"


class SharedWork(WireModel):
    """The place of one worker among those that run a conversion together.

    Numbers only spread the workers over the work. Workers may be missing, late, or started twice with one number.
    """

    number: int = Field(default=0, ge=0)
    count: int = Field(default=1, ge=1)
    lease_s: float = Field(default=DEFAULT_LEASE_S, ge=0.5, le=3600)
    """Seconds without a sign of life after which the other workers take over the work of this one. Network file systems
    cache the attributes of files for up to 60 s (NFS `acregmax`)."""
    least_bytes: int = Field(default=0, ge=0)
    """A conversion that writes fewer bytes is run by one worker alone."""

    @model_validator(mode="after")
    def _in_range(self) -> SharedWork:
        if self.number >= self.count:
            raise ValueError(f"worker {self.number} of {self.count}: numbers go from 0 to {self.count - 1}")
        return self


def shared_work(workers: str | None, worker: int | None, environ: Mapping[str, str]) -> SharedWork | None:
    """The worker's place from the flags `--workers` and `--worker`; None if it works alone.

    Args:
        workers: A number, or `auto` to ask the launcher's variables.
        worker: This worker's number, from 0; with `auto` it is not given.
        environ: Environment variables.

    Raises:
        RequestError: `request.invalid`.
    """
    if workers is None:
        if worker is not None:
            raise RequestError("request.invalid", "--worker is given without --workers", fix=_FIX)
        return None
    lease_s = _number(environ, LEASE_VARIABLE, float) if environ.get(LEASE_VARIABLE, "").strip() else DEFAULT_LEASE_S
    if workers == "auto":
        if worker is not None:
            raise RequestError("request.invalid", "--workers auto numbers the workers itself", fix=_FIX)
        number, count = _of_launcher(environ)
    elif workers.isdecimal() and worker is not None:
        number, count = worker, int(workers)
    else:
        raise RequestError(
            "request.invalid", f"--workers {printable(workers)!r} needs --worker, and a number", fix=_FIX
        )
    try:
        return SharedWork(number=number, count=count, lease_s=lease_s)
    except ValidationError as error:
        said = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise RequestError("request.invalid", f"--workers {count}, lease {lease_s:g} s: {said}", fix=_FIX) from None


def _of_launcher(environ: Mapping[str, str]) -> tuple[int, int]:
    for rank, size in LAUNCHERS:
        if environ.get(rank, "").strip():
            number = _number(environ, rank, int)
            # An indexed Job does not say how many pods it has. The number only spreads the workers.
            count = _number(environ, size, int) if size and environ.get(size, "").strip() else number + 1
            return number, max(count, number + 1) if not size else count
    names = ", ".join(rank for rank, _ in LAUNCHERS)
    raise RequestError("request.invalid", f"no launcher numbers this process (none of {names} is set)", fix=_FIX)


def _number(environ: Mapping[str, str], name: str, kind: Callable[[str], _T]) -> _T:
    text = environ[name].strip()
    try:
        return kind(text)
    except ValueError:
        raise RequestError("request.invalid", f"{name} is {printable(text)!r}, not a number", fix=_FIX) from None


# What every claim needs, wherever it is kept: the name of its owner, and whether the owner is alive.

_NAME = re.compile("([0-9a-f]{10})-([0-9]+)-[0-9a-f]{12}")


def process_name() -> str:
    """A name for this process, unlike any other: the scope of its process id, the id, and a random text."""
    return f"{_scope()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"


def _scope() -> str:
    """The scope of process ids: this host, and the PID namespace of this container."""
    namespace = "-"
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:10]


def process_ended(name: str) -> bool:
    """True if a whole name is that of a process of this scope that has ended."""
    found = _NAME.fullmatch(name)
    if found is None or found[1] != _scope():
        return False
    try:
        os.kill(int(found[2]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


class Lease:
    """Tells by the watcher's clock if an owner is silent: no clock of one process is compared with that of another."""

    def __init__(self, length_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """The lease begins now; `clock` gives seconds."""
        self._length_s, self._clock = length_s, clock
        self._since = clock()
        self.version: object = None
        """The version of the owner's text when it was last seen; None if it has not been seen."""

    def saw(self, version: object) -> None:
        """Take note of the owner's text, whose version changes with each sign of life."""
        if version != self.version:
            self._since = self._clock()  # before the version: another thread may ask in between
            self.version = version

    @property
    def is_over(self) -> bool:
        """True if the text has not changed for the length of the lease."""
        return self._clock() - self._since > self._length_s


@contextmanager
def repeated(call: Callable[[], object], *, every_s: float, name: str) -> Generator[None]:
    """Make a call now, and again after each pause, until the block ends.

    Args:
        call: The call. It raises nothing.
        every_s: The pause in seconds.
        name: The name of the thread.
    """
    ended = threading.Event()

    def repeat() -> None:
        call()
        while not ended.wait(every_s):
            call()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
