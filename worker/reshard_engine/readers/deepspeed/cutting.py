"""Which rules say how a checkpoint's parameters are cut: the user's, a family's, or the checkpoint's own.

Source: deepspeed 0.19.8 `checkpoint/constants.py` (`universal_checkpoint_info`); Megatron-DeepSpeed (July 2025)
`megatron/arguments.py` (names of `args`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard_engine.deepspeed_names import INFO
from reshard_engine.pickles.nodes import Global, Node, PObject, is_mapping, mapping_items
from reshard_engine.pickles.plain import plain_value
from reshard_engine.readers.deepspeed.model_states import ModelStates
from reshard_engine.rules.affine import AffineMaps
from reshard_engine.rules.cut_rules import (
    AFFINE,
    DEFAULT,
    HEADS,
    ORIGINAL_VOCAB,
    PADDED_VOCAB,
    VERSION,
    VOCAB_DIVISOR,
    CutRules,
)
from reshard_engine.rules.facts import as_mapping
from reshard_engine.rules.families import HEADED

_CARRIED = (ORIGINAL_VOCAB, PADDED_VOCAB)


def namespace_items(node: Node) -> Mapping[str | int, Node]:
    """The attributes of an `argparse.Namespace`; nothing for anything else."""
    if isinstance(node, PObject) and isinstance(node.cls, Global) and node.cls.dotted == "argparse.Namespace":
        return mapping_items(node.state, what="args") if is_mapping(node.state) else {}
    return {}


def rules_of(model: ModelStates, wanted: Mapping[str, Any] | None) -> tuple[CutRules | None, AffineMaps | None]:
    """The rules for a checkpoint, and its affine maps.

    Args:
        model: Model states of model-parallel rank 0.
        wanted: Rules that the request gives, by DeepSpeed's keys; they take the place of the checkpoint's own.

    Raises:
        SourceError: `rules.*`, `checkpoint.malformed`.
    """
    node = model.entries.get(INFO)
    info: dict[str, Any] = plain_value(node, what=INFO) if is_mapping(node) else {}
    if wanted is None and not info:
        return None, None
    args = namespace_items(model.entries.get("args"))
    facts: dict[str, Any] = {**(wanted if wanted is not None else info)}
    if wanted is not None:
        facts = {k: info[k] for k in _CARRIED if k in info} | facts
        facts.setdefault(VERSION, 0.4 if wanted.get("sub_param_shard_widths") else 0.3)
    facts.setdefault(HEADS, _heads(args))
    if VOCAB_DIVISOR not in facts and type(args.get(VOCAB_DIVISOR)) is int:
        facts[VOCAB_DIVISOR] = args[VOCAB_DIVISOR]
    complete = bool(info) if wanted is None else wanted.get(DEFAULT) == "column"
    rules = CutRules(facts, complete=complete, what=INFO if wanted is None else "the rules of the request")
    maps = info.get(AFFINE)
    return rules, AffineMaps(as_mapping(maps, AFFINE)) if wanted is None and maps is not None else None


def _heads(args: Mapping[str | int, Node]) -> list[dict[str, Any]]:
    """Attention heads, or the groups of them that share keys: tensor parallelism cuts between them."""
    counts = [args.get(k) for k in ("num_key_value_heads", "num_attention_heads")]
    heads = next((c for c in counts if type(c) is int and c > 0), None)
    return [{"patterns": HEADED, "heads": heads}] if heads is not None else []
