"""Merging of LoRA adapters: weights (base plus scale times B A, DoRA's magnitudes), biases and trained tokens.

All sums are in fp32 and are taken term by term over the rank. So an element has the same bits in whichever block of
rows it is computed. A matrix product would sum in an order that depends on the block.

Source: peft 0.21.2 `tuners/lora/layer.py` (`get_delta_weight`, `merge`), `tuners/lora/dora.py` (`get_weight_norm`),
`tuners/trainable_tokens/layer.py` (`merge`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float32]
ROW_BLOCK_ELEMS = 1 << 18
"""Number of elements that are merged at once; a longer row is merged whole."""


def merged_rows(base: Matrix, left: Matrix, right: Matrix, scale: float, magnitude: Matrix | None) -> Matrix:
    """Rows of a merged weight.

    Args:
        base: Rows of the weight, `[rows, columns]`.
        left: The rows of the adapter's left factor, `[rows, rank]`.
        right: The adapter's right factor, `[rank, columns]`.
        scale: The scale of the product of both factors.
        magnitude: The length of each row in DoRA, `[rows]`; None without DoRA.
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
    """Replace rows of a matrix by rows of a source.

    Args:
        values: Elements of the matrix from `begin` on, in row-major order. They are changed in place.
        begin: The number of the first of these elements.
        rows: For each row of the source the row that it replaces.
        source: The new rows.
    """
    columns, end = source.shape[1], begin + len(values)
    for row, new in zip(rows, source, strict=True):
        low, high = max(row * columns, begin), min((row + 1) * columns, end)
        if low < high:
            values[low - begin : high - begin] = new[low - row * columns : high - row * columns]
