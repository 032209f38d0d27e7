"""The most memory and the most threads that a request may ask for: the operator's, or what the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reshard.errors import RequestError, format_size
from reshard.models import DEFAULT_MEMORY_LIMIT_BYTES, ConvertRequest
from reshard.wire_model import MOST_BYTES

MOST_THREADS = 1024
"""The largest number of threads in a request, as `ConvertRequest` declares it."""
_THREADS_PER_CORE = 4
_LEAST_THREADS = 64
"""Threads that any machine may run: most of them wait for a store."""
_ENGINE_THREADS = 8
"""Threads that an engine runs on a machine with few cores, if its request names no number."""
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Maxima:
    """The largest numbers that a request may name."""

    memory_bytes: int = MOST_BYTES
    threads: int = MOST_THREADS

    def allowed_request(self, request: ConvertRequest) -> ConvertRequest:
        """The request, if it asks for no more. The default of a request is never refused, but lowered to the maximum.

        Raises:
            RequestError: `request.above_maximum`.
        """
        if request.memory_limit_bytes > self.memory_bytes:
            if request.memory_limit_bytes != DEFAULT_MEMORY_LIMIT_BYTES:
                raise RequestError(
                    "request.above_maximum",
                    f"memory_limit_bytes is {request.memory_limit_bytes}, and the maximum of this service is "
                    f"{self.memory_bytes} ({format_size(self.memory_bytes)})",
                    fix="name a smaller memory limit or none, or ask the operator to raise RESHARD_MAX_MEMORY_BYTES",
                    details={"field": "memory_limit_bytes", "maximum": self.memory_bytes},
                )
            request = request.model_copy(update={"memory_limit_bytes": self.memory_bytes})
        if request.threads is not None and request.threads > self.threads:
            raise RequestError(
                "request.above_maximum",
                f"threads is {request.threads}, and the maximum of this service is {self.threads}",
                fix="name fewer threads or no number, or ask the operator to raise RESHARD_MAX_THREADS",
                details={"field": "threads", "maximum": self.threads},
            )
        return request

    def with_threads(self, request: ConvertRequest) -> ConvertRequest:
        """The request with a number of threads, if it names none and an engine's own choice could be too large."""
        if request.threads is not None or self.threads >= max(_cores(), _ENGINE_THREADS):
            return request
        return request.model_copy(update={"threads": self.threads})


def maxima_of_this_machine() -> Maxima:
    """The maxima of an operator who set none: the memory of this machine, and at least 64 threads."""
    return Maxima(
        max(_memory_bytes(), DEFAULT_MEMORY_LIMIT_BYTES),
        min(max(_cores() * _THREADS_PER_CORE, _LEAST_THREADS), MOST_THREADS),
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int:
    """The memory of this machine, or of the control group that this process runs in, if that has less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *_memory_of_groups()])


def _memory_of_groups() -> Iterator[int]:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in {"", "memory"}:
            continue
        mount, name = (_CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
        # A container sees its own group as the root, whatever the path says.
        group = mount / path.strip("/")
        for directory in (group, *group.parents):
            try:
                text = (directory / name).read_text(encoding="ascii").strip()
            except OSError:
                text = ""
            if text.isdigit():
                yield int(text)
            if directory == mount:
                break
