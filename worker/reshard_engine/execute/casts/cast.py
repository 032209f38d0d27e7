"""Casts of floating tensors: round to nearest, ties to even, bit for bit the same on every device.

The numpy kernel is the reference. On a machine with a CUDA device, `DeviceCast` casts there if that is faster.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt

from reshard.choices import Quantization
from reshard.errors import RequestError, SourceError
from reshard_engine.execute.casts.rows import ByteArray, Kind, Rows, copy_rows, starts_of
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.views import BLOCK_ROWS, Quantized

# Casts of one tile, which is so small that it stays in a core's cache.
#
# `ml_dtypes` rounds to bfloat16 in one pass of vector registers. numpy converts float16 one element at a time, so casts
# of float16 are made here of whole-array steps of integer arithmetic. They run at 1.4 (narrowing) and 2.5 times
# (widening) numpy's speed, with numpy 2.4. Two maxima tell if a tile holds a special element (a NaN, an infinity, or an
# element that becomes one): the bits of floats are ordered like integers, positive floats as signed and negative floats
# as unsigned integers.

TILE_ELEMS = 1 << 18
"""Elements of a tile: 1 MiB of float32. Measured with 2 MiB of L2 cache, casts to bfloat16 with one thread and with
two: tiles of 256 KiB 3.9 and 3.8 GB/s, tiles of 1 MiB 3.5 and 6.2 GB/s. The steps of a small tile are so short that
two threads spend their time passing Python's lock to each other."""
Bytes = npt.NDArray[np.uint8]
Bits16 = npt.NDArray[np.uint16]
Bits32 = npt.NDArray[np.uint32]

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
INF32, _INF_BFLOAT16, _INF16 = 0x7F800000, 0x7F80, 0x7C00
_SIGN32, _SIGN16 = 0x80000000, 0x8000
_LEAST_LOST = 0x477FF000
"""The bits of the smallest float32 that becomes infinite in float16."""
# These scalars have numpy types: each call would convert a plain scalar, which takes about a microsecond.
_SIXTEEN = np.uint32(16)
_ABS, _EXPONENT, _TOP_BIT = np.uint32(0x7FFFFFFF), np.uint32(INF32), np.uint32(_SIGN16)
_CLAMP = np.uint32(0x47800000)
_LEAST_NORMAL = np.uint32(113 << 23)
"""The bits of 2**-14. Below it, all float16 numbers have one spacing."""
_THIRTEEN, _BY_2_TO_13, _REBIAS = np.uint32(13), np.uint32(13 << 23), np.uint16(2 << 10)
_KEEP, _THREE, _BY_2_TO_112 = np.int32(-0x70002000), np.int32(3), np.float32(2.0**112)


class Scratch(threading.local):
    """Memory for the steps of one tile. Each thread keeps its own: new pages would cost as much as a step."""

    def __init__(self) -> None:
        """Begin without memory."""
        self._take(0)

    def _take(self, elems: int) -> None:
        self.values = np.empty(elems, dtype=np.float32)
        self.first = np.empty(elems, dtype=np.uint32)
        self.second = np.empty(elems, dtype=np.uint32)
        self.source = np.empty(elems * 8, dtype=np.uint8)
        self.target = np.empty(elems * 4, dtype=np.uint8)

    def at_least(self, elems: int) -> Self:
        """This scratch, with room for at least so many elements, but for no more than one tile."""
        if len(self.values) < min(elems, TILE_ELEMS):
            self._take(min(elems, TILE_ELEMS))
        return self


def _maxima(bits: Bits32) -> tuple[int, int]:
    """The largest magnitude of the positive and of the negative elements, as bits without the sign."""
    return max(int(bits.view(np.int32).max()), 0), max(int(bits.max()), _SIGN32) - _SIGN32


