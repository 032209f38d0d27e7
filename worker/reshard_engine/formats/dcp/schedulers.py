"""State dicts of torch's learning-rate schedulers, recognised by their content."""

from __future__ import annotations

from reshard_engine.pickles.nodes import Node, PList, is_mapping, mapping_items, mapping_of

_LAMBDAS = "lr_lambdas"


def is_scheduler(node: Node) -> bool:
    """True for the state dict of one of torch's schedulers.

    Source: torch 2.13.0 `optim/lr_scheduler.py` (`LRScheduler.state_dict`: every attribute but the optimizer).
    """
    return is_mapping(node) and "last_epoch" in mapping_items(node, what="a scheduler")


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
