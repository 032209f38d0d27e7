"""Source files for readers: one pinned object, or ranges of one stream; many at once; JSON and YAML within bounds."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import yaml

from reshard.errors import SourceError, printable
from reshard_engine.storage.crc32 import crc32
from reshard_engine.storage.protocol import ObjectInfo, Store

_BLOCK_BYTES = 64 << 10
_MOST_BLOCKS = 16


class RecordSums:
    """What the torch archives in a file tell of the records of tensors. Readers add the records that they meet.

    Offsets are those in the whole stream, also of a record that was met in a part of it.
    """

    def __init__(self) -> None:
        """Know no record."""
        self._tables = [np.zeros((3, 0), np.int64)]
        self.matching: set[int] = set()
        """Offsets of small records that were read with the metadata, and that match their CRC-32."""
        self.damaged: dict[int, int] = {}
        """Lengths of those that do not match, by their offsets."""

    def add(self, table: npt.NDArray[np.int64]) -> None:
        """Add records, a column for each: offset, length, CRC-32. Those that are known already count once."""
        self._tables.append(table)

    @property
    def table(self) -> npt.NDArray[np.int64]:
        """`[3, count]`: offset, length and CRC-32 of each record with a CRC-32 that is known, in file order."""
        if len(self._tables) > 1:
            merged = np.concatenate(self._tables, axis=1)
            _, first = np.unique(merged[0], return_index=True)
            self._tables = [np.ascontiguousarray(merged[:, first])]
        return self._tables[0]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A stream of bytes, stored in one object or in several consecutive ones."""

    store: Store
    name: str
    """Path relative to the checkpoint's directory, without part suffixes."""
    objects: tuple[ObjectInfo, ...]
    directory_sha256: str | None = field(default=None, compare=False)
    """Digest of the names, sizes and CRC-32s of the file's records, set by the parser if the container has them."""
    sums: RecordSums = field(default_factory=RecordSums, compare=False, repr=False)
    """The CRC-32s of the records of tensors in the whole stream."""
    archives: npt.NDArray[np.int64] | None = field(default=None, compare=False, repr=False)
    """`[count, 2]`: offset and length of each torch archive in file order, if the stream is a sequence of archives."""
    extent: tuple[int, int] | None = None
    """(offset, length) if this is a part of the stream of the objects; None for the whole of it."""
    starts: tuple[int, ...] = field(init=False)
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute the offset of each object in the stream."""
        ends = list(accumulate(o.size_bytes for o in self.objects))
        object.__setattr__(self, "starts", (0, *ends[:-1]))
        object.__setattr__(self, "size_bytes", ends[-1] if self.extent is None else self.extent[1])

    @property
    def begin(self) -> int:
        """Offset in the stream of the objects, if this is a part of it; else 0."""
        return 0 if self.extent is None else self.extent[0]

    def part(self, offset: int, length: int) -> SourceFile:
        """A range of this file as a file of its own, for containers inside a larger file.

        Raises:
            SourceError: `checkpoint.incomplete` if the file is shorter.
        """
        self._check_range(offset, length)
        return replace(self, directory_sha256=None, archives=None, extent=(self.begin + offset, length))

    def compare(self, offset: int, data: bytes, expected: int) -> None:
        """Compare a whole record of this file, which was read with the metadata, with its CRC-32.

        The outcome is noted: whoever takes the record refuses it, and `inspect` can still describe the rest.
        """
        if crc32(data) == expected:
            self.sums.matching.add(self.begin + offset)
        else:
            self.sums.damaged[self.begin + offset] = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the stream's bytes from `offset` on.

        Raises:
            SourceError: `checkpoint.incomplete` if the stream is shorter, `source.changed` if an object does not
                match its pin any more.
        """
        self._check_range(offset, len(buffer))
        first = self.begin + offset
        done = 0
        while done < len(buffer):
            at = first + done
            index = bisect_right(self.starts, at) - 1
            info = self.objects[index]
            count = min(len(buffer) - done, self.starts[index] + info.size_bytes - at)
            if count:
                self.store.read_into(info, at - self.starts[index], buffer[done : done + count])
            done += count

    def _check_range(self, offset: int, length: int) -> None:
        if offset < 0 or offset + length > self.size_bytes:
            raise SourceError(
                "checkpoint.incomplete",
                f"{printable(self.name)} has {self.size_bytes} bytes, not {offset} to {offset + length}",
                fix="the file is truncated: copy the checkpoint again",
            )

    def read(self, offset: int, length: int) -> bytes:
        """The stream's bytes `[offset, offset + length)` without a second copy: a pickle may have hundreds of MB."""
        # `BytesIO` fills and returns the object that it was made of; `bytes(bytearray)` would copy it.
        stream = BytesIO(bytes(length))
        if length:
            with stream.getbuffer() as buffer:
                self.read_into(offset, buffer)
        return stream.getvalue()


