"""The settings of a `ds_config` that decide the layout of a run, and the same config for another layout.

Source: deepspeed 0.19.8 `runtime/config.py`, `runtime/zero/config.py`, `runtime/engine.py` (`_configure_optimizer`:
bf16 with `grad_accum_dtype` fp32 at stage 1 means BF16_Optimizer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from reshard_engine.formats.deepspeed.names import CONFIG
from reshard_engine.pickles.nodes import Node, is_mapping, mapping_items, mapping_of

DEFAULT_SUB_GROUP_SIZE = 10**9
_LARGEST = 1 << 62
_SECTION_OF = {"bfloat16": "bf16", "float16": "fp16"}


def section_of(node: Node, name: str) -> dict[str | int, Node]:
    """A section of a `ds_config`, which may be a mapping, a path, or absent; nothing where there is none."""
    found = mapping_items(node, what=CONFIG).get(name) if is_mapping(node) else None
    return mapping_items(found, what=name) if is_mapping(found) else {}


def decoupled_weight_decay(config: Node) -> bool | None:
    """True if a `ds_config` asks for AdamW, False if it asks for Adam; None if it asks for neither.

    Source: deepspeed 0.19.8 `runtime/engine.py` (`_configure_basic_optimizer`: `Adam` means AdamW, unless `adam_w_mode`
    is false; 0.3.11 and later).
    """
    optimizer = section_of(config, "optimizer")
    name, params = optimizer.get("type"), optimizer.get("params")
    kind = name.lower() if isinstance(name, str) else ""
    if kind not in ("adam", "adamw") or not is_mapping(params):
        return None
    return kind == "adamw" or mapping_items(params, what="params").get("adam_w_mode", True) is True


def _is_number(value: Node) -> TypeGuard[int | float]:
    """True for an int or a float that is finite and small enough to convert to the other type."""
    return isinstance(value, int | float) and -_LARGEST < value < _LARGEST


@dataclass(frozen=True)
class RunConfig:
    """The settings of a source's run that decide its layout; None where its config does not say."""

    stage: int | None = None
    dtype: str | None = None
    round_robin: bool = False
    aligned: bool = False
    sub_group_size: int | None = None
    clip_grad: float | None = None
    data_before_experts: bool = False
    """True if ranks that hold the same experts have consecutive numbers."""
    fp16: Mapping[str | int, Any] = field(default_factory=dict[str | int, Any])

    @classmethod
    def of(cls, config: Node) -> RunConfig:
        """The settings in a `ds_config`, which may be a mapping, a path, or absent."""
        if not is_mapping(config):
            return cls()
        zero, bf16, fp16 = (section_of(config, name) for name in ("zero_optimization", "bf16", "fp16"))
        stage, size = zero.get("stage", 0), zero.get("sub_group_size")
        clip = mapping_items(config, what=CONFIG).get("gradient_clipping")
        return cls(
            stage=stage if type(stage) is int else None,
            dtype="bfloat16"
            if bf16.get("enabled") is True
            else "float16"
            if fp16.get("enabled") is True
            else "float32",
            round_robin=zero.get("round_robin_gradients") is True,
            aligned=zero.get("parameter_alignment") is True,
            sub_group_size=int(size) if _is_number(size) and size >= 1 else None,
            clip_grad=float(clip) if _is_number(clip) else None,
            data_before_experts=mapping_items(config, what=CONFIG).get("use_data_before_expert_parallelism") is True,
            fp16=fp16,
        )


def config_for(
    config: Node, *, stage: int, dtype: str, bf16_optimizer: bool, ep: int, options: Mapping[str, Node]
) -> Node:
    """A copy of the config that describes the target; a config that is no mapping stays as it is.

    Args:
        config: The source's `ds_config`.
        stage: ZeRO stage of the target.
        dtype: The model's element type.
        bf16_optimizer: True to accumulate gradients in fp32, which selects BF16_Optimizer.
        ep: Expert-parallel ranks; only AutoEP's config names them.
        options: Entries of `zero_optimization`; None removes one.
    """
    if not is_mapping(config):
        return config
    entries = dict(mapping_items(config, what=CONFIG))
    fused = section_of(config, "expert_parallel")
    if fused.get("enabled") is True:
        entries["expert_parallel"] = mapping_of({**fused, "autoep_size": ep})
    gone = {name for name, value in options.items() if value is None}
    zero: dict[str | int, Node] = {**section_of(config, "zero_optimization"), "stage": stage, **options}
    entries["zero_optimization"] = mapping_of({k: v for k, v in zero.items() if k not in gone})
    for name, section in _SECTION_OF.items():
        old = section_of(config, section)
        if old or name == dtype:
            entries[section] = mapping_of({**old, "enabled": name == dtype})
    types = section_of(config, "data_types")
    if bf16_optimizer:
        entries["data_types"] = mapping_of({**types, "grad_accum_dtype": "fp32"})
    elif dtype == "bfloat16" and stage == 1 and types.get("grad_accum_dtype") == "fp32":
        entries["data_types"] = mapping_of({k: v for k, v in types.items() if k != "grad_accum_dtype"})
    return mapping_of(entries)
