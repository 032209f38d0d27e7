"""The part of a DeepSpeed run's state that `diff` compares beside its tensors: the same under every layout."""

from __future__ import annotations

from collections.abc import Mapping

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.deepspeed.facts import facts_of
from reshard_engine.formats.deepspeed.megatron import ARGS, without_layout
from reshard_engine.formats.deepspeed.names import LAYOUT_KEYS
from reshard_engine.formats.format import RunFacts
from reshard_engine.pickles.nodes import Node, PObject, is_mapping, mapping_items

_SCALE = "cur_scale"
_SCALER = (_SCALE, "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_CLIPPING = "clip_grad"


def run_facts(checkpoint: Checkpoint) -> RunFacts:
    """The run's state for `diff`: model states without layout entries, the loss scale, and the gradient clipping.

    Raises:
        SourceError: `checkpoint.malformed` for trees of the wrong shape.
    """
    entries = checkpoint.facts.run_state(checkpoint)
    state = {str(k): v for k, v in entries.items() if k not in LAYOUT_KEYS} if entries else None
    if state is not None and ARGS in state:
        state[ARGS] = without_layout(state[ARGS])
    if checkpoint.optimizer is None:
        return RunFacts(state)
    beside = facts_of(checkpoint).optimizer_entries
    scaler = _scaler(beside)
    # Stage 0 in fp32 and BF16_Optimizer keep no scale: they scale by 1. Only some stages keep the other attributes.
    optimizer: dict[str, Node] = {f"loss_scaler.{_SCALE}": scaler.get(_SCALE, 1.0)}
    optimizer |= {f"loss_scaler.{key}": scaler[key] for key in _SCALER[1:] if key in scaler}
    optimizer |= {_CLIPPING: beside[_CLIPPING]} if _CLIPPING in beside else {}
    return RunFacts(state, optimizer, frozenset(k for k in optimizer if k != f"loss_scaler.{_SCALE}"))


def _scaler(beside: Mapping[str, Node]) -> Mapping[str | int, Node]:
    """The loss scaler's attributes, from the object that stages 1 to 3 keep, or from stage 0's entries.

    Source: deepspeed 0.19.8 `runtime/fp16/loss_scaler.py` (`LossScalerBase`), `runtime/fp16/fused_optimizer.py`.
    """
    node = beside.get("loss_scaler")
    if isinstance(node, PObject) and node.has_state and is_mapping(node.state):
        return mapping_items(node.state, what="loss_scaler")
    return {k: v for k, v in beside.items() if k in _SCALER}