class CachedFile:
    """Serves small reads of a source file from a few larger ones: metadata costs two requests instead of fifty."""

    def __init__(self, file: SourceFile) -> None:
        """Start without reading."""
        self.file = file
        self.size_bytes = file.size_bytes
        self._blocks: dict[int, bytes] = {}
        self._tail_at = max(0, file.size_bytes - _BLOCK_BYTES)

    def holds(self, offset: int, length: int) -> bool:
        """True if `read` would not access the store."""
        return any(at <= offset and offset + length <= at + len(block) for at, block in self._blocks.items())

    def spans(self) -> list[tuple[int, int]]:
        """Begin and end of each range that was read."""
        return [(at, at + len(block)) for at, block in self._blocks.items()]

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes `[offset, offset + length)`; at least a whole window is fetched."""
        # Look into the latest block first: headers are read in file order, and a large directory leaves many blocks.
        for at, block in reversed(self._blocks.items()):
            if at <= offset and offset + length <= at + len(block):
                return block[offset - at : offset - at + length]
        at = min(self._tail_at, offset)
        count = max(length + offset - at, min(_BLOCK_BYTES, self.size_bytes - at))
        block = self.file.read(at, count)
        self._blocks[at] = block
        if len(self._blocks) > _MOST_BLOCKS:
            # Headers of large records lie far apart, so their blocks serve no other read. The tail holds the directory.
            del self._blocks[next(start for start in self._blocks if start != self._tail_at)]
        return block[offset - at : offset - at + length]


# Reads the metadata of many files in parallel with a bounded pool of threads, because latency dominates.

_LOCAL_THREADS, _REMOTE_THREADS = 8, 32
_BATCH = 1_024
_Result = TypeVar("_Result")


def open_all(files: Sequence[SourceFile], parse: Callable[[SourceFile], _Result]) -> list[_Result]:
    """`parse(file)` of each file, in order. A remote file costs two or three round trips, a local one only work.

    Only one batch of files is in flight, because there may be a hundred thousand.
    """
    remote = any(file.store.scheme != "file" for file in files)
    found: list[_Result] = []
    with ThreadPoolExecutor(_REMOTE_THREADS if remote else _LOCAL_THREADS) as pool:
        for start in range(0, len(files), _BATCH):
            found += pool.map(parse, files[start : start + _BATCH])
    return found


# Parses documents. JSON from checkpoints, within bounds; JSON that parsers read differently is refused. YAML of users.

MAX_STRUCTURE = 2_000_000
"""Largest number of commas and opening brackets: about 250,000 tensors, and 64 bytes of memory each at worst."""


def parse_json(data: bytes, *, code: str, what: str) -> Any:
    """Parse a JSON document in UTF-8.

    Duplicate keys, lone surrogates, NaN and infinities are refused: parsers disagree about them.

    Args:
        data: The document; the caller bounds its length.
        code: Code of the error for anything that is not such a document.
        what: The name of the document in errors.

    Raises:
        SourceError: `code`, or `checkpoint.too_large` if it would take too much memory.
    """
    structure = data.count(b",") + data.count(b"[") + data.count(b"{")
    if structure > MAX_STRUCTURE:
        raise SourceError(
            "checkpoint.too_large",
            f"{what} has {structure} parts, the limit is {MAX_STRUCTURE}",
            fix="copy the file again; if it is right, please report it with its size",
        )

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            name = next(k for k, _ in items if k in seen or seen.add(k))
            raise SourceError(code, f"{what} has the key {printable(name)!r} twice")
        return found

    def constant(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise SourceError(code, f"{what} is not valid JSON: {printable(str(error))}") from None
    return value


class _YamlLoader(yaml.SafeLoader):
    """A YAML loader without aliases, with which a few lines could expand to gigabytes, and without keys twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, unless it is an alias."""
        if self.check_event(yaml.AliasEvent):  # pyright: ignore[reportUnknownMemberType]  # the package has no types
            raise yaml.YAMLError("aliases are not read here")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - the package's signature
        """A mapping of distinct keys."""
        found = super().construct_mapping(node, deep=deep)
        if len(found) != len(node.value):
            raise yaml.YAMLError("a mapping has a key twice")
        return found


def parse_yaml(text: str) -> Any:
    """Parse a YAML document that a user wrote.

    Raises:
        ValueError: It is none, or has aliases, or a key twice; the text is the reason, in one line.
    """
    try:
        return yaml.load(text, Loader=_YamlLoader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
