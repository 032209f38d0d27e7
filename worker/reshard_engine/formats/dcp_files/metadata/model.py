"""The contents of `.metadata`, checked: which chunks of which tensors, and which other values, lie where.

Chunks are columns of integers, not objects: 5,000 tensors on 1,024 ranks have five million of them.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`Metadata`, `TensorStorageMetadata`, `ChunkStorageMetadata`,
`BytesStorageMetadata`, `MetadataIndex`), `distributed/checkpoint/filesystem.py` (`_StorageInfo`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from reshard.errors import SourceError, printable
from reshard_engine.pickles.nodes import Global, Node, PDict, PObject, PTuple, kind_of, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.tensors.dtypes import BY_NAME, Dtype
from reshard_engine.tensors.shard_map import index_at

# Names of the files of a directory.
#
# Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`.metadata`, `__RANK_NUMBER.distcp`; `__RANK.metadata` of
# `use_collectives=False`).

METADATA_FILE = ".metadata"
SUFFIX = ".distcp"
OWN_STATE, BUFFERS = "reshard", "buffers"
"""An attribute of `.metadata` that our own writer adds, as Megatron adds others; torch ignores it."""
RANK_METADATA = re.compile(r"__(\d{1,7})\.metadata")
"""A rank's own metadata, of a save without collectives."""
DATA_FILE = re.compile(r"__(\d{1,7})_(\d{1,7})\.distcp")

Column = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.int32]
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor. Its chunks are the rows `[first, first + count)` of `Metadata`'s columns."""

    key: str
    """The flat key of the state dict."""
    dtype: Dtype
    shape: tuple[int, ...]
    """The global shape."""
    first: int
    count: int
    boxes: Column
    """`[count, 2, dims]`: the offsets and the sizes of each chunk in the global tensor, in elements."""
    requires_grad: bool = False
    """True proves a parameter: `named_parameters()` was saved, or our own writer marked it. `state_dict()` detaches
    all tensors, so that False says nothing."""


@dataclass(frozen=True, slots=True)
class BytesEntry:
    """A value that is not a tensor: a stream of `torch.save` in a range of a file."""

    key: str
    file: int
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metadata:
    """The whole of `.metadata`. The constructor of the parser has matched every chunk with its place."""

    tensors: tuple[TensorEntry, ...]
    values: tuple[BytesEntry, ...]
    paths: Mapping[str, KeyPath] | None
    """`planner_data`: for each flat key the path of keys and list indices in the nested state dict; None if absent."""
    files: tuple[str, ...]
    """Relative paths of the `.distcp` files, each once, in the order in which they are first named."""
    file: Narrow
    """For each chunk the index of its file in `files`."""
    offset: Column
    """For each chunk the byte offset of its record in the file."""
    length: Column
    """For each chunk the length of its record in bytes."""
    transforms: Mapping[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])
    """Transform descriptors by row, for the chunks that have any."""
    original_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """`mcore_data`: the shapes of tensors that Megatron flattened, before that; their `shape` is the flattened one."""
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """Counters of the run that our own writer keeps in an attribute of its own, which torch ignores."""
    buffers: frozenset[str] | None = None
    """The keys of tensors that our own writer knew for buffers; None in files of others."""


# The names that writers of `.metadata` use. A pickle that names anything else is refused, and none is imported.
#
# Source: torch 2.13.0 `distributed/checkpoint/{metadata,filesystem,planner}.py` and `torch/serialization.py`
# (`_get_layout`); torch 2.2 `distributed/checkpoint/metadata.py` takes `TensorProperties` from
# `distributed/_shard/sharded_tensor/metadata.py`; megatron-core 0.16.1 `dist_checkpointing/strategies/torch.py` stores
# the plans of all ranks as `all_local_plans`, older ones as its own `MCoreSavePlan`.

_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"

