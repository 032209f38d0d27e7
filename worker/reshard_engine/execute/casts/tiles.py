"""Casts of one tile, which is so small that it stays in a core's cache.

`ml_dtypes` rounds to bfloat16 in one pass of vector registers. numpy converts float16 one element at a time, so casts
of float16 are made here of whole-array steps of integer arithmetic. They run at 1.4 (narrowing) and 2.5 times
(widening) numpy's speed, with numpy 2.4. Two maxima tell if a tile holds a special element (a NaN, an infinity, or an
element that becomes one): the bits of floats are ordered like integers, positive floats as signed and negative floats
as unsigned integers.
"""

from __future__ import annotations

import threading
from typing import Self

import ml_dtypes
import numpy as np
import numpy.typing as npt

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