def holds_special(bits: Bits16 | Bits32, infinity: int) -> bool:
    """True if a tile holds a zero, an infinity or a NaN. `infinity` is the bits of the type's positive infinity.

    The maxima and minima of the bits, as signed and as unsigned integers, give the answer.
    """
    signed = bits.view(f"i{bits.itemsize}")
    sign = 1 << 8 * bits.itemsize - 1
    if max(int(signed.max()), int(bits.max()) - sign) >= infinity:
        return True
    return int(bits.min()) == 0 or int(signed.min()) == -sign


def narrow_to_bfloat16(values: npt.NDArray[np.float32], out: Bits16) -> bool:
    """Round a tile to bfloat16; returns True if the result holds a zero, an infinity or a NaN."""
    np.copyto(out.view(_BFLOAT16), values, casting="unsafe")
    # The result is searched and not the source, because it has half the bytes.
    found = holds_special(out, _INF_BFLOAT16)
    if found:
        nan = np.isnan(values)
        # The sign and the payload are kept, and the quiet bit is set; ml_dtypes would make the same NaN of all.
        out[nan] = (values.view(np.uint32)[nan] >> 16).astype(np.uint16) | 0x40
    return found


def narrow_to_float16(values: npt.NDArray[np.float32], out: Bits16, scratch: Scratch) -> bool:
    """Round a tile to float16; returns True if the result holds a zero, an infinity or a NaN.

    Each element is added to 2**13 times its own power of two. This addition rounds the element to the eleven binary
    digits that float16 keeps, which are then the low bits of the sum. For subnormal numbers, the power of the least
    normal number is used instead of their own. Source: Fabian Giesen, "Float->half variants" (public domain), which
    adds a constant, for subnormal numbers only.
    """
    bits, count = values.view(np.uint32), len(values)
    digits, power = scratch.first[:count], scratch.second[:count]
    largest = max(_maxima(bits))
    np.bitwise_and(bits, _ABS, out=digits)
    if largest >= _LEAST_LOST:
        np.minimum(digits, _CLAMP, out=digits)
    np.bitwise_and(digits, _EXPONENT, out=power)
    # The bits are compared as signed numbers, because numpy vectorises that maximum; none is negative here.
    np.maximum(power.view(np.int32), _LEAST_NORMAL.view(np.int32), out=power.view(np.int32))
    power += _BY_2_TO_13
    np.add(digits.view(np.float32), power.view(np.float32), out=digits.view(np.float32))
    digits -= power
    power >>= _THIRTEEN
    digits += power
    np.right_shift(bits, _SIXTEEN, out=power)
    power &= _TOP_BIT
    digits += power
    np.copyto(out, digits, casting="unsafe")
    # The exponent's bias in the sum is wrong by 126. In sixteen bits this wraps around, so that 2 must be added.
    out += _REBIAS
    if largest > INF32:
        nan = np.isnan(values)
        # The sign and the payload are kept. A payload that would vanish gets one bit, or the NaN would become infinite.
        kept = (bits[nan] >> 13 & 0x3FF).astype(np.uint16)
        out[nan] = (bits[nan] >> 16 & _SIGN16).astype(np.uint16) | _INF16 | np.maximum(kept, 1)
    return holds_special(out, _INF16)


def widen_bfloat16(data: Bits16, out: Bits32) -> None:
    """Widen a tile: an element is the upper half of the float32."""
    np.copyto(out, data)
    out <<= _SIXTEEN


def widen_float16(data: Bits16, out: Bits32) -> None:
    """Widen a tile: shift exponent and digits; one multiplication sets the bias, also of subnormal numbers."""
    np.copyto(out, data)
    if _flushes_subnormals():
        np.copyto(out.view(np.float32), data.view(np.float16))
        return
    signed = out.view(np.int32)
    out <<= _SIXTEEN
    signed >>= _THREE
    signed &= _KEEP
    values = out.view(np.float32)
    values *= _BY_2_TO_112
    if max(int(data.view(np.int16).max()), int(data.max()) - _SIGN16) >= _INF16:
        special = (data & _INF16) == _INF16
        kept = data[special].astype(np.uint32)
        out[special] = (kept & _SIGN16) << 16 | INF32 | (kept & 0x3FF) << 13


