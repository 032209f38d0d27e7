"""Param groups as the optimizers of torch expect them: every hyper-parameter that they ask a checkpoint for.

`dcp.load` asks for each key of the running optimizer's groups, so a key that the source's optimizer does not have must
be there. Keys are added where the source shows that it is Adam or AdamW, and nowhere else.

Source: torch 2.13.0 `optim/adamw.py`, `optim/adam.py` (`defaults`), `optim/lr_scheduler.py` (`initial_lr`),
`distributed/checkpoint/default_planner.py` (`Missing key in checkpoint state_dict`); deepspeed 0.19.8
`ops/adam/fused_adam.py`, `ops/adam/cpu_adam.py` (the groups' keys).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import RequestError, listed
from reshard_engine.checkpoint import Checkpoint, ParamGroup, Question
from reshard_engine.formats.dcp.facts import facts_of
from reshard_engine.formats.dcp.optimizers import is_adam
from reshard_engine.pickles.nodes import Node, PList, PTuple, is_mapping, mapping_items

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
    found: list[ParamGroup] = []
    added: dict[str, None] = {}
    for number, group in enumerate(groups):
        values = dict(group.hyper_parameters)
        if facts_of(checkpoint) is None and values.get(_BIAS_CORRECTION) is True and _ADAM.keys() <= values.keys():
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
