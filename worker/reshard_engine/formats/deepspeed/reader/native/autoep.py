"""AutoEP: a layer's experts fused along the first dimension of three tensors, and cut there over expert-parallel ranks.

Each rank holds `experts.w1`, `w2` and `w3` of its own experts under the same names; `ds_autoep_layers` says which
experts these are. Below stage 3, each expert's weights have a file of their own. At stage 3, only the optimizer's
shares hold them, and each rank's file says which ranks share a sub-group.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_save_moe_checkpoint`), `checkpoint/autoep_affine.py` (placement),
`checkpoint/autoep_zero3_metadata.py`, `runtime/zero/stage3.py` (`_zero3_partition_group_metadata`); verified by
running.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Parameter
from reshard_engine.formats.deepspeed.names import FUSED_LAYERS, FUSED_LAYERS_LEGACY, FUSED_WEIGHTS, OPTIMIZER_STATE
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates, Shapes
from reshard_engine.formats.deepspeed.reader.native.optim_states import RankStates
from reshard_engine.formats.deepspeed.rules.facts import as_count, as_items, as_lengths, as_mapping
from reshard_engine.formats.names import checked_name
from reshard_engine.pickles.nodes import mapping_items
from reshard_engine.pickles.plain import plain_value
from reshard_engine.tensors.shard_map import ShardMapBuilder
from reshard_engine.tensors.views import Box, View

_FOLDING = "folding"
_PARTITION_GROUPS = "ds_zero_partition_groups"
_PLACEMENT_VERSION = 1
MAX_EXPERTS = 1 << 16
_PART = re.compile(r"(?P<name>.+)@ep(?P<rank>0|[1-9][0-9]{0,8})")

Placement = tuple[tuple[int, ...], ...]
"""The experts of each expert-parallel rank, in the order in which they are stored."""


@dataclass(frozen=True)
class FusedExperts:
    """The parameters that hold fused experts, and the experts that each expert-parallel rank has of each."""

    placements: Mapping[str, Placement] = field(default_factory=dict[str, Placement])
    """By parameter name."""

    def __contains__(self, name: str) -> bool:
        """True if a parameter holds fused experts."""
        return name in self.placements

    def count(self, name: str) -> int:
        """The number of a parameter's experts on all ranks."""
        return sum(map(len, self.placements[name]))

    def whole(self, group: Shapes) -> Shapes:
        """The names and shapes of a group, where fused parameters have the experts of all ranks."""
        return tuple((n, (self.count(n), *shape[1:]) if n in self and shape else shape) for n, shape in group)

    def parts(self, group: Shapes, rank: int) -> Shapes:
        """The names and shapes of a group on one expert-parallel rank; parts of fused parameters get their own names.

        Args:
            group: As the first rank lists it.
            rank: Expert-parallel rank.

        Raises:
            SourceError: `checkpoint.mixed` if the listed shape is not that of the first rank's experts.
        """
        found: list[tuple[str, tuple[int, ...]]] = []
        for name, shape in group:
            if name in self:
                placement = self.placements[name]
                if rank >= len(placement) or not shape or shape[0] != len(placement[0]):
                    raise SourceError(
                        "checkpoint.mixed",
                        f"{printable(name)} {shape} on expert-parallel rank {rank}; {FUSED_LAYERS} gives it "
                        f"{[len(experts) for experts in placement[:8]]} experts",
                    )
                found.append((f"{name}@ep{rank}", (len(placement[rank]), *shape[1:])))
            else:
                found.append((name, shape))
        return tuple(found)

    def joined(self, builder: ShardMapBuilder, members: Sequence[Parameter]) -> list[Parameter]:
        """The parameters of a group with fused ones made whole; each takes the place of its first part.

        Raises:
            SourceError: `checkpoint.mixed` if ranks have different states or counters, `source.unsupported`.
        """
        parts: dict[str, list[Parameter]] = {}
        for parameter in members:
            match = _PART.fullmatch(parameter.fqn)
            parts.setdefault(match["name"] if match and match["name"] in self else parameter.fqn, []).append(parameter)
        return [
            self._whole(builder, name, same) if name in self and same[0].fqn != name else same[0]
            for name, same in parts.items()
        ]

    def _whole(self, builder: ShardMapBuilder, name: str, parts: Sequence[Parameter]) -> Parameter:
        first, placement = parts[0], self.placements[name]
        if len(parts) != len(placement):
            raise SourceError("checkpoint.mixed", f"{printable(name)} has {len(parts)} of {len(placement)} parts")
        for rank, part in enumerate(parts):
            if (part.scalars, list(part.states)) != (first.scalars, list(first.states)):
                raise SourceError(
                    "checkpoint.mixed",
                    f"{printable(name)}: expert-parallel rank {rank} has other states or counters",
                    fix="the files are of different steps: copy one whole save",
                )
        shape = (self.count(name), *first.shape[1:])
        states = {key: self._view(builder, name, key, shape, [p.states[key] for p in parts]) for key in first.states}
        return replace(first, fqn=name, shape=shape, states=states)

    def _view(
        self, builder: ShardMapBuilder, name: str, state: str, shape: tuple[int, ...], tensors: Sequence[int]
    ) -> int:
        boxes: list[Box] = []
        rest = shape[1:]
        zero = (0,) * len(rest)
        for tensor, experts in zip(tensors, self.placements[name], strict=True):
            for local, first, count in _stretches(experts):
                boxes.append(
                    Box(tensor, (len(experts), *rest), (local, *zero), (first, *zero), (count, *rest)),
                )
        return _added(builder, name, state, View(shape, tuple(boxes)))

    def whole_weights(self, builder: ShardMapBuilder, table: Mapping[str, int]) -> dict[str, int]:
        """A table of weights in which the weights of single experts are joined to fused parameters.

        Args:
            builder: Collects tensors.
            table: Tensor numbers by name; an expert's weight has its number behind the parameter's name.

        Raises:
            SourceError: `checkpoint.incomplete` if files of experts are missing.
        """
        found = dict(table)
        for name in self.placements:
            count = self.count(name)
            singles = [found.pop(f"{name}.{expert}", None) for expert in range(count)]
            present = [tensor for tensor in singles if tensor is not None]
            if not present:
                continue
            shapes = {builder.tensors[t].shape for t in present}
            if len(present) != count or len(shapes) != 1:
                raise SourceError(
                    "checkpoint.incomplete",
                    f"{printable(name)}: weights of {len(present)} of {count} experts in {len(shapes)} shapes",
                    fix="copy every layer_*_expert_*_model_states.pt of the tag",
                )
            rest = shapes.pop()
            zero = (0,) * len(rest)
            boxes = [Box(t, (1, *rest), (0, *zero), (i, *zero), (1, *rest)) for i, t in enumerate(present)]
            found[name] = _added(builder, name, "weight", View((count, *rest), tuple(boxes)))
        return found

    def without(self, model: ModelStates) -> ModelStates:
        """Model states without frozen fused experts: they hold only the first rank's; expert files hold all of them."""
        fragments = {n: t for n, t in model.frozen_fragments.items() if n not in self}
        return replace(
            model, frozen_fragments=fragments, frozen_shapes=tuple(s for s in model.frozen_shapes if s[0] not in self)
        )


