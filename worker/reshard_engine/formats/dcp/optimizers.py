"""The optimizers and schedulers of torch: known by the keys of their state, written with every key that they ask for.

The files of an optimizer do not name its class. Where the keys are not those of an optimizer that is known, nothing is
known of its states: GaLore keeps `exp_avg` of a projection, and RMSprop of timm begins `square_avg` as ones.

Source: torch 1.12 to 2.14 `optim/*.py` (all but Muon have `foreach`); deepspeed 0.19.8 `ops/adam/fused_adam.py`,
`ops/adam/cpu_adam.py`; verified by running.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from reshard.errors import RequestError, listed
from reshard_engine.checkpoint import Checkpoint, ParamGroup, Question
from reshard_engine.formats.dcp.facts import facts_of
from reshard_engine.formats.trainer_files import TrainerFacts
from reshard_engine.pickles.nodes import Node, PList, PTuple, is_mapping, mapping_items, mapping_of

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


def joined_optimizers(groups: Sequence[ParamGroup]) -> list[str]:
    """A warning for a file of numbered parameters, if the groups are of several optimizers, such as Muon and AdamW.

    An optimizer of torch has the same hyper-parameters in each of its groups.

    Source: torch 2.13.0 `optim/optimizer.py` (`add_param_group` fills in all `defaults`; `load_state_dict` refuses
    another number of groups), `distributed/checkpoint/state_dict.py` (`get_optimizer_state_dict` joins optimizers).
    """
    own = [frozenset(map(str, group.hyper_parameters)) & (_OF_TORCH | _OF_MUON) for group in groups]
    common = own[0].intersection(*own) if own else frozenset[str]()
    kinds = {keys - common: number for number, keys in reversed([*enumerate(own)])}
    # A script may add keys of its own to any group. Two optimizers each have keys of torch's that the other lacks.
    several = sorted((number, keys) for keys, number in kinds.items() if keys)
    if len(several) < 2:
        return []
    which = "; ".join(f"group {number} has {listed(sorted(keys))}" for number, keys in several)
    text = (
        f"the param groups are of several optimizers ({which}), and the file has one optimizer with all of them: a "
        "script that makes several optimizers loads none of it. --to dcp keeps the parameters' names, from which "
        "set_optimizer_state_dict gives each optimizer its own"
    )
    return [text]


def _is_known(keys: Collection[str | int]) -> bool:
    own = {*map(str, keys)} - _ANYWHERE
    if own >= _OF_ADAM:  # `groups_to_write` completes DeepSpeed's Adam with torch's keys, and keeps its own
        own -= {_BIAS_CORRECTION}
    return ("foreach" in own and own <= _OF_TORCH) or not own ^ _OF_MUON or _is_deepspeeds({*map(str, keys)})


def _is_deepspeeds(keys: set[str]) -> bool:
    return _OF_DEEPSPEED <= keys <= _OF_DEEPSPEED | _ANYWHERE | {"amsgrad"}


# Param groups as the optimizers of torch expect them: every hyper-parameter that they ask a checkpoint for.
#
# `dcp.load` asks for each key of the running optimizer's groups, so a key that the source's optimizer does not have
# must be there. Keys are added where the source shows that it is Adam or AdamW, and nowhere else.
#
# Source: torch 2.13.0 `optim/adamw.py`, `optim/adam.py` (`defaults`), `optim/lr_scheduler.py` (`initial_lr`),
# `distributed/checkpoint/default_planner.py` (`Missing key in checkpoint state_dict`); deepspeed 0.19.8
# `ops/adam/fused_adam.py`, `ops/adam/cpu_adam.py` (the groups' keys).

_ADAM: Mapping[str | int, Node] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""Hyper-parameters of torch's Adam and AdamW beside lr, betas, eps and weight_decay, with their defaults."""
_DECOUPLED = "decoupled_weight_decay"
"""False for Adam, True for AdamW, which sets it again whatever it loads (torch from 2.7 on; earlier ones have no such
key and drop it). So False is right for both where nothing says which one it was."""
_INITIAL = "initial_lr"
_BIAS_CORRECTION = "bias_correction"