METADATA = f"{_METADATA}.Metadata"
TENSOR = f"{_METADATA}.TensorStorageMetadata"
BYTES = f"{_METADATA}.BytesStorageMetadata"
CHUNK = f"{_METADATA}.ChunkStorageMetadata"
INDEX = f"{_METADATA}.MetadataIndex"
STORAGE_META = f"{_METADATA}.StorageMeta"
PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
LAYOUT = "torch.serialization._get_layout"
SIZE = "torch.Size"
ITEM = f"{_PLANNER}.WriteItem"
ITEM_DATA = f"{_PLANNER}.TensorWriteData"
PROPERTY = f"{_METADATA}.TensorProperties"
PROPERTIES = frozenset({PROPERTY, f"{_SHARDED}.TensorProperties"})
MEMORY_FORMATS = frozenset({f"{_METADATA}._MEM_FORMAT_ENCODING", f"{_SHARDED}.MEM_FORMAT_ENCODING"})
MEMORY_FORMAT_MEMBERS = frozenset(
    f"{enum}.{member}"
    for enum in MEMORY_FORMATS
    for member in ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
)
"""Members as names: Python 3.11.0 to 3.11.3 pickles an enum's member as `getattr` of its class."""
_PLANS = frozenset(
    {f"{_PLANNER}.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")}
    | {f"{_PLANNER}.WriteItemType.{member}" for member in ("TENSOR", "SHARD", "BYTE_IO")}
    | {
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
    }
)
OTHER_DTYPES = frozenset(
    {"complex32", "float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
    | {"qint8", "qint32", "quint8", "quint2x4", "quint4x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)
"""Element types of torch 2.13 that no format of ours has."""

_KNOWN = (
    frozenset({METADATA, TENSOR, BYTES, CHUNK, INDEX, STORAGE_META, PLACE, LAYOUT, SIZE})
    | PROPERTIES
    | MEMORY_FORMATS
    | MEMORY_FORMAT_MEMBERS
    | _PLANS
    | {f"torch.{name}" for name in OTHER_DTYPES | BY_NAME.keys()}
)


def refuse_foreign_names(ledger: OpaqueLedger, name: str) -> None:
    """Refuse a `.metadata` that names what no known writer names.

    Raises:
        SourceError: `pickle.forbidden_global`.
    """
    for foreign in ledger.foreign:
        if foreign not in _KNOWN:
            raise SourceError(
                "pickle.forbidden_global",
                f"{name} names {foreign}, which no writer of distributed checkpoints names; nothing of it was executed",
                fix="do not load this checkpoint with torch either; if a writer that you trust made it, please report "
                "its name and version",
                details={"global": printable(foreign)},
            )


# Reads typed values from the inert nodes of a `.metadata`: attributes of objects, sizes, numbers, texts.
#
# Source: torch 2.13.0 `distributed/checkpoint/metadata.py`: dataclasses, whose pickled state is a dict of attributes;
# `torch/csrc/Size.cpp` (`THPSize_reduce`: `torch.Size` is called with one tuple).

MAX_NUMBER = 1 << 62
"""Offsets, sizes and lengths are below it, so that the sum of two of them fits 64 bits."""
MAX_DIMS = 64
MAX_KEY_CHARS = 4_096
_LAYOUTS = frozenset({LAYOUT})
_Kind = TypeVar("_Kind", str, bool)


def malformed(what: str, node: Node, wanted: str) -> SourceError:
    """The error for a value of another kind than `wanted`."""
    return SourceError("checkpoint.malformed", f"{what} is {_shown(node)}, not {wanted}")


def _shown(node: Node) -> str:
    scalar = node is None or isinstance(node, bool | int | float | str | bytes)
    return printable(repr(node), max_chars=60) if scalar else kind_of(node)


def class_of(node: Node) -> str:
    """The dotted name of the class of an object; empty for anything else."""
    if isinstance(node, PObject) and node.how == "newobj" and isinstance(node.cls, Global):
        return node.cls.dotted
    return ""


def attributes_of(node: Node, kind: str, known: frozenset[str], what: str) -> dict[str, Node]:
    """The attributes of an object of the class `kind`. Those whose values are the class's defaults can be absent.

    Raises:
        SourceError: `checkpoint.malformed` for another class, a state that is not a dict of attributes, or an attribute
            that is not known: a later torch may have given it a meaning.
    """
    if class_of(node) != kind or node.args.items or node.kwargs is not None or node.items or node.appends:
        raise malformed(what, node, f"a plain {kind}")
    if not node.has_state:
        return {}
    if not isinstance(node.state, PDict):
        raise malformed(f"the state of {what}", node.state, "a dict")
    found: dict[str, Node] = {}
    pairs = node.state.pairs
    for at in range(0, len(pairs), 2):
        key = pairs[at]
        if type(key) is not str or key not in known or key in found:
            raise SourceError(
                "checkpoint.malformed",
                f"{what} has the attribute {_shown(key)}, which no known version of torch writes there",
                fix="please report the version of the writer",
            )
        found[key] = pairs[at + 1]
    return found


def number_of(node: Node, what: str) -> int:
    """An offset, a size or a length.

    Raises:
        SourceError: `checkpoint.malformed` for anything but an int, `tensor.bad_extent` for one out of range.
    """
    if type(node) is not int:
        raise malformed(what, node, "an integer")
    if not 0 <= node < MAX_NUMBER:
        raise SourceError("tensor.bad_extent", f"{what} is {printable(hex(node), max_chars=40)}")
    return node


def size_of(node: Node, what: str) -> tuple[int, ...]:
    """The numbers of a `torch.Size` or a tuple.

    Raises:
        SourceError: as `number_of`; `tensor.bad_extent` for more than 64 dimensions.
    """
    inner = node
    if isinstance(node, PObject) and isinstance(node.cls, Global) and node.cls.dotted == SIZE:
        if node.how != "reduce" or node.has_state or node.items or node.appends:
            raise malformed(what, node, "a plain torch.Size")
        inner = node.args.items[0] if node.args.items else PTuple()
    if not isinstance(inner, PTuple):
        raise malformed(what, node, "a torch.Size")
    if len(inner.items) > MAX_DIMS:
        raise SourceError("tensor.bad_extent", f"{what} has {len(inner.items)} dimensions, the limit is {MAX_DIMS}")
    return tuple(number_of(item, what) for item in inner.items)


def scalar_of(node: Node, kind: type[_Kind], what: str) -> _Kind:
    """A text or a flag.

    Raises:
        SourceError: `checkpoint.malformed` for anything else.
    """
    if type(node) is not kind:
        raise malformed(what, node, f"a {kind.__name__}")
    return node


def key_of(node: Node, what: str) -> str:
    """A key of the state dict: free text, but bounded. Names that become parts of paths are checked by their readers.

    Raises:
        SourceError: `checkpoint.malformed` for anything but a text, `name.invalid`.
    """
    key = scalar_of(node, str, what)
    if len(key) > MAX_KEY_CHARS:
        raise SourceError("name.invalid", f"{what} has {len(key)} characters, the limit is {MAX_KEY_CHARS}")
    return key


def text_items(node: Node, what: str) -> dict[str, Node]:
    """The entries of a dict whose keys are keys of the state dict.

    Raises:
        SourceError: `checkpoint.malformed`, `name.invalid`, `pickle.ambiguous_key`.
    """
    return {key_of(key, f"a key of {what}"): value for key, value in mapping_items(node, what=what).items()}


def properties_of(node: Node, what: str) -> tuple[Dtype, bool]:
    """The element type and `requires_grad` from a `TensorProperties`.

    Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`TensorProperties.__getstate__`, a tuple of dtype,
    layout, requires_grad, memory format and pin_memory since torch 1.10).

    Raises:
        SourceError: `checkpoint.malformed`; `tensor.unsupported` for another element type or layout.
    """
    if class_of(node) not in PROPERTIES or node.args.items or node.items or node.appends:
        raise malformed(f"the properties of {what}", node, "TensorProperties")
    state = node.state
    if not isinstance(state, PTuple) or len(state.items) != 5:
        raise malformed(f"the properties of {what}", state, "a tuple of five values")
    dtype, layout, requires_grad, memory_format, pin_memory = state.items
    required = bool(scalar_of(requires_grad, bool, f"requires_grad of {what}"))
    scalar_of(pin_memory, bool, f"pin_memory of {what}")
    _check_layout(layout, what)
    _check_memory_format(memory_format, what)
    if not isinstance(dtype, Global) or dtype.module != "torch":
        raise malformed(f"the dtype of {what}", dtype, "a torch.dtype")
    if dtype.name in OTHER_DTYPES:
        raise SourceError("tensor.unsupported", f"{what} has elements of type {dtype.dotted}")
    if dtype.name not in BY_NAME:
        raise malformed(f"the dtype of {what}", dtype, "a torch.dtype")
    return BY_NAME[dtype.name], required


def _argument_of(node: Node, functions: frozenset[str], what: str) -> Node:
    """The one argument of a call of one of the functions."""
    name = node.cls.dotted if isinstance(node, PObject) and isinstance(node.cls, Global) else ""
    if name in functions and node.how == "reduce" and not node.has_state and len(node.args.items) == 1:
        return node.args.items[0]
    raise malformed(what, node, "as torch writes it")


def _check_layout(node: Node, what: str) -> None:
    layout = scalar_of(_argument_of(node, _LAYOUTS, f"the layout of {what}"), str, f"the layout of {what}")
    if layout != "torch.strided":
        raise SourceError(
            "tensor.unsupported",
            f"{what} has the layout {printable(layout, max_chars=60)}; only dense tensors can be converted",
            fix="call .to_dense() on the tensor before saving",
        )


def _check_memory_format(node: Node, what: str) -> None:
    # The format says nothing about the record: each record has the strides of its tensor.
    if isinstance(node, Global) and node.dotted in MEMORY_FORMAT_MEMBERS:
        return
    value = _argument_of(node, MEMORY_FORMATS, f"the memory format of {what}")
    if type(value) is not int or value not in (0, 1, 2):
        raise malformed(f"the memory format of {what}", value, "0, 1 or 2")


# Matches the chunks of every tensor with the places of their records, and checks the numbers of both.
#
# Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`MetadataIndex`: two are equal if their names and offsets
# are; `index` is a hint), `distributed/checkpoint/filesystem.py` (`FileSystemReader.read_data` looks a record up by
# it).

NO_TRANSFORM = -1
NO_OFFSET = -1
"""The number of dimensions of a place without an offset: that of a value that is not a tensor."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """A tensor of `state_dict_metadata` with its chunks, as the file has them."""

    number: int
    """The position of its key in `state_dict_metadata`."""
    key: str
    dtype: Dtype
    shape: tuple[int, ...]
    offsets: Column
    """`[chunks, dims]`"""
    sizes: Column
    """`[chunks, dims]`"""
    requires_grad: bool = False

    def __post_init__(self) -> None:
        """Refuse chunks outside of their tensor.

        Raises:
            SourceError: `tensor.bad_extent`.
        """
        if prod(self.shape) >= MAX_NUMBER:
            raise SourceError("tensor.bad_extent", f"tensor {printable(self.key)} has the shape {_text(self.shape)}")
        bound = np.array(self.shape, np.int64)
        inside = ((self.offsets >= 0) & (self.sizes >= 0) & (self.sizes <= bound)).all(axis=1)
        # The sum is taken last: it cannot overflow where both numbers are checked.
        inside &= (self.offsets <= bound - self.sizes).all(axis=1)
        if not inside.all():
            row = int(np.argmin(inside))
            raise SourceError(
                "tensor.bad_extent",
                f"tensor {printable(self.key)} has the shape {_text(self.shape)}, but a chunk at "
                f"{_text(self.offsets[row].tolist())} of {_text(self.sizes[row].tolist())}",
            )


@dataclass(frozen=True, slots=True)
class Places:
    """The entries of `storage_data` as columns."""

    number: Narrow
    """The position of the entry's key in `state_dict_metadata`."""
    dims: npt.NDArray[np.int16]
    """The number of dimensions of the offset, or `NO_OFFSET`."""
    offsets: Column
    """The offsets of all entries, one behind the other."""
    file: Narrow
    offset: Column
    length: Column
    transform: Narrow
    """The position of each record's transforms in `transforms`, or `NO_TRANSFORM`."""
    files: tuple[str, ...] = ()
    transforms: tuple[tuple[str, ...], ...] = ()


def joined(parts: Sequence[Places], files: tuple[str, ...], transforms: tuple[tuple[str, ...], ...]) -> Places:
    """The places of all parts, which number the same files and transforms."""
    if len(parts) == 1:
        return replace(parts[0], files=files, transforms=transforms)
    return Places(
        np.concatenate([part.number for part in parts]),
        np.concatenate([part.dims for part in parts]),
        np.concatenate([part.offsets for part in parts]),
        np.concatenate([part.file for part in parts]),
        np.concatenate([part.offset for part in parts]),
        np.concatenate([part.length for part in parts]),
        np.concatenate([part.transform for part in parts]),
        files,
        transforms,
    )


class RowTransforms(Mapping[int, tuple[str, ...]]):
    """The transforms of the rows that have any, as a column of small integers."""

    def __init__(self, column: Narrow, transforms: tuple[tuple[str, ...], ...]) -> None:
        self._column = column
        self._transforms = transforms

    def __getitem__(self, row: int) -> tuple[str, ...]:
        if not 0 <= row < len(self._column) or self._column[row] == NO_TRANSFORM:
            raise KeyError(row)
        return self._transforms[int(self._column[row])]

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._column != NO_TRANSFORM).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self._column != NO_TRANSFORM))