def _added(builder: ShardMapBuilder, name: str, state: str, view: View) -> int:
    try:
        return builder.view(name, state, view, view.grid)
    except ValueError as error:
        raise SourceError("source.unsupported", f"{printable(state)} of {printable(name)}: {error}") from None


def _stretches(experts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first place, first expert, count) of each run of consecutive experts."""
    found: list[tuple[int, int, int]] = []
    for place, expert in enumerate(experts):
        if found and found[-1][1] + found[-1][2] == expert:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((place, expert, 1))
    return found


def fused_experts(model: ModelStates) -> FusedExperts:
    """The fused experts that model states describe.

    Raises:
        SourceError: `checkpoint.malformed`, `source.unsupported` for experts that tensor parallelism cuts too, or that
            several ranks hold, `source.unsupported_version`.
    """
    node = model.entries.get(FUSED_LAYERS, model.entries.get(FUSED_LAYERS_LEGACY))
    if node is None:
        return FusedExperts()
    if model.entries.get(_FOLDING) is not None:
        raise SourceError(
            "source.unsupported",
            "AutoEP and AutoTP shared their ranks (`folding`), which this version does not read",
            fix="save it without AutoTP, or with an own group of ranks for the experts",
        )
    placements: dict[str, Placement] = {}
    for item in as_items(plain_value(node, what=FUSED_LAYERS), FUSED_LAYERS):
        entry = as_mapping(item, FUSED_LAYERS)
        prefix = entry.get("expert_key_prefix")
        if not isinstance(prefix, str):
            raise SourceError("checkpoint.malformed", f"{FUSED_LAYERS}: an entry has no `expert_key_prefix`")
        placement = _placement(entry)
        for weight in FUSED_WEIGHTS:
            if placements.setdefault(checked_name(f"{prefix}.{weight}"), placement) is not placement:
                raise SourceError("checkpoint.ambiguous", f"{FUSED_LAYERS}: {printable(prefix)} comes twice")
    return FusedExperts(placements)


def _placement(entry: Mapping[str, Any]) -> Placement:
    count, ranks = (as_count(entry.get(key), f"{FUSED_LAYERS}: {key}") for key in ("num_experts", "ep_size"))
    if count > MAX_EXPERTS or ranks > count:
        raise SourceError("checkpoint.malformed", f"{FUSED_LAYERS}: {count} experts over {ranks} ranks")
    stated = entry.get("expert_placement")
    if stated is None:
        local = count // ranks
        placement = tuple(tuple(range(r * local, (r + 1) * local)) for r in range(ranks))
    else:
        facts = as_mapping(stated, f"{FUSED_LAYERS}: expert_placement")
        if facts.get("version") != _PLACEMENT_VERSION:
            raise SourceError("source.unsupported_version", f"{FUSED_LAYERS}: a placement of another version than 1")
        by_rank = {
            rank.get("rank"): as_lengths(rank.get("experts"), f"{FUSED_LAYERS}: experts", max_items=count)
            for rank in (
                as_mapping(r, f"{FUSED_LAYERS}: ranks") for r in as_items(facts.get("ranks"), f"{FUSED_LAYERS}: ranks")
            )
        }
        if set(by_rank) != set(range(ranks)):
            raise SourceError("checkpoint.malformed", f"{FUSED_LAYERS}: ranks {list(by_rank)[:8]} of {ranks}")
        placement = tuple(by_rank[r] for r in range(ranks))
    experts = sorted(expert for held in placement for expert in held)
    if experts != list(range(count)):
        raise SourceError(
            "source.unsupported",
            f"{FUSED_LAYERS}: {count} experts are held {len(experts)} times: an expert on several ranks is not read",
        )
    return placement


def sharing_ranks(states: Sequence[RankStates], index: int) -> list[tuple[int, ...]]:
    """The ranks that share a sub-group of stage 3, for each expert-parallel rank.

    Raises:
        SourceError: `checkpoint.mixed` if the ranks' statements contradict one another.
    """
    world = len(states)
    found: dict[tuple[int, ...], None] = {}
    for rank, state in enumerate(states):
        outer = mapping_items(state.torch_file.root, what=printable(state.torch_file.file.name))
        inner = mapping_items(outer.get(OPTIMIZER_STATE), what=OPTIMIZER_STATE)
        groups = as_items(plain_value(inner.get(_PARTITION_GROUPS), what=_PARTITION_GROUPS), _PARTITION_GROUPS)
        stated = [g.get("partition_ranks") for g in (as_mapping(g, _PARTITION_GROUPS) for g in groups)]
        ranks = as_lengths(stated[index], "partition_ranks", max_items=world) if index < len(stated) else ()
        if rank not in ranks:
            raise SourceError(
                "checkpoint.mixed", f"rank {rank} does not say that it shares sub-group {index} ({_PARTITION_GROUPS})"
            )
        found[ranks] = None
    if sorted(r for ranks in found for r in ranks) != list(range(world)):
        raise SourceError("checkpoint.mixed", f"the ranks disagree about which of them share sub-group {index}")
    # The lowest data-parallel rank of expert-parallel rank e rises with e in both orders (E + D and D + E).
    return sorted(found, key=min)
