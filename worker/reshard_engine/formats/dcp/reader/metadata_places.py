"""Reads `storage_data`: in which file, and where in it, the record of each chunk and value lies.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`_StorageInfo`, whose state leaves `transform_descriptors`
out if there are none; `FileSystemWriter.finish` collects the entries of all ranks, rank by rank),
`distributed/checkpoint/_extension.py` (`StreamTransformExtension.get_descriptor`, such as `stream.zstd/1`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

import numpy as np

from reshard.errors import SourceError, printable
from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata_columns import NO_OFFSET, Places
from reshard_engine.formats.dcp.reader.metadata_nodes import (
    MAX_NUMBER,
    attributes_of,
    key_of,
    malformed,
    number_of,
    scalar_of,
    size_of,
)
from reshard_engine.pickles.nodes import Node, PDict, PList, PTuple

MAX_PATH_CHARS = 512
_MAX_TRANSFORMS = 8
_TRANSFORM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}")
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


class PlaceColumns:
    """Collects the entries of `storage_data` as columns."""

    def __init__(self, keys: Mapping[str, int]) -> None:
        self._keys = keys
        self._files: dict[str, int] = {}
        self._number: list[int] = []
        self._dims: list[int] = []
        self._offsets: list[int] = []
        self._file: list[int] = []
        self._offset: list[int] = []
        self._length: list[int] = []
        self._transforms: dict[int, tuple[str, ...]] = {}

    def add(self, index: Node, place: Node) -> None:
        """Take one entry.

        Raises:
            SourceError: `checkpoint.malformed`, `tensor.bad_extent`, `name.invalid`.
        """
        parts = attributes_of(index, names.INDEX, _INDEX, "a key of storage_data")
        key = key_of(parts.get("fqn"), "the name in a key of storage_data")
        number = self._keys.get(key)
        if number is None:
            raise SourceError(
                "checkpoint.malformed",
                f"a place is given for {printable(key)}, which state_dict_metadata does not have",
            )
        hint = parts.get("index")
        if hint is not None:
            number_of(hint, f"the index of {printable(key)}")
        offset = parts.get("offset")
        at = None if offset is None else size_of(offset, f"the offset of a chunk of {printable(key)}")
        self._dims.append(NO_OFFSET if at is None else len(at))
        self._offsets += at or ()
        self._number.append(number)
        self._take_place(place, f"the place of {printable(key)}")

    def _take_place(self, node: Node, what: str) -> None:
        parts = attributes_of(node, names.PLACE, _PLACE, what)
        path = checked_path(parts.get("relative_path"))
        offset = number_of(parts.get("offset"), f"the offset in {what}")
        length = number_of(parts.get("length"), f"the length in {what}")
        if offset + length >= MAX_NUMBER:
            raise SourceError("tensor.bad_extent", f"{what} ends at byte {offset + length}")
        transforms = _transforms(parts.get("transform_descriptors"), what)
        if transforms:
            self._transforms[len(self._file)] = transforms
        self._file.append(self._files.setdefault(path, len(self._files)))
        self._offset.append(offset)
        self._length.append(length)

    def places(self) -> Places:
        """The columns."""
        return Places(
            np.array(self._number, np.int32),
            np.array(self._dims, np.int16),
            np.array(self._offsets, np.int64),
            np.array(self._file, np.int32),
            np.array(self._offset, np.int64),
            np.array(self._length, np.int64),
            self._transforms,
        )

    def files(self) -> tuple[str, ...]:
        """The files in the order in which they are first named."""
        return tuple(self._files)


def places_of(node: Node, keys: Mapping[str, int]) -> tuple[Places, tuple[str, ...]]:
    """The places of all entries, and the files that they name.

    Raises:
        SourceError: as `PlaceColumns.add`.
    """
    columns = PlaceColumns(keys)
    if node is not None:
        if not isinstance(node, PDict):
            raise malformed("storage_data", node, "a dict")
        for at in range(0, len(node.pairs), 2):
            columns.add(node.pairs[at], node.pairs[at + 1])
    return columns.places(), columns.files()


def _transforms(node: Node, what: str) -> tuple[str, ...]:
    if node is None:
        return ()
    if not isinstance(node, PList | PTuple) or len(node.items) > _MAX_TRANSFORMS:
        raise malformed(f"transform_descriptors in {what}", node, "a short list of texts")
    for item in node.items:
        if type(item) is not str or _TRANSFORM.fullmatch(item) is None:
            raise malformed(f"a transform descriptor in {what}", item, "a name such as stream.zstd/1")
    return tuple(cast("list[str]", list(node.items)))
