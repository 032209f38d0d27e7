"""Reads `.metadata`: a pickle that is never unpickled, but interpreted as inert data and checked.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`FileSystemWriter.finish` pickles a `Metadata` with
Python's default protocol: 4 up to Python 3.13, 5 from 3.14 on), `distributed/checkpoint/metadata.py`. Up to torch 2.3
`Metadata` has `state_dict_metadata`, `planner_data` and `storage_data`; then came `storage_meta` and `version`.
"""

from __future__ import annotations

import os
import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast

import numpy as np

from reshard.choices import OpaquePolicy
from reshard.errors import SourceError, printable
from reshard_engine.formats.dcp_files.metadata import model as names
from reshard_engine.formats.dcp_files.metadata.cursor import ATTRIBUTES, CLASSES, Run, Window
from reshard_engine.formats.dcp_files.metadata.model import (
    BUFFERS,
    MAX_DIMS,
    MAX_KEY_CHARS,
    MAX_NUMBER,
    NO_OFFSET,
    NO_TRANSFORM,
    OWN_STATE,
    Chunks,
    Column,
    KeyPath,
    Metadata,
    Narrow,
    Places,
    attributes_of,
    class_of,
    joined,
    key_of,
    malformed,
    matched,
    number_of,
    properties_of,
    refuse_foreign_names,
    scalar_of,
    size_of,
    text_items,
)
from reshard_engine.formats.dcp_files.metadata.runs import (
    ChunkRun,
    PlaceReader,
    PlaceRun,
    RegularTensor,
    TensorReader,
    TensorRun,
    chunk_run,
    plan_run,
)
from reshard_engine.pickles import vm as objects, vm as values
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PDict,
    PickleLimits,
    PList,
    PTuple,
    collector_paused,
    configured_limits,
    mapping_items,
    sequence_items,
)
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.vm import CONTAINERS, PickleMachine, bad, parse_pickle

# Interprets the pickle of a `.metadata` with its runs of equal records left as columns.
#
# It is stricter than the interpreter of all pickles, and never laxer: whatever it does not know, it gives up on, and
# the whole stream is interpreted anew without runs. Both import nothing and call nothing.
#
# Source: CPython 3.11 `Modules/_pickle.c`, protocols 4 and 5 (MEMOIZE numbers the memo; no writer of DCP chooses
# another protocol than Python's default, 4 since Python 3.8).

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_F64 = struct.Struct(">d")
_U64 = struct.Struct("<Q")
_I32 = struct.Struct("<i")
_SHALLOW = 6
"""Depth of the values that an item of a plan may fetch: a chunk is an object, a dict, a size, and two tuples."""
_DEEPER = 16
"""More levels than a run hides: an item of a plan is an object with a dict with an object with a dict with a chunk."""
_RUNS = (names.TENSOR, names.CHUNK, names.INDEX, names.ITEM)
_ROW_BYTES = 64
"""Bytes that a record counts. Columns of two dimensions take 32 bytes for a chunk and 49 for a place."""
_RUN_BYTES = 2 << 10
"""Bytes that a run counts: a dozen arrays."""
_LEAST_WINDOW, _MOST_WINDOW = 2 << 10, 1 << 20
_MOST_IDLE = 1 << 12
_STOP, _PROTO, _FRAME, _GET = 0x2E, 0x80, 0x95, 0x68
_MOST_FRAMES = 64
_WORTHWHILE = 16
"""Records that a run must have: reading one at once costs as much as interpreting ten of them."""


class Skipped:
    """A value inside a run of records that the stream fetches again."""


