"""Wire models of a checkpoint's layout: the file that holds each part of each tensor; and the picture of one or two."""

from __future__ import annotations

import os
from dataclasses import dataclass

from reshard.errors import RequestError, printable
from reshard.layout_svg import WIDTH, render
from reshard.models import SCHEMA_VERSION, WireModel


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


class LayoutPicture(WireModel):
    """The layout of a checkpoint: its files, and the tensors that were asked for."""

    schema_version: int = SCHEMA_VERSION
    url: str
    format: str
    world: dict[str, int]
    files: tuple[FileShare, ...]
    tensors: tuple[TensorPicture, ...] = ()

    def _repr_html_(self) -> str:
        """The picture in a notebook."""
        return render(self)


class LayoutPair(WireModel):
    """The layouts of a conversion's source, and of its target as it is planned, each with the parts of one tensor."""

    source: LayoutPicture
    target: LayoutPicture

    def _repr_html_(self) -> str:
        """The picture in a notebook."""
        return render(self.source, self.target)


@dataclass(frozen=True)
class Picture:
    """The picture of a checkpoint's layout, or of two side by side. A notebook shows it."""

    source: LayoutPicture
    target: LayoutPicture | None = None
    tensor: str | None = None
    """`NAME` or `NAME/STATE` of the tensor that is drawn; None for the first that `source` lists."""

    def svg(self, *, width: int = WIDTH) -> str:
        """The picture as the text of an SVG; below 760 pixels source and target are one above the other."""
        return render(self.source, self.target, self.tensor, width=width)

    def save(self, path: str | os.PathLike[str], *, width: int = WIDTH) -> None:
        """Write the picture into a file.

        Args:
            path: The file, such as `moves.svg`.
            width: Its width in pixels.

        Raises:
            RequestError: `request.invalid` if the file cannot be written.
        """
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(self.svg(width=width))
        except OSError as error:
            raise RequestError(
                "request.invalid",
                f"{printable(os.fspath(path))}: {error.strerror}",
                fix="name a file in a directory that exists",
            ) from None

    def _repr_html_(self) -> str:
        """The picture in a notebook."""
        return self.svg()
