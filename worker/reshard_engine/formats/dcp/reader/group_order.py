"""The order of param groups that were made of flattened hyper-parameters, found by the scheduler's learning rates.

A flattened optimizer does not number its groups, and a scheduler keeps one rate for each group in their order.

Source: torch 2.13.0 `distributed/checkpoint/state_dict.py` (`_flatten_optim_state_dict`), `optim/lr_scheduler.py`
(`base_lrs`, `initial_lr`); verified by running.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard_engine.formats.dcp.reader.optimizer import ReadGroup
from reshard_engine.pickles.nodes import Node, PList, PTuple, is_mapping, mapping_items

_NO_ORDER = (
    "the scheduler keeps the initial rates {rates}, and the param groups, which were flattened, have {own}: no order "
    "of the groups fits, so set the scheduler anew after loading"
)


def in_order_of(groups: Sequence[ReadGroup], schedulers: Sequence[Node]) -> tuple[list[ReadGroup], list[str]]:
    """The groups in the order of the first scheduler's rates, and a warning if no order fits."""
    rates = next((r for s in schedulers if (r := _rates(s)) is not None), None)
    if rates is None or not groups:
        return list(groups), []
    left = list(groups)
    found: list[ReadGroup] = []
    for rate in rates:
        fitting = next((g for g in left if _initial(g) == rate), None)
        if fitting is not None:
            left.remove(fitting)
            found.append(fitting)
    if left or len(found) != len(rates):
        return list(groups), [_NO_ORDER.format(rates=rates, own=[_initial(g) for g in groups])]
    return found, []


def _initial(group: ReadGroup) -> Node:
    values = group.group.hyper_parameters
    return values.get("initial_lr", values.get("lr"))


def _rates(scheduler: Node) -> list[Node] | None:
    held = mapping_items(scheduler, what="a scheduler").get("base_lrs") if is_mapping(scheduler) else None
    rates = list(held.items) if isinstance(held, PList | PTuple) else []
    return rates if rates and all(type(r) is float for r in rates) else None
