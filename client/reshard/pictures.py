"""Wire models of a checkpoint's layout: the file that holds each part of each tensor."""

from __future__ import annotations

from reshard.wire_model import SCHEMA_VERSION, RenderedModel, WireModel


class Region(WireModel):
    """A rectangle of a tensor that is seen as a matrix: the first dimension as rows, all others together as columns."""

    file: str
    rank: str
    """The rank that owns the file, such as `dp 1 tp 0 pp 0`; empty if the file belongs to no single rank."""
    rows: tuple[int, int]
    """The first row, and one past the last."""
    columns: tuple[int, int]

    @property
    def elements(self) -> int:
        """Number of elements of the region."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


class TensorPicture(WireModel):
    """One tensor of a checkpoint, with the files that hold its regions."""

    fqn: str
    state: str
    dtype: str
    shape: tuple[int, ...]
    cut: str
    """A sentence on how tensor parallelism cuts the tensor."""
    regions: tuple[Region, ...]
    """The regions tile the tensor; `left_out` more are not listed."""
    left_out: int = 0


class FileShare(WireModel):
    """The contents of one file, by tensor state."""

    file: str
    rank: str
    size_bytes: int
    bytes_by_state: dict[str, int]


class LayoutPicture(RenderedModel):
    """The layout of a checkpoint: its files, and the tensors that were asked for."""

    schema_version: int = SCHEMA_VERSION
    url: str
    format: str
    world: dict[str, int]
    files: tuple[FileShare, ...]
    tensors: tuple[TensorPicture, ...] = ()


class LayoutPair(RenderedModel):
    """The layouts of a conversion's source, and of its target as it is planned, each with the parts of one tensor."""

    source: LayoutPicture
    target: LayoutPicture
