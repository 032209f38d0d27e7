"""Lets DeepSpeed's real optimizer swapper run without libaio and without a compiler, on tensors small enough for tests.

Only the compiled asynchronous I/O handle is replaced, by Python that reads and writes the same bytes of the same files
in order; what is swapped, under which names and with how much padding stays DeepSpeed's doing. ``REAL_AIO=1`` in the
environment keeps the compiled one, which takes libaio's headers and minutes to build the first time: the files are the
same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_optimizer_swapper, partitioned_param_swapper
from torch import Tensor

from oracle.aio import Builder, Handle

SWAPPABLE_BYTES = 512
"""In place of DeepSpeed's 1 MiB, under which it leaves a sub-group in memory."""


class _Handle(Handle):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._locked: dict[int, int] = {}

    def new_cpu_locked_tensor(self, numel: int, example: Tensor) -> Tensor:
        tensor = torch.empty(numel, dtype=example.dtype)
        self._locked[tensor.data_ptr()] = tensor.data_ptr() + tensor.nbytes
        return tensor

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        return self._locked.pop(tensor.data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        return any(low <= tensor.data_ptr() < high for low, high in self._locked.items())

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        with Path(path).open("rb") as file:
            file.seek(offset)
            data = bytearray(file.read(buffer.nbytes))
        if len(data) != buffer.nbytes:
            raise OSError(f"{path} ends {buffer.nbytes - len(data)} bytes early")
        buffer.view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
        return self.submitted()

    def async_pwrite(self, buffer: Tensor, path: str, offset: int) -> int:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(descriptor, buffer.view(torch.uint8).numpy().tobytes(), offset)
        finally:
            os.close(descriptor)
        return self.submitted()


def enable_swapping() -> None:
    """Patches this rank."""
    for module in (optimizer_utils, partitioned_param_swapper):
        module.MIN_AIO_BYTES = SWAPPABLE_BYTES
    if os.environ.get("REAL_AIO") != "1":
        for module in (partitioned_optimizer_swapper, partitioned_param_swapper):
            module.AsyncIOBuilder = Builder(_Handle)


def swap_folder() -> str:
    """A folder that goes with this world."""
    return str(Path(os.environ["ORACLE_STORE"].removeprefix("file://")).parent / "nvme")
