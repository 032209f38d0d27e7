"""Parameters that a training checkpoint was saved without.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_save_checkpoint`: with `exclude_frozen_parameters=True` the entry
`frozen_param_shapes` is None at stages 2 and 3, where it is a mapping else; `module_state_dict`), transformers 5.23.0
`integrations/deepspeed.py` and `trainer.py` (Trainer saves PEFT models so).
"""

from __future__ import annotations

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.peft.run import lacks_base


def left_out(checkpoint: Checkpoint) -> str | None:
    """A note for people about frozen parameters that are not in the checkpoint; None if there is nothing to say."""
    if lacks_base(checkpoint):
        return "the base model's weights are not in the checkpoint: it was saved without its frozen parameters"
    # Stages 0 and 1 never say; None of `zero_stage` is a universal form, whose source may have been one of these.
    if checkpoint.zero_stage in (2, 3) and checkpoint.frozen_left_out and not checkpoint.frozen:
        return (
            "it was saved with exclude_frozen_parameters=True: frozen parameters, if the model had any, are not in it"
        )
    return None
