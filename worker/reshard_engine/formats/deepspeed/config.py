"""The settings of a `ds_config` that decide the layout of a run and the meaning of its files.

Source: deepspeed 0.19.8 `runtime/config.py`, `runtime/zero/config.py`, `runtime/engine.py` (`_configure_optimizer`:
bf16 with `grad_accum_dtype` fp32 at stage 1 means BF16_Optimizer).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from reshard.errors import RequestError, printable
from reshard_engine.checkpoint import Checkpoint, ParamGroup
from reshard_engine.formats.deepspeed.facts import facts_of
from reshard_engine.formats.deepspeed.files import CONFIG
from reshard_engine.formats.deepspeed.rank_files import ModelStates
from reshard_engine.pickles.nodes import Node, PList, PTuple, is_mapping, mapping_items, mapping_of

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
    """A copy of the config that describes the target; a config that is not a mapping stays as it is.

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


# Param groups made from `ds_config`, for optimizer states that carry none (`elastic_checkpoint`).
#
# With such states, DeepSpeed's loader keeps the groups of the run that loads. A state dict of the optimizer, as
# DeepSpeed usually saves it, replaces those groups: a key that the state dict lacks is missing at the next step.
#
# Source: deepspeed 0.19.8 `runtime/engine.py` (`_configure_basic_optimizer`, `get_optimizer_configuration`),
# `runtime/zero/stage_1_and_2.py` (`_get_base_optimizer_state`, `_restore_base_optimizer_state`),
# `ops/adam/fused_adam.py`, `ops/adam/cpu_adam.py`, `ops/lion/fused_lion.py`; torch 2.13.0 `optim/adamw.py`,
# `optim/adam.py`, `optim/adagrad.py`.

_Values = Mapping[str | int, Node]
_ADAM: _Values = {"lr": 1e-3, "betas": PTuple((0.9, 0.999)), "eps": 1e-8, "weight_decay": 0.0}
_TORCH_SWITCHES: _Values = {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False}
_TORCH_LAST: _Values = {"differentiable": False, "fused": None}
_TORCH_ADAM: _Values = {**_ADAM, **_TORCH_SWITCHES, **_TORCH_LAST}
_DEFAULTS: Mapping[str, _Values] = {
    "torch.optim.AdamW": {**_TORCH_ADAM, "weight_decay": 0.01, "decoupled_weight_decay": True},
    "torch.optim.Adam": {**_TORCH_ADAM, "weight_decay": 0, "decoupled_weight_decay": False},
    "FusedAdam": {"lr": 1e-3, "bias_correction": True, **_ADAM},
    "DeepSpeedCPUAdam": {"lr": 1e-3, "bias_correction": True, **_ADAM, "amsgrad": False},
    "torch.optim.Adagrad": {
        "lr": 0.01,
        "lr_decay": 0,
        "eps": 1e-10,
        "weight_decay": 0,
        "initial_accumulator_value": 0,
        "foreach": None,
        "maximize": False,
        **_TORCH_LAST,
    },
    "FusedLion": {"lr": 1e-4, "betas": PTuple((0.9, 0.99)), "weight_decay": 0.0},
}
_VERSIONS = "torch 2.13.0 and deepspeed 0.19.8"


def configured_groups(checkpoint: Checkpoint) -> list[ParamGroup]:
    """Param groups made from `ds_config`, for list-form states, which carry none.

    All groups have the same values, except the learning rate, where a scheduler keeps one for each group.

    Raises:
        RequestError: `request.unsatisfiable` if the config names no optimizer, or one that is not known.
    """
    _, values, _ = _configured(checkpoint)
    rates = _scheduled_rates(checkpoint)
    own = [{"lr": rates[g]} if rates else {} for g in range(_count(checkpoint))]
    return [ParamGroup({**values, **own[g]}) for g in range(_count(checkpoint))]


def configured_warnings(checkpoint: Checkpoint) -> list[str]:
    """Warnings about hyper-parameters that the source does not carry; none where it carries them."""
    optimizer = checkpoint.optimizer
    if optimizer is None or optimizer.groups:
        return []
    kind, values, given = _configured(checkpoint)
    scheduled = "lr is the scheduler's last, " if _scheduled_rates(checkpoint) else ""
    said = [str(k) for k in given if not (scheduled and k == "lr")]
    made = [str(k) for k in values if k not in given and not (scheduled and k == "lr")]
    text = (
        f"the source carries no hyper-parameters (elastic_checkpoint): {scheduled}{', '.join(said) or 'none'} are "
        f"ds_config's, {', '.join(made) or 'none'} are the defaults of {kind} ({_VERSIONS})"
    )
    if (count := _count(checkpoint)) > 1:
        text += f"; all {count} groups have the same: set what differs, such as weight_decay, after load_checkpoint"
    return [text]