def matched(
    keys: Sequence[str],
    tensors: Sequence[Chunks],
    places: Places,
    *,
    paths: Mapping[str, KeyPath] | None,
    original_shapes: Mapping[str, tuple[int, ...]],
) -> Metadata:
    """The metadata, with a place for every chunk and a chunk or value for every place.

    Chunks without elements are left out: fully sharded ranks without rows write them, and several may share an offset.

    Args:
        keys: The keys of `state_dict_metadata` in their order. Those that no tensor has are values.
        tensors: The tensors in the order of their keys.
        places: The places of all keys.
        paths: Key paths of the flat keys, if the file has them.
        original_shapes: Shapes of tensors that were flattened.

    Raises:
        SourceError: `checkpoint.incomplete` for a chunk or value without a place, `checkpoint.malformed` for a place
            without either, `checkpoint.ambiguous` for two of one.
    """
    entries, values, rows = _Matching(keys, places).entries(tensors)
    columns = places.file[rows], places.offset[rows], places.length[rows]
    transforms: Mapping[int, tuple[str, ...]] = {}
    if places.transforms:
        transforms = RowTransforms(places.transform[rows], places.transforms)
    return Metadata(entries, values, paths, places.files, *columns, transforms, original_shapes)


class _Matching:
    """The places, sorted by key."""

    def __init__(self, keys: Sequence[str], places: Places) -> None:
        self._keys = keys
        self._places = places
        self._order = np.argsort(places.number, kind="stable")
        """The rows of the places, by key."""
        counts = np.bincount(places.number, minlength=len(keys))
        self._bounds = np.concatenate([[0], np.cumsum(counts)])
        dims = np.maximum(places.dims, 0)
        self._starts = np.cumsum(dims, dtype=np.int64) - dims

    def entries(self, tensors: Sequence[Chunks]) -> tuple[tuple[TensorEntry, ...], tuple[BytesEntry, ...], Column]:
        """The tensors, the values, and the rows of the places of all chunks."""
        entries: list[TensorEntry] = []
        rows: list[Column] = [np.empty(0, np.int64)]
        first = 0
        for tensor in tensors:
            kept = np.all(tensor.sizes > 0, axis=1)
            found = self._rows(tensor, kept)
            boxes = np.stack([tensor.offsets[kept], tensor.sizes[kept]], axis=1)
            entries.append(
                TensorEntry(tensor.key, tensor.dtype, tensor.shape, first, len(found), boxes, tensor.requires_grad)
            )
            rows.append(found)
            first += len(found)
        of_tensors = {tensor.number for tensor in tensors}
        values = tuple(self._value(n) for n in range(len(self._keys)) if n not in of_tensors)
        return tuple(entries), values, np.concatenate(rows)

    def _of_key(self, number: int) -> Column:
        return self._order[self._bounds[number] : self._bounds[number + 1]]

    def _value(self, number: int) -> BytesEntry:
        rows, key = self._of_key(number), self._keys[number]
        if len(rows) == 0:
            raise SourceError("checkpoint.incomplete", f"no file is named for the value {printable(key)}")
        if len(rows) > 1:
            raise SourceError("checkpoint.ambiguous", f"the value {printable(key)} has {len(rows)} places")
        row, p = int(rows[0]), self._places
        if p.dims[row] != NO_OFFSET:
            raise SourceError("checkpoint.malformed", f"a place with an offset is given for the value {printable(key)}")
        place = int(p.file[row]), int(p.offset[row]), int(p.length[row])
        transform = int(p.transform[row])
        return BytesEntry(key, *place, () if transform == NO_TRANSFORM else p.transforms[transform])

    def _rows(self, tensor: Chunks, kept: npt.NDArray[np.bool_]) -> Column:
        """The rows of the places of the chunks that have elements, in the order of the chunks."""
        rows, dims, p = self._of_key(tensor.number), len(tensor.shape), self._places
        if (p.dims[rows] != dims).any():
            raise SourceError(
                "checkpoint.malformed",
                f"a place with an offset of another number of dimensions than {dims} is given for the tensor "
                f"{printable(tensor.key)}",
            )
        found = p.offsets[self._starts[rows][:, None] + np.arange(dims)]
        inside = (found < np.array(tensor.shape, np.int64)).all(axis=1)
        wanted = _linear(tensor.offsets[kept], tensor.shape)
        given, rows_inside = _linear(found[inside], tensor.shape), rows[inside]
        if not (given[1:] > given[:-1]).all():
            order = np.argsort(given, kind="stable")
            given, rows_inside = given[order], rows_inside[order]
        _check_once(given, tensor, "places for the chunk")
        _check_once(np.sort(wanted), tensor, "chunks")
        at = np.minimum(np.searchsorted(given, wanted), max(0, len(given) - 1))
        hit = given[at] == wanted if len(given) else np.zeros(len(wanted), np.bool_)
        if not hit.all():
            raise SourceError(
                "checkpoint.incomplete",
                f"no file is named for the chunk of {printable(tensor.key)} at "
                f"{_text(index_at(int(wanted[np.argmin(hit)]), tensor.shape))}",
            )
        if len(at) < len(rows):
            self._check_others(tensor, kept, found, set(wanted.tolist()))
        return rows_inside[at]

    def _check_others(self, tensor: Chunks, kept: npt.NDArray[np.bool_], found: Column, matched: set[int]) -> None:
        """Refuse places that belong to no chunk at all, nor to one without elements."""
        empty: set[tuple[int, ...]] = {tuple(offset) for offset in tensor.offsets[~kept].tolist()}
        for offset in found.tolist():
            place = tuple(offset)
            inside = all(o < n for o, n in zip(place, tensor.shape, strict=True))
            if inside and _one_linear(place, tensor.shape) in matched:
                continue
            if place not in empty:
                raise SourceError(
                    "checkpoint.malformed",
                    f"a place is given for a chunk of {printable(tensor.key)} at {_text(place)}, which does not exist",
                )
            empty.discard(place)


def _linear(offsets: Column, shape: tuple[int, ...]) -> Column:
    """The row-major numbers of elements inside a tensor."""
    numbers = np.zeros(len(offsets), np.int64)
    for axis, length in enumerate(shape):
        numbers = numbers * length + offsets[:, axis]
    return numbers


def _one_linear(offset: Sequence[int], shape: tuple[int, ...]) -> int:
    number = 0
    for at, length in zip(offset, shape, strict=True):
        number = number * length + at
    return number


def _check_once(numbers: Column, tensor: Chunks, what: str) -> None:
    """Refuse a number that comes twice in a sorted column."""
    same = numbers[1:] == numbers[:-1]
    if same.any():
        at = index_at(int(numbers[np.argmax(same)]), tensor.shape)
        raise SourceError("checkpoint.ambiguous", f"tensor {printable(tensor.key)} has two {what} at {_text(at)}")


def _text(numbers: Sequence[int]) -> str:
    return f"({printable(', '.join(map(str, numbers)), max_chars=120)})"
