"""The layout of a target, byte for byte, which is known before any tensor data is read.

A `FileTemplate` is the shape of a file: literal bytes, bodies that are filled from tensors, and slots for the CRCs of
bodies. The CRCs are known only after the bodies are filled. Files of equal shape share one template: the atoms of a
transformer have only a dozen distinct templates.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from reshard.errors import SourceError, StorageError, printable
from reshard.models.jobs import NotCarried
from reshard_engine.storage.protocol import Listing, ObjectInfo, join
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.shard_map import LogicalTensor, ShardMap
from reshard_engine.tensors.views import Quantized, View

MAX_NAME_BYTES = 255
"""Longest component of a path that file systems accept."""
IMAGE_BYTES = 16 << 10
"""Largest file of which the template also keeps an image."""
ZEROS = -1
"""The tensor number of a body that consists of zeros."""


@dataclass(frozen=True, slots=True)
class Body:
    """A run of elements of one tensor in a file.

    `slot` is an index into the tensors of the `TargetFile`. `begin` and `end` count elements in the row-major order of
    the tensor. `dtype` is the element type in the target.
    """

    offset: int
    slot: int
    begin: int
    end: int
    dtype: Dtype
    record: int | None
    """The record (see `FileTemplate.records`) whose CRC covers this body."""

    @property
    def length_bytes(self) -> int:
        """Length of the body in the target file."""
        return (self.end - self.begin) * self.dtype.itemsize_bytes


class _Spans:
    """Half-open byte spans in file order, with a binary search: a file of 20,000 records has 60,000 literals."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]
        if self._starts != sorted(self._starts) or self._ends != sorted(self._ends):
            raise AssertionError("a layout lists its parts out of file order")

    def within(self, begin: int, end: int) -> slice:
        """The slice of spans that overlap the bytes `[begin, end)`, with the empty spans between them."""
        first = bisect_right(self._ends, begin)
        return slice(first, max(first, bisect_left(self._starts, end)))


@dataclass(frozen=True)
class FileTemplate:
    """The shape of a file. The constructor proves that literals and bodies tile the file exactly."""

    size_bytes: int
    literals: tuple[tuple[int, bytes], ...]
    """(offset, bytes) of each literal; the bytes of CRC slots are zero."""
    bodies: tuple[Body, ...]
    records: tuple[tuple[int, int], ...] = ()
    """(offset, length) of each span whose CRC-32 is computed."""
    crc_slots: tuple[tuple[int, int], ...] = ()
    """(offset, record): four little-endian bytes that hold the record's CRC-32."""
    digest: str = field(init=False)
    _literal_spans: _Spans = field(init=False, repr=False, compare=False)
    _body_spans: _Spans = field(init=False, repr=False, compare=False)
    _record_spans: _Spans = field(init=False, repr=False, compare=False)
    _slot_spans: _Spans = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Prove the tiling and compute the digest."""
        spans = [(o, len(b)) for o, b in self.literals] + [(b.offset, b.length_bytes) for b in self.bodies]
        spans = sorted(s for s in spans if s[1])
        at = 0
        for offset, length in spans:
            if offset != at:
                raise AssertionError(f"a layout leaves bytes {at} to {offset} of {self.size_bytes} undefined")
            at += length
        if at != self.size_bytes:
            raise AssertionError(f"a layout defines {at} of {self.size_bytes} bytes")
        digest = hashlib.sha256(f"{self.size_bytes}|{self.records}|{self.crc_slots}".encode())
        for offset, data in self.literals:
            digest.update(offset.to_bytes(8, "little") + data)
        for body in self.bodies:
            digest.update(f"{body.offset},{body.slot},{body.begin},{body.end},{body.dtype.name};".encode())
        object.__setattr__(self, "digest", digest.hexdigest())
        object.__setattr__(self, "_literal_spans", _Spans([(o, o + len(d)) for o, d in self.literals]))
        object.__setattr__(self, "_body_spans", _Spans([(b.offset, b.offset + b.length_bytes) for b in self.bodies]))
        object.__setattr__(self, "_record_spans", _Spans([(o, o + n) for o, n in self.records]))
        object.__setattr__(self, "_slot_spans", _Spans([(o, o + 4) for o, _ in self.crc_slots]))

    @cached_property
    def image(self) -> bytes | None:
        """The whole file with zeros in place of bodies and CRCs; None if the file is larger than `IMAGE_BYTES`.

        It saves work: a target of 20,000 small tensors has two million literals, but only a dozen images.
        """
        if self.size_bytes > IMAGE_BYTES:
            return None
        found = bytearray(self.size_bytes)
        for offset, data in self.literals:
            found[offset : offset + len(data)] = data
        return bytes(found)

    @cached_property
    def filled_bodies(self) -> tuple[Body, ...]:
        """The bodies that are not empty."""
        return tuple(b for b in self.bodies if b.length_bytes)

    def literals_in(self, begin: int, end: int) -> Sequence[tuple[int, bytes]]:
        """The literals that overlap the bytes `[begin, end)`."""
        return self.literals[self._literal_spans.within(begin, end)]

    def bodies_in(self, begin: int, end: int) -> Sequence[Body]:
        """The bodies that overlap the bytes `[begin, end)`. Empty bodies overlap nothing."""
        if begin == 0 and end == self.size_bytes:
            return self.filled_bodies
        return [b for b in self.bodies[self._body_spans.within(begin, end)] if b.length_bytes]

    def records_in(self, begin: int, end: int) -> range:
        """The numbers of the records that overlap the bytes `[begin, end)`."""
        found = self._record_spans.within(begin, end)
        return range(found.start, found.stop)

    def slots_in(self, begin: int, end: int) -> Sequence[tuple[int, int]]:
        """The CRC slots that overlap the bytes `[begin, end)`."""
        return self.crc_slots[self._slot_spans.within(begin, end)]


@dataclass(frozen=True, slots=True)
class TargetFile:
    """One file of the target: a template and the tensors that fill its bodies."""

    path: str
    """Path relative to the target directory."""
    template: FileTemplate
    tensors: tuple[int, ...]
    commit: bool = False
    """True for a commit file: the framework's loader refuses the target without it, so it is published last."""
    archives: tuple[tuple[int, int], ...] = ()
    """(offset, length) of each torch archive in file order, if the file is a sequence of archives."""

    @property
    def size_bytes(self) -> int:
        """Size of the file in bytes."""
        return self.template.size_bytes


