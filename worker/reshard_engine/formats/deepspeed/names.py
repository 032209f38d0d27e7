"""What DeepSpeed's files call things, said once for those that read them and those that write them.

Source: deepspeed 0.19.8 `checkpoint/constants.py`, `runtime/pipe/module.py` (`tied_modules`),
`module_inject/auto_ep.py` and `runtime/engine.py` (`ds_autoep_layers`).
"""

from __future__ import annotations

import re

LATEST, LATEST_UNIVERSAL = POINTERS = ("latest", "latest_universal")
"""Files beside tag directories that name one of them; the training run's own comes first."""

INFO = "universal_checkpoint_info"
OPTIMIZER_STATE = "optimizer_state_dict"
"""The entry of optimizer files that holds everything of the optimizer."""
FROZEN_SHAPES, FROZEN_FRAGMENTS = "frozen_param_shapes", "frozen_param_fragments"
PARALLEL_DIMENSIONS = "checkpoint_parallel_dimensions"
LAYOUT_NOTES = "reshard_layout"
"""An entry of universal model states that is ours: loaders pass what they do not know to the client."""

RNG_KEYS = ("rng_state", "random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
"""Entries of model states that hold random states: Megatron's, and the names of its members."""
DESCRIBED_KEYS = frozenset(
    {
        *("module", "optimizer", "param_shapes", FROZEN_SHAPES, FROZEN_FRAGMENTS, "shared_params", "buffer_names"),
        LAYOUT_NOTES,
    }
)
"""Entries of model states that name, shape or hold tensors."""
TIED = "tied_modules."
"""What names of modules begin with that several layers of a pipeline share."""
NUMBERED = re.compile(r"(?P<layer>0|[1-9][0-9]{0,5})\..+")
"""A name that begins with the number of its layer."""
EXPERT = re.compile(r"(?P<head>(?:.*\.)?deepspeed_experts\.)(?P<number>[0-9]{1,9})(?P<tail>\..*)")
"""A parameter of an expert, numbered in its layer."""

FUSED_LAYERS = "ds_autoep_layers"
FUSED_LAYERS_LEGACY = "autoep_layers"
FUSED_WEIGHTS = ("w1", "w2", "w3")
"""Parameters in which AutoEP fuses the experts of a layer."""


def round_robin_order(count: int, ranks: int) -> list[int]:
    """The flat order of a group's parameters under `round_robin_gradients`.

    Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`_round_robin_reorder`).
    """
    return [index for first in range(min(ranks, count)) for index in range(first, count, ranks)]
