"""The mean of copies that differ after training. This is the only rule whose result is not a copy bit for bit.

The copies are added in the order of their ranks and divided by their number. Each step is rounded to their own element
type, as in DeepSpeed. An element with the same bits in all copies is kept unchanged; in DeepSpeed, the sum of such
elements may be rounded or overflow, and -0.0 becomes 0.0.

Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`: `sum(slices) / len(slices)`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.execute.casts.rows import ByteArray
from reshard_engine.tensors.dtypes import FLOAT32, Dtype


def mean_of(copies: Iterable[ByteArray], dtype: Dtype, kernel: CastKernel) -> ByteArray:
    """The mean of at least one copy, element by element.

    Args:
        copies: Packed elements, equally many in each copy. A copy is released before the next one is taken.
        dtype: Element type of the copies: float64, or a type that `kernel` casts to float32 and back.
        kernel: The kernel for casts between float32 and 16-bit types.
    """
    remaining = iter(copies)
    first = next(remaining)
    same = np.ones(len(first) // dtype.itemsize_bytes, dtype=np.bool_)
    total, count = first, 1
    for copy in remaining:
        same &= (_bits(copy, dtype) == _bits(first, dtype)).all(axis=1)
        with np.errstate(over="ignore", invalid="ignore"):
            total = _rounded(_values(total, dtype, kernel) + _values(copy, dtype, kernel), dtype, kernel)
        count += 1
    mean = _rounded(_values(total, dtype, kernel) / count, dtype, kernel)
    _bits(mean, dtype)[same] = _bits(first, dtype)[same]
    return mean


def _bits(data: ByteArray, dtype: Dtype) -> ByteArray:
    return data.reshape(-1, dtype.itemsize_bytes)


def _values(data: ByteArray, dtype: Dtype, kernel: CastKernel) -> npt.NDArray[np.floating]:
    if dtype.name == "float64":
        return data.view(np.float64)
    return (data if dtype is FLOAT32 else kernel.cast(data, dtype, FLOAT32)).view(np.float32)


def _rounded(values: npt.NDArray[np.floating], dtype: Dtype, kernel: CastKernel) -> ByteArray:
    data = values.view(np.uint8)
    return data if values.dtype == np.float64 or dtype is FLOAT32 else kernel.cast(data, FLOAT32, dtype)
