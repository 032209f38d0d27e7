"""CRC-32 of concatenations from the CRC-32s of the parts, and the board where running units meet.

Source: zlib's `crc32_combine` (Mark Adler): appending n zero bytes is a linear map over GF(2).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320


def _times(matrix: tuple[int, ...], vector: int) -> int:
    result = 0
    for row in matrix:
        if not vector:
            break
        if vector & 1:
            result ^= row
        vector >>= 1
    return result


def _square(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_times(matrix, row) for row in matrix)


@lru_cache(maxsize=64)
def _zeros_matrix(power: int) -> tuple[int, ...]:
    """The map that appends 2**power zero bytes."""
    if power == 0:
        one_bit = (_POLYNOMIAL, *(1 << n for n in range(31)))
        return _square(_square(_square(one_bit)))
    return _square(_zeros_matrix(power - 1))


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two byte strings put together, from theirs and the second one's length.

    >>> import zlib
    >>> combine(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
    True
    """
    power = 0
    while second_bytes:
        if second_bytes & 1:
            first = _times(_zeros_matrix(power), first)
        second_bytes >>= 1
        power += 1
    return first ^ second


@lru_cache(maxsize=64)
def _unzeros_matrix(power: int) -> tuple[int, ...]:
    """The map that takes 2**power zero bytes away again: appending one bit can be undone, its carry shows on top."""
    if power == 0:
        one_bit = (*(1 << n for n in range(1, 32)), (((1 << 31) ^ _POLYNOMIAL) << 1) | 1)
        return _square(_square(_square(one_bit)))
    return _square(_unzeros_matrix(power - 1))


def without_prefix(whole: int, prefix: int, rest_bytes: int) -> int:
    """The CRC-32 of what follows a prefix, from the CRC-32s of all and of the prefix, and the length of the rest.

    >>> import zlib
    >>> without_prefix(zlib.crc32(b"abcde"), zlib.crc32(b"ab"), 3) == zlib.crc32(b"cde")
    True
    """
    return combine(prefix, whole, rest_bytes)


def without_suffix(whole: int, suffix: int, suffix_bytes: int) -> int:
    """The CRC-32 of what stands before a suffix, from the CRC-32s of all and of the suffix, and its length.

    >>> import zlib
    >>> without_suffix(zlib.crc32(b"abcde"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"ab")
    True
    """
    rest, power = whole ^ suffix, 0
    while suffix_bytes:
        if suffix_bytes & 1:
            rest = _times(_unzeros_matrix(power), rest)
        suffix_bytes >>= 1
        power += 1
    return rest


Span = tuple[int, int, int]
"""(offset in the record, bytes, CRC-32)."""


class CrcBoard:
    """CRC-32s of parts of records, put up by the units that pass them, read by those that write the sums."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._spans: dict[tuple[int, int], dict[int, Span]] = {}
        self._changed = threading.Condition()
        self._failed = False

    def put(self, file: int, record: int, spans: Iterable[Span]) -> None:
        """Put up parts of a record."""
        with self._changed:
            known = self._spans.setdefault((file, record), {})
            for span in spans:
                known[span[0]] = span
            self._changed.notify_all()

    def fail(self) -> None:
        """Wake everyone that waits: what they wait for will not come."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait_for(self, file: int, record: int, length_bytes: int) -> int | None:
        """The CRC-32 of a whole record when all its parts are known; None after a failure elsewhere."""
        with self._changed:
            while not self._failed:
                spans = self._spans.get((file, record), {})
                if sum(s[1] for s in spans.values()) == length_bytes:
                    total = 0
                    for span in sorted(spans.values()):
                        total = combine(total, span[2], span[1])
                    return total
                self._changed.wait()
        return None
