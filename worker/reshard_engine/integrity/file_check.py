"""Reads files of a target once, front to back, and compares them with the manifest.

It shares no code with the writers but the checksums: bytes come from the store, and offsets of tensors from the
manifest. `reshard verify` and the read-back of `--verify full` both use it.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from reshard.errors import counted, printable
from reshard.models.jobs import VerifyProblem
from reshard_engine.integrity.checksums import BLOCK_BYTES, BlockRun, Sha256, TensorStream, block_count
from reshard_engine.integrity.manifest import Manifest, ManifestFile, ManifestTensor
from reshard_engine.storage.crc32 import crc32, pieces_of
from reshard_engine.storage.protocol import ObjectInfo, Store

_THREADS = 4


@dataclass(frozen=True, slots=True)
class TensorRange:
    """The bytes of a tensor `[begin, end)` in a file from `offset` on."""

    tensor: int
    offset: int
    begin: int
    end: int

    @property
    def stop(self) -> int:
        """The file offset behind these bytes."""
        return self.offset + self.end - self.begin


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of a file that does not match its CRC-32."""

    file: int
    begin: int
    end: int
    crc32: int
    expected: int

    @property
    def problem(self) -> str:
        """A description of the damage for users."""
        return f"CRC-32 {self.crc32:08x}, the manifest says {self.expected:08x}"


@dataclass(frozen=True)
class FileReading:
    """The findings in one file."""

    file: int
    sha256: Sha256 | None
    """None if the file was not read."""
    read_bytes: int
    problems: list[VerifyProblem]
    damaged: list[Damage] = field(default_factory=list[Damage])
    blocks: list[BlockRun] = field(default_factory=list[BlockRun])
    """Digests of the blocks that begin in the file, by the numbers of tensors in the manifest."""


