"""Casts of floating tensors: round to nearest, ties to even, bit for bit the same on every device.

The numpy kernel is the reference. With a CUDA device a torch kernel does the same work there; NaNs go
through the reference, because devices differ in the payloads that they keep.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from reshard.errors import RequestError, SourceError
from reshard_engine.dtypes import Dtype

DEVICE_VARIABLE = "RESHARD_DEVICE"
Bytes = npt.NDArray[np.uint8]
_NATIVE = {"float64": np.float64, "float32": np.float32, "float16": np.float16}


class CastKernel(Protocol):
    """Casts packed elements."""

    def cast(self, data: Bytes, source: Dtype, target: Dtype) -> Bytes:
        """The elements in the target's type, little-endian."""
        ...


def _widened(data: Bytes, source: Dtype) -> npt.NDArray[np.float32]:
    if source.name == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if source.name not in _NATIVE:
        raise SourceError("tensor.unsupported", f"cannot cast from {source.name}")
    with np.errstate(over="ignore", invalid="ignore"):
        return data.view(_NATIVE[source.name]).astype(np.float32, copy=False)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> Bytes:
    bits = values.view(np.uint32)
    # Adding half of the dropped part, plus one if the kept part is odd, rounds ties to even.
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    result = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        # Keep sign and payload, and set the quiet bit: rounding would carry some NaNs into infinity.
        result[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x40
    return result.view(np.uint8)


class NumpyCast:
    """The reference kernel."""

    def cast(self, data: Bytes, source: Dtype, target: Dtype) -> Bytes:
        """The elements in the target's type, little-endian."""
        values = _widened(data, source)
        if target.name == "float32":
            return values.view(np.uint8)
        if target.name == "bfloat16":
            return _to_bfloat16(values)
        if target.name == "float16":
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                return values.astype(np.float16).view(np.uint8)
        raise RequestError("request.unsatisfiable", f"cannot cast to {target.name}")


class TorchCast:
    """The same work by torch on a device; falls back to the reference where the device has no room."""

    def __init__(self, device: str) -> None:
        """Import torch now, so that a missing one is met at the start."""
        import torch  # a guest: only workers with a device pay for it

        self._torch: Any = torch
        self._device = device
        self._reference = NumpyCast()

    @property
    def usable(self) -> bool:
        """Whether this torch can reach the device."""
        return not self._device.startswith("cuda") or bool(self._torch.cuda.is_available())

    def cast(self, data: Bytes, source: Dtype, target: Dtype) -> Bytes:
        """The elements in the target's type, little-endian."""
        torch = self._torch
        try:
            values = torch.from_numpy(data).to(self._device).view(getattr(torch, source.name)).to(torch.float32)
            result = values.to(getattr(torch, target.name))
            if bool(torch.isnan(values).any()):
                return self._reference.cast(data, source, target)
            return result.view(torch.uint8).cpu().numpy()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return self._reference.cast(data, source, target)


@lru_cache(maxsize=1)
def default_kernel() -> CastKernel:
    """The kernel of this process: `RESHARD_DEVICE` says `cpu` (the default without a GPU), `cuda` or `auto`."""
    wanted = os.environ.get(DEVICE_VARIABLE, "auto")
    if wanted == "cpu" or (wanted == "auto" and not os.path.exists("/dev/nvidiactl")):
        return NumpyCast()
    try:
        kernel = TorchCast("cuda" if wanted == "auto" else wanted)
    except ImportError:
        if wanted == "auto":
            return NumpyCast()
        raise RequestError(
            "request.invalid", f"{DEVICE_VARIABLE}={wanted} needs torch", fix="pip install torch"
        ) from None
    return kernel if wanted != "auto" or kernel.usable else NumpyCast()


def overflowed(before: Bytes, after: Bytes, source: Dtype, target: Dtype) -> int:
    """How many finite elements became infinite."""
    if target.itemsize_bytes >= source.itemsize_bytes and (source.name, target.name) != ("bfloat16", "float16"):
        return 0
    inf_after = _infinite(after, target)
    if not inf_after.any():
        return 0
    return int((inf_after & _finite(before, source)).sum())


def _infinite(data: Bytes, dtype: Dtype) -> npt.NDArray[np.bool_]:
    if dtype.name == "bfloat16":
        return (data.view(np.uint16) & 0x7FFF) == 0x7F80
    return np.isinf(data.view(_NATIVE[dtype.name]))


def _finite(data: Bytes, dtype: Dtype) -> npt.NDArray[np.bool_]:
    # In its own type: a large float64 is infinite once it is widened to float32.
    if dtype.name == "bfloat16":
        return (data.view(np.uint16) & 0x7F80) != 0x7F80
    return np.isfinite(data.view(_NATIVE[dtype.name]))
