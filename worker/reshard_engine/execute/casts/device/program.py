"""The program that a device runs on a batch: gather, cast, count special elements, and sum, in one round trip.

It consists of plain torch operations, so the CPU runs the same program as a GPU. They pass over the device's memory
several times, but on a GPU that memory is many times as fast as the transfer. The device itself casts numbers (round to
nearest, ties to even). Devices differ in the payloads of NaNs, so NaNs are cast by integer arithmetic as in the
reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reshard_engine.execute.casts.device.sums import ROW_WORDS
from reshard_engine.tensors.dtypes import Dtype

_INF32, _ABS32 = 0x7F800000, 0x7FFFFFFF
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results that go back to the host."""

    data: Tensor
    """The elements as bytes, in whole rows of `sums`."""
    facts: Tensor
    """Four numbers: the sum of the received bytes, the sum of the result, the number of results that are zero, infinite
    or NaN, and the number of source elements that are not finite."""


def run(data: Tensor, rows: Tensor | int, count: int, kinds: tuple[Dtype, Dtype], padded: int) -> Outcome:
    """Gather, cast, count and sum one slice.

    Args:
        data: The received bytes, in whole rows of `sums`.
        rows: Begins and lengths of runs, in elements, as two rows of int32; or the begin of the only run.
        count: Number of elements of all runs.
        kinds: The source type and the target type.
        padded: Length of the result in bytes, in whole rows of `sums`.
    """
    source, target = kinds
    before = data.view(_INTEGERS[source.itemsize_bytes])
    single = isinstance(rows, int)
    before = before[rows : rows + count] if single else before.index_select(0, _places(rows, count))
    after = _narrowed(_widened(before, source), target)
    result = torch.zeros(padded, dtype=torch.uint8, device=data.device)
    result.view(after.dtype)[:count] = after
    values, cast = before.view(getattr(torch, source.name)), after.view(getattr(torch, target.name))
    special = count - torch.count_nonzero(torch.isfinite(cast) & (cast != 0))
    odd = count - torch.count_nonzero(torch.isfinite(values))
    return Outcome(result, torch.stack([_position_sum(data), _position_sum(result), special, odd]))


def _places(rows: Tensor, count: int) -> Tensor:
    begin, length = rows[0], rows[1]
    first = torch.cumsum(length, 0, dtype=torch.int32) - length
    places = torch.repeat_interleave(begin - first, length, output_size=count)
    places += torch.arange(count, dtype=torch.int32, device=rows.device)
    return places


def _widened(bits: Tensor, source: Dtype) -> Tensor:
    """The elements as bits of float32."""
    if source.name == "float32":
        return bits
    if source.name == "bfloat16":
        return bits.to(torch.int32) << 16
    wide = bits.view(getattr(torch, source.name)).to(torch.float32).view(torch.int32)
    if source.name == "float16":
        extended = bits.to(torch.int32)
        nan = (extended & 0x7FFF) > 0x7C00
        kept = (extended >> 31 << 31) | _INF32 | (extended & 0x3FF) << 13
    else:
        nan = (bits & ((1 << 63) - 1)) > (0x7FF << 52)
        # CPUs keep the upper part of the payload and set the quiet bit.
        kept = (bits >> 63).to(torch.int32) << 31 | _INF32 | 1 << 22 | ((bits >> 29) & 0x7FFFFF).to(torch.int32)
    return torch.where(nan, kept, wide)


def _narrowed(bits: Tensor, target: Dtype) -> Tensor:
    """Bits of float32 as bits of the target."""
    if target.name == "float32":
        return bits
    result = bits.view(torch.float32).to(getattr(torch, target.name)).view(torch.int16)
    nan = (bits & _ABS32) > _INF32
    if target.name == "bfloat16":
        return torch.where(nan, (bits >> 16 | 0x40).to(torch.int16), result)
    kept = (bits >> 31 << 15) | 0x7C00 | (bits >> 13 & 0x3FF).clamp(min=1)
    return torch.where(nan, kept.to(torch.int16), result)


def _position_sum(data: Tensor) -> Tensor:
    rows = data.view(torch.int64).view(-1, ROW_WORDS).sum(1)
    return (rows * torch.arange(1, 2 * len(rows), 2, dtype=torch.int64, device=data.device)).sum()
