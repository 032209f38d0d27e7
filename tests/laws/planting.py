"""Keys that no framework writes, planted at every level of a checkpoint's files, and the search for them in a target.

A conversion must carry such a key, or name it: `not_carried` of its result. Everything is read by torch itself.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

import torch

from reshard.errors import printable
from reshard.models.jobs import NotCarried

MARK = "planted_"
EXTRA = "deep._extra_state"
_SCALARS = (7, 0.25, "text", b"bytes", True, None)


class Place(Enum):
    """The kinds of mappings into which a key can be planted."""

    STATE = "a state of a parameter, within an optimizer"
    ENTRY = "an entry of the model's state dict, or a part of one"
    OTHER = "anything else: counters, configuration, param groups, client state"

    @classmethod
    def of(cls, path: str) -> Place:
        """The kind of the mapping at a path, as `_levels` spells paths."""
        if _STATE.search(path):
            return cls.STATE
        return cls.ENTRY if path == "module" or path.startswith("module.") else cls.OTHER


@dataclass(frozen=True)
class Planted:
    """One key.

    Attributes:
        key: its last key, which occurs nowhere else.
        path: the keys from the top of its file, as `NotCarried` spells them.
        file: the file that holds it.
        parts: keys of its value, where that is a mapping.
        place: the kind of the mapping that holds it.
    """

    key: str
    path: str
    file: str
    parts: tuple[str, ...]
    place: Place


_STATE = re.compile(r"^(optimizer_state_dict\.)?(base_optimizer_state|optimizer_state_dict|optimizer)\.state\.[^.]+$")
_KEY = re.compile(rf"{MARK}[0-9]+")
_NUMBER = re.compile(r"[0-9]+")
_ALL = 0.7
"""Share of the keys that are planted into every file of a kind: ranks save most things alike."""


_LAYER = re.compile(r"layer_([0-9]+)-")
_OF_OPTIMIZER = ("param_groups", "loss_scaler")


def _base(name: str) -> str:
    return name.rpartition("/")[2]


class Gardener:
    """Plants keys into the files of one checkpoint."""

    def __init__(self, files: Mapping[str, bytes], random: Random) -> None:
        """For files that torch wrote, by path; `random` chooses levels and values."""
        self.files = dict(files)
        self.planted: list[Planted] = []
        self._random = random

    def plant(self, *, times: int, places: Container[Place] = tuple(Place)) -> None:
        """Plant keys into files of one kind, all of them or one, at a level in `places` that chance chooses."""
        kinds: dict[str, list[str]] = {}
        for name in self.files:
            if name.endswith(".pt") and (_base(name) == "optimizer_state.pt" or name.endswith("_states.pt")):
                kinds.setdefault(_NUMBER.sub("N", _base(name)), []).append(name)
        # Our own test files: nothing here comes from elsewhere.
        loaded = {n: torch.load(io.BytesIO(self.files[n]), weights_only=False) for ns in kinds.values() for n in ns}
        for value in loaded.values():
            if isinstance(value, dict) and isinstance(value.get("module"), dict):
                value["module"][EXTRA] = {"scale": torch.ones(2), "n": 3}
        paths = {n: [p for p, _ in _levels(v, _base(n)) if Place.of(p) in places] for n, v in loaded.items()}
        open_kinds = [kind for kind, names in kinds.items() if all(paths[n] for n in names)]
        for _ in range(times):
            names = kinds[self._random.choice(open_kinds)]
            chosen = names if self._random.random() < _ALL else [self._random.choice(names)]
            self._into_one_level(chosen, self._random.choice(paths[chosen[0]]), loaded)
        for name, value in loaded.items():
            buffer = io.BytesIO()
            torch.save(value, buffer)
            self.files[name] = buffer.getvalue()

    def _into_one_level(self, names: list[str], path: str, loaded: Mapping[str, Any]) -> None:
        levels = {name: dict(_levels(loaded[name], _base(name))) for name in names}
        key = f"{MARK}{len(self.planted)}"
        value = self._value(path)
        whole = f"{path}.{key}" if path else key
        for name in names:
            mapping = levels[name].get(path)
            if isinstance(mapping, dict):
                mapping[key] = value
            elif mapping is not None:
                setattr(mapping, key, value)
        parts = tuple(value) if isinstance(value, dict) else ()
        self.planted.append(Planted(key, whole, _base(names[0]), parts, Place.of(path)))

    def _value(self, path: str) -> Any:
        choice = self._random.randrange(4)
        if (
            ".state." in f".{path}."
        ):  # an optimizer's own states are numbers or tensors; others are refused, and said so
            return self._random.choice([3, 0.5, torch.tensor(2.0)])
        if choice == 0:
            return self._random.choice(_SCALARS)
        if choice == 1:
            return torch.arange(self._random.randrange(1, 5))
        if choice == 2:
            return {"inner": [1, (2.0, "three")], "tensor": torch.ones(2)}
        return [1, {"deep": "value"}]


def _levels(value: Any, file: str) -> Iterator[tuple[str, Any]]:
    """The mappings of a file into which a key can be planted without saying something about tensors.

    Names of parameters and their shapes, and the fragments of frozen ones, are tables of the model's own names: another
    key there is another parameter.
    """
    if file == "optimizer_state.pt":
        yield "", value
        yield from _optimizer_levels(value, "", inner="optimizer_state_dict")
        yield from _client_levels(value["param_groups"][0], "param_groups[0]")
        return
    if (layer := _LAYER.match(file)) is not None:
        yield f"module.{int(layer[1])}", value
        return
    if not isinstance(value, dict) or not ("optimizer_state_dict" in value or "module" in value):
        return
    yield "", value
    if "module" in value:
        yield from _model_levels(value)
        return
    inner = value["optimizer_state_dict"]
    yield "optimizer_state_dict", inner
    wrapped = "optimizer_state_dict" if "optimizer_state_dict" in inner else "base_optimizer_state"
    yield from _optimizer_levels(inner, "optimizer_state_dict", inner=wrapped)
    if hasattr(inner.get("loss_scaler"), "__dict__"):
        yield "loss_scaler", inner["loss_scaler"]


def _model_levels(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The mappings of model states."""
    module = value["module"] or {}  # pipelines keep theirs in files of layers
    if module:
        yield "module", module
    if isinstance(module.get(EXTRA), dict):
        yield f"module.{EXTRA}", module[EXTRA]
    for key in sorted(set(value) - _TABLES, key=str):
        yield from _client_levels(value[key], str(key))
    if isinstance(value.get("optimizer"), dict):
        yield "optimizer", value["optimizer"]
        yield from _optimizer_levels(value, "", inner="optimizer")


