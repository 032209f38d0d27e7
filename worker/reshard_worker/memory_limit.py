"""Limits the memory of the engine's process, in addition to the limit that the engine keeps itself."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from reshard.models import ConvertRequest

_BESIDE_BUFFERS_BYTES = 3 << 30
"""Bytes for the interpreter, libraries and the metadata of a large checkpoint; measured: below 1 GiB."""
_RESERVE_BYTES = 64 << 20
"""Bytes kept free to report an engine that ran into its limit: the frames of the error still hold the memory."""
_STACK_BYTES = 8 << 20
"""Bytes of one thread, as the kernel counts them."""
_GPU = Path("/dev/nvidiactl")


def engine_memory_bytes(request: ConvertRequest, chosen_bytes: int | None) -> int:
    """Bytes of memory that the engine process may use for this request; 0 is no limit.

    Args:
        request: The request of the engine.
        chosen_bytes: The operator's limit; None derives one from the request's own limit.
    """
    if chosen_bytes is not None:
        return chosen_bytes
    return request.memory_limit_bytes + _BESIDE_BUFFERS_BYTES + (request.threads or 0) * _STACK_BYTES


def limit_memory(size_bytes: int) -> None:
    """Limit the memory of this process. 0 is no limit, and there is none if a GPU may be used."""
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
