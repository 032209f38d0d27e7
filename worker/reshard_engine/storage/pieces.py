"""Reading of long ranges in bounded pieces, for checks that read bytes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

PIECE_BYTES = 1 << 20


def pieces_of(read_into: Callable[[int, memoryview], None], begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of each piece of a range, in order. The bytes are valid until the next piece is requested."""
    buffer = bytearray(min(PIECE_BYTES, end - begin))
    for at in range(begin, end, max(1, len(buffer))):
        view = memoryview(buffer)[: min(len(buffer), end - at)]
        read_into(at, view)
        yield at, view
