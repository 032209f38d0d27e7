"""Runs that say less than others; runs inside the ranks.

Their optimizer has two equally shaped parameters in another order than the model, or their config is a path.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from oracle import models, train
from oracle.cases import Case

_GROUPS = models.param_groups


def swapped(case: Case, model: nn.Module) -> list[Any]:
    """The parameters in the model's order, but for the first matrix and the next one of its shape."""
    found = _GROUPS(case, model)
    first, second = swapped_places([tuple(p.shape) for p in found])
    found[first], found[second] = found[second], found[first]
    return found


def dealt_out(case: Case, model: nn.Module) -> list[Any]:
    """The parameters in two groups that no shapes tell apart: every second one, the second group from the end."""
    found = _GROUPS(case, model)
    return [
        {"params": found[::2], "lr": 1e-2, "weight_decay": 0.1},
        {"params": found[1::2][::-1], "lr": 5e-3, "weight_decay": 0.0},
    ]


def swapped_places(shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """The places of the first two matrices of one shape."""
    pairs = ((i, shapes.index(s, i + 1)) for i, s in enumerate(shapes) if len(s) > 1 and s in shapes[i + 1 :])
    return next(pairs)


def train_and_save(**arguments: Any) -> dict[str, Any]:
    """As ``train.train_and_save``."""
    train.param_groups = swapped
    return train.train_and_save(**arguments)


def resume_native(**arguments: Any) -> dict[str, Any]:
    """As ``train.resume_native``."""
    train.param_groups = swapped
    return train.resume_native(**arguments)


def train_dealt_out(**arguments: Any) -> dict[str, Any]:
    """As ``train.train_and_save``, with the groups of ``dealt_out``."""
    train.param_groups = dealt_out
    return train.train_and_save(**arguments)


def resume_dealt_out(**arguments: Any) -> dict[str, Any]:
    """As ``train.resume_native``, with the groups of ``dealt_out``."""
    train.param_groups = dealt_out
    return train.resume_native(**arguments)


def train_by_path(**arguments: Any) -> dict[str, Any]:
    """As ``train.train_and_save``, with a path in place of the config: DeepSpeed 0.14.0 saves what it was given."""
    build = train.build_engine

    def by_path(*given: Any, **others: Any) -> Any:
        engine = build(*given, **others)
        engine.config = "ds_config.json"
        return engine

    train.build_engine = by_path
    return train.train_and_save(**arguments)
