"""Classes that Python's pickler writes as it writes those of torch's distributed checkpoints, without torch.

Source: torch 2.13.0 `distributed/checkpoint/{metadata,filesystem,planner}.py`, `torch/csrc/Size.cpp`,
`torch/serialization.py`; torch 2.2.0 `distributed/_shard/sharded_tensor/metadata.py`. `test_dcp_metadata.py` compares
the bytes.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import patch

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
PLANNER = "torch.distributed.checkpoint.planner"
SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_MODULES: dict[str, dict[str, Any]] = {}


class Plain:
    """An object whose state is its attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def named(dotted: str, bases: tuple[type, ...] = (Plain,)) -> Any:
    """A class that pickles call by this name, one for each name."""
    module, _, name = dotted.rpartition(".")
    known = _MODULES.setdefault(module, {})
    # The text of a module's name is one object in its classes, but not in those that are written in C.
    module = next((m for m in _MODULES if m == module), module) if module != "torch" else module
    if name not in known:
        known[name] = type(name, bases, {"__module__": module})
    return known[name]


class _Size(tuple[int, ...]):
    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (tuple(self),)


class _Properties:
    def __init__(self, *state: Any) -> None:
        self._state = state

    def __getstate__(self) -> Any:
        return self._state[0] if len(self._state) == 1 else self._state


class _Named:
    """A value that pickles write as a bare name of the module torch."""

    __module__ = "torch"

    def __init__(self, name: str) -> None:
        self._name = name
        _MODULES.setdefault("torch", {})[name] = self

    def __reduce__(self) -> str:
        return self._name


class _Called:
    """A value that pickles write as a call of a named function or class."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


def function(dotted: str) -> Any:
    """A function that pickles call by this name."""
    module, _, name = dotted.rpartition(".")

    def stand_in(*_: Any) -> None:
        raise AssertionError(f"{dotted} was called")

    stand_in.__module__, stand_in.__qualname__, stand_in.__name__ = module, name, name
    return _MODULES.setdefault(module, {}).setdefault(name, stand_in)


Size: Any = named("torch.Size", (_Size,))
Metadata = named(f"{METADATA}.Metadata")
Tensor = named(f"{METADATA}.TensorStorageMetadata")
Bytes = named(f"{METADATA}.BytesStorageMetadata")
Chunk = named(f"{METADATA}.ChunkStorageMetadata")
Index = named(f"{METADATA}.MetadataIndex")
StorageMeta = named(f"{METADATA}.StorageMeta")
Place = named(f"{FILESYSTEM}._StorageInfo")
Item = named(f"{PLANNER}.WriteItem")
ItemData = named(f"{PLANNER}.TensorWriteData")
Properties = named(f"{METADATA}.TensorProperties", (_Properties,))
OldProperties = named(f"{SHARDED}.TensorProperties", (_Properties,))
MEMORY_FORMAT = f"{METADATA}._MEM_FORMAT_ENCODING"
_MemoryFormat = named(MEMORY_FORMAT)
_OldMemoryFormat = named(f"{SHARDED}.MEM_FORMAT_ENCODING")
_DTYPES: dict[str, _Named] = {}


def called(dotted: str, *arguments: Any) -> Any:
    """The result of a call of this name."""
    return _Called(function(dotted), *arguments)


def dtype(name: str = "float32") -> Any:
    """An element type: the same object for the same name."""
    if name not in _DTYPES:
        _DTYPES[name] = _Named(name)
    return _DTYPES[name]


STRIDED = called("torch.serialization._get_layout", "torch.strided")
CONTIGUOUS = _Called(_MemoryFormat, 0)
OLD_CONTIGUOUS = _Called(_OldMemoryFormat, 0)


def properties(name: str = "float32", *, layout: Any = STRIDED, old: bool = False) -> Any:
    """The properties of a tensor, as torch up to 2.2 or later writes them."""
    if old:
        return OldProperties(dtype(name), layout, False, OLD_CONTIGUOUS, False)
    return Properties(dtype(name), layout, False, CONTIGUOUS, False)


def size(*numbers: Any) -> Any:
    """A `torch.Size`."""
    return Size(numbers)


def chunk(offsets: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """A chunk of a tensor."""
    return Chunk(offsets=Size(offsets), sizes=Size(sizes))


def tensor(shape: Sequence[Any], chunks: Iterable[Any], **attributes: Any) -> Any:
    """A tensor with its chunks."""
    return Tensor(**({"properties": properties(), "size": Size(shape), "chunks": list(chunks)} | attributes))


def index(fqn: Any, offset: Sequence[Any] | None = None, number: Any = None) -> Any:
    """A key of `storage_data`, in the order in which the constructor sets its attributes."""
    attributes = {"fqn": fqn, "index": number}
    return Index(**attributes) if offset is None else Index(**attributes, offset=Size(offset))


def place(path: Any = "__0_0.distcp", offset: Any = 0, length: Any = 1_500, **attributes: Any) -> Any:
    """The place of a record."""
    return Place(relative_path=path, offset=offset, length=length, **attributes)


def dumped(value: Any, *, protocol: int = 4, modules: Mapping[str, Mapping[str, Any]] | None = None) -> bytes:
    """The pickle of a value, made while stand-ins are in the place of the modules that they are named after."""
    named_modules: dict[str, ModuleType] = {}
    for dotted, members in {**_MODULES, **(modules or {})}.items():
        module = ModuleType(dotted)
        vars(module).update(members)
        named_modules[dotted] = module
    # A package of which a module is imported must be there as well.
    for dotted in list(named_modules):
        for at in (at for at, char in enumerate(dotted) if char == "."):
            named_modules.setdefault(dotted[:at], sys.modules.get(dotted[:at]) or ModuleType(dotted[:at]))
    with patch.dict(sys.modules, named_modules):
        return pickle.dumps(value, protocol=protocol)
