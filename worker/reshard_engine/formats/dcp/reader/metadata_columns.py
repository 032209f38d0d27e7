"""Matches the chunks of every tensor with the places of their records, and checks the numbers of both.

Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`MetadataIndex`: two are equal if their names and offsets
are; `index` is a hint), `distributed/checkpoint/filesystem.py` (`FileSystemReader.read_data` looks a record up by it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from reshard.errors import SourceError, printable
from reshard_engine.formats.dcp.reader.metadata import BytesEntry, Column, KeyPath, Metadata, Narrow, TensorEntry
from reshard_engine.formats.dcp.reader.metadata_nodes import MAX_NUMBER
from reshard_engine.tensors.dtypes import Dtype

NO_TRANSFORM = -1
NO_OFFSET = -1
"""The number of dimensions of a place without an offset: that of a value that is no tensor."""


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
                f"{_text(_unravelled(int(wanted[np.argmin(hit)]), tensor.shape))}",
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


def _unravelled(number: int, shape: tuple[int, ...]) -> list[int]:
    found: list[int] = []
    for length in reversed(shape):
        number, at = divmod(number, length)
        found.append(at)
    return found[::-1]


def _check_once(numbers: Column, tensor: Chunks, what: str) -> None:
    """Refuse a number that comes twice in a sorted column."""
    same = numbers[1:] == numbers[:-1]
    if same.any():
        at = _unravelled(int(numbers[np.argmax(same)]), tensor.shape)
        raise SourceError("checkpoint.ambiguous", f"tensor {printable(tensor.key)} has two {what} at {_text(at)}")


def _text(numbers: Sequence[int]) -> str:
    return f"({printable(', '.join(map(str, numbers)), max_chars=120)})"
