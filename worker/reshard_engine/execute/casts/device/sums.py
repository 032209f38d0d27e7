"""The sum that follows bytes to a device and back: cheap on both sides, and sensitive to where a row of bytes lies.

Words of eight bytes are added up by rows, and the rows' sums, each times an odd number of its own, once more, all
modulo 2**64. Any change within one row changes the sum, as odd numbers have inverses; so do rows that change places.
It finds accidents of a transfer. The digests of what is written (`digests`) are taken on the host, from what arrived.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROW_BYTES = 2 << 10
ROW_WORDS = ROW_BYTES // 8


def padded_bytes(length_bytes: int) -> int:
    """The length in whole rows."""
    return -(-length_bytes // ROW_BYTES) * ROW_BYTES


def position_sum(data: npt.NDArray[np.uint8]) -> int:
    """The sum of whole rows, as a signed number: so does torch count."""
    rows = np.add.reduce(data.view(np.int64).reshape(-1, ROW_WORDS), axis=1)
    rows *= np.arange(1, 2 * len(rows), 2, dtype=np.int64)
    return int(np.add.reduce(rows))
