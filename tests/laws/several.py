"""State dicts with several models, optimizers, moving averages and schedulers, at random keys and depths.

Every tensor has elements that no other tensor has, so that a target's tensors tell where they come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from laws.dcp_files import Save, Sharded, save

WORDS = ("model", "ema", "unet", "net", "gen", "disc", "app", "state", "online", "a.b", "vae", "x", "optimizer", "opt")
SHAPES = ((4, 6), (6,), (4, 6), (3, 2, 2), (5,), (6, 4), (6, 6))
Keys = Literal["names", "flat", "numbers", "named_numbers"]
_KEYS: tuple[Keys, ...] = ("names", "names", "flat", "numbers", "named_numbers")
Path_ = tuple[str, ...]
STATES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "adamw": (
        {
            "lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False,
            "foreach": None, "capturable": False, "differentiable": False, "fused": None,
        },
        ("exp_avg", "exp_avg_sq"),
    ),
    "sgd": (
        {"lr": 0.1, "momentum": 0.9, "dampening": 0, "weight_decay": 0.0, "nesterov": False, "foreach": None},
        ("momentum_buffer",),
    ),
    "lion": ({"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}, ("exp_avg",)),
    "adafactor": ({"lr": 0.1, "eps": (1e-30, 1e-3), "decay_rate": -0.8}, ("exp_avg_sq_row", "exp_avg_sq_col")),
}  # fmt: skip
"""Optimizers: the hyper-parameters of a group, and the states of a parameter."""


@dataclass
class Engine:
    """The place of an optimizer, and the names of its parameters in its own order."""

    place: Path_
    order: list[str]
    shapes: dict[str, tuple[int, ...]]

    def fits(self, names: dict[str, tuple[int, ...]]) -> bool:
        """True if a model with these names has all of its parameters."""
        return all(names.get(n) == self.shapes[n] for n in self.order)


@dataclass
class Several:
    """One state dict, with what is known about it."""

    state: dict[str, Any]
    engines: list[Engine]
    models: dict[Path_, dict[str, tuple[int, ...]]]
    """The names and shapes of each model, by its place."""
    schedulers: list[Path_]
    sharded: bool
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    """Every tensor of the state dict by its flat key."""

    def write(self, folder: Path) -> None:
        """Save it as ranks of FSDP do."""
        save(self.state, folder, Save((2,) if self.sharded else (1,)))


class Maker:
    """Makes one state dict; `random` decides everything."""

    def __init__(self, random: Random) -> None:
        self._random, self._next = random, 1
        self._sharded = random.random() < 0.7
        self._taken: list[Path_] = []
        self._found = Several({}, [], {}, [], self._sharded)

    def make(self) -> Several:
        """A state dict of some models, with optimizers, averages, schedulers, and what a script saves beside."""
        random, found = self._random, self._found
        families = [self._names() for _ in range(random.choice((1, 1, 2)))]
        for number, names in enumerate(families):
            flat = number == 0 and random.random() < 0.2
            place = () if flat else self._place()
            self._model(place, names)
            for _ in range(random.choice((0, 1, 1, 2))):
                self._model(self._place(), names)  # a moving average, or a model that another one begins with
            for _ in range(random.choice((0, 1, 1, 1, 2))):
                self._optimizer(names)
        for _ in range(random.choice((0, 1, 2))):
            self._scheduler()
        for _ in range(random.randrange(3)):
            self._put(self._place(), random.choice((7, "text", self._tensor((3,)), {"inner": [1, 2.5]}, [1, 2])))
        found.tensors = dict(_leaves(found.state, ""))
        return found

    def make_twins(self) -> Several:
        """Two models with the same parameters, and an optimizer that names them.

        Nothing tells which model is trained. Every target can store the states: they are of one kind.
        """
        names = self._names()
        self._taken += [("optimizer",), ("twins", "a"), ("twins", "b")]
        for place in (("twins", "a"), ("twins", "b")):
            self._model(place, names)
        self._optimizer(names, "names", place=("optimizer",), kinds=[self._random.choice(("adamw", "sgd", "lion"))])
        found = self._found
        found.tensors = dict(_leaves(found.state, ""))
        return found

    def make_numbered(self) -> Several:
        """One model, of which several tensors have one shape, with an optimizer that numbers its parameters."""
        names = {f"layers.{i}.weight": self._random.choice(SHAPES[:3]) for i in range(self._random.randrange(1, 5))}
        self._taken.append(("model",))
        self._model(("model",), names)
        self._optimizer(names, "numbers")
        found = self._found
        found.tensors = dict(_leaves(found.state, ""))
        return found

    def _names(self) -> dict[str, tuple[int, ...]]:
        chosen = self._random.sample(range(20), self._random.randrange(2, 5))
        return {f"layers.{i}.weight": self._random.choice(SHAPES) for i in chosen}

    def _place(self) -> Path_:
        """A path at which nothing lies yet, nor above it, nor below it."""
        while True:
            path = tuple(self._random.choice(WORDS) for _ in range(self._random.choice((1, 1, 2, 3))))
            clashes = (p[: len(path)] == path or path[: len(p)] == p for p in self._taken if p)
            if not any(clashes):
                self._taken.append(path)
                return path

    def _put(self, path: Path_, value: Any) -> None:
        target = self._found.state
        for part in path[:-1]:
            target = target.setdefault(part, {})
        target[path[-1]] = value

    def _tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        count = torch.Size(shape).numel()
        self._next += count
        return torch.arange(self._next - count, self._next, dtype=torch.float32).reshape(shape) + 0.5

    def _parameter(self, shape: tuple[int, ...]) -> Any:
        placement = (Shard(0),) if self._random.random() < 0.8 else (Replicate(),)
        return Sharded(self._tensor(shape), placement) if self._sharded else self._tensor(shape)

    def _model(self, place: Path_, names: dict[str, tuple[int, ...]]) -> None:
        made = {name: self._parameter(shape) for name, shape in names.items()}
        if place:
            self._put(place, made)
        else:
            self._found.state |= made
        self._found.models[place] = names

    def _optimizer(
        self,
        names: dict[str, tuple[int, ...]],
        keys: Keys | None = None,
        *,
        place: Path_ | None = None,
        kinds: list[str] | None = None,
    ) -> None:
        random = self._random
        order = list(names)
        random.shuffle(order)
        order = order[: random.choice((len(order), len(order), max(1, len(order) - 1)))]
        kinds = kinds or random.sample(sorted(STATES), random.choice((1, 1, 2)))
        keys = keys or random.choice(_KEYS)
        cut = random.randrange(1, len(order)) if len(order) > 1 and (len(kinds) > 1 or random.random() < 0.5) else 0
        members = [order[:cut], order[cut:]] if cut else [order]
        kinds = (kinds * 2)[: len(members)]
        label = {n: (i if keys in ("numbers", "named_numbers") else n) for i, n in enumerate(order)}
        groups: list[dict[str, Any]] = []
        states: dict[Any, dict[str, Any]] = {}
        for number, (kind, held) in enumerate(zip(kinds, members, strict=True)):
            hyper = {**STATES[kind][0], "lr": 0.1 / (number + 1)}
            more = {"param_names": list(held)} if keys == "named_numbers" else {}
            groups.append({**hyper, **more, "params": [label[n] for n in held]})
            for name in held:
                states[label[name]] = self._states(kind, names[name])
        place = place or self._place()
        self._put(place, _flattened(states, groups) if keys == "flat" else {"state": states, "param_groups": groups})
        self._found.engines.append(Engine(place, order, {n: names[n] for n in order}))

    def _states(self, kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
        # transformers' Adafactor factors what has two dimensions or more.
        names = ("exp_avg_sq",) if kind == "adafactor" and len(shape) == 1 else STATES[kind][1]
        shapes = {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": (*shape[:-2], shape[-1])}
        found: dict[str, Any] = {name: self._parameter(shapes.get(name, shape)) for name in names}
        return found | ({"step": torch.tensor(3.0)} if kind == "adamw" else {"step": 3} if kind == "adafactor" else {})

    def _scheduler(self) -> None:
        place = self._place()
        self._put(place, {"last_epoch": 3, "base_lrs": [0.1], "_last_lr": [self._random.choice((0.1, 0.05))]})
        self._found.schedulers.append(place)


def _flattened(states: dict[Any, dict[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    found = {f"state.{name}.{key}": value for name, held in states.items() for key, value in held.items()}
    for group in groups:
        for name in group["params"]:
            found |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    return found


def _leaves(value: Any, key: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, Sharded):
        yield key, value.whole
    elif isinstance(value, torch.Tensor):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
