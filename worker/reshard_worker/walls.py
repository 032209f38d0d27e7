"""The second wall around the engine: memory that its process may take, whatever it believes it needs."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from reshard.models import ConvertRequest

_BESIDE_BUFFERS_BYTES = 3 << 30
"""For the interpreter, libraries and the metadata of a large checkpoint; measured: below 1 GiB."""
_RESERVE_BYTES = 64 << 20
"""For the outcome of an engine that ran into its limit: what filled the memory is still held by the error's frames."""
_STACK_BYTES = 8 << 20
"""Of one thread, as the kernel counts it."""
_GPU = Path("/dev/nvidiactl")


def engine_memory_bytes(request: ConvertRequest, chosen_bytes: int | None) -> int:
    """What the engine process may take for this request; 0 is no limit.

    Args:
        request: What it is to do.
        chosen_bytes: What the operator allows; None to derive it from the request's own limit.
    """
    if chosen_bytes is not None:
        return chosen_bytes
    return request.memory_limit_bytes + _BESIDE_BUFFERS_BYTES + (request.threads or 0) * _STACK_BYTES


def limit_memory(size_bytes: int) -> None:
    """Bound this process's own memory; 0 is no limit, and there is none where a GPU may be used."""
    if size_bytes <= 0 or _uses_gpu():
        return
    # Not RLIMIT_AS: that counts what is only mapped, and a CUDA build of torch maps more than a checkpoint needs.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    whole_bytes = size_bytes + _RESERVE_BYTES
    whole_bytes = whole_bytes if most == resource.RLIM_INFINITY else min(whole_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (min(size_bytes, whole_bytes), whole_bytes))


def open_reserve() -> None:
    """Allow the little that is kept for saying that the memory ran out."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _uses_gpu() -> bool:
    device = os.environ.get("RESHARD_DEVICE", "")
    return device.startswith("cuda") or (device != "cpu" and _GPU.exists())
