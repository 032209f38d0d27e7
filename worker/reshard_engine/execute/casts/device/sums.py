"""The sum that checks transfers to a device and back. It is cheap on both sides and depends on the order of rows.

The words of eight bytes of each row are added up. The row sums are multiplied by different odd numbers and added up.
All arithmetic is modulo 2**64. A changed row sum changes the result, because odd numbers have inverses; exchanged rows
change it too. The sum finds accidental errors of a transfer. The digests of written bytes (`digests`) are computed on
the host, from the bytes that arrived there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROW_BYTES = 2 << 10
ROW_WORDS = ROW_BYTES // 8


def padded_bytes(length_bytes: int) -> int:
    """The length in bytes, rounded up to whole rows."""
    return -(-length_bytes // ROW_BYTES) * ROW_BYTES


def position_sum(data: npt.NDArray[np.uint8]) -> int:
    """The sum of whole rows, as a signed number like torch's int64."""
    rows = np.add.reduce(data.view(np.int64).reshape(-1, ROW_WORDS), axis=1)
    rows *= np.arange(1, 2 * len(rows), 2, dtype=np.int64)
    return int(np.add.reduce(rows))