class RunMachine(PickleMachine):
    """The state of one run of the interpreter, with the runs of records that it has met."""

    __slots__ = ("_bases", "_idle", "_penalty", "_places", "_runs", "_tensors", "_windows", "gets", "next", "skipped")

    def __init__(self, data: bytes, ledger: OpaqueLedger, limits: PickleLimits) -> None:
        super().__init__(data, ledger, replace(limits, value_depth=max(1, limits.value_depth - _DEEPER)))
        self.next = 0
        """The number of the next value in the memo."""
        self.gets: dict[str, bytes] = {}
        self.skipped = False
        """True if a value inside a run was fetched again."""
        self._places = PlaceReader(self.text_of)
        self._tensors = TensorReader(self._small_value, self.text_of)
        self._runs: list[Run] = []
        self._bases: list[int] = []
        self._windows: dict[str, int] = dict.fromkeys(_RUNS, _LEAST_WINDOW)
        """By the class that records begin with: how many bytes to look at."""
        self._idle: dict[str, int] = dict.fromkeys(_RUNS, 0)
        """How many records to interpret before the next attempt at a run."""
        self._penalty = dict(self._idle)

    def memoise(self) -> None:
        """MEMOIZE."""
        value = self.top()
        self.memo[self.next] = value
        if type(value) is Global:
            word = value.dotted if value.dotted in CLASSES else ""
        else:
            word = value if type(value) is str and value in ATTRIBUTES else ""
        if word:
            self.gets.setdefault(word, b"h" + bytes([self.next]) if self.next < 256 else b"j" + _U32.pack(self.next))
        self.next += 1

    def fetch(self, number: int, start: int) -> None:
        """BINGET and LONG_BINGET, which may begin a run of records."""
        if number in self.memo:
            value = self.memo[number]
        elif (text := self.text_of(number)) is not None:
            value = text
        elif number < self.next:
            value, self.skipped = Skipped(), True
        else:
            raise bad("bad_memo", f"GET of memo {number}, which was never set")
        if type(value) is not Global or not self._begins_run(value, start):
            self.push(value)

    def text_of(self, number: int) -> str | None:
        """The text that has this number in the memo, if it is one."""
        value = self.memo.get(number)
        if value is None and number < self.next and self._runs:
            at = bisect_right(self._bases, number) - 1
            if at >= 0 and number - self._bases[at] < self._runs[at].memoised:
                return self._runs[at].text(number - self._bases[at])
        return value if type(value) is str else None

    def _small_value(self, number: int) -> Node:
        return self.memo.get(number) if self._is_shallow(number) else None

    def _is_shallow(self, number: int) -> bool:
        value: Node = self.memo.get(number)
        # The state of properties may not be made from dicts: their keys would have to be checked.
        return type(value) is not PDict and (type(value) not in CONTAINERS or value.depth <= _SHALLOW)

    def _begins_run(self, cls: Global, start: int) -> bool:
        """True if a run of records was read, in place of the class that its first record begins with."""
        name = cls.dotted
        if name not in _RUNS or not self.marks:
            return False
        if self._idle[name]:
            self._idle[name] -= 1
            return False
        mark = self.marks[-1]
        target = self.stack[mark - 1] if mark else None
        if name in (names.INDEX, names.TENSOR):
            # A place is read with its key, a tensor behind it.
            fits = type(target) is PDict and (len(self.stack) - mark) % 2 == (name == names.INDEX)
        else:
            fits = type(target) is PList
        return fits and self._read_run(name, start)

    def _read_run(self, name: str, start: int) -> bool:
        """Read one run after the other, in windows that grow while every record in them is regular."""
        self.at, rows, length = start, 0, 0
        first = self.data[start : start + (2 if self.data[start] == _GET else 5)]
        while (self.boundary - self.at < len(first) or self.data.startswith(first, self.at)) and (
            run := self._next_run(name)
        ):
            rows, length = rows + len(run), length + run.end
            self._windows[name] = min(2 * self._windows[name], _MOST_WINDOW)
        if rows == 0:
            self.at = start + len(first)
        elif name != names.TENSOR or not self._tensors.wants_more:
            # The next run is expected to be as long.
            self._windows[name] = min(max(length * 5 // 4, _LEAST_WINDOW), _MOST_WINDOW)
        self._penalty[name] = 0 if rows >= _WORTHWHILE else min(max(1, 2 * self._penalty[name]), _MOST_IDLE)
        self._idle[name] = self._penalty[name]
        return rows > 0

    def _next_run(self, name: str) -> Run | None:
        pieces, frames = self._pieces(self._windows[name])
        window = Window(pieces)
        run = self._run_in(window, name)
        if run is None:
            if name == names.TENSOR and self._tensors.wants_more and self._windows[name] < _MOST_WINDOW:
                # The chunks of one tensor fill the window.
                self._windows[name] *= 2
                return self._next_run(name)
            return None
        base = self.next
        self._runs.append(run)
        self._bases.append(base)
        self.next += run.memoised
        at = bisect_left(window.cuts, run.end)
        if at == 0:
            self.at += run.end
        else:
            first, self.boundary = frames[at - 1]
            self.at = first + run.end - window.cuts[at - 1]
        self._push_run(run, base)
        return run

    def _run_in(self, window: Window, name: str) -> Run | None:
        if name == names.TENSOR:
            return self._tensors.run(window, self.gets)
        if name == names.CHUNK:
            return chunk_run(window, self.gets)
        if name == names.INDEX:
            return self._places.run(window, self.next, self.gets)
        return plan_run(window, self.next, self.gets, self._is_shallow)

    def _push_run(self, run: Run, base: int) -> None:
        """Put what stands for the records on the stack."""
        self.charge(_RUN_BYTES + _ROW_BYTES * len(run))
        if isinstance(run, TensorRun):
            self.push(run.tensors[0])
            for key, number, tensor in zip(run.keys, run.numbers, run.tensors[1:], strict=True):
                self.push(key, len(key))
                self.push(tensor)
                if number >= 0:
                    self.memo[base + number] = key
            return
        self.push(run)
        if isinstance(run, PlaceRun):
            # In the place of the key and of the value: a dict is made from pairs.
            self.push(run)

    def _pieces(self, left: int) -> tuple[list[bytes], list[tuple[int, int]]]:
        """So many bytes from here on without frames, and the bounds of the frames that begin in them."""
        data = self.data
        pieces, frames = [data[self.at : min(self.boundary, self.at + left)]], list[tuple[int, int]]()
        left -= len(pieces[0])
        boundary = self.boundary
        while left > 0 and boundary < self.end - 9 and data[boundary] == _FRAME and len(frames) < _MOST_FRAMES:
            first = boundary + 9
            boundary = first + _U64.unpack_from(data, boundary + 1)[0]
            if boundary > self.end:
                break
            pieces.append(data[first : min(boundary, first + left)])
            frames.append((first, boundary))
            left -= len(pieces[-1])
        return pieces, frames

    def result(self) -> Node:
        """The value of the whole stream."""
        data = self.data
        for count in range(self.limits.opcodes + 1):
            if self.at >= self.boundary:
                values.leave_frame(self, count)
            opcode = data[self.at]
            self.at += 1
            if opcode == _STOP:
                value, used = values.op_stop(self)
                if used != self.end:
                    raise bad("trailing", f"{self.end - used} bytes after the end of the pickle")
                return value
            if opcode == _PROTO:
                values.op_proto(self, count)
                continue
            step = _STEPS[opcode]
            if step is None:
                raise bad("unsupported_op", f"opcode 0x{opcode:02x} at byte {self.at - 1}")
            step(self)
        raise bad("too_much_work", f"more than {self.limits.opcodes} opcodes")


def _steps() -> list[Callable[[RunMachine], None] | None]:
    take = RunMachine.take
    table: list[Callable[[RunMachine], None] | None] = [None] * 256
    named: dict[bytes, Callable[[RunMachine], None]] = {
        b"(": values.op_mark,
        b"N": lambda m: m.push(None),
        b"\x88": lambda m: m.push(True),
        b"\x89": lambda m: m.push(False),
        b"K": lambda m: m.push(take(m, 1)[0]),
        b"M": lambda m: m.push(_U16.unpack(take(m, 2))[0]),
        b"J": lambda m: m.push(_I32.unpack(take(m, 4))[0]),
        b"\x8a": lambda m: values.op_long(m, take(m, 1)[0]),
        b"G": lambda m: m.push(_F64.unpack(take(m, 8))[0]),
        b"B": lambda m: m.stack.append(m.text(_U32.unpack(take(m, 4))[0])),
        b"C": lambda m: m.stack.append(m.text(take(m, 1)[0])),
        b"X": values.op_binunicode,
        b"\x8c": lambda m: values.op_utf8(m, m.text(take(m, 1)[0])),
        b"]": lambda m: m.push(PList(), 56),
        b")": lambda m: m.push(PTuple(), 56),
        b"}": lambda m: m.push(PDict(), 64),
        b"\x85": lambda m: objects.op_tuple_of(m, 1),
        b"\x86": lambda m: objects.op_tuple_of(m, 2),
        b"\x87": lambda m: objects.op_tuple_of(m, 3),
        b"t": objects.op_tuple,
        b"a": objects.op_append,
        b"e": objects.op_appends,
        b"s": objects.op_setitem,
        b"u": objects.op_setitems,
        b"\x93": objects.op_stack_global,
        b"R": objects.op_reduce,
        b"b": objects.op_build,
        b"\x81": objects.op_newobj,
        b"\x94": RunMachine.memoise,
        b"h": lambda m: m.fetch(take(m, 1)[0], m.at - 2),
        b"j": lambda m: m.fetch(_U32.unpack(take(m, 4))[0], m.at - 5),
        b"\x95": values.op_frame,
    }
    for opcode, step in named.items():
        table[opcode[0]] = step
    return table


_STEPS = _steps()


# Reads `state_dict_metadata`: the type, the shape and the chunks of every tensor, and the keys of other values.
#
# Source: torch 2.13.0 `distributed/checkpoint/metadata.py` (`TensorStorageMetadata`, `ChunkStorageMetadata`,
# `BytesStorageMetadata`, which has no attributes).

_TENSOR = frozenset({"properties", "size", "chunks"})
_CHUNK = frozenset({"offsets", "sizes"})
_NOTHING: frozenset[str] = frozenset()


def tensors_of(items: dict[str, Node]) -> list[Chunks]:
    """The tensors among the entries of `state_dict_metadata`.

    Raises:
        SourceError: `checkpoint.malformed`, `tensor.bad_extent`, `tensor.unsupported`.
    """
    found: list[Chunks] = []
    for number, (key, node) in enumerate(items.items()):
        if isinstance(node, RegularTensor):
            dtype, requires_grad = properties_of(node.properties, f"tensor {printable(key)}")
            found.append(Chunks(number, key, dtype, node.shape, node.offsets, node.sizes, requires_grad))
        elif class_of(node) == names.BYTES:
            attributes_of(node, names.BYTES, _NOTHING, f"the entry of {printable(key)}")
        else:
            found.append(_tensor(number, key, node))
    return found


def _tensor(number: int, key: str, node: Node) -> Chunks:
    what = f"tensor {printable(key)}"
    parts = attributes_of(node, names.TENSOR, _TENSOR, what)
    dtype, requires_grad = properties_of(parts.get("properties"), what)
    shape = size_of(parts.get("size"), f"the size of {what}")
    chunks = parts.get("chunks")
    if not isinstance(chunks, PList):
        raise malformed(f"the chunks of {what}", chunks, "a list")
    parts = [_columns(run, shape, what) for run in _runs(chunks.items)]
    if len(parts) == 1:
        return Chunks(number, key, dtype, shape, *parts[0], requires_grad)
    empty = np.empty((0, len(shape)), np.int64)
    offsets, sizes = (np.concatenate([empty, *(part[end] for part in parts)]) for end in (0, 1))
    return Chunks(number, key, dtype, shape, offsets, sizes, requires_grad)


def _runs(items: list[Node]) -> Iterator[ChunkRun | list[Node]]:
    """The chunks of a list: runs of them, and those between."""
    for regular, run in groupby(items, lambda item: isinstance(item, ChunkRun)):
        if regular:
            yield from run
        else:
            yield list(run)


def _columns(run: ChunkRun | list[Node], shape: tuple[int, ...], what: str) -> tuple[Column, Column]:
    if isinstance(run, ChunkRun):
        _check_dims(run.offsets.shape[1], shape, what)
        return run.offsets, run.sizes
    offsets: list[int] = []
    sizes: list[int] = []
    for chunk in run:
        ends = attributes_of(chunk, names.CHUNK, _CHUNK, f"a chunk of {what}")
        for end, numbers in (("offsets", offsets), ("sizes", sizes)):
            corner = size_of(ends.get(end), f"a chunk of {what}")
            _check_dims(len(corner), shape, what)
            numbers.extend(corner)
    box = len(run), len(shape)
    return np.array(offsets, np.int64).reshape(box), np.array(sizes, np.int64).reshape(box)


def _check_dims(dims: int, shape: tuple[int, ...], what: str) -> None:
    if dims != len(shape):
        raise SourceError("tensor.bad_extent", f"{what} has {len(shape)} dimensions, but a chunk of it {dims}")


# Reads `storage_data`: in which file, and where in it, the record of each chunk and value lies.
#
# Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`_StorageInfo`, whose state leaves
# `transform_descriptors` out if there are none; `FileSystemWriter.finish` collects the entries of all ranks, rank by
# rank), `distributed/checkpoint/_extension.py` (`StreamTransformExtension.get_descriptor`, such as `stream.zstd/1`).

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
            f"the checkpoint names the file {printable(path)!r}, which is not a plain path below its directory",
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


# Reads the whole of `.metadata`: with runs as columns, or as nodes alone where that gives up.

_VERSION = "1."
_STREAM_BYTES = "RESHARD_PICKLE_STREAM_BYTES"
_FIXES = {
    "pickle.too_large": _STREAM_BYTES,
    "pickle.too_much_work": "RESHARD_PICKLE_OPCODES",
    "pickle.too_much_memory": "RESHARD_PICKLE_NODE_BYTES",
}
"""The environment's variables that set the limits, by the code of the error."""
METADATA_BYTES = 2 << 30
"""Largest `.metadata` by default: twice that of 5,000 tensors on 1,024 ranks. Reading takes twice its size in memory.

Other pickles have a smaller limit, because each of their bytes may become sixty of nodes; runs of records become
columns that are smaller than the stream, and all that is not a run is bounded as in any pickle."""


def metadata_limits(environ: Mapping[str, str] = os.environ) -> PickleLimits:
    """The bounds for `.metadata`: those of all pickles, but for its size.

    Raises:
        RequestError: `request.invalid` for a value in the environment that is not a positive number.
    """
    limits = configured_limits(environ)
    return limits if _STREAM_BYTES in environ else replace(limits, stream_bytes=METADATA_BYTES)


def parse_metadata(data: bytes, name: str, *, limits: PickleLimits | None = None) -> Metadata:
    """The contents of a `.metadata` file.

    Args:
        data: The whole file.
        name: The file's name, for messages.
        limits: Bounds on work and memory; by default `metadata_limits`.

    Raises:
        SourceError: `pickle.*` for a bad pickle or one that names what no writer names; `checkpoint.malformed`,
            `checkpoint.incomplete`, `checkpoint.ambiguous`, `tensor.bad_extent`, `tensor.unsupported`, `name.invalid`,
            `source.unsupported_version`.
    """
    chosen = limits or metadata_limits()
    if len(data) > chosen.stream_bytes:
        message = f"{name} has {len(data)} bytes, the limit is {chosen.stream_bytes}"
        raise SourceError("pickle.too_large", message, fix=f"set {_STREAM_BYTES} to {len(data)} or more")
    try:
        parts = parts_with_runs(data, name, chosen)
    except SourceError as problem:
        # Runs are an abridgement: what is wrong, if anything is, the interpreter of all pickles says.
        try:
            parts = parts_of_nodes(data, name, chosen)
        except SourceError as error:
            if error.code not in _FIXES:
                raise error from None
            if not problem.code.startswith("pickle."):
                raise problem from None
            fix = f"if you trust its origin, set {_FIXES[error.code]} to more"
            raise SourceError(error.code, f"{name}: {error.message}", fix=fix) from None
    return metadata_of(parts)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a `.metadata`, checked each for itself."""

    keys: tuple[str, ...]
    tensors: list[Chunks]
    places: Places
    paths: dict[str, KeyPath] | None
    original_shapes: dict[str, tuple[int, ...]]
    counters: dict[str, int]
    buffers: frozenset[str] | None


def metadata_of(parts: Parts) -> Metadata:
    """The metadata from its parts.

    Raises:
        SourceError: as `matched`.
    """
    found = matched(parts.keys, parts.tensors, parts.places, paths=parts.paths, original_shapes=parts.original_shapes)
    return replace(found, counters=parts.counters, buffers=parts.buffers)


def parts_with_runs(data: bytes, name: str, limits: PickleLimits) -> Parts:
    """The parts, with runs of equal records read at once.

    Raises:
        SourceError: as `parts_of_nodes`, and for anything that is merely irregular.
    """
    ledger = OpaqueLedger(OpaquePolicy.KEEP)
    with collector_paused():
        root = RunMachine(data, ledger, limits).result()
    refuse_foreign_names(ledger, name)
    return _parts(root, name)


def parts_of_nodes(data: bytes, name: str, limits: PickleLimits) -> Parts:
    """The parts, from one node for every object.

    Raises:
        SourceError: as `parse_metadata`.
    """
    ledger = OpaqueLedger(OpaquePolicy.KEEP)
    root, _ = parse_pickle(data, ledger, limits=limits)
    refuse_foreign_names(ledger, name)
    return _parts(root, name)


def _parts(root: Node, name: str) -> Parts:
    if class_of(root) != names.METADATA or not root.has_state:
        raise malformed(name, root, "the Metadata of a distributed checkpoint")
    # Other attributes of the root, such as the plans of all ranks, describe nothing that a reader needs.
    state = mapping_items(root.state, what=f"the state of {name}")
    _check_version(state.get("version"), name)
    items = text_items(state.get("state_dict_metadata"), "state_dict_metadata")
    tensors = tensors_of(items)
    places = places_of(state.get("storage_data"), {key: number for number, key in enumerate(items)})
    paths, shapes = _paths(state.get("planner_data")), _original_shapes(state.get("mcore_data"))
    return Parts(tuple(items), tensors, places, paths, shapes, *_own(state.get(OWN_STATE)))


def _own(node: Node) -> tuple[dict[str, int], frozenset[str] | None]:
    """The counters and the keys of buffers in the attribute of our own writer."""
    found = {} if node is None else dict(text_items(node, OWN_STATE))
    listed = found.pop(BUFFERS, None)
    for key, value in found.items():
        if type(value) is not int or not 0 <= value < MAX_NUMBER:
            raise malformed(f"{printable(key)} of {OWN_STATE}", value, "a count")
    counters = {key: value for key, value in found.items() if isinstance(value, int)}
    if listed is None:
        return counters, None
    keys = sequence_items(listed, what=f"{BUFFERS} of {OWN_STATE}")
    return counters, frozenset(key_of(key, f"{BUFFERS} of {OWN_STATE}") for key in keys)


def _check_version(node: Node, name: str) -> None:
    if node is None:
        return
    if type(node) is not str:
        raise malformed(f"the version of {name}", node, "a text")
    if not node.startswith(_VERSION):
        raise SourceError(
            "source.unsupported_version",
            f"{name} has the version {printable(node, max_chars=60)}; versions 1.x are known",
        )


def _paths(node: Node) -> dict[str, KeyPath] | None:
    """The key paths of `planner_data`.

    Source: torch 2.13.0 `distributed/checkpoint/_nested_dict.py` (`flatten_state_dict`).
    """
    if node is None:
        return None
    return {key: _path(value, key) for key, value in text_items(node, "planner_data").items()}


def _path(node: Node, key: str) -> KeyPath:
    what = f"the path of {printable(key)} in planner_data"
    if not isinstance(node, PTuple) or not 0 < len(node.items) <= MAX_DIMS:
        raise malformed(what, node, "a tuple of keys")
    for part in node.items:
        text = type(part) is str and len(part) <= MAX_KEY_CHARS
        if not text and not (type(part) is int and -MAX_NUMBER < part < MAX_NUMBER):
            raise malformed(f"a part of {what}", part, "a printable text or a list index")
    return tuple(node.items)


def _original_shapes(node: Node) -> dict[str, tuple[int, ...]]:
    """The shapes in `mcore_data`, an attribute that Megatron adds.

    Source: megatron-core 0.5 to 0.14 `dist_checkpointing/strategies/torch.py` (`MCoreSavePlanner.create_global_plan`:
    a dict of dicts by key, each with `nd_reformulated_orig_global_shape` or empty).
    """
    found: dict[str, tuple[int, ...]] = {}
    for key, value in ({} if node is None else text_items(node, "mcore_data")).items():
        shape = mapping_items(value, what=f"mcore_data of {printable(key)}").get("nd_reformulated_orig_global_shape")
        if shape is not None:
            found[key] = size_of(shape, f"the original shape of {printable(key)}")
    return found