def groups_to_write(checkpoint: Checkpoint, *, needs_initial_lr: bool) -> tuple[list[ParamGroup], list[str]]:
    """The source's param groups with the keys that torch asks for, and warnings about those that were added.

    Raises:
        RequestError: `request.unsatisfiable` if the source has optimizer states and no param groups.
    """
    optimizer = checkpoint.optimizer
    groups = list(optimizer.groups) if optimizer is not None else []
    if checkpoint.trained and not groups:
        raise RequestError(
            "request.unsatisfiable",
            "the source keeps no hyper-parameters of its param groups",
            fix="write the weights alone: --to safetensors",
        )
    rates = _base_rates(checkpoint, len(groups))
    facts = facts_of(checkpoint)
    # Shards name a framework: without one, only a trainer's files are beside the source. Full files name none.
    of_torch = facts.framework is not None if facts is not None else type(checkpoint.facts) is TrainerFacts
    found: list[ParamGroup] = []
    added: dict[str, None] = {}
    for number, group in enumerate(groups):
        values = dict(group.hyper_parameters)
        if not of_torch and values.get(_BIAS_CORRECTION) is True and _ADAM.keys() <= values.keys():
            del values[_BIAS_CORRECTION]  # added for DeepSpeed's Adam; torch's has no such key: it always corrects
        more: dict[str | int, Node] = {}
        if is_adam(values, {s for p in checkpoint.members(number) for s in p.states} - {"fp32"}):
            decoupled = optimizer.decoupled_weight_decay if optimizer is not None else None
            more = {k: v for k, v in {**_ADAM, _DECOUPLED: bool(decoupled)}.items() if k not in values}
        if _INITIAL not in values and (rates or needs_initial_lr):
            more[_INITIAL] = rates[number] if rates else values.get("lr")
        added |= dict.fromkeys(f"{k} ({more[k]})" for k in more)
        found.append(ParamGroup({**values, **more}))
    text = f"param groups got what torch's optimizer asks for and the source does not have: {listed(list(added))}"
    return found, [*([text] if added else []), *_unfactored(checkpoint)]


def _unfactored(checkpoint: Checkpoint) -> list[str]:
    """A warning about states of Adafactor that it keeps for DeepSpeed's flat partitions alone.

    Source: transformers 5.23.0 `optimization.py` (`Adafactor._get_options`: it factors what has two dimensions).
    """
    if facts_of(checkpoint) is not None or checkpoint.optimizer is None or not checkpoint.optimizer.is_adafactor:
        return []
    whole = [p.fqn for p in checkpoint.trained if len(p.shape) > 1 and "exp_avg_sq" in p.states]
    if not whole:
        return []
    text = (
        "DeepSpeed flattens parameters, so its Adafactor kept exp_avg_sq of each element; on whole matrices "
        f"({listed(whole)}) it keeps exp_avg_sq_row and exp_avg_sq_col, and does not load these states: go back to "
        "DeepSpeed with them, or begin the optimizer anew"
    )
    return [text]


def _base_rates(checkpoint: Checkpoint, count: int) -> Sequence[Node]:
    """The initial learning rate of each group, from the optimizer's scheduler.

    None if the scheduler keeps none, or if nobody knows which scheduler is the optimizer's.
    """
    if any(u.question is Question.SCHEDULER for u in checkpoint.undecided):
        return ()
    node = checkpoint.scheduler
    rates = mapping_items(node, what="a scheduler").get("base_lrs") if is_mapping(node) else None
    return rates.items if isinstance(rates, PList | PTuple) and len(rates.items) == count else ()


# State dicts of torch's learning-rate schedulers.

_LAMBDAS = "lr_lambdas"
_OF_ALL = frozenset(
    {"base_lrs", "last_epoch", "verbose", "_last_lr", "_step_count", "_is_initial", "_get_lr_called_within_step"}
)
"""The attributes of torch's base class. LambdaLR and MultiplicativeLR alone have no others but `lr_lambdas`.

Source: torch 1.12 to 2.14 `optim/lr_scheduler.py`.
"""


def loadable_scheduler(node: Node) -> Node:
    """The state dict of a scheduler with the `lr_lambdas` that torch dropped when it flattened it.

    A mapping without attributes, such as that of the `functools.partial` in each schedule of transformers, is no leaf
    of a state dict, and so a distributed checkpoint holds nothing of the list. LambdaLR refuses a state without a list;
    with an empty one it keeps the functions of the run, which is right for functions that had no attributes.

    Source: torch 2.13.0 `distributed/checkpoint/_traverse.py`; `optim/lr_scheduler.py` (`LambdaLR.load_state_dict`),
    verified by running.
    """
    items = mapping_items(node, what="a scheduler")
    return mapping_of({**items, _LAMBDAS: PList([])}) if {"base_lrs", "last_epoch"} <= items.keys() <= _OF_ALL else node


def flattened_scheduler(node: Node) -> Node:
    """The state dict of a scheduler as torch flattens it: without the list that `loadable_scheduler` adds."""
    items = mapping_items(node, what="a scheduler")
    lambdas = items.get(_LAMBDAS)
    if not isinstance(lambdas, PList) or lambdas.items:
        return node
    return mapping_of({key: value for key, value in items.items() if key != _LAMBDAS})


def plain_scheduler(node: Node) -> Node:
    """The state dict of a scheduler without empty mappings in `lr_lambdas`, which torch drops when it flattens them.

    Source: torch 2.13.0 `optim/lr_scheduler.py` (`LambdaLR.state_dict`: the attributes of a function that is an object,
    or None; `load_state_dict` takes None for a function without any), `distributed/checkpoint/_traverse.py`.
    """
    items = mapping_items(node, what="a scheduler")
    lambdas = items.get(_LAMBDAS)
    if not isinstance(lambdas, PList):
        return node
    plain = [None if is_mapping(i) and not mapping_items(i, what=_LAMBDAS) else i for i in lambdas.items]
    return mapping_of({**items, _LAMBDAS: PList(plain)})
