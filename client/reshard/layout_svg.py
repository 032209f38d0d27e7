"""The picture of a layout as SVG: which rank holds what, source and target side by side, and one tensor on its way.

The command line, notebooks, the dashboard and the documents all call `render`. It needs nothing but a `LayoutPicture`,
and draws 4,096 ranks as it draws 4: ranges of ranks share a row, and the picture says how many.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.drawing import marks
from reshard.drawing.bars import draw_bars
from reshard.drawing.movement import draw_movement
from reshard.drawing.parts import first_moving, named, unlike
from reshard.drawing.sheet import Sheet
from reshard.errors import RequestError, printable

if TYPE_CHECKING:
    from reshard.pictures import LayoutPicture

WIDTH = 1_080
"""The default width in pixels."""
STYLE = marks.STYLE
"""The style sheet of every picture, for a page that keeps styles in a file of its own (`render(..., styled=False)`)."""


def render(
    source: LayoutPicture,
    target: LayoutPicture | None = None,
    tensor: str | None = None,
    *,
    width: int = WIDTH,
    styled: bool = True,
) -> str:
    """Draw a layout, or source and target beside one another.

    Args:
        source: The layout of a checkpoint.
        target: The layout that it is, or was, converted to.
        tensor: `NAME` or `NAME/STATE` of a tensor whose parts, and whose movement, to draw. It must be among the
            tensors of the pictures; by default those of `source` are drawn. Beside a target, one tensor is drawn: the
            first state.
        width: Width in pixels. Below 760 the target is drawn below the source, as for a phone.
        styled: False to leave out the style sheet, for a page that has `STYLE` in a file of its own.

    Returns:
        The text of one `<svg>` element that loads nothing and runs nothing. Names in it are escaped.
    """
    sheet = Sheet(float(width))
    draw_bars(sheet, source, target)
    found = named(source, tensor)
    # Beside a target one state is drawn. By itself, each state that lies elsewhere than the states before.
    for shown in unlike(found) if target is None else first_moving(found, target):
        draw_movement(sheet, shown, source, target)
    title = f"Layout of {source.url}" if target is None else f"From {source.url} to {target.url}"
    told = " ".join(sheet.told)
    return marks.picture(width, sheet.y + 14, "\n".join(sheet.marks), title=title, told=told, styled=styled)


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