def _flushes_subnormals() -> bool:
    """True if a library has set this thread's processor to treat subnormal numbers as zero."""
    return not bool(_SUBNORMAL[0] * _BY_2_TO_112)


_SUBNORMAL = np.array([1 << 13], dtype=np.uint32).view(np.float32)


# Losses of a cast: counts of elements that became infinite or zero, and of those that were already NaN or infinite.

_BITS = {8: np.uint64, 4: np.uint32, 2: np.uint16}
_INFINITY = {"float64": 0x7FF << 52, "float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


@dataclass(frozen=True, slots=True)
class Losses:
    """Counts of elements that a cast lost, and of elements that were special before it."""

    overflowed: int = 0
    """Elements that are finite, but infinite in the narrower type (with saturation: its largest number)."""
    underflowed: int = 0
    """Elements that are not zero, but zero in the narrower type."""
    nan: int = 0
    infinite: int = 0
    """Elements that were infinite before the cast."""
    largest_error: float = 0.0
    """The largest distance of a quantized number, as readers compute it, from the one before."""
    error_squares: float = 0.0
    """The sum of the squares of these distances."""
    squares: float = 0.0
    """The sum of the squares of the elements before."""

    def __add__(self, other: Losses) -> Losses:
        """The sum of both, field by field."""
        return Losses(
            self.overflowed + other.overflowed,
            self.underflowed + other.underflowed,
            self.nan + other.nan,
            self.infinite + other.infinite,
            max(self.largest_error, other.largest_error),
            self.error_squares + other.error_squares,
            self.squares + other.squares,
        )

    def __bool__(self) -> bool:
        """True if any count is not zero."""
        return self != _NOTHING

    def columns(self) -> list[float]:
        """The values in the order of the fields, without those of quantized elements where there are none."""
        counts = [self.overflowed, self.underflowed, self.nan, self.infinite]
        errors = [self.largest_error, self.error_squares, self.squares]
        return [*counts, *errors] if any(errors) else [*counts]

    @classmethod
    def of_columns(cls, columns: Sequence[float]) -> Losses:
        """The losses with these columns."""
        return cls(*map(int, columns[:4]), *map(float, columns[4:]))


_NOTHING = Losses()


def may_lose(source: Dtype, target: Dtype) -> bool:
    """True if a cast can lose anything. Widening to float32 cannot."""
    return target.name != "float32" or source.name == "float64"


def losses_of(before: ByteArray, after: ByteArray, source: Dtype, target: Dtype, *, saturate: bool = False) -> Losses:
    """The losses of a cast. With `saturate`, elements of `after` that overflowed are replaced.

    Args:
        before: The elements, in memory that is aligned for their type.
        after: Their casts, also in aligned memory.
        source: The type of the elements.
        target: The type of the casts.
        saturate: True to turn finite elements that became infinite into the largest finite number of their sign.
    """
    if not may_lose(source, target):
        return _NOTHING
    old, new = _magnitude(before, source), _magnitude(after, target)
    old_limit, new_limit = _infinity(source), _infinity(target)
    overflowed = (old < old_limit) & (new == new_limit)
    count = int(np.count_nonzero(overflowed))
    if saturate and count:
        # The bits of the largest finite number are those of infinity minus one; the sign stays.
        after.view(_BITS[target.itemsize_bytes])[overflowed] -= 1
    return Losses(
        count,
        int(np.count_nonzero((old != 0) & (new == 0))),
        int(np.count_nonzero(old > old_limit)),
        int(np.count_nonzero(old == old_limit)),
    )


def _magnitude(data: ByteArray, dtype: Dtype) -> npt.NDArray[np.unsignedinteger]:
    """The bits without the sign. They are ordered like the magnitudes of the numbers."""
    size = dtype.itemsize_bytes
    bits = data.view(_BITS[size])
    return bits & np.array((1 << size * 8 - 1) - 1, dtype=_BITS[size])


def _infinity(dtype: Dtype) -> npt.NDArray[np.unsignedinteger]:
    return np.array(_INFINITY[dtype.name], dtype=_BITS[dtype.itemsize_bytes])


def are_nan(data: ByteArray, dtype: Dtype) -> npt.NDArray[np.bool_]:
    """A mask that is True for each element of a floating type that is NaN."""
    return _magnitude(data, dtype) > _infinity(dtype)


def special(data: ByteArray, dtype: Dtype) -> int:
    """The number of elements that are zero, infinite or NaN. A cast to this type can have lost no other elements."""
    bits = _magnitude(data, dtype)
    return int(np.count_nonzero((bits == 0) | (bits >= _infinity(dtype))))


# The protocol of kernels, and the kernel of numpy.

CAST_BYTES = 32 << 10
"""Mean row length from which rows are cast one by one. Shorter rows are packed first: a copy costs less than a call."""
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


class CastKernel(Protocol):
    """The protocol of kernels, which cast packed elements."""

    def cast(self, data: ByteArray, source: Dtype, target: Dtype) -> ByteArray:
        """The elements in the target's type, little-endian."""
        ...

    def cast_into(self, data: ByteArray, source: Dtype, target: Dtype, out: ByteArray) -> int:
        """Put the elements in the target's type into memory; returns how many results are zero, infinite or NaN."""
        ...

    def cast_rows(self, rows: Rows, source: ByteArray, target: ByteArray, kind: Kind) -> int:
        """Cast rows of one memory into another; returns how many results are zero, infinite or NaN."""
        ...

    def staging(self, length_bytes: int) -> ByteArray:
        """Memory to read a batch into. It belongs to this thread until the thread asks again."""
        ...

    def take_warnings(self) -> list[str]:
        """The warnings for the user since the last call."""
        ...


class NumpyCast:
    """The reference kernel."""

    def __init__(self) -> None:
        """Make a kernel that several threads may share."""
        self._scratch = Scratch()

    def cast(self, data: ByteArray, source: Dtype, target: Dtype) -> ByteArray:
        """The elements in the target's type, little-endian."""
        result = np.empty(len(data) // source.itemsize_bytes * target.itemsize_bytes, dtype=np.uint8)
        self.cast_into(data, source, target, result)
        return result

    def cast_into(self, data: ByteArray, source: Dtype, target: Dtype, out: ByteArray) -> int:
        """Put the elements in the target's type into memory; returns how many results are zero, infinite or NaN."""
        if source.name not in _FLOATS:
            raise SourceError(
                "tensor.unsupported",
                f"cannot cast from {source.name}",
                fix="leave --dtype out: elements of this type are written as they are",
            )
        if target.name not in _FLOATS or target.name == "float64":
            raise RequestError(
                "request.unsatisfiable", f"cannot cast to {target.name}", fix="use --dtype fp32, fp16 or bf16"
            )
        wide, narrow = source.itemsize_bytes, target.itemsize_bytes
        scratch, found = self._scratch.at_least(len(data) // wide), 0
        # numpy's views of wider elements need aligned memory. Tiles have the alignment of the whole memory.
        odd_source, odd_target = data.ctypes.data % wide, out.ctypes.data % narrow
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for first in range(0, len(data) // wide, TILE_ELEMS):
                tile = data[first * wide : (first + TILE_ELEMS) * wide]
                result = out[first * narrow : (first + TILE_ELEMS) * narrow]
                tile = _copied(tile, scratch.source) if odd_source else tile
                place = scratch.target[: len(result)] if odd_target else result
                if _cast_tile(tile, source, target, place, scratch):
                    found += special(place, target)
                if place is not result:
                    result[:] = place
        return found

    def cast_rows(self, rows: Rows, source: ByteArray, target: ByteArray, kind: Kind) -> int:
        """Cast rows of one memory into another; returns how many results are zero, infinite or NaN."""
        wide, narrow = kind.source.itemsize_bytes, kind.target.itemsize_bytes
        begin, length, at = rows.begin, rows.length, rows.at
        total, shorter = int(length.sum()), length // wide * narrow
        if len(length) == 1 or total >= len(length) * CAST_BYTES:
            each = zip(begin.tolist(), length.tolist(), at.tolist(), shorter.tolist(), strict=True)
            return sum(
                self.cast_into(source[low : low + count], kind.source, kind.target, target[to : to + less])
                for low, count, to, less in each
            )
        packed, result = np.empty(total, dtype=np.uint8), np.empty(total // wide * narrow, dtype=np.uint8)
        copy_rows(source, begin, packed, starts_of(length), length)
        found = self.cast_into(packed, kind.source, kind.target, result)
        copy_rows(result, starts_of(shorter), target, at, shorter)
        return found

    def staging(self, length_bytes: int) -> ByteArray:
        """New memory. By measurement it costs no more than memory that is kept between calls."""
        return np.empty(length_bytes, dtype=np.uint8)

    def take_warnings(self) -> list[str]:
        """An empty list: the reference kernel has no warnings."""
        return []


def _copied(data: ByteArray, memory: ByteArray) -> ByteArray:
    copy = memory[: len(data)]
    copy[:] = data
    return copy


def _cast_tile(tile: ByteArray, source: Dtype, target: Dtype, out: ByteArray, scratch: Scratch) -> bool:
    """Cast one tile; returns True if the result holds a zero, an infinity or a NaN. Widening casts return False."""
    count = len(tile) // source.itemsize_bytes
    direct = target.name == "float32"
    values = out.view(np.float32) if direct else scratch.values[:count]
    if source.name == "float32":
        values = tile.view(np.float32)
        if direct:
            out[:] = tile
    elif source.name == "float64":
        np.copyto(values, tile.view(np.float64), casting="same_kind")
        if direct:
            return holds_special(values.view(np.uint32), INF32)
    elif source.name == "bfloat16":
        widen_bfloat16(tile.view(np.uint16), values.view(np.uint32))
    else:
        widen_float16(tile.view(np.uint16), values.view(np.uint32))
    if direct:
        return False
    if target.name == "bfloat16":
        return narrow_to_bfloat16(values, out.view(np.uint16))
    return narrow_to_float16(values, out.view(np.uint16), scratch)


# Matrices in eight bits, a run of at most 128 rows at a time.
#
# FP8: e4m3, and a scale in fp32 for each block of 128 by 128. It is the reciprocal of 448 times the reciprocal of the
# block's largest magnitude, in fp32. A block whose factor no fp32 number holds (it has zeros or numbers below 1.4e-36
# alone) has the scale 1. Source: transformers 5.23.0 `integrations/finegrained_fp8.py` (`Fp8Quantize._quantize_one`),
# whose bits these are; verified by running.
#
# int8: from -128 to 127, and a scale for each row, its largest magnitude by 127.5, rounded to its type before numbers
# are divided by it. A row of zeros has the least step of that type at 1. Source: compressed-tensors 0.20.0
# `quantization/utils/helpers.py` (`calculate_qparams`: symmetric), `lifecycle/forward.py` (`_quantize`), whose bits
# these are for fp32 weights; verified by running.

Matrix = npt.NDArray[np.float32]
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
_MOST_FLOAT8 = np.float32(448)
"""The largest number of e4m3."""
_BLOCKS_AT_ONCE = 16
"""Blocks whose numbers are scaled at once: 1 MiB of fp32."""
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number of each type."""
_HALF_RANGE = np.float32(127.5)
"""Half of the distance between the ends of int8."""


def elements_of_rows(rule: Quantized, columns: int) -> int:
    """The elements that 128 rows of a matrix have in the tensor that a rule makes of it."""
    if not rule.scales:
        return BLOCK_ROWS * columns
    return columns // BLOCK_ROWS if rule.kind is Quantization.FP8_BLOCK else BLOCK_ROWS


@dataclass(frozen=True, slots=True)
class Scaled:
    """A run of rows of a matrix, with the scales of its numbers in eight bits."""

    values: Matrix
    """`[rows, columns]`; for FP8, 128 rows and a multiple of 128 columns."""
    scales: npt.NDArray[Any]
    """The scales as the target holds them."""
    factors: Matrix
    """The numbers by which numbers of the rows are multiplied (FP8) or divided (int8) before they are rounded."""
    kind: Quantization

    @classmethod
    def of(cls, values: Matrix, rule: Quantized) -> Scaled:
        """Find the scales.

        Raises:
            SourceError: `tensor.overflow` for a NaN or an infinity, with which there is no scale.
        """
        if rule.kind is Quantization.FP8_BLOCK:
            blocks = values.reshape(BLOCK_ROWS, -1, BLOCK_ROWS)
            largest = _finite(np.maximum(blocks.max(axis=(0, 2)), -blocks.min(axis=(0, 2))))
            with np.errstate(divide="ignore", over="ignore"):
                factors = np.float32(1) / largest * _MOST_FLOAT8  # torch divides a number by a tensor so
            factors = np.where(np.isfinite(factors), factors, np.float32(1))
            return cls(values, (np.float32(1) / factors).astype(np.float32), factors, rule.kind)
        steps = (_finite(np.maximum(values.max(axis=1), -values.min(axis=1))) / _HALF_RANGE)[:, None]
        kept = _BFLOAT16 if rule.scale.name == "bfloat16" else np.dtype(rule.scale.name)
        with np.errstate(over="ignore"):  # found below
            stored = steps.astype(kept)
        stored[stored == 0] = _EPS[rule.scale.name]
        return cls(values, stored, _finite(stored.astype(np.float32)), rule.kind)

    @property
    def numbers(self) -> Matrix:
        """The numbers by which readers multiply the rows in eight bits, in a shape that broadcasts with them."""
        return np.repeat(self.scales, BLOCK_ROWS)[None] if self.kind is Quantization.FP8_BLOCK else self.factors

    def quantized(self) -> npt.NDArray[Any]:
        """The rows in eight bits."""
        if self.kind is Quantization.INT8:
            return np.rint(np.clip(self.values / self.factors, np.float32(-128), np.float32(127))).astype(np.int8)
        blocks, most = self.values.reshape(BLOCK_ROWS, -1, BLOCK_ROWS), _MOST_FLOAT8
        codes = np.empty(blocks.shape, dtype=_FLOAT8)
        for low in range(0, len(self.factors), _BLOCKS_AT_ONCE):
            some = slice(low, low + _BLOCKS_AT_ONCE)
            codes[:, some] = np.clip(blocks[:, some] * self.factors[some, None], -most, most).astype(_FLOAT8)
        return codes.reshape(self.values.shape)

    def errors(self, codes: npt.NDArray[Any], part: tuple[int, int]) -> Losses:
        """The distances of the numbers that readers compute of the rows in eight bits, for elements `[begin, end)`."""
        begin, end = part
        columns, lost = self.values.shape[1], Losses()
        number_of = np.broadcast_to(self.numbers, self.values.shape)
        for row in range(begin // columns, -(-end // columns)):
            own = slice(max(row * columns, begin) - row * columns, min((row + 1) * columns, end) - row * columns)
            before = self.values[row, own].astype(np.float64)
            distance = codes[row, own].astype(np.float32) * number_of[row, own] - before
            squares = float(np.square(distance).sum()), float(np.square(before).sum())
            lost += Losses(0, 0, 0, 0, float(np.abs(distance).max()), *squares)
        return lost


def _finite(largest: Matrix) -> Matrix:
    if not bool(np.isfinite(largest).all()):
        raise SourceError(
            "tensor.overflow",
            "a weight has a NaN, an infinity or a number beyond the type of the scales, and cannot be quantized",
            fix="leave --quantize out, or choose an earlier checkpoint",
        )
    return largest
