"""The choice of the kernel that casts in this process: the reference, or a device if that is faster."""

from __future__ import annotations

import os
from functools import lru_cache

from reshard.errors import RequestError
from reshard.install import install_line
from reshard.sizes import parse_size
from reshard_engine.execute.casts.cast import CastKernel, NumpyCast

DEVICE_VARIABLE = "RESHARD_DEVICE"
MEMORY_VARIABLE = "RESHARD_DEVICE_MEMORY"


@lru_cache(maxsize=1)
def default_kernel() -> CastKernel:
    """The kernel of this process, as `RESHARD_DEVICE` says.

    `cpu`: the reference casts; `auto` does the same without a GPU. `cuda` or `cuda:1`: every cast that is not tiny runs
    on that device. `auto` with a GPU: each cast runs where it is faster according to measurements.

    Raises:
        RequestError: `request.invalid` if a device is asked for that cannot be used.
    """
    wanted = os.environ.get(DEVICE_VARIABLE, "auto")
    if wanted == "cpu" or (wanted == "auto" and not os.path.exists("/dev/nvidiactl")):
        return NumpyCast()
    from reshard_engine.execute.casts.device.kernel import WARM_UP_BYTES, DeviceCast  # needed with a GPU only

    memory = os.environ.get(MEMORY_VARIABLE)
    memory_bytes = parse_size(memory) if memory else None
    if wanted == "auto":
        return DeviceCast("cuda", always=False, memory_bytes=memory_bytes, warm_up_bytes=WARM_UP_BYTES)
    kernel = DeviceCast(wanted, memory_bytes=memory_bytes)
    try:
        kernel.start()
    except ImportError:
        raise RequestError(
            "request.invalid", f"{DEVICE_VARIABLE}={wanted} needs torch", fix=install_line("worker")
        ) from None
    except RuntimeError as error:
        raise RequestError(
            "request.invalid", f"{DEVICE_VARIABLE}={wanted}: {error}", fix=f"cast on the CPU: unset {DEVICE_VARIABLE}"
        ) from None
    return kernel
