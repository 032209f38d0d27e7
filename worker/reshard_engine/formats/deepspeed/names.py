"""Names of files, entries and keys in DeepSpeed's checkpoints, for readers and writers alike.

Source: deepspeed 0.19.8 `checkpoint/constants.py`, `runtime/pipe/module.py` (`tied_modules`),
`module_inject/auto_ep.py` and `runtime/engine.py` (`ds_autoep_layers`).
"""

from __future__ import annotations

import re

from reshard.names_on_disk import POINTERS

LATEST, LATEST_UNIVERSAL = POINTERS
"""Pointer files beside tag directories: the training run's own, then that of universal checkpoints."""

INFO = "universal_checkpoint_info"
CONFIG = "ds_config"
"""The entry of model states that holds the run's configuration."""
VERSION = "ds_version"
SCHEDULER = "lr_scheduler"
COUNTERS = {"skipped_steps": "skipped_steps", "global_steps": "steps", "global_samples": "samples"}
"""Keys of counters in model states, each with its field of `checkpoint.Counters`."""
OPTIMIZER_STATE = "optimizer_state_dict"
"""The entry of optimizer files that holds everything of the optimizer."""
PARAM_SHAPES = "param_shapes"
FROZEN_SHAPES, FROZEN_FRAGMENTS = "frozen_param_shapes", "frozen_param_fragments"
PARALLEL_DIMENSIONS = "checkpoint_parallel_dimensions"
LAYOUT_NOTES = "reshard_layout"
"""An entry that our universal writer adds to model states. DeepSpeed's loaders pass unknown entries to the client."""

RNG_KEYS = ("rng_state", "random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
"""Entries of model states that hold random states: Megatron's `rng_state`, and the keys of the entries inside it."""
DESCRIBED_KEYS = frozenset(
    {
        *("module", "optimizer", PARAM_SHAPES, FROZEN_SHAPES, FROZEN_FRAGMENTS, "shared_params", "buffer_names"),
        LAYOUT_NOTES,
    }
)
"""Entries of model states that name, shape or hold tensors."""
FUSED_LAYERS = "ds_autoep_layers"
FUSED_LAYERS_LEGACY = "autoep_layers"
LAYOUT_KEYS = DESCRIBED_KEYS | {"dp_world_size", "mp_world_size", PARALLEL_DIMENSIONS, INFO, CONFIG, VERSION}
"""Entries of model states that describe the files or their tensors. Another layout has other values.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`, `_save_checkpoint`).
"""
OWN_KEYS = LAYOUT_KEYS | {
    *(FUSED_LAYERS, FUSED_LAYERS_LEGACY, "data_sampler", "random_ltd", "sparse_tensor_module_names"),
}
"""Entries of model states that mean something to DeepSpeed only."""
TIED = "tied_modules."
"""The prefix of the names of modules that several layers of a pipeline share."""
NUMBERED = re.compile(r"(?P<layer>0|[1-9][0-9]{0,5})\..+")
"""A name that begins with the number of its layer."""
EXPERT = re.compile(r"(?P<head>(?:.*\.)?deepspeed_experts\.)(?P<number>[0-9]{1,9})(?P<tail>\..*)")
"""A parameter of an expert, numbered in its layer."""

FUSED_WEIGHTS = ("w1", "w2", "w3")
"""Parameters in which AutoEP fuses the experts of a layer."""


def round_robin_order(count: int, ranks: int) -> list[int]:
    """The flat order of a group's parameters under `round_robin_gradients`.

    Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`_round_robin_reorder`).
    """
    return [index for first in range(min(ranks, count)) for index in range(first, count, ranks)]
