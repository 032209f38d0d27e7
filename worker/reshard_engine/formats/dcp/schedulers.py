"""State dicts of torch's learning-rate schedulers, recognised by their content."""

from __future__ import annotations

from reshard_engine.pickles.nodes import Node, PList, is_mapping, mapping_items, mapping_of

_LAMBDAS, _EPOCH = "lr_lambdas", "last_epoch"
_OF_CHAINED = frozenset({"_schedulers", "_last_lr"})
"""Attributes of `ChainedScheduler`, which counts nothing itself."""
_BESIDE_EPOCH = frozenset({"_step_count", "_last_lr", "base_lrs", "num_bad_epochs"})
"""Attributes of which every scheduler of torch has some: `ReduceLROnPlateau` the last one."""


def is_scheduler(node: Node) -> bool:
    """True for the state dict of one of torch's schedulers.

    A script's own counters may have a `last_epoch`, too. One that is alone is what is left of another framework's
    scheduler: the count of its steps.

    Source: torch 2.13.0 `optim/lr_scheduler.py` (`LRScheduler.state_dict`: every attribute but the optimizer).
    """
    keys = mapping_items(node, what="a scheduler").keys() if is_mapping(node) else ()
    if _EPOCH not in keys:
        return _OF_CHAINED.issubset(keys)
    return len(keys) == 1 or not _BESIDE_EPOCH.isdisjoint(map(str, keys))


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