def _count(checkpoint: Checkpoint) -> int:
    return 1 + max((p.group for p in checkpoint.trained if p.group is not None), default=0)


def _scheduled_rates(checkpoint: Checkpoint) -> list[Node]:
    """The learning rates that a scheduler of torch set last, one per group; empty where no scheduler keeps them."""
    node = checkpoint.scheduler
    last = mapping_items(node, what="a scheduler").get("_last_lr") if is_mapping(node) else None
    rates = list(last.items) if isinstance(last, PList) else []
    return rates if len(rates) == _count(checkpoint) and all(type(r) is float for r in rates) else []


def _configured(checkpoint: Checkpoint) -> tuple[str, _Values, list[str | int]]:
    """The optimizer's class, its hyper-parameters, and the names of those that the config gives."""
    if not facts_of(checkpoint).order:
        raise RequestError(
            "request.unsatisfiable",
            "the source keeps no hyper-parameters of its param groups",
            fix="write the weights alone: --to safetensors",
        )
    config = facts_of(checkpoint).entries.get(CONFIG)
    optimizer = section_of(config, "optimizer")
    params, name = section_of(mapping_of({**optimizer}), "params"), optimizer.get("type")
    if not isinstance(name, str) or not params:
        raise _refused("ds_config names none")
    offloaded = section_of(mapping_of({**section_of(config, "zero_optimization")}), "offload_optimizer")
    kind = _class_of(name.lower(), params, on_cpu=offloaded.get("device") in ("cpu", "nvme"))
    if kind is None:
        raise _refused(f"the defaults of {printable(name)} are not known here")
    known = _DEFAULTS[kind]
    given = [k for k in known if k in params]
    if odd := [k for k in given if isinstance(params[k], str)]:
        raise _refused(
            f"ds_config has {printable(str(odd[0]))} {printable(str(params[odd[0]]))!r}, which is not a number"
        )
    return kind, {k: _as_torch(params.get(k, v)) for k, v in known.items()}, given


def _class_of(name: str, params: _Values, *, on_cpu: bool) -> str | None:
    """The class that DeepSpeed makes of a type in `ds_config`."""
    if name in ("adam", "adamw"):
        if params.get("torch_adam") is True:
            decoupled = name == "adamw" or params.get("adam_w_mode", True) is True
            return "torch.optim.AdamW" if decoupled else "torch.optim.Adam"
        return "DeepSpeedCPUAdam" if on_cpu else "FusedAdam"
    return {"adagrad": "torch.optim.Adagrad", "lion": "FusedLion"}.get(name) if not on_cpu else None


def _as_torch(value: Node) -> Node:
    return PTuple(tuple(value.items)) if isinstance(value, PList) else value


def _refused(why: str) -> RequestError:
    return RequestError(
        "request.unsatisfiable",
        f"the optimizer states carry no hyper-parameters (elastic_checkpoint), and {why}",
        fix="save again with elastic_checkpoint off, or write the weights alone: --to safetensors",
    )


# Settings of a run, from the `ds_config` in its model states, that decide the meaning of its files.


def zero_options(model: ModelStates) -> Mapping[str | int, Node] | None:
    """The section `zero_optimization`; None where the config is a path or absent, so that the section is unknown."""
    config = model.entries.get(CONFIG)
    return section_of(config, "zero_optimization") if is_mapping(config) else None


def offloads_optimizer(options: Mapping[str | int, Node] | None) -> bool | None:
    """True if a section `zero_optimization` keeps optimizer states on the CPU or on NVMe; None for an unknown section.

    Source: deepspeed 0.19.8 `runtime/zero/config.py` (`cpu_offload` is the older name of `offload_optimizer`).
    """
    if options is None:
        return None
    device = section_of(mapping_of({**options}), "offload_optimizer").get("device")
    return device in ("cpu", "nvme") or options.get("cpu_offload") is True


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
