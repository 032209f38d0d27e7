"""A weight with its LoRA adapter merged: base plus scale times B A, and DoRA's magnitudes; biases; trained tokens.

In fp32, term by term of the rank, so that an element has the same bits whichever block of rows it is computed with: a
matrix product sums in an order that depends on the block.

Source: peft 0.21.2 `tuners/lora/layer.py` (`get_delta_weight`, `merge`), `tuners/lora/dora.py` (`get_weight_norm`),
`tuners/trainable_tokens/layer.py` (`merge`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]
ROW_BLOCK_ELEMS = 1 << 18
"""Elements that are merged at once, or one row."""


def merged_rows(base: Matrix, left: Matrix, right: Matrix, scale: float, magnitude: Matrix | None) -> Matrix:
    """Rows of a merged weight.

    Args:
        base: Rows of the weight, `[rows, columns]`.
        left: The rows of the adapter's left factor, `[rows, rank]`.
        right: Its right factor, `[rank, columns]`.
        scale: Of their product.
        magnitude: DoRA's length of each of these rows, `[rows]`; None without DoRA.
    """
    delta = np.zeros_like(base)
    term = np.empty_like(base)
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(right.shape[0]):
            np.multiply(left[:, k : k + 1], right[k : k + 1], out=term)
            delta += term
        delta *= np.float32(scale)
        delta += base
        if magnitude is not None:
            squares = np.square(delta, dtype=np.float64).sum(axis=1)
            delta *= (magnitude / np.sqrt(squares).astype(np.float32))[:, None]
    return delta


def shifted(base: Matrix, other: Matrix, scale: float) -> Matrix:
    """Elements of a bias with the adapter's own bias merged."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.add(base, other * np.float32(scale), dtype=np.float32)


def replace_rows(values: Matrix, begin: int, rows: Sequence[int], source: Matrix) -> None:
    """Put a source's rows in their places.

    Args:
        values: Elements of the matrix from `begin` on, in row-major order; changed.
        begin: Their first element's number.
        rows: For each row of the source the row that it replaces.
        source: The new rows.
    """
    columns, end = source.shape[1], begin + len(values)
    for row, new in zip(rows, source, strict=True):
        low, high = max(row * columns, begin), min((row + 1) * columns, end)
        if low < high:
            values[low - begin : high - begin] = new[low - row * columns : high - row * columns]
