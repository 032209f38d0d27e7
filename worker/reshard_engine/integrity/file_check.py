"""Files of a target read once, front to back, and compared with what the manifest says of them.

Shares no code with what wrote them but the checksums themselves: bytes come from the store, places of
tensors from the manifest. `reshard verify` and the read-back of `--verify full` are both this.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from reshard.errors import printable
from reshard.models import VerifyProblem
from reshard_engine.integrity.digests import TensorStream
from reshard_engine.integrity.manifest import Manifest, ManifestFile, ManifestTensor
from reshard_engine.storage.checksums import crc32
from reshard_engine.storage.pieces import pieces_of
from reshard_engine.storage.protocol import ObjectInfo, Store

_THREADS = 4


@dataclass(frozen=True, slots=True)
class Held:
    """The bytes of a tensor `[begin, end)` in a file from `offset` on."""

    tensor: int
    offset: int
    begin: int
    end: int

    @property
    def stop(self) -> int:
        """The byte of the file behind them."""
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
        """What is wrong, for people."""
        return f"CRC-32 {self.crc32:08x}, the manifest says {self.expected:08x}"


@dataclass
class TargetCheck:
    """A running comparison of a target's files with a manifest."""

    manifest: Manifest
    should_stop: Callable[[], None]
    """Called between reads; raises to give up."""
    problems: list[VerifyProblem] = field(default_factory=list[VerifyProblem])
    """Complete after `conclude`."""
    damaged: list[Damage] = field(default_factory=list[Damage])
    """Ranges that do not match their CRC-32."""
    sha256: dict[str, str] = field(default_factory=dict[str, str])
    """Of every file that was read whole."""
    read_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stream: TensorStream = field(default_factory=TensorStream)
    _held: dict[int, list[Held]] = field(init=False)
    _sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Sort what the tensors hold by file."""
        self._held = {}
        self._sizes = [max((end for _, _, _, end in t.extents), default=0) for t in self.manifest.tensors]
        for number, tensor in enumerate(self.manifest.tensors):
            for file, offset, begin, end in tensor.extents:
                self._held.setdefault(file, []).append(Held(number, offset, begin, end))
        for held in self._held.values():
            held.sort(key=lambda h: h.offset)

    def read(self, store: Store, there: Mapping[str, ObjectInfo], files: Sequence[int]) -> None:
        """Read files of the manifest, by number, and note what is wrong with each."""
        with ThreadPoolExecutor(_THREADS) as pool:
            for found in pool.map(partial(self._read_file, store, there), files):
                self.problems += found

    def conclude(self) -> None:
        """When all wanted files were read: say which tensors a damage hit, and which differ without one."""
        wrong = {
            n
            for n, t in enumerate(self.manifest.tensors)
            if t.xxh3 and self._was_read(t) and self.digest_of(n) != t.xxh3
        }
        named: set[int] = set()
        for damage in self.damaged:
            hit = [h for h in self.held_in(damage) if h.tensor in wrong]
            self.problems += [self._damaged(damage, h) for h in hit] or [self._damaged(damage, None)]
            named |= {h.tensor for h in hit}
        for number in sorted(wrong - named):
            tensor = self.manifest.tensors[number]
            file, offset, begin, end = tensor.extents[0]
            text = f"the elements of {printable(tensor.state)} are not those that were written"
            span = (offset, offset + end - begin)
            self.problems.append(_problem(self.manifest.files[file].path, text, span, printable(tensor.fqn)))

    def _was_read(self, tensor: ManifestTensor) -> bool:
        return all(self.manifest.files[file].path in self.sha256 for file, _, _, _ in tensor.extents)

    def held_in(self, damage: Damage) -> Sequence[Held]:
        """What tensors hold in a damaged range."""
        return _overlapping(self._held.get(damage.file, []), damage.begin, damage.end)

    def _damaged(self, damage: Damage, held: Held | None) -> VerifyProblem:
        path, span = self.manifest.files[damage.file].path, (damage.begin, damage.end)
        if held is None:
            return _problem(path, damage.problem, span)
        tensor = self.manifest.tensors[held.tensor]
        inside = (max(held.offset, damage.begin), min(held.stop, damage.end))
        return _problem(path, f"{damage.problem}; {printable(tensor.state)}", inside, printable(tensor.fqn))

    def digest_of(self, number: int) -> str | None:
        """The digest of a tensor as it was read; None if not all of it was."""
        return self._stream.digests.digest(number, self.manifest.tensors[number].dtype, self._sizes[number])

    def _read_file(self, store: Store, there: Mapping[str, ObjectInfo], number: int) -> list[VerifyProblem]:
        file = self.manifest.files[number]
        info = there.get(file.path)
        if (problem := size_problem(file, info)) is not None or info is None:
            return [problem or _problem(file.path, "missing")]
        sha256, damaged, held = hashlib.sha256(), list[Damage](), self._held.get(number, [])
        for offset, length, expected in file.chunks:
            crc = 0
            for at, view in pieces_of(partial(store.read_into, info), offset, offset + length):
                self.should_stop()
                crc = crc32(view, crc)
                sha256.update(view)
                self._feed(held, at, view)
            if crc != expected:
                damaged.append(Damage(number, offset, offset + length, crc, expected))
        with self._lock:
            self.read_bytes += file.size_bytes
            self.damaged += damaged
            self.sha256[file.path] = sha256.hexdigest()
        if file.sha256 not in (None, sha256.hexdigest()) and not damaged:
            return [_problem(file.path, "SHA-256 is not what the manifest says")]
        return []

    def _feed(self, held: Sequence[Held], at: int, view: memoryview) -> None:
        for piece in _overlapping(held, at, at + len(view)):
            low, high = max(piece.offset, at), min(piece.stop, at + len(view))
            dtype, size = self.manifest.tensors[piece.tensor].dtype, self._sizes[piece.tensor]
            begin = piece.begin + low - piece.offset
            self._stream.feed(piece.tensor, dtype, size, begin=begin, data=view[low - at : high - at])


def size_problem(file: ManifestFile, info: ObjectInfo | None) -> VerifyProblem | None:
    """What is wrong with a file before it is read."""
    if info is None:
        return _problem(file.path, "missing")
    if info.size_bytes != file.size_bytes:
        return _problem(file.path, f"{info.size_bytes} bytes, the manifest says {file.size_bytes}")
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


def _overlapping(held: Sequence[Held], begin: int, end: int) -> Sequence[Held]:
    """What lies in `[begin, end)`. Nothing in a file overlaps, so starts and ends are in one order."""
    first = bisect_right(held, begin, key=lambda h: h.stop)
    return held[first : max(first, bisect_left(held, end, key=lambda h: h.offset))]
