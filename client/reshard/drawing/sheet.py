"""A picture that grows downwards: its marks so far, and the same in words."""

from __future__ import annotations

from dataclasses import dataclass, field

MARGIN = 24.0
STACKED_BELOW = 760
"""Widths in pixels below which the target is drawn below the source."""


@dataclass
class Sheet:
    """The marks of a picture, from top to bottom."""

    width: float
    y: float = MARGIN
    """The place of the next line."""
    marks: list[str] = field(default_factory=list[str])
    told: list[str] = field(default_factory=list[str])
    """The picture in words, for those who do not see it."""

    @property
    def stacked(self) -> bool:
        """True if source and target do not fit beside one another."""
        return self.width < STACKED_BELOW

    @property
    def inner(self) -> float:
        """The width between the margins."""
        return self.width - 2 * MARGIN

    def add(self, *marks: str) -> None:
        """Put marks on the sheet."""
        self.marks.extend(marks)
