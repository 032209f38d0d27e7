"""Param groups made from `ds_config`, for optimizer states that carry none (`elastic_checkpoint`).

With such states, DeepSpeed's loader keeps the groups of the run that loads. A state dict of the optimizer, as DeepSpeed
usually saves it, replaces those groups: a key that the state dict lacks is missing at the next step.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_configure_basic_optimizer`, `get_optimizer_configuration`),
`runtime/zero/stage_1_and_2.py` (`_get_base_optimizer_state`, `_restore_base_optimizer_state`),
`ops/adam/fused_adam.py`, `ops/adam/cpu_adam.py`, `ops/lion/fused_lion.py`; torch 2.13.0 `optim/adamw.py`,
`optim/adam.py`, `optim/adagrad.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from reshard.errors import RequestError, printable
from reshard_engine.checkpoint import Checkpoint, ParamGroup
from reshard_engine.formats.deepspeed.config import section_of
from reshard_engine.formats.deepspeed.facts import facts_of
from reshard_engine.formats.deepspeed.names import CONFIG
from reshard_engine.pickles.nodes import Node, PList, PTuple, is_mapping, mapping_items, mapping_of

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
        raise _refused(f"ds_config has {printable(str(odd[0]))} {printable(str(params[odd[0]]))!r}, which is no number")
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