@dataclass(frozen=True, slots=True)
class Pointer:
    """A small file in the target's save directory that names the target, such as `latest_universal`."""

    name: str
    content: bytes
    """The content of the file: the tag, unless `says` has it."""
    beside: tuple[tuple[str, bytes], ...] = ()
    """Names and contents of further small files for other tools. They are written before the pointer."""
    says: str = ""
    """The tag, where the content is none, such as the number of a step."""

    @property
    def tag(self) -> str:
        """The target's tag: its path without that of the save directory."""
        return self.says or self.content.decode()

    def directory(self, target: str) -> str:
        """The save directory of a target, whose path or URL ends with the tag."""
        return target.removesuffix(f"/{self.tag}") or "/"


@dataclass(frozen=True, slots=True)
class KnownFiles:
    """The file names by which an existing directory is recognised as a checkpoint."""

    pointers: tuple[str, ...] = ()
    """Names of pointers: small files beside checkpoints that name one of them. The training run's own comes first."""
    entries: tuple[str, ...] = ()
    """Names of entries that only a checkpoint directory has."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of entries that only a checkpoint directory has."""
    needed: tuple[str, ...] = ()
    """Names, as `fnmatch` patterns, of the files without which no loader accepts the checkpoint.

    These are the commit files of the format's targets, and no other file of them. Commit files are written last and
    removed first, so that what is there meanwhile is no checkpoint.
    """
    numbered: tuple[tuple[str, str], ...] = ()
    """Names of pointers that hold the number of a step, each with the form of the directories' names (`step_{:05d}`).

    No source is found by them here: files of this name may be of several formats, which find their own.
    """

    @classmethod
    def of_all(cls, known: Iterable[KnownFiles]) -> KnownFiles:
        """The names of several formats together."""
        parts = list(known)
        return cls(
            tuple(n for k in parts for n in k.pointers),
            tuple(n for k in parts for n in k.entries),
            tuple(n for k in parts for n in k.suffixes),
            tuple(n for k in parts for n in k.needed),
            tuple(n for k in parts for n in k.numbered),
        )

    @property
    def all_pointers(self) -> tuple[str, ...]:
        """Names of pointers of both kinds."""
        return (*self.pointers, *(name for name, _ in self.numbered))

    def tag_in(self, pointer: str, content: bytes) -> str:
        """The tag that a pointer of this name and content names."""
        text = content.decode("utf-8", "replace").strip()
        form = dict(self.numbered).get(pointer)
        return form.format(int(text)) if form is not None and re.fullmatch(r"[0-9]{1,18}", text) else text

    def needs(self, path: str) -> bool:
        """True if no loader accepts a checkpoint without the file of this path."""
        return _matching(self.needed).fullmatch(path.rpartition("/")[2]) is not None

    def holds_checkpoint(self, names: Iterable[str]) -> bool:
        """True if a directory with these entries is a checkpoint, so that `--overwrite` may remove it."""
        return any(n in self.entries or n.endswith(self.suffixes) for n in names)


