"""Lets DeepSpeed's real FastFileWriter run without libaio and without a compiler.

Only the two compiled helpers are replaced, by Python that does the same system calls in order: the asynchronous I/O
handle and the view of tensors as bytes.  Which files the writer makes, and what is in them, stays DeepSpeed's doing.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.io import fast_file_writer
from deepspeed.runtime.model_checkpointing import writer_factory
from torch import Tensor

_ALIGNMENT_BYTES = 4096


class _Handle:
    """Stands for ``aio_handle``: writes at once, and counts what ``wait`` shall report."""

    def __init__(self, **_: Any) -> None:
        self._pending = 0

    def get_alignment(self) -> int:
        return _ALIGNMENT_BYTES

    def async_pwrite(self, buffer: Tensor, fd: int, file_offset: int) -> int:
        os.pwrite(fd, buffer.numpy().tobytes(), file_offset)
        self._pending += 1
        return 0

    def wait(self) -> int:
        done, self._pending = self._pending, 0
        return done


class _AioBuilder:
    def load(self) -> _AioBuilder:
        return self

    aio_handle = _Handle


class _UtilsBuilder:
    def load(self) -> _UtilsBuilder:
        return self

    @staticmethod
    def cast_to_byte_tensor(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]


def enable_fast_writer() -> None:
    """Patches this rank; O_DIRECT goes too, because Python's buffers are not aligned to disk blocks."""
    writer_factory.AsyncIOBuilder = _AioBuilder
    fast_file_writer.UtilsBuilder = _UtilsBuilder
    accelerator: Any = get_accelerator()
    accelerator.is_pinned = lambda _tensor: True
    os.O_DIRECT = 0  # type: ignore[misc]
