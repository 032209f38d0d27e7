"""The optimizers of torch, which are known by the keys of their param groups, and what is known of their states.

The files of an optimizer do not name its class. Where the keys are not those of an optimizer that is known, nothing is
known of its states: GaLore keeps `exp_avg` of a projection, and RMSprop of timm begins `square_avg` as ones.

Source: torch 1.12 to 2.14 `optim/*.py` (all but Muon have `foreach`); deepspeed 0.19.8 `ops/adam/fused_adam.py`,
`ops/adam/cpu_adam.py`; verified by running.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from reshard_engine.pickles.nodes import Node

STEP = "step"
_OF_TORCH = frozenset(
    {
        "lr", "betas", "eps", "weight_decay", "amsgrad", "foreach", "maximize", "capturable", "differentiable", "fused",
        "decoupled_weight_decay", "rho", "lr_decay", "initial_accumulator_value", "alpha", "lambd", "t0",
        "momentum_decay", "centered", "momentum", "etas", "step_sizes", "dampening", "nesterov", "beta2_decay", "d",
    }
)  # fmt: skip
"""All keys of torch's optimizers but Muon and LBFGS, which keeps no state of each parameter."""
_OF_MUON = frozenset(
    {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}
)
_OF_DEEPSPEED = frozenset({"lr", "betas", "eps", "weight_decay", "bias_correction"})
"""All keys of DeepSpeed's FusedAdam, and of apex's; its CPUAdam also has `amsgrad`. FusedLamb has more."""
_ANYWHERE = frozenset({
    "initial_lr", "name", "lr_scale", "lr_mult", "wd_mult", "params", "param_names", "step", "swa_lr", "group_name",
})  # fmt: skip
"""Keys that schedulers, frameworks and DeepSpeed's optimizers add to groups of any optimizer."""
_OF_ADAM = frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad", "foreach"})
"""Keys that of torch's optimizers Adam and AdamW alone have together; torch 1.12 to 2.14."""
_OF_OTHERS = frozenset({"momentum_decay", "rho", "alpha", "momentum", "nesterov", "max_coeff", "min_coeff"})
_ADAM_STATES = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
_OF_EACH_ELEMENT = _ADAM_STATES | {
    "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum", "ax", "prev", "step_size", "variance",
}  # fmt: skip
"""States of the parameter's shape. Others have shapes of their own, such as Adafactor's means of rows."""
_FROM_ZERO = _ADAM_STATES | {STEP, "exp_inf", "square_avg", "acc_delta", "grad_avg", "momentum_buffer", "sum"}
"""States that begin as zeros, `momentum_buffer` and `sum` if `_NOT_FROM_ZERO` are 0. NAdam's `mu_product` does not."""
_NOT_FROM_ZERO = ("dampening", "initial_accumulator_value")
_DECIDE_STATES = ("momentum", "amsgrad", "centered")
"""Hyper-parameters that decide which states an optimizer keeps, by being 0 or false."""


def has_its_shape(keys: Collection[str | int], states: Collection[str]) -> bool:
    """True if states that have one shape have that of their parameter.

    Args:
        keys: The keys of the param group.
        states: The names of the tensors.
    """
    return _is_known(keys) and not _OF_EACH_ELEMENT.isdisjoint(states)


def begins_as_zeros(values: Mapping[str | int, Node], states: Collection[str]) -> bool:
    """True if the optimizer of a group with these hyper-parameters begins all of these states as zeros."""
    return _is_known(values) and _FROM_ZERO.issuperset(states) and not any(values.get(n) for n in _NOT_FROM_ZERO)


def keeps_like(values: Mapping[str | int, Node]) -> object:
    """A value that is equal for groups whose parameters have the same states."""
    return frozenset(map(str, values)), tuple(bool(values.get(n)) for n in _DECIDE_STATES)


def is_adam(values: Mapping[str | int, Node], states: Collection[str]) -> bool:
    """True if a group's keys and its parameters' states are those of Adam or AdamW, and of no other optimizer.

    RAdam and NAdam keep the same states; of their keys `amsgrad` and `fused` are missing. Adamax keeps `exp_inf`.
    """
    keys = {*map(str, values)}
    if not _ADAM_STATES.issuperset(states) or keys & _OF_OTHERS:
        return False
    return keys >= _OF_ADAM or _is_deepspeeds(keys)


def _is_known(keys: Collection[str | int]) -> bool:
    own = {*map(str, keys)} - _ANYWHERE
    return ("foreach" in own and own <= _OF_TORCH) or not own ^ _OF_MUON or _is_deepspeeds({*map(str, keys)})


def _is_deepspeeds(keys: set[str]) -> bool:
    return _OF_DEEPSPEED <= keys <= _OF_DEEPSPEED | _ANYWHERE | {"amsgrad"}
