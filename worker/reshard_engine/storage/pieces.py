"""Long ranges read in bounded pieces, one after the other, by whoever looks at bytes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

PIECE_BYTES = 1 << 20


def pieces_of(read_into: Callable[[int, memoryview], None], begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of a range in order; the bytes live until the next piece is asked for."""
    buffer = bytearray(min(PIECE_BYTES, end - begin))
    for at in range(begin, end, max(1, len(buffer))):
        view = memoryview(buffer)[: min(len(buffer), end - at)]
        read_into(at, view)
        yield at, view
