"""State dicts of torch's learning-rate schedulers, recognised by their content."""

from __future__ import annotations

from reshard_engine.pickles.nodes import Node, is_mapping, mapping_items


def is_scheduler(node: Node) -> bool:
    """True for the state dict of one of torch's schedulers.

    Source: torch 2.13.0 `optim/lr_scheduler.py` (`LRScheduler.state_dict`: every attribute but the optimizer).
    """
    return is_mapping(node) and "last_epoch" in mapping_items(node, what="a scheduler")