_TABLES = {
    *("module", "optimizer", "param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"),
    *("buffer_names", "checkpoint_parallel_dimensions", "reshard_layout", "universal_checkpoint_info"),
}


def _client_levels(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Mappings within non-tensor state."""
    if isinstance(value, dict | OrderedDict):
        yield path, value
        for key, inner in value.items():
            yield from _client_levels(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _client_levels(inner, f"{path}[{number}]")


def _optimizer_levels(outer: Mapping[str, Any], path: str, *, inner: str) -> Iterator[tuple[str, Any]]:
    """The base optimizer's own state dict, its states and its param groups."""
    base = outer.get(inner)
    where = f"{path}.{inner}" if path else inner
    if not isinstance(base, dict):
        return  # list-form: elastic
    yield where, base
    if "param_groups" not in base:
        return
    for index, group in enumerate(base["param_groups"]):
        yield f"param_groups[{index}]", group
    for index, state in base.get("state", {}).items():
        yield f"{where}.state.{index}", state


def keys_in(files: Mapping[str, bytes]) -> set[str]:
    """Every planted key that the files of a target hold, at any depth."""
    found: set[str] = set()
    for name, data in files.items():
        for value in _loaded(name, data, files):
            _collect(value, found)
        found.update(_KEY.findall(name))  # an optimizer's state of a universal checkpoint is a file
    return found


def _collect(value: Any, found: set[str]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            found.update(_KEY.findall(str(key)))
            _collect(inner, found)
    elif isinstance(value, list | tuple):
        for inner in value:
            _collect(inner, found)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
        _collect(vars(value), found)


def _loaded(name: str, data: bytes, files: Mapping[str, bytes]) -> Iterator[Any]:
    """Everything that a file holds, loaded by torch or Python; items of a distributed checkpoint with their names."""
    if name.endswith((".pt", ".bin")):
        yield torch.load(io.BytesIO(data), weights_only=False)
    elif name.endswith(".safetensors"):
        yield json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    elif name.endswith(".metadata"):
        metadata: Any = pickle.loads(data)
        for index, where in metadata.storage_data.items():
            held = files[f"{name.removesuffix('.metadata')}{where.relative_path}"]
            item = io.BytesIO(held[where.offset : where.offset + where.length])
            yield {index.fqn: torch.load(item, weights_only=False)}


def is_named(planted: Planted, named: tuple[NotCarried, ...]) -> bool:
    """True if an entry names the key or something that holds it, or entries name every part of its value."""
    paths = {entry.path for entry in named}
    parts = [f"{planted.path}.{part}" for part in planted.parts]
    return _is_named(planted.path, planted, paths) or (bool(parts) and all(_is_named(p, planted, paths) for p in parts))


def _is_named(path: str, planted: Planted, named: set[str]) -> bool:
    ends = [n for n, char in enumerate(path) if char in ".["] + [len(path)]
    holders = {printable(path[:end]) for end in ends}
    if "optim" in planted.file or path.startswith(_OF_OPTIMIZER):
        holders |= {"optimizer", *(f"optimizer_state_dict.{holder}" for holder in holders)}
    return bool(holders & named)
