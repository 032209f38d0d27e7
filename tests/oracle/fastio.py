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

from oracle.aio import Builder, Handle

_ALIGNMENT_BYTES = 4096


class _Handle(Handle):
    def get_alignment(self) -> int:
        return _ALIGNMENT_BYTES

    def async_pwrite(self, buffer: Tensor, fd: int, file_offset: int) -> int:
        os.pwrite(fd, buffer.numpy().tobytes(), file_offset)
        return self.submitted()


class _UtilsBuilder:
    def load(self) -> _UtilsBuilder:
        return self

    @staticmethod
    def cast_to_byte_tensor(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]


def enable_fast_writer() -> None:
    """Patches this rank; O_DIRECT goes too, because Python's buffers are not aligned to disk blocks."""
    writer_factory.AsyncIOBuilder = Builder(_Handle)
    fast_file_writer.UtilsBuilder = _UtilsBuilder
    accelerator: Any = get_accelerator()
    accelerator.is_pinned = lambda _tensor: True
    os.O_DIRECT = 0  # type: ignore[misc]
