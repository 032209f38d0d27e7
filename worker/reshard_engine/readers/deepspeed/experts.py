"""Expert parallelism in flat groups: which ranks partition a group, and which expert a name means.

A group of experts is partitioned over the ranks that hold the same experts; the others hold other experts under the
same local names. Data-parallel rank d belongs to expert-parallel rank d mod EP, and holds the experts
[e * local, (e + 1) * local) of each layer.

Source: deepspeed 0.19.8 `utils/groups.py` (`_create_expert_and_data_parallel`: E + D order), `moe/utils.py` (param
groups with `moe`), `runtime/engine.py` (`_save_moe_checkpoint`: local to global numbers); verified by running.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import SourceError
from reshard_engine.readers.deepspeed.model_states import Shapes
from reshard_engine.readers.deepspeed.optim_states import RankStates

_LOCAL = re.compile(r"(?P<head>(?:.*\.)?deepspeed_experts\.)(?P<local>[0-9]{1,9})(?P<tail>\..*)")


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """A flat (sub-)group as the ranks that share it hold it."""

    index: int
    """Of the (sub-)group."""
    shapes: Shapes
    """With global expert numbers."""
    ranks: tuple[int, ...]
    """Data-parallel ranks, in the order of their pieces."""
    ep: int
    """Expert-parallel ranks that the group's experts are spread over; 1 for a group without experts."""


def expert_groups(shapes: Sequence[Shapes], states: Sequence[RankStates]) -> list[ExpertGroup]:
    """Every (sub-)group once for each set of ranks that partitions it.

    Raises:
        SourceError: `checkpoint.mixed` if sizes of partitions do not go together, `source.unsupported`.
    """
    world = len(states)
    found: list[ExpertGroup] = []
    for index, group in enumerate(shapes):
        count = states[0].partition_counts[index] if index < len(states[0].partition_counts) else world
        if count == world or states[0].stage == 3:
            found.append(ExpertGroup(index, group, tuple(range(world)), 1))
            continue
        if world % count:
            raise SourceError("checkpoint.mixed", f"group {index} is partitioned over {count} of {world} ranks")
        ep = world // count
        if not all(_LOCAL.fullmatch(name) for name, _ in group):
            raise SourceError(
                "source.unsupported", f"group {index} is partitioned over {count} of {world} ranks and holds no experts"
            )
        found += [ExpertGroup(index, _numbered(group, r), tuple(range(r, world, ep)), ep) for r in range(ep)]
    return found


def in_model_order(names: Sequence[str]) -> list[int]:
    """Positions of a group's experts, layer by layer and by global number: as a model that holds all lists them."""
    heads: dict[str, int] = {}
    keys: list[tuple[int, int]] = []
    for name in names:
        match = _LOCAL.fullmatch(name)
        assert match is not None
        keys.append((heads.setdefault(match["head"], len(heads)), int(match["local"])))
    return sorted(range(len(names)), key=keys.__getitem__)


def _numbered(group: Shapes, rank: int) -> Shapes:
    """The group with the global numbers of the experts of one expert-parallel rank."""
    local: dict[str, int] = {}
    for name, _ in group:
        match = _LOCAL.fullmatch(name)
        assert match is not None
        local[match["head"]] = max(local.get(match["head"], 0), int(match["local"]) + 1)
    renamed: list[tuple[str, tuple[int, ...]]] = []
    for name, shape in group:
        match = _LOCAL.fullmatch(name)
        assert match is not None
        number = rank * local[match["head"]] + int(match["local"])
        renamed.append((f"{match['head']}{number}{match['tail']}", shape))
    return tuple(renamed)
