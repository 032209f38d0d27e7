"""The rules for a checkpoint's cuts, in order: the user's, then a family's, then the checkpoint's own.

Source: deepspeed 0.19.8 `checkpoint/constants.py` (`universal_checkpoint_info`); Megatron-DeepSpeed (July 2025)
`megatron/arguments.py` (names of `args`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard_engine.formats.deepspeed.megatron import ARGS, namespace_items
from reshard_engine.formats.deepspeed.names import INFO
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates
from reshard_engine.formats.deepspeed.rules.affine import AffineMaps
from reshard_engine.formats.deepspeed.rules.cut_rules import (
    AFFINE,
    BEHIND,
    DEFAULT,
    HEADS,
    ORIGINAL_VOCAB,
    PADDED_VOCAB,
    VOCAB_DIVISOR,
    CutRules,
)
from reshard_engine.formats.deepspeed.rules.facts import as_mapping
from reshard_engine.formats.deepspeed.rules.families import HEADED
from reshard_engine.formats.deepspeed.rules.layers import RuleLayers
from reshard_engine.pickles.nodes import Node, is_mapping
from reshard_engine.pickles.plain import plain_value

_CARRIED = (ORIGINAL_VOCAB, PADDED_VOCAB)
_REQUESTED = "the rules of the request"


def rules_of(model: ModelStates, wanted: Mapping[str, Any] | None) -> tuple[RuleLayers | None, AffineMaps | None]:
    """The rules for a checkpoint, and its affine maps.

    Args:
        model: Model states of model-parallel rank 0.
        wanted: Rules of the request, by DeepSpeed's keys. They come before the checkpoint's own rules, which say the
            rest, unless the request's `default` is `refuse`.

    Raises:
        SourceError: `rules.*`, `checkpoint.malformed`.
    """
    node = model.entries.get(INFO)
    info: dict[str, Any] = plain_value(node, what=INFO) if is_mapping(node) else {}
    if wanted is None and not info:
        return None, None
    args = namespace_items(model.entries.get(ARGS))
    shared: dict[str, Any] = {HEADS: _heads(args)}
    if type(args.get(VOCAB_DIVISOR)) is int:
        shared[VOCAB_DIVISOR] = args[VOCAB_DIVISOR]
    carried = shared | {k: info[k] for k in _CARRIED if k in info}
    layers: list[CutRules] = []
    given = dict(wanted or {})
    behind, default = given.pop(BEHIND, None), given.pop(DEFAULT, None)
    if given:
        layers.append(CutRules(carried | given, complete=False, what=_REQUESTED))
        carried |= {k: given[k] for k in _CARRIED if k in given}
    if behind is not None:
        layers.append(CutRules(carried | behind, complete=False, what="the family's rules"))
    if info and default != "refuse":
        layers.append(CutRules(shared | info, complete=True, what=INFO))
    if default == "column" or not layers:
        layers.append(CutRules(carried | given, complete=default == "column", stated=True, what=_REQUESTED))
    maps = info.get(AFFINE)
    return RuleLayers(layers), AffineMaps(as_mapping(maps, AFFINE)) if wanted is None and maps is not None else None


def _heads(args: Mapping[str | int, Node]) -> list[dict[str, Any]]:
    """The rule that tensor parallelism cuts attention between heads, or between groups of heads that share keys."""
    counts = [args.get(k) for k in ("num_key_value_heads", "num_attention_heads")]
    heads = next((c for c in counts if type(c) is int and c > 0), None)
    return [{"patterns": HEADED, "heads": heads}] if heads is not None else []
