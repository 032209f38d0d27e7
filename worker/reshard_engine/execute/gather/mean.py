"""The mean of copies that training let drift apart: the one rule that is not bit for bit.

Copies are added in the order of their ranks and divided by their number, each step rounded to their own element type:
so does DeepSpeed. An element that all copies hold with the same bits is taken as it is, where DeepSpeed's sum may round
or overflow and turns -0.0 into 0.0.

Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`: `sum(slices) / len(slices)`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.tensors.dtypes import FLOAT32, Dtype

Buffer = npt.NDArray[np.uint8]


def mean_of(copies: Iterable[Buffer], dtype: Dtype, kernel: CastKernel) -> Buffer:
    """The mean of at least one copy, element by element.

    Args:
        copies: Packed elements of equal number; each is let go before the next is taken.
        dtype: Their element type: float64, or one that `kernel` casts to float32 and back.
        kernel: Casts between float32 and 16-bit types.
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


def _bits(data: Buffer, dtype: Dtype) -> Buffer:
    return data.reshape(-1, dtype.itemsize_bytes)


def _values(data: Buffer, dtype: Dtype, kernel: CastKernel) -> npt.NDArray[np.floating]:
    if dtype.name == "float64":
        return data.view(np.float64)
    return (data if dtype is FLOAT32 else kernel.cast(data, dtype, FLOAT32)).view(np.float32)


def _rounded(values: npt.NDArray[np.floating], dtype: Dtype, kernel: CastKernel) -> Buffer:
    data = values.view(np.uint8)
    return data if values.dtype == np.float64 or dtype is FLOAT32 else kernel.cast(data, FLOAT32, dtype)
