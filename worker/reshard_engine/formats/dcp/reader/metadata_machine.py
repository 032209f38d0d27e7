"""Interprets the pickle of a `.metadata` with its runs of equal records left as columns.

It is stricter than the interpreter of all pickles, and never laxer: whatever it does not know, it gives up on, and the
whole stream is interpreted anew without runs. Both import nothing and call nothing.

Source: CPython 3.11 `Modules/_pickle.c`, protocols 4 and 5 (MEMOIZE numbers the memo; no writer of DCP chooses another
protocol than Python's default, 4 since Python 3.8).
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace

from reshard_engine.formats.dcp.reader import metadata_names as names
from reshard_engine.formats.dcp.reader.metadata_chunk_runs import chunk_run
from reshard_engine.formats.dcp.reader.metadata_cursor import Window
from reshard_engine.formats.dcp.reader.metadata_place_runs import PlaceReader, PlaceRun
from reshard_engine.formats.dcp.reader.metadata_plan_runs import plan_run
from reshard_engine.formats.dcp.reader.metadata_runs import ATTRIBUTES, CLASSES, Run
from reshard_engine.formats.dcp.reader.metadata_tensor_runs import TensorReader, TensorRun
from reshard_engine.pickles import opcodes_objects as objects, opcodes_values as values
from reshard_engine.pickles.limits import PickleLimits
from reshard_engine.pickles.machine import CONTAINERS, PickleMachine, bad
from reshard_engine.pickles.nodes import Global, Node, PDict, PList, PTuple
from reshard_engine.pickles.policy import OpaqueLedger

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
