"""The parameters of each flat group, from `param_shapes`, which versions of DeepSpeed store in different files.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_get_zero_param_shapes`: a list, in the model file); before 0.6.0
in every optimizer file, before 0.5.4 one mapping over all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from reshard.errors import SourceError
from reshard_engine.formats.deepspeed.names import PARAM_SHAPES
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates, Shapes, parse_param_shapes
from reshard_engine.formats.deepspeed.reader.native.optim_states import RankStates
from reshard_engine.pickles.nodes import is_mapping


def shapes_by_group(model: ModelStates, states: Sequence[RankStates]) -> tuple[Shapes, ...]:
    """Names and shapes of each group (ZeRO-1/2, BF16) or sub-group (ZeRO-3), in flat order.

    Raises:
        SourceError: `source.unsupported_version` if the files do not say, `checkpoint.mixed` if they contradict
            one another.
    """
    first, node = states[0], model.entries.get(PARAM_SHAPES)
    shapes = model.param_shapes
    if shapes is None and first.legacy_param_shapes is not None:
        node = first.legacy_param_shapes
        shapes = parse_param_shapes(node, what="param_shapes of the optimizer file")
    if shapes is None:
        raise SourceError(
            "source.unsupported_version",
            "neither the model file nor the optimizer file has `param_shapes` "
            f"(deepspeed {model.version or 'of unknown version'})",
            fix="load it once with a DeepSpeed of 0.5 or later at the old world size, and save again",
        )
    if is_mapping(node) and len(first.fp32) > 1:
        return _cut_into_groups(shapes[0], states)
    if len(shapes) != len(first.fp32):
        raise SourceError(
            "checkpoint.mixed", f"{len(shapes)} groups of parameter shapes, {len(first.fp32)} groups of flat tensors"
        )
    return shapes


def _cut_into_groups(shapes: Shapes, states: Sequence[RankStates]) -> tuple[Shapes, ...]:
    """The (sub-)groups of one mapping over all groups (before 0.5.4), told apart by the sizes of their flat tensors.

    Source: deepspeed 0.5.3 `runtime/engine.py` (`_get_zero_param_shapes` walks the groups into one mapping).
    """
    ranks, sharded = len(states), states[0].stage == 3
    groups: list[Shapes] = []
    begin = end = 0
    for index, flat in enumerate(states[0].fp32):
        room = flat.numel if sharded else sum(s.fp32[index].numel for s in states)
        while room > 0 and end < len(shapes):
            numel = prod(shapes[end][1])
            room -= -(-numel // ranks) if sharded else numel
            end += 1
        if room:
            break
        groups.append(shapes[begin:end])
        begin = end
    if len(groups) != len(states[0].fp32) or end != len(shapes):
        raise SourceError(
            "source.unsupported_version",
            "`param_shapes` does not tell parameter groups apart, and the groups' sizes do not either",
            fix="load it once with a DeepSpeed of 0.5.4 or later at the old world size, and save again",
        )
    return tuple(groups)
