"""Param groups as the optimizers of torch expect them: every hyper-parameter that they ask a checkpoint for.

`dcp.load` asks for each key of the running optimizer, so a key that the source's optimizer does not have must be there.

Source: torch 2.13.0 `optim/adamw.py`, `optim/adam.py` (`defaults`), `optim/lr_scheduler.py` (`initial_lr`),
`distributed/checkpoint/default_planner.py` (`Missing key in checkpoint state_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import RequestError, listed
from reshard_engine.checkpoint import Checkpoint, ParamGroup
from reshard_engine.pickles.nodes import Node, PList, PTuple, is_mapping, mapping_items

_ADAM: Mapping[str | int, Node] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
"""Hyper-parameters of torch's AdamW beside lr, betas, eps and weight_decay, with their defaults."""
_INITIAL = "initial_lr"


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
        more = {k: v for k, v in _ADAM.items() if k not in values} if _is_adam(values) else {}
        if _INITIAL not in values and (rates or needs_initial_lr):
            more[_INITIAL] = rates[number] if rates else values.get("lr")
        added |= dict.fromkeys(map(str, more))
        found.append(ParamGroup({**values, **more}))
    text = f"param groups got what torch's optimizer asks for and the source does not have: {listed(list(added))}"
    return found, [text] if added else []


def _is_adam(values: Mapping[str | int, Node]) -> bool:
    return "betas" in values and "eps" in values


def _base_rates(checkpoint: Checkpoint, count: int) -> Sequence[Node]:
    """The initial learning rate of each group, from a scheduler that keeps them; none where no scheduler does."""
    for node in checkpoint.schedulers:
        rates = mapping_items(node, what="a scheduler").get("base_lrs") if is_mapping(node) else None
        if isinstance(rates, PList | PTuple) and len(rates.items) == count:
            return rates.items
    return ()
