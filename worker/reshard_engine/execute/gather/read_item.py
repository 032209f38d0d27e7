"""The request to a reader of tensors."""

from __future__ import annotations

from dataclasses import dataclass

from reshard_engine.tensors.dtypes import Dtype


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A run of elements of a tensor to read, their type in the target, and their place (`at`) in memory."""

    tensor: int
    dtype: Dtype
    begin: int
    end: int
    at: int
    counted: bool = True
    """True if cast losses are counted: elements that are read twice must be counted once."""
