"""Parameters that a training checkpoint was saved without.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_save_checkpoint`: with `exclude_frozen_parameters=True` the entry
`frozen_param_shapes` is None at stages 2 and 3, where it is a mapping else; `module_state_dict`), transformers 5.23.0
`integrations/deepspeed.py` and `trainer.py` (Trainer saves PEFT models so).
"""

from __future__ import annotations

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.peft_run import lacks_base
from reshard_engine.pickles.nodes import is_mapping, mapping_items

_SHAPES = "frozen_param_shapes"


def left_out(checkpoint: Checkpoint) -> str | None:
    """What people should know of frozen parameters that are not in the checkpoint; None if there is nothing."""
    if lacks_base(checkpoint):
        return "the base model's weights are not in the checkpoint: it was saved without its frozen parameters"
    if checkpoint.zero_stage not in (2, 3) or checkpoint.frozen or not is_mapping(checkpoint.model_state):
        return None
    entries = mapping_items(checkpoint.model_state, what="model states")
    if _SHAPES in entries and entries[_SHAPES] is None:
        return (
            "it was saved with exclude_frozen_parameters=True: frozen parameters, if the model had any, are not in it"
        )
    return None
