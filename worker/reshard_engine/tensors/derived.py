"""The origin of a logical tensor's elements: files hold them, or they are made from other tensors of the map.

`ShardMap.origin` returns one member of the closed union `Origin` for every tensor. Callers match all members.
"""

from __future__ import annotations

from dataclasses import dataclass

from reshard_engine.tensors.views import View


@dataclass(frozen=True, slots=True)
class Stored:
    """Files hold the elements; pieces of the shard map say where."""


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of copies that differ after training; see `gather.mean`."""

    copies: tuple[int, ...]
    """Tensors of equal shape and element type, in rank order."""


@dataclass(frozen=True, slots=True)
class LoraMerge:
    """A weight with its LoRA adapter merged: base plus scale times left times right; see `gather.lora_merge`."""

    base: int
    left: int
    """`[rows, rank]`, or `[rank, rows]` where `transposed`."""
    right: int
    """`[rank, columns]`, or `[columns, rank]` where `transposed`."""
    scale: float
    transposed: bool
    magnitude: int | None
    """The tensor of DoRA's magnitudes; None without DoRA."""


@dataclass(frozen=True, slots=True)
class LoraBias:
    """A bias with the bias of its LoRA adapter merged: `base` plus `scale` times `other`."""

    base: int
    other: int
    scale: float


@dataclass(frozen=True, slots=True)
class NewRows:
    """A matrix with some rows taken from another matrix: the trained tokens of an embedding."""

    base: int
    source: int
    """The new rows, `[len(rows), columns]`."""
    rows: tuple[int, ...]
    """For each row of `source`, the row of `base` that it replaces. No row occurs twice."""


Merged = LoraMerge | LoraBias | NewRows
"""Weights and biases with a merged adapter."""
Derived = View | Mean | Merged
"""Tensors without bytes of their own in files. A view refers to stored tensors and means, never to views."""
Origin = Stored | Derived
STORED = Stored()


def operands(merged: Merged) -> tuple[int, ...]:
    """The numbers of the tensors from which a merged weight is computed."""
    match merged:
        case LoraMerge(base, left, right, magnitude=magnitude):
            return (base, left, right) if magnitude is None else (base, left, right, magnitude)
        case LoraBias(base, other):
            return base, other
        case NewRows(base, source):
            return base, source


def plan_facts(merged: Merged) -> list[object]:
    """Everything beside the operands' contents that decides the bytes of a merged weight, for the plan's digest."""
    match merged:
        case LoraMerge():
            return [merged.base, merged.left, merged.right, merged.scale, merged.transposed]
        case LoraBias():
            return ["shift", merged.base, merged.other, merged.scale]
        case NewRows():
            return ["rows", merged.base, merged.source, list(merged.rows)]
