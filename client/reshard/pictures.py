"""Wire models of a checkpoint's layout: which file holds which part of which tensor."""

from __future__ import annotations

from reshard.models import SCHEMA_VERSION, WireModel


class Region(WireModel):
    """A rectangle of a tensor seen as a matrix: its first dimension as rows, all others together as columns."""

    file: str
    rank: str
    """Which rank's file it is, such as `dp 1 tp 0 pp 0`; empty where a file is no rank's own."""
    rows: tuple[int, int]
    """First row, and one past the last."""
    columns: tuple[int, int]

    @property
    def elements(self) -> int:
        """How many elements it holds."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


class TensorPicture(WireModel):
    """One tensor of a checkpoint, and where its elements are."""

    fqn: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    cut: str
    """How tensor parallelism cuts it, in words."""
    regions: tuple[Region, ...]
    """They tile the tensor, up to `left_out` of them."""
    left_out: int = 0


class FileShare(WireModel):
    """What one file holds."""

    file: str
    rank: str
    size_bytes: int
    bytes_by_state: dict[str, int]


class LayoutPicture(WireModel):
    """The layout of a checkpoint: of all its files, and of the tensors that were asked for."""

    schema_version: int = SCHEMA_VERSION
    url: str
    format: str
    world: dict[str, int]
    files: tuple[FileShare, ...]
    tensors: tuple[TensorPicture, ...] = ()
