"""One worker of several that run a conversion together: how launchers number them, and how processes are told apart."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
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


# Tells processes apart: the scope of their ids, and if one has ended.


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
