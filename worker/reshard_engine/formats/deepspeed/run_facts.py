"""The part of a DeepSpeed run's state that `diff` compares beside its tensors: the same under every layout."""

from __future__ import annotations

from collections.abc import Mapping

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.deepspeed.config import CONFIG
from reshard_engine.formats.deepspeed.megatron import ARGS, without_layout
from reshard_engine.formats.deepspeed.names import INFO, LAYOUT_NOTES, PARALLEL_DIMENSIONS
from reshard_engine.formats.format import RunFacts
from reshard_engine.pickles.nodes import Node, PObject, is_mapping, mapping_items

LAYOUT_KEYS = frozenset(
    {
        "module",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "buffer_names",
        "shared_params",
        "dp_world_size",
        "mp_world_size",
        PARALLEL_DIMENSIONS,
        LAYOUT_NOTES,
        INFO,
        CONFIG,
        "ds_version",
    }
)
"""Entries of model states that describe the files, or that are compared as tensors: another layout has others.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`, `_save_checkpoint`).
"""
_SCALE = "cur_scale"
_SCALER = (_SCALE, "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_CLIPPING = "clip_grad"


def run_facts(checkpoint: Checkpoint) -> RunFacts:
    """Model states without what describes the files, the loss scale whatever object keeps it, and the clipping.

    Raises:
        SourceError: `checkpoint.malformed` for trees of the wrong shape.
    """
    entries = _entries(checkpoint)
    state = {str(k): v for k, v in entries.items() if k not in LAYOUT_KEYS} if entries else None
    if state is not None and ARGS in state:
        state[ARGS] = without_layout(state[ARGS])
    if checkpoint.optimizer is None:
        return RunFacts(state)
    extras = checkpoint.optimizer.extras
    scaler = _scaler(extras)
    # Stage 0 in fp32 and BF16_Optimizer keep no scale: they scale by one. The other attributes are of some stages.
    optimizer: dict[str, Node] = {f"loss_scaler.{_SCALE}": scaler.get(_SCALE, 1.0)}
    optimizer |= {f"loss_scaler.{key}": scaler[key] for key in _SCALER[1:] if key in scaler}
    optimizer |= {_CLIPPING: extras[_CLIPPING]} if _CLIPPING in extras else {}
    return RunFacts(state, optimizer, frozenset(k for k in optimizer if k != f"loss_scaler.{_SCALE}"))


def _entries(checkpoint: Checkpoint) -> Mapping[str | int, Node]:
    return mapping_items(checkpoint.model_state, what="model states") if is_mapping(checkpoint.model_state) else {}


def _scaler(extras: Mapping[str, Node]) -> Mapping[str | int, Node]:
    """The loss scaler's attributes: of the object of stages 1 to 3, or of stage 0's own entries.

    Source: deepspeed 0.19.8 `runtime/fp16/loss_scaler.py` (`LossScalerBase`), `runtime/fp16/fused_optimizer.py`.
    """
    node = extras.get("loss_scaler")
    if isinstance(node, PObject) and node.has_state and is_mapping(node.state):
        return mapping_items(node.state, what="loss_scaler")
    return {k: v for k, v in extras.items() if k in _SCALER}
