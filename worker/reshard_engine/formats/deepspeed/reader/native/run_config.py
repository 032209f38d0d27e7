"""Settings of a run, from the `ds_config` in its model states, that decide the meaning of its files."""

from __future__ import annotations

from collections.abc import Mapping

from reshard_engine.formats.deepspeed.config import RunConfig, section_of
from reshard_engine.formats.deepspeed.names import CONFIG
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates
from reshard_engine.pickles.nodes import Node, is_mapping


def zero_options(model: ModelStates) -> Mapping[str | int, Node] | None:
    """The section `zero_optimization`; None where the config is a path or absent, so that the section is unknown."""
    config = model.entries.get(CONFIG)
    return section_of(config, "zero_optimization") if is_mapping(config) else None


def configured_stage(model: ModelStates) -> int:
    """The run's ZeRO stage; 0 where its config does not say."""
    stage = (zero_options(model) or {}).get("stage")
    return stage if type(stage) is int else 0


def has_16bit_masters(model: ModelStates) -> bool:
    """True if the run kept masters in the model's 16 bits (`*_master_weights_and_grads`)."""
    types = ("bf16", "fp16")
    config = model.entries.get(CONFIG)
    return any(section_of(config, t).get(f"{t}_master_weights_and_grads") is True for t in types)


def data_before_experts(model: ModelStates) -> bool:
    """True if ranks that hold the same experts have consecutive numbers."""
    return RunConfig.of(model.entries.get(CONFIG)).data_before_experts


def uses_round_robin(model: ModelStates) -> bool | None:
    """True if gradients were dealt out over the ranks (`round_robin_gradients`); None where the config is unknown."""
    options = zero_options(model)
    return None if options is None else options.get("round_robin_gradients") is True


def may_be_quantized(model: ModelStates) -> bool:
    """True if `zero_quantized_nontrainable_weights` may have made int8 frozen weights, whose scales are not saved.

    Source: deepspeed 0.19.8 `runtime/zero/partition_parameters.py` (`_partition_param`), `ops/csrc/quantization/
    pt_binding.cpp` (`quantize_kernel`: int8; bytes without a sign are others', such as bitsandbytes' of four bits).
    """
    options = zero_options(model)
    return options is None or options.get("zero_quantized_nontrainable_weights") not in (None, False)
