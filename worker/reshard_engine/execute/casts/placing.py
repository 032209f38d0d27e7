"""Placement of read bytes in memory: they are copied, or cast by the kernel of this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from reshard.errors import RequestError
from reshard.extras import install_line
from reshard.option import parse_size
from reshard_engine.execute.casts.cast import CastKernel, Losses, NumpyCast, losses_of, may_lose
from reshard_engine.execute.casts.rows import ByteArray, Column, Kind, Rows, copy_rows


@dataclass(slots=True)
class ReadCounts:
    """Counts of read bytes and of cast losses."""

    read_bytes: int = 0
    """Number of source bytes that were read."""
    losses: dict[int, Losses] = field(default_factory=dict[int, Losses])
    """The losses of casts, by tensor number."""


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows with two more columns: the number of each row's tensor, and the number of its kind in `Placer.kinds`."""

    rows: Rows
    tensor: Column
    kind: Column


class Placer:
    """Copies or casts rows from one memory to another."""

    def __init__(self, kernel: CastKernel, losses: dict[int, Losses], *, saturate: bool) -> None:
        """With `saturate`, finite elements that would become infinite become the largest number of their sign."""
        self._kernel = kernel
        self._losses = losses
        self._saturate = saturate
        self.kinds: list[Kind] = []
        """The kinds to which rows refer by number. The maker of rows appends new kinds."""

    def read_and_place(
        self, read: Callable[[memoryview], None], length_bytes: int, placed: PlacedRows, memory: ByteArray
    ) -> None:
        """Read bytes into staging memory of the kernel, then put rows of them in place."""
        staging = self._kernel.staging(length_bytes)
        read(staging.data)
        self.place(placed, staging, memory)

    def place(self, placed: PlacedRows, staging: ByteArray, memory: ByteArray) -> None:
        """Put all rows in place."""
        kinds: list[int] = sorted(set(placed.kind.tolist()))
        if len(kinds) == 1:
            self._place(placed.rows, placed.tensor, staging, memory, self.kinds[kinds[0]])
            return
        for number in kinds:
            some = np.flatnonzero(placed.kind == number)
            self._place(placed.rows.some(some), placed.tensor[some], staging, memory, self.kinds[number])

    def place_one(self, tensor: int, data: ByteArray, target: ByteArray, kind: Kind) -> None:
        """Put elements of one tensor in place."""
        if not kind.casts:
            target[:] = data
            return
        one, zero = np.array([len(data)], dtype=np.int64), np.zeros(1, dtype=np.int64)
        self._place(Rows(zero, one, zero), np.array([tensor], dtype=np.int64), data, target, kind)

    def _place(self, rows: Rows, tensors: Column, staging: ByteArray, memory: ByteArray, kind: Kind) -> None:
        if not kind.casts:
            copy_rows(staging, rows.begin, memory, rows.at, rows.length)
        elif self._kernel.cast_rows(rows, staging, memory, kind) and may_lose(kind.source, kind.target):
            self._count(tensors, rows, staging, memory, kind)

    def _count(self, tensors: Column, rows: Rows, staging: ByteArray, memory: ByteArray, kind: Kind) -> None:
        narrow = rows.length // kind.source.itemsize_bytes * kind.target.itemsize_bytes
        columns = tensors, rows.begin, rows.length, rows.at, narrow
        for tensor, low, length, at, count in zip(*(c.tolist() for c in columns), strict=True):
            place = memory[at : at + count]
            before, after = _aligned(staging[low : low + length]), _aligned(place)
            lost = losses_of(before, after, kind.source, kind.target, saturate=self._saturate)
            if lost.overflowed and after is not place:
                place[:] = after
            if lost and kind.counted:
                self._losses[tensor] = self._losses.get(tensor, Losses()) + lost


def _aligned(data: ByteArray) -> ByteArray:
    """The bytes at an address that is a multiple of 8, as numpy's views of wider elements need it."""
    return data.copy() if data.ctypes.data % 8 else data


# The choice of the kernel that casts in this process: the reference, or a device if that is faster.

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
    from reshard_engine.execute.casts.device import WARM_UP_BYTES, DeviceCast  # needed with a GPU only

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