@cache
def _matching(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)")


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """All files of a target in the order in which they are written, commit files last."""

    files: tuple[TargetFile, ...]
    pointer: Pointer | None
    warnings: tuple[str, ...] = ()
    parts: tuple[tuple[LogicalTensor, View | Quantized], ...] = ()
    """Tensors of the target that are made of the source's tensors. Their numbers follow those of the source."""
    not_carried: tuple[NotCarried, ...] = ()
    """Everything that the checkpoint holds and these files do not."""

    def map_over(self, shard_map: ShardMap) -> ShardMap:
        """The source's shard map with the target's views added."""
        return shard_map.with_derived(self.parts) if self.parts else shard_map

    def __post_init__(self) -> None:
        """Prove that paths stay below the target and do not collide, because checkpoints decide their names.

        Raises:
            SourceError: `name.invalid`.
        """
        paths = {f.path for f in self.files}
        for file in self.files:
            parts = file.path.split("/")
            clean = all(p not in ("", ".", "..") and len(p.encode("utf-8", "replace")) <= MAX_NAME_BYTES for p in parts)
            taken = any("/".join(parts[:n]) in paths for n in range(1, len(parts)))
            if not clean or taken or not file.path.isprintable() or "\\" in file.path:
                raise SourceError(
                    "name.invalid",
                    f"{printable(file.path)!r} cannot be a file of the target",
                    fix="save the checkpoint with other names: its names become names of files",
                )
        if len(paths) != len(self.files):
            raise SourceError("name.invalid", "two files of the target have the same name")


def require_distinct(names: Iterable[str]) -> None:
    """Refuse two tensors with the same name: a file would hold both, and readers would find one or none.

    Raises:
        SourceError: `checkpoint.ambiguous`.
    """
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise SourceError(
            "checkpoint.ambiguous",
            f"two tensors are called {printable(twice[0])}" + (f", and {len(twice) - 1} more" if twice[1:] else ""),
        )


def literal_template(data: bytes) -> FileTemplate:
    """The template of a file whose bytes are all known."""
    return FileTemplate(len(data), ((0, data),), ())


class PlannedStore:
    """A store whose only files are those of a layout. Tensors and checksums that no one knows yet are zeros.

    Args:
        path: The path of the target's directory.
        layout: The files of the target.
    """

    scheme = "planned"

    def __init__(self, path: str, layout: TargetLayout) -> None:
        self._path = path
        self._files: dict[str, TargetFile] = {join(path, f.path): f for f in layout.files}

    def list_directory(self, path: str, *, most: int | None = None) -> Listing:
        """The immediate children of a directory of the target."""
        below = [(i, i.path[len(path.rstrip("/")) + 1 :]) for i in self.list_tree(path)]
        files = tuple(info for info, name in below if "/" not in name)
        directories = sorted({name.partition("/")[0] for _, name in below if "/" in name})
        return Listing(files[:most], tuple(directories[:most]))

    def list_tree(self, path: str) -> list[ObjectInfo]:
        """Every file below a directory, sorted by path."""
        head = path.rstrip("/") + "/"
        found: Sequence[str] = sorted(p for p in self._files if p.startswith(head))
        return [ObjectInfo(p, self._files[p].size_bytes, "planned") for p in found]

    def stat(self, path: str) -> ObjectInfo | None:
        """The file at exactly this path, or None."""
        file = self._files.get(path)
        return None if file is None else ObjectInfo(path, file.size_bytes, "planned")

    def read_into(self, info: ObjectInfo, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with what the layout says of these bytes.

        Raises:
            StorageError: `storage.protocol` for bytes outside of the file.
        """
        file = self._files.get(info.path)
        end = offset + len(buffer)
        if file is None or offset < 0 or end > file.size_bytes:
            raise outside(info.path, offset, len(buffer))
        buffer[:] = bytes(len(buffer))
        for at, data in file.template.literals_in(offset, end):
            first, last = max(at, offset), min(at + len(data), end)
            if first < last:
                buffer[first - offset : last - offset] = data[first - at : last - at]


def outside(path: str, offset: int, length: int) -> StorageError:
    """The error for bytes that a file of a layout does not have."""
    return StorageError("storage.protocol", f"{printable(path)}: {offset}:{offset + length} is outside of the layout")
