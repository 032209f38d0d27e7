"""Expert parallelism in flat groups: which ranks partition a group, and which expert a name means.

A group of experts is partitioned over the ranks that hold the same experts; the others hold other experts under the
same local names. Data-parallel rank d belongs to expert-parallel rank e = d mod EP, and holds the experts
[e * local, (e + 1) * local) of each layer; with `use_data_before_expert_parallelism` e is d over the number of ranks
that hold the same experts.

Source: deepspeed 0.19.8 `utils/groups.py` (`_create_expert_and_data_parallel`: E + D order, or D + E),
`moe/utils.py` (param groups with `moe`), `runtime/engine.py` (`_save_moe_checkpoint`: local to global numbers);
verified by running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reshard.errors import SourceError
from reshard_engine.formats.deepspeed.names import EXPERT
from reshard_engine.formats.deepspeed.reader.native.autoep import FusedExperts, sharing_ranks
from reshard_engine.formats.deepspeed.reader.native.model_states import Shapes
from reshard_engine.formats.deepspeed.reader.native.optim_states import RankStates


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """A flat (sub-)group as the ranks that share it hold it."""

    index: int
    """The number of the (sub-)group."""
    shapes: Shapes
    """Names and shapes, with global expert numbers in the names."""
    ranks: tuple[int, ...]
    """Data-parallel ranks, in the order of their pieces."""
    ep: int
    """Expert-parallel ranks that the group's experts are spread over; 1 for a group without experts."""


def expert_groups(
    shapes: Sequence[Shapes], states: Sequence[RankStates], fused: FusedExperts, *, data_first: bool
) -> list[ExpertGroup]:
    """One `ExpertGroup` for each (sub-)group and each set of ranks that partitions it.

    Args:
        shapes: Names and shapes of each (sub-)group, as the first rank lists them.
        states: All data-parallel ranks.
        fused: Experts that AutoEP fused.
        data_first: See `run_config.data_before_experts`.

    Raises:
        SourceError: `checkpoint.mixed` if the sizes of partitions contradict one another, `source.unsupported`.
    """
    world = len(states)
    found: list[ExpertGroup] = []
    for index, group in enumerate(shapes):
        count = states[0].partition_counts[index] if index < len(states[0].partition_counts) else world
        if states[0].stage == 3 and any(name in fused for name, _ in group):
            sharing = sharing_ranks(states, index)
            found += [ExpertGroup(index, fused.parts(group, r), s, len(sharing)) for r, s in enumerate(sharing)]
            continue
        if count == world or states[0].stage == 3:
            found.append(ExpertGroup(index, fused.parts(group, 0), tuple(range(world)), 1))
            continue
        if world % count:
            raise SourceError("checkpoint.mixed", f"group {index} is partitioned over {count} of {world} ranks")
        ep = world // count
        if not all(EXPERT.fullmatch(name) or name in fused for name, _ in group):
            raise SourceError(
                "source.unsupported", f"group {index} is partitioned over {count} of {world} ranks and holds no experts"
            )
        for r in range(ep):
            ranks = range(r * count, (r + 1) * count) if data_first else range(r, world, ep)
            found.append(ExpertGroup(index, fused.parts(_numbered(group, r), r), tuple(ranks), ep))
    return found


def in_model_order(names: Sequence[str]) -> list[int]:
    """Positions of a group's experts in the order of a model that holds all of them: by layer, then by number."""
    heads: dict[str, int] = {}
    keys: list[tuple[int, int]] = []
    for name in names:
        match = EXPERT.fullmatch(name)
        head, number = (match["head"], int(match["number"])) if match else (name, 0)
        keys.append((heads.setdefault(head, len(heads)), number))
    return sorted(range(len(names)), key=keys.__getitem__)


def _numbered(group: Shapes, rank: int) -> Shapes:
    """The group with the global numbers of the experts of one expert-parallel rank."""
    local: dict[str, int] = {}
    for name, _ in group:
        if (match := EXPERT.fullmatch(name)) is not None:
            local[match["head"]] = max(local.get(match["head"], 0), int(match["number"]) + 1)
    renamed: list[tuple[str, tuple[int, ...]]] = []
    for name, shape in group:
        match = EXPERT.fullmatch(name)
        if match is None:
            renamed.append((name, shape))
            continue
        number = rank * local[match["head"]] + int(match["number"])
        renamed.append((f"{match['head']}{number}{match['tail']}", shape))
    return tuple(renamed)
