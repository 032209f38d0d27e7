"""CRC-32 of concatenations and of their parts from one another, and the board where running units meet.

Source: zlib's `crc32_combine` (Mark Adler), which `isal` binds: appending n zero bytes to a message multiplies its
CRC-32 by x^(8n) modulo the polynomial. That polynomial is primitive, so x^(2^32 - 1) is 1.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from isal.isal_zlib import crc32_combine

_ORDER = (1 << 32) - 1
"""After so many zero bytes every CRC-32 is what it was: appending `_ORDER - n` takes n away again."""


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two byte strings put together, from theirs and the second one's length.

    >>> import zlib
    >>> combine(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
    True
    """
    return crc32_combine(first, second, second_bytes)


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
    return combine(whole ^ suffix, 0, -suffix_bytes % _ORDER)


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

    def knows(self, file: int, record: int, offset: int, length_bytes: int) -> bool:
        """True if this part of a record was put up."""
        with self._changed:
            span = self._spans.get((file, record), {}).get(offset)
            return span is not None and span[1] == length_bytes

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
