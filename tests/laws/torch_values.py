"""Between logical values and what torch saves and loads: the only place of the laws that knows torch's tensors."""

from __future__ import annotations

import importlib
import io
import sys
from collections import OrderedDict
from typing import Any

import torch

from reshard_engine.testing.logical import Bits, Instance, Tree

SCALERS = ("LossScaler", "DynamicLossScaler")
SCALER_MODULE = "deepspeed.runtime.fp16.loss_scaler"


class _Bag:
    """Stands for an object of DeepSpeed: keeps the attributes, does nothing."""


class _StaticScaler(_Bag):
    dotted = f"{SCALER_MODULE}.{SCALERS[0]}"


class _DynamicScaler(_Bag):
    dotted = f"{SCALER_MODULE}.{SCALERS[1]}"


class Fragment:
    """Stands for `fragment_address`: a named tuple, which pickles as a call."""

    def __init__(self, numel: int, start: int) -> None:
        self.place = (numel, start)


_STAND_INS: list[Any] = [
    (_StaticScaler, _StaticScaler.dotted),
    (_DynamicScaler, _DynamicScaler.dotted),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (bytes, "__builtin__.bytes"),  # how protocol 2 spells empty bytes ...
    (bytes, "builtins.bytes"),  # ... and how torch reads that
]


def tensor_of(bits: Bits) -> torch.Tensor:
    """A tensor with a storage of its own."""
    dtype = getattr(torch, bits.dtype)
    if not bits.data:
        return torch.empty(bits.shape, dtype=dtype)
    return torch.frombuffer(bytearray(bits.data), dtype=dtype).reshape(bits.shape)


def bits_of(tensor: torch.Tensor) -> Bits:
    """The bits of a tensor."""
    flat = tensor.detach().contiguous().reshape(-1)
    return Bits(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes())


def cast(bits: Bits, dtype: str) -> Bits:
    """What torch's `.to(dtype)` makes of a tensor."""
    return bits if bits.dtype == dtype else bits_of(tensor_of(bits).to(getattr(torch, dtype)))


def torch_value(tree: Tree) -> Any:
    """A tree as a script would hand it to `torch.save`."""
    if isinstance(tree, Bits):
        return tensor_of(tree)
    if isinstance(tree, Instance):
        return _instance(tree)
    if isinstance(tree, dict):
        return {key: torch_value(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(torch_value(value) for value in tree)
    return tree


def _instance(tree: Instance) -> Any:
    module, _, name = tree.dotted.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if not tree.attributes:
        return found  # a value of a module, such as torch.float16
    made = found.__new__(found)
    vars(made).update({key: torch_value(value) for key, value in tree.attributes.items()})
    return made


def tree_of(value: Any) -> Tree:
    """What `torch.load` gave, as a tree."""
    if isinstance(value, torch.Tensor):
        return bits_of(value)
    if isinstance(value, torch.dtype):
        return Instance(str(value), {})
    if isinstance(value, _Bag):
        return Instance(type(value).dotted, {key: tree_of(item) for key, item in vars(value).items()})  # type: ignore[attr-defined]
    if type(value).__module__ == SCALER_MODULE:
        return Instance(f"{SCALER_MODULE}.{type(value).__name__}", {k: tree_of(v) for k, v in vars(value).items()})
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, OrderedDict):
        return {key: tree_of(item) for key, item in value.items()}
    if isinstance(value, dict):
        return {key: tree_of(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(tree_of(item) for item in value)
    return value


def _stage_named(stand_in: type, name: str) -> int:
    """A member of ZeroStageEnum, which `int` stands in for."""
    assert stand_in is int
    return ("disabled", "optimizer_states", "gradients", "weights").index(name)


_OLD_PYTHON = [(_stage_named, "builtins.getattr")] if (3, 11) <= sys.version_info < (3, 11, 4) else []
"""Python 3.11.0 to 3.11.3 pickle members of enums as `getattr(class, name)`: what tests save under these has that."""


def load(data: bytes) -> Any:
    """A `torch.save` file, with nothing of it run but torch's own tensors."""
    with torch.serialization.safe_globals([*_STAND_INS, *_OLD_PYTHON]):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