@dataclass
class TargetCheck:
    """A running comparison of a target's files with a manifest."""

    manifest: Manifest
    should_stop: Callable[[], None]
    """Called between reads; it raises to stop the comparison."""
    problems: list[VerifyProblem] = field(default_factory=list[VerifyProblem])
    """The problems; complete after `conclude`."""
    damaged: list[Damage] = field(default_factory=list[Damage])
    """Ranges that do not match their CRC-32."""
    sha256: dict[str, str] = field(default_factory=dict[str, str])
    """SHA-256 of every file that was read whole."""
    read_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stream: TensorStream = field(default_factory=TensorStream)
    _held: dict[int, list[TensorRange]] = field(init=False)
    _sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Sort the byte ranges of tensors by file."""
        self._held = {}
        self._sizes = [max((end for _, _, _, end in t.extents), default=0) for t in self.manifest.tensors]
        for number, tensor in enumerate(self.manifest.tensors):
            for file, offset, begin, end in tensor.extents:
                self._held.setdefault(file, []).append(TensorRange(number, offset, begin, end))
        for held in self._held.values():
            held.sort(key=lambda h: h.offset)

    def read(self, store: Store, listing: Mapping[str, ObjectInfo], files: Sequence[int]) -> None:
        """Read files of the manifest, by number, and note their problems."""
        with ThreadPoolExecutor(_THREADS) as pool:
            for found in pool.map(partial(self._read_file, store, listing), files):
                self.problems += found

    def conclude(self) -> None:
        """Finish after all files were read: name the tensors in damaged ranges, and those that differ elsewhere."""
        wrong = {
            n
            for n, t in enumerate(self.manifest.tensors)
            if t.xxh3 and self._was_read(t) and self.digest_of(n) != t.xxh3
        }
        named: set[int] = set()
        for damage in self.damaged:
            hit = [h for h in self.ranges_in(damage) if h.tensor in wrong]
            self.problems += [self._damaged(damage, h) for h in hit] or [self._damaged(damage, None)]
            named |= {h.tensor for h in hit}
        for number in sorted(wrong - named):
            tensor = self.manifest.tensors[number]
            file, offset, begin, end = tensor.extents[0]
            text = f"the elements of {printable(tensor.state)} are not those that were written"
            span = (offset, offset + end - begin)
            self.problems.append(_problem(self.manifest.files[file].path, text, span, printable(tensor.fqn)))

    def size_bytes(self, number: int, dtype: str) -> int:
        """The size of a tensor of the manifest; 0 if it has another element type."""
        return self._sizes[number] if self.manifest.tensors[number].dtype == dtype else 0

    def _was_read(self, tensor: ManifestTensor) -> bool:
        return all(self.manifest.files[file].path in self.sha256 for file, _, _, _ in tensor.extents)

    def ranges_in(self, damage: Damage) -> Sequence[TensorRange]:
        """The byte ranges of tensors in a damaged range."""
        return _overlapping(self._held.get(damage.file, []), damage.begin, damage.end)

    def _damaged(self, damage: Damage, held: TensorRange | None) -> VerifyProblem:
        path, span = self.manifest.files[damage.file].path, (damage.begin, damage.end)
        if held is None:
            return _problem(path, damage.problem, span)
        tensor = self.manifest.tensors[held.tensor]
        inside = (max(held.offset, damage.begin), min(held.stop, damage.end))
        return _problem(path, f"{damage.problem}; {printable(tensor.state)}", inside, printable(tensor.fqn))

    def digest_of(self, number: int) -> str | None:
        """The digest of a tensor as it was read; None if it was not read whole."""
        return self._stream.digests.digest(number, self.manifest.tensors[number].dtype, self._sizes[number])

    def _read_file(self, store: Store, listing: Mapping[str, ObjectInfo], number: int) -> list[VerifyProblem]:
        reading = self._reading(store, listing, number, self._feed)
        with self._lock:
            self.absorb(reading)
        return reading.problems

    def absorb(self, reading: FileReading) -> None:
        """Take what was found in a file, except its problems."""
        for run in reading.blocks:
            self._stream.digests.add(run)
        self.read_bytes += reading.read_bytes
        self.damaged += reading.damaged
        if reading.sha256 is not None:
            self.sha256[self.manifest.files[reading.file].path] = reading.sha256

    def read_alone(self, store: Store, listing: Mapping[str, ObjectInfo], number: int) -> FileReading:
        """Read one file, of which tensors may go on in files that others read. Any thread may call it.

        The result has the digests of all blocks that begin in the file. The rest of a block that ends elsewhere is
        read from there, if that file can be read.
        """
        stream = TensorStream()

        def feed(held: Sequence[TensorRange], at: int, view: memoryview) -> None:
            for piece in _overlapping(held, at, at + len(view)):
                self._feed_own(stream, piece, at, view)
                if piece.offset < piece.stop <= at + len(view):
                    self._feed_rest(stream, piece, store, listing)

        reading = self._reading(store, listing, number, feed)
        return replace(reading, blocks=stream.digests.runs())

    def _reading(
        self,
        store: Store,
        listing: Mapping[str, ObjectInfo],
        number: int,
        feed: Callable[[Sequence[TensorRange], int, memoryview], None],
    ) -> FileReading:
        """Read one file, and pass its bytes to `feed`."""
        file = self.manifest.files[number]
        info = listing.get(file.path)
        if (problem := size_problem(file, info)) is not None or info is None:
            return FileReading(number, None, 0, [problem or _problem(file.path, "missing")])
        sha256, damaged, held = hashlib.sha256(), list[Damage](), self._held.get(number, [])
        for offset, length, expected in file.chunks:
            crc = 0
            for at, view in pieces_of(partial(store.read_into, info), offset, offset + length):
                self.should_stop()
                crc = crc32(view, crc)
                sha256.update(view)
                feed(held, at, view)
            if crc != expected:
                damaged.append(Damage(number, offset, offset + length, crc, expected))
        differs = file.sha256 not in (None, sha256.hexdigest()) and not damaged
        problems = [_problem(file.path, "the SHA-256 differs from the manifest")] if differs else []
        return FileReading(number, sha256.hexdigest(), file.size_bytes, problems, damaged)

    def _feed(self, held: Sequence[TensorRange], at: int, view: memoryview) -> None:
        for piece in _overlapping(held, at, at + len(view)):
            self._feed_range(self._stream, piece, at, view)

    def _feed_own(self, stream: TensorStream, piece: TensorRange, at: int, view: memoryview) -> None:
        """Feed only the blocks that begin in this range of the tensor."""
        first = block_count(piece.begin) * BLOCK_BYTES
        if first < piece.end:
            own = TensorRange(piece.tensor, piece.offset + first - piece.begin, first, piece.end)
            self._feed_range(stream, own, at, view)

    def _feed_range(self, stream: TensorStream, piece: TensorRange, at: int, view: memoryview) -> None:
        low, high = max(piece.offset, at), min(piece.stop, at + len(view))
        if low < high:
            dtype, size = self.manifest.tensors[piece.tensor].dtype, self._sizes[piece.tensor]
            begin = piece.begin + low - piece.offset
            stream.feed(piece.tensor, dtype, size, begin=begin, data=view[low - at : high - at])

    def _feed_rest(
        self, stream: TensorStream, piece: TensorRange, store: Store, listing: Mapping[str, ObjectInfo]
    ) -> None:
        """Feed the rest of the block that begins in a range and ends behind it."""
        start = piece.end // BLOCK_BYTES * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._sizes[piece.tensor])
        if start >= piece.begin and start < piece.end < stop:
            self._feed_bytes(stream, piece.tensor, (piece.end, stop), store, listing)

    def _feed_bytes(
        self, stream: TensorStream, tensor: int, span: tuple[int, int], store: Store, listing: Mapping[str, ObjectInfo]
    ) -> None:
        """Read bytes of a tensor from the files that hold them, and feed them; nothing if a file cannot be read."""
        places = [e for e in self.manifest.tensors[tensor].extents if e[2] < span[1] and e[3] > span[0]]
        files = [self.manifest.files[file] for file, _, _, _ in places]
        if any(size_problem(file, listing.get(file.path)) is not None for file in files):
            return  # the check of that file says so
        for file, (_, offset, begin, end) in zip(files, places, strict=True):
            low, high = max(begin, span[0]), min(end, span[1])
            held = TensorRange(tensor, offset + low - begin, low, high)
            for at, view in pieces_of(partial(store.read_into, listing[file.path]), held.offset, held.stop):
                self.should_stop()
                self._feed_range(stream, held, at, view)

    def read_missing(self, store: Store, listing: Mapping[str, ObjectInfo]) -> None:
        """Read the blocks of tensors that have no digest although all of their files were read, each file alone.

        They end in a file that could not be read yet when the file was read in which they begin.
        """
        for number, tensor in enumerate(self.manifest.tensors):
            size = self._sizes[number]
            if not self._was_read(tensor):
                continue
            for block in self._stream.digests.missing(number, tensor.dtype, size):
                span = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size)
                self._feed_bytes(self._stream, number, span, store, listing)


def size_problem(file: ManifestFile, info: ObjectInfo | None) -> VerifyProblem | None:
    """The problem of a file that can be found without reading the file; None if there is none."""
    if info is None:
        return _problem(file.path, "missing")
    if info.size_bytes != file.size_bytes:
        return _problem(file.path, f"{counted(info.size_bytes, 'byte')}, the manifest says {file.size_bytes}")
    covered = 0
    for offset, length, _ in file.chunks:
        if offset != covered or length < 0:
            break
        covered += length
    if covered != file.size_bytes:
        return _problem(file.path, "the manifest does not cover the file", (covered, file.size_bytes))
    return None


def _problem(path: str, text: str, span: tuple[int, int] | None = None, tensor: str | None = None) -> VerifyProblem:
    offset, length = (None, None) if span is None else (span[0], span[1] - span[0])
    return VerifyProblem(path=printable(path), offset=offset, length_bytes=length, tensor=tensor, problem=text)


def _overlapping(held: Sequence[TensorRange], begin: int, end: int) -> Sequence[TensorRange]:
    """The ranges that overlap `[begin, end)`. They do not overlap one another, so starts and ends have one order."""
    first = bisect_right(held, begin, key=lambda h: h.stop)
    return held[first : max(first, bisect_left(held, end, key=lambda h: h.offset))]


def sha256_of_each(store: Store, objects: Mapping[str, ObjectInfo], threads: int) -> dict[str, str]:
    """The SHA-256 of every object, by its path."""

    def digest(path: str) -> str:
        sha256, info = hashlib.sha256(), objects[path]
        for _, view in pieces_of(partial(store.read_into, info), 0, info.size_bytes):
            sha256.update(view)
        return sha256.hexdigest()

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(objects, pool.map(digest, objects), strict=True))


# Reads written bytes again, to compare them with the CRC-32s that were computed while they were written.


def crc_of_range(store: Store, info: ObjectInfo, offset: int, length: int) -> int:
    """The CRC-32 of a byte range of an object, read in bounded pieces."""
    crc = 0
    for _, view in pieces_of(partial(store.read_into, info), offset, offset + length):
        crc = crc32(view, crc)
    return crc
