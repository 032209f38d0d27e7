"""Rules that make a weight from other tensors where no file has its bytes; see `execute.gather.lora_merge`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Merge:
    """A weight with its LoRA adapter: base plus scale times left times right."""

    base: int
    left: int
    """`[rows, rank]`, or `[rank, rows]` where `transposed`."""
    right: int
    """`[rank, columns]`, or `[columns, rank]` where `transposed`."""
    scale: float
    transposed: bool
    magnitude: int | None
    """DoRA's; None without."""

    @property
    def said(self) -> list[object]:
        """Everything that decides the bytes, for the plan's digest."""
        return [self.base, self.left, self.right, self.scale, self.transposed]

    @property
    def tensors(self) -> tuple[int, ...]:
        """The tensors that it is made of."""
        found = (self.base, self.left, self.right)
        return found if self.magnitude is None else (*found, self.magnitude)


@dataclass(frozen=True, slots=True)
class Shift:
    """A bias with the bias of its LoRA adapter: base plus scale times the other."""

    base: int
    other: int
    scale: float

    @property
    def said(self) -> list[object]:
        """Everything that decides the bytes, for the plan's digest."""
        return ["shift", self.base, self.other, self.scale]

    @property
    def tensors(self) -> tuple[int, ...]:
        """The tensors that it is made of."""
        return (self.base, self.other)


@dataclass(frozen=True, slots=True)
class NewRows:
    """A matrix some rows of which are another's: trained tokens of an embedding."""

    base: int
    source: int
    """`[len(rows), columns]`."""
    rows: tuple[int, ...]
    """For each row of the source the row of the base that it replaces; no row twice."""

    @property
    def said(self) -> list[object]:
        """Everything that decides the bytes, for the plan's digest."""
        return ["rows", self.base, self.source, list(self.rows)]

    @property
    def tensors(self) -> tuple[int, ...]:
        """The tensors that it is made of."""
        return (self.base, self.source)


MergeRule = Merge | Shift | NewRows
