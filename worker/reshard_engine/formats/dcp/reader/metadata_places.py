"""Reads `storage_data`: in which file, and where in it, the record of each chunk and value lies.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`_StorageInfo`, whose state leaves `transform_descriptors`
out if there are none; `FileSystemWriter.finish` collects the entries of all ranks, rank by rank),
`distributed/checkpoint/_extension.py` (`StreamTransformExtension.get_descriptor`, such as `stream.zstd/1`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from reshard.errors import SourceError, printable
from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata import Narrow
from reshard_engine.formats.dcp.reader.metadata_columns import NO_OFFSET, NO_TRANSFORM, Places, joined
from reshard_engine.formats.dcp.reader.metadata_nodes import (
    MAX_NUMBER,
    attributes_of,
    key_of,
    malformed,
    number_of,
    scalar_of,
    size_of,
)
from reshard_engine.formats.dcp.reader.metadata_place_runs import PlaceRun
from reshard_engine.pickles.nodes import Node, PDict, PList, PTuple

MAX_PATH_CHARS = 512
_MAX_TRANSFORMS = 8
_TRANSFORM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}")
_NAME = "the name in a key of storage_data"
_INDEX = frozenset({"fqn", "offset", "index"})
_PLACE = frozenset({"relative_path", "offset", "length", "transform_descriptors"})


def checked_path(node: Node) -> str:
    """The path of a file of the checkpoint: relative, below the directory, printable.

    Raises:
        SourceError: `checkpoint.malformed` for anything but a text, `name.invalid`.
    """
    path = scalar_of(node, str, "a relative_path")
    bad = not path or len(path) > MAX_PATH_CHARS or not path.isprintable() or "\\" in path or ":" in path
    if bad or any(part in ("", ".", "..") for part in path.split("/")):
        raise SourceError(
            "name.invalid",
            f"the checkpoint names the file {printable(path)!r}, which is no plain path below its directory",
        )
    return path


class _Texts:
    """The files and transforms that places name, each once."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.transforms: dict[tuple[str, ...], int] = {}

    def file(self, path: Node) -> int:
        """The number of a file."""
        return self.files.setdefault(checked_path(path), len(self.files))

    def transform(self, names: tuple[str, ...]) -> int:
        """The number of a list of transforms; -1 for none."""
        return self.transforms.setdefault(names, len(self.transforms)) if names else NO_TRANSFORM


class _Rows:
    """Entries of `storage_data` that are nodes, as columns."""

    def __init__(self, keys: Mapping[str, int], texts: _Texts) -> None:
        self._keys = keys
        self._texts = texts
        self._columns: tuple[list[int], ...] = tuple([] for _ in range(7))

    def add(self, index: Node, place: Node) -> None:
        """Take one entry.

        Raises:
            SourceError: `checkpoint.malformed`, `tensor.bad_extent`, `name.invalid`.
        """
        numbers, dims, offsets, *_ = self._columns
        parts = attributes_of(index, names.INDEX, _INDEX, "a key of storage_data")
        key = key_of(parts.get("fqn"), _NAME)
        numbers.append(_number_of(key, self._keys))
        hint = parts.get("index")
        if hint is not None:
            number_of(hint, f"the index of {printable(key)}")
        offset = parts.get("offset")
        at = None if offset is None else size_of(offset, f"the offset of a chunk of {printable(key)}")
        dims.append(NO_OFFSET if at is None else len(at))
        offsets += at or ()
        self._take_place(place, f"the place of {printable(key)}")

    def _take_place(self, node: Node, what: str) -> None:
        parts = attributes_of(node, names.PLACE, _PLACE, what)
        offset = number_of(parts.get("offset"), f"the offset in {what}")
        length = number_of(parts.get("length"), f"the length in {what}")
        if offset + length >= MAX_NUMBER:
            raise SourceError("tensor.bad_extent", f"{what} ends at byte {offset + length}")
        transform = self._texts.transform(_transforms(parts.get("transform_descriptors"), what))
        row = self._texts.file(parts.get("relative_path")), offset, length, transform
        for column, value in zip(self._columns[3:], row, strict=True):
            column.append(value)

    def places(self) -> Places:
        """The columns."""
        numbers, dims, offsets, file, offset, length, transform = self._columns
        return Places(
            np.array(numbers, np.int32), np.array(dims, np.int16), np.array(offsets, np.int64),
            np.array(file, np.int32), np.array(offset, np.int64), np.array(length, np.int64),
            np.array(transform, np.int32),
        )  # fmt: skip


class _Runs:
    """Turns runs of places into columns: every text of theirs is looked up once."""

    def __init__(self, keys: Mapping[str, int], texts: _Texts) -> None:
        self._keys = keys
        self._texts = texts
        self._numbers: dict[int, int] = {}
        self._files: dict[int, int] = {}
        self._transforms: dict[int, int] = {-1: NO_TRANSFORM}

    def places(self, run: PlaceRun) -> Places:
        """The columns of one run.

        Raises:
            SourceError: as `_Rows.add`.
        """
        number = _each(
            run.name, self._numbers, lambda word: _number_of(key_of(run.words.texts[word], _NAME), self._keys)
        )
        file = _each(run.path, self._files, lambda word: self._texts.file(run.words.texts[word]))
        transform = _each(run.transform, self._transforms, lambda word: self._transform(run.words.texts[word]))
        return Places(number, run.dims, run.offsets, file, run.offset, run.length, transform)

    def _transform(self, text: str) -> int:
        return self._texts.transform(_transforms(PList([text]), "a place"))


def _each(words: Narrow, known: dict[int, int], found: Callable[[int], int]) -> Narrow:
    """The numbers for a column of words: `found` is asked once for each word, in the order in which they come."""
    distinct, first, inverse = np.unique(words, return_index=True, return_inverse=True)
    for word in distinct[np.argsort(first)].tolist():
        if word not in known:
            known[word] = found(word)
    return np.array([known[word] for word in distinct.tolist()], np.int32)[inverse]


def places_of(node: Node, keys: Mapping[str, int]) -> Places:
    """The places of all entries, with the files that they name.

    Raises:
        SourceError: `checkpoint.malformed`, `tensor.bad_extent`, `name.invalid`.
    """
    texts = _Texts()
    runs = _Runs(keys, texts)
    parts: list[Places] = []
    rows = _Rows(keys, texts)
    if node is not None and not isinstance(node, PDict):
        raise malformed("storage_data", node, "a dict")
    pairs: list[Node] = [] if node is None else node.pairs
    for at in range(0, len(pairs), 2):
        index, place = pairs[at], pairs[at + 1]
        if isinstance(index, PlaceRun) and place is index:
            parts += rows.places(), runs.places(index)
            rows = _Rows(keys, texts)
        else:
            rows.add(index, place)
    return joined([*parts, rows.places()], tuple(texts.files), tuple(texts.transforms))


def _number_of(key: str, keys: Mapping[str, int]) -> int:
    number = keys.get(key)
    if number is None:
        raise SourceError(
            "checkpoint.malformed", f"a place is given for {printable(key)}, which state_dict_metadata does not have"
        )
    return number


def _transforms(node: Node, what: str) -> tuple[str, ...]:
    if node is None:
        return ()
    if not isinstance(node, PList | PTuple) or len(node.items) > _MAX_TRANSFORMS:
        raise malformed(f"transform_descriptors in {what}", node, "a short list of texts")
    for item in node.items:
        if type(item) is not str or _TRANSFORM.fullmatch(item) is None:
            raise malformed(f"a transform descriptor in {what}", item, "a name such as stream.zstd/1")
    return tuple(cast("list[str]", list(node.items)))
