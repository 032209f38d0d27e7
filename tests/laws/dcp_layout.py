"""The layout of a run of FSDP: its mesh, the placements of its tensors, and the framework whose keys it saves under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Literal

import numpy as np
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from laws.dcp_files import Save, StridedShard, box_of

Grammar = Literal["nested", "app", "old", "numbers", "flat", "accelerate", "trainer", "lightning", "bare"]
Role = Literal["replicate", "shard", "tensor"]
MESHES: tuple[tuple[tuple[Role, int], ...], ...] = (
    (("shard", 4),),
    (("replicate", 2), ("shard", 2)),
    (("shard", 2), ("tensor", 2)),
    (("shard", 1),),
    (("replicate", 2), ("shard", 2), ("tensor", 2)),
    (("shard", 5),),
    (("shard", 3), ("tensor", 2)),
    (("replicate", 3),),
    (("replicate", 2), ("shard", 1), ("tensor", 3)),
)
"""Axes from the outermost one, as FSDP2 nests them: hybrid sharding around sharding around tensor parallelism."""


@dataclass(frozen=True)
class Layout:
    """How a run is cut and saved.

    Attributes:
        grammar: whose keys and files.
        roles: what each axis of the mesh does.
        how: mesh and options of the save.
        wrapper: a module that makes names longer; none if empty.
        idle: one of the trained parameters never had a gradient.
        turned: tensors that one rank holds whole lie transposed in their records.
        seed: of everything else: placements, places of the wrapper.
        rows: every tensor is partitioned along dim 0, as FSDP does it.
    """

    grammar: Grammar
    roles: tuple[Role, ...]
    how: Save
    wrapper: str
    idle: bool
    turned: bool
    seed: int
    rows: bool = False

    def chance(self, *about: object) -> Random:
        """The chance that decides something of this run."""
        return Random(f"{self.seed} {about}")

    @property
    def folders(self) -> bool:
        """True if model and optimizer have directories of their own."""
        return self.grammar in ("accelerate", "trainer")

    def wrapped(self, name: str) -> str:
        """The name of a parameter with that of the wrapper."""
        if not self.wrapper:
            return name
        parts = name.split(".")
        parts.insert(self.chance("wrapper", name).randrange(len(parts)), self.wrapper)
        return ".".join(parts)

    def optimizers_name(self, name: str) -> str:
        """The optimizer's name of a parameter: torch's state dicts leave wrappers out, plain ones do not."""
        return name if self.chance("optimizer's names").random() < 0.5 else self.wrapped(name)

    def placements(self, name: str, shape: tuple[int, ...]) -> tuple[Placement, ...]:
        """The placements of a parameter: along its first dimension, or as chance has it."""
        if not shape:
            return self.how.replicated
        chance = self.chance("placements", name)
        along = chance.randrange(len(shape)) if chance.random() < 0.25 and not self.rows else 0
        across = chance.randrange(len(shape)) if chance.random() < 0.7 else None
        for way in (across, None):
            found = _placed(self.roles, self.how.mesh, along, way)
            if _is_partition(shape, self.how.mesh, found):
                return found
        raise AssertionError("a cut along one dimension is a partition")


def _placed(roles: Sequence[Role], mesh: Sequence[int], along: int, across: int | None) -> tuple[Placement, ...]:
    ways = dict(zip(roles, mesh, strict=True))
    tensor: Placement = Replicate() if across is None else Shard(across)
    # Tensor parallelism cuts first, although its axis is the inner one: where both cut a dimension, FSDP's is strided.
    strided = across == along and "tensor" in ways
    shard: Placement = StridedShard(along, split_factor=ways["tensor"]) if strided else Shard(along)
    by_role: dict[Role, Placement] = {"replicate": Replicate(), "shard": shard, "tensor": tensor}
    return tuple(by_role[role] for role in roles)


@lru_cache(maxsize=10_000)
def _is_partition(shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> bool:
    """True if torch says of every element once where it is. Of some uneven strided cuts it does not, up to 2.13."""
    painted = np.zeros(shape, dtype=np.int8)
    for offsets, sizes in {box_of(shape, mesh, at, placements) for at in Save(mesh).coordinates}:
        painted[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    return bool((painted == 1).all())
