"""Settings of the run that decide what its files mean: `zero_optimization` of the `ds_config` in the model states."""

from __future__ import annotations

from collections.abc import Mapping

from reshard_engine.pickles.nodes import Node, is_mapping, mapping_items
from reshard_engine.readers.deepspeed.model_states import ModelStates


def zero_options(model: ModelStates) -> Mapping[str | int, Node] | None:
    """The section `zero_optimization`; None where the config is a path or absent, so that nothing is known of it."""
    config = model.entries.get("ds_config")
    if not is_mapping(config):
        return None
    zero = mapping_items(config, what="ds_config").get("zero_optimization")
    return mapping_items(zero, what="zero_optimization") if is_mapping(zero) else {}


def has_16bit_masters(model: ModelStates) -> bool:
    """Whether the run kept masters in the model's 16 bits (`*_master_weights_and_grads`)."""
    config = model.entries.get("ds_config")
    entries = mapping_items(config, what="ds_config") if is_mapping(config) else {}
    sections = ((name, entries.get(name)) for name in ("bf16", "fp16"))
    options = (mapping_items(s, what=n).get(f"{n}_master_weights_and_grads") for n, s in sections if is_mapping(s))
    return any(option is True for option in options)


def uses_round_robin(model: ModelStates) -> bool:
    """Whether gradients were dealt out over the ranks (`round_robin_gradients`)."""
    return (zero_options(model) or {}).get("round_robin_gradients") is True


def may_be_quantized(model: ModelStates) -> bool:
    """Whether 8-bit frozen weights may be what `zero_quantized_nontrainable_weights` leaves, which lacks the scales.

    Source: deepspeed 0.19.8 `runtime/zero/partition_parameters.py` (`_partition_param`).
    """
    options = zero_options(model)
    return options is None or options.get("zero_quantized_nontrainable_weights") not in (None, False)
