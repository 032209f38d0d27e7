"""The pickle interpreter: opcodes to inert nodes, under bounds, importing and calling nothing.

Overriding `find_class` of Python's unpickler is no boundary (it hashes attacker values, allocates
gigabytes from eight bytes and crashes on deep keys), so this is an interpreter of its own. It
executes the data opcodes and records the code opcodes (GLOBAL, REDUCE, BUILD, ...) as data.

Source: CPython 3.11 `Lib/pickletools.py` (opcodes); torch 2.13.0 `torch/serialization.py`
(persistent ids of storages).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from reshard.errors import SourceError, printable

from reshard_engine.pickles import rebuild
from reshard_engine.pickles.limits import DEFAULT_LIMITS, PickleLimits
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PBytearray,
    PDict,
    PList,
    PObject,
    PSet,
    PStorage,
    PTensor,
    PTuple,
)
from reshard_engine.pickles.policy import OpaqueLedger, is_listed

_MARK = object()
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct(">d")
_CONTAINERS = (PList, PTuple, PDict, PSet, PObject)


def _bad(code: str, message: str) -> SourceError:
    return SourceError(f"pickle.{code}", message)


class PickleMachine:
    """Runs one pickle stream. Use `parse_pickle`; an instance serves one stream."""

    def __init__(self, data: bytes | memoryview, ledger: OpaqueLedger, limits: PickleLimits) -> None:
        if len(data) > limits.stream_bytes:
            raise _bad("too_large", f"the pickle has {len(data)} bytes, the limit is {limits.stream_bytes}")
        self._data = bytes(data)
        self._end = len(data)
        self._at = 0
        self._ledger = ledger
        self._limits = limits
        self._stack: list[Any] = []
        self._marks = 0
        self._memo: dict[int, Any] = {}
        self._cost_bytes = 0
        self._frame_end: int | None = None
        self._unlisted: dict[str, Global] = {}

    def run(self) -> tuple[Node, int]:
        """The value and the number of bytes read up to and including STOP."""
        data, end, budget = self._data, self._end, self._limits.opcodes
        for count in range(budget + 1):
            at = self._at
            if at >= end:
                raise _bad("truncated", f"the pickle ends after {count} opcodes without STOP")
            if self._frame_end is not None and at >= self._frame_end:
                if at > self._frame_end:
                    raise _bad("bad_frame", f"an opcode crosses the end of its frame at byte {self._frame_end}")
                self._frame_end = None
            opcode = data[at]
            self._at = at + 1
            if opcode == 0x2E:  # STOP
                return self._stop()
            if opcode == 0x80:
                self._proto(count)
                continue
            step = _DISPATCH[opcode]
            if step is None:
                raise _bad("unsupported_op", f"opcode 0x{opcode:02x} at byte {at}")
            step(self)
        raise _bad("too_much_work", f"more than {budget} opcodes")

    # -- reading ---------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        at = self._at
        if count > self._end - at:
            raise _bad("truncated", f"{count} bytes wanted at byte {at}, {self._end - at} left")
        self._at = at + count
        return self._data[at : at + count]

    def _text(self, count: int) -> bytes:
        if count > self._end - self._at:
            raise _bad("truncated", f"a text of {count} bytes at byte {self._at}, {self._end - self._at} left")
        if count > self._limits.text_bytes:
            raise _bad("too_large", f"a text of {count} bytes, the limit is {self._limits.text_bytes}")
        self._charge(count)
        return self._take(count)

    def _line(self) -> bytes:
        stop = self._data.find(b"\n", self._at, self._at + self._limits.line_bytes)
        if stop < 0:
            raise _bad("truncated", f"a line at byte {self._at} does not end within {self._limits.line_bytes} bytes")
        line = self._data[self._at : stop]
        self._at = stop + 1
        return line

    def _charge(self, count: int) -> None:
        self._cost_bytes += 64 + count
        if self._cost_bytes > self._limits.node_bytes:
            raise _bad("too_much_memory", f"the values take more than {self._limits.node_bytes} bytes")

    # -- stack -----------------------------------------------------------------------------------

    def _pop(self) -> Node:
        if not self._stack:
            raise _bad("malformed", f"stack underflow at byte {self._at}")
        value = self._stack.pop()
        if value is _MARK:
            raise _bad("malformed", f"a mark where a value was wanted at byte {self._at}")
        return value

    def _top(self) -> Node:
        if not self._stack or self._stack[-1] is _MARK:
            raise _bad("malformed", f"no value on the stack at byte {self._at}")
        return self._stack[-1]

    def _since_mark(self) -> list[Node]:
        stack = self._stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at] is _MARK:
                items = stack[at + 1 :]
                del stack[at:]
                self._marks -= 1
                return items
        raise _bad("malformed", f"no mark on the stack at byte {self._at}")

    def _push(self, value: Node, cost: int = 0) -> None:
        self._charge(cost)
        self._stack.append(value)

    def _depth(self, children: list[Node] | tuple[Node, ...]) -> int:
        depth = 1
        for child in children:
            if isinstance(child, _CONTAINERS) and child.depth >= depth:
                depth = child.depth + 1
        if depth > self._limits.value_depth:
            raise _bad("too_deep", f"values nested deeper than {self._limits.value_depth}")
        return depth

    def _deepen(self, parent: Any, children: list[Node]) -> None:
        depth = self._depth(children)
        if depth > parent.depth:
            parent.depth = depth

    # -- opcodes: framing, marks, memo -------------------------------------------------------------

    def _stop(self) -> tuple[Node, int]:
        value = self._pop()
        if self._stack:
            raise _bad("malformed", f"{len(self._stack)} values left on the stack at STOP")
        # Calls were met, with their own codes, when they happened; this is for names that are only mentioned.
        for name in self._unlisted.values():
            self._ledger.meet(name, code="pickle.forbidden_global")
        return value, self._at

    def _proto(self, count: int) -> None:
        version = self._take(1)[0]
        if count != 0 or version > 5:
            raise _bad("malformed", f"PROTO {version} as opcode number {count}")

    def _frame(self) -> None:
        length = _U64.unpack(self._take(8))[0]
        if self._frame_end is not None or length > self._end - self._at:
            raise _bad("bad_frame", f"a frame of {length} bytes at byte {self._at}, {self._end - self._at} left")
        self._frame_end = self._at + length

    def _mark(self) -> None:
        self._marks += 1
        if self._marks > self._limits.mark_depth:
            raise _bad("too_deep", f"more than {self._limits.mark_depth} open marks")
        self._stack.append(_MARK)

    def _pop_op(self) -> None:
        if not self._stack:
            raise _bad("malformed", "POP on an empty stack")
        if self._stack.pop() is _MARK:
            self._marks -= 1

    def _pop_mark(self) -> None:
        self._since_mark()

    def _dup(self) -> None:
        self._push(self._top())

    def _put(self, index: int) -> None:
        self._charge(0)
        self._memo[index] = self._top()

    def _put_text(self) -> None:
        line = self._line()
        if not line.isdigit() or len(line) > 10 or int(line) >= 1 << 32:
            raise _bad("bad_memo", f"PUT {printable(line)}")
        self._put(int(line))

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise _bad("bad_memo", f"GET of memo {index}, which was never set")
        self._push(self._memo[index])

    def _get_text(self) -> None:
        line = self._line()
        if not line.isdigit() or len(line) > 10:
            raise _bad("bad_memo", f"GET {printable(line)}")
        self._get(int(line))

    # -- opcodes: scalars --------------------------------------------------------------------------

    def _int_text(self) -> None:
        line = self._line()
        if line in (b"00", b"01"):
            self._push(line == b"01")
            return
        self._push(self._digits(line))

    def _long_text(self) -> None:
        line = self._line()
        self._push(self._digits(line.removesuffix(b"L")))

    def _digits(self, line: bytes) -> int:
        body = line[1:] if line[:1] in (b"-", b"+") else line
        if not body.isdigit() or len(body) > self._limits.digits:
            raise _bad("bad_number", f"an integer written as {printable(line)}")
        return int(line)

    def _long(self, count: int) -> None:
        if count < 0 or count > self._limits.long_bytes:
            raise _bad("bad_number", f"an integer of {count} bytes, the limit is {self._limits.long_bytes}")
        self._push(int.from_bytes(self._text(count), "little", signed=True))

    def _float_text(self) -> None:
        line = self._line()
        if len(line) > 64 or b"_" in line:
            raise _bad("bad_number", f"a float written as {printable(line)}")
        try:
            self._push(float(line))
        except ValueError:
            raise _bad("bad_number", f"a float written as {printable(line)}") from None

    def _utf8(self, raw: bytes) -> None:
        try:
            self._stack.append(raw.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise _bad("malformed", f"a text at byte {self._at} is not UTF-8") from None

    def _unicode_text(self) -> None:
        line = self._line()
        self._charge(len(line))
        try:
            self._stack.append(line.decode("raw-unicode-escape"))
        except UnicodeDecodeError:
            raise _bad("malformed", f"a text at byte {self._at} is not escaped Unicode") from None

    def _string_text(self) -> None:
        line = self._line().strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"') or b"\\" in line:
            raise _bad("malformed", f"a quoted string at byte {self._at} is not plain")
        self._charge(len(line))
        self._latin(line[1:-1])

    def _latin(self, raw: bytes) -> None:
        # Python 2 strings: ASCII stays text, anything else stays bytes.
        self._stack.append(raw.decode("ascii") if raw.isascii() else raw)

    def _binstring(self) -> None:
        count = _I32.unpack(self._take(4))[0]
        if count < 0:
            raise _bad("truncated", f"a string of {count} bytes")
        self._latin(self._text(count))

    # -- opcodes: containers -----------------------------------------------------------------------

    def _tuple_of(self, count: int) -> None:
        items = tuple(reversed([self._pop() for _ in range(count)]))
        self._push(PTuple(items, self._depth(items)), 8 * count)

    def _tuple(self) -> None:
        items = self._since_mark()
        self._push(PTuple(tuple(items), self._depth(items)), 8 * len(items))

    def _list(self) -> None:
        items = self._since_mark()
        self._push(PList(items, self._depth(items)), 8 * len(items))

    def _dict(self) -> None:
        items = self._since_mark()
        if len(items) % 2:
            raise _bad("type_confusion", "a dict from an odd number of values")
        self._push(PDict(items, self._depth(items)), 16 * len(items))

    def _frozenset(self) -> None:
        items = self._since_mark()
        self._push(PSet(items, frozen=True, depth=self._depth(items)), 8 * len(items))

    def _append(self) -> None:
        value = self._pop()
        self._extend([value])

    def _appends(self) -> None:
        self._extend(self._since_mark())

    def _extend(self, values: list[Node]) -> None:
        target = self._top()
        if isinstance(target, PList):
            target.items.extend(values)
        elif isinstance(target, PObject):
            target.appends.extend(values)
        else:
            raise _bad("type_confusion", f"APPEND to {type(target).__name__}")
        self._charge(8 * len(values))
        self._deepen(target, values)

    def _setitem(self) -> None:
        value = self._pop()
        key = self._pop()
        self._update([key, value])

    def _setitems(self) -> None:
        self._update(self._since_mark())

    def _update(self, pairs: list[Node]) -> None:
        if len(pairs) % 2:
            raise _bad("type_confusion", "SETITEMS with an odd number of values")
        target = self._top()
        if isinstance(target, PDict):
            target.pairs.extend(pairs)
        elif isinstance(target, PObject):
            target.items.extend(pairs)
        else:
            raise _bad("type_confusion", f"SETITEM on {type(target).__name__}")
        self._charge(16 * len(pairs))
        self._deepen(target, pairs)

    def _additems(self) -> None:
        values = self._since_mark()
        target = self._top()
        if not isinstance(target, PSet) or target.frozen:
            raise _bad("type_confusion", f"ADDITEMS to {type(target).__name__}")
        target.items.extend(values)
        self._charge(8 * len(values))
        self._deepen(target, values)

    # -- opcodes: names, calls, objects ------------------------------------------------------------

    def _name(self, module: object, name: object) -> Global:
        limits = self._limits
        for part in (module, name):
            if not isinstance(part, str) or not part or len(part) > limits.name_chars:
                raise _bad("forbidden_global", f"a name that is {printable(part)!r}")
            if part.count(".") >= limits.name_dots or not part.isascii() or not part.isprintable():
                raise _bad("forbidden_global", f"a name that is {printable(part)!r}")
        found = Global(str(module), str(name))
        if not is_listed(found):
            self._unlisted[found.dotted] = found
        return found

    def _global(self) -> None:
        try:
            module, name = self._line().decode("utf-8"), self._line().decode("utf-8")
        except UnicodeDecodeError:
            raise _bad("forbidden_global", f"a name at byte {self._at} is not UTF-8") from None
        self._push(self._name(module, name))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._push(self._name(module, name))

    def _checked_class(self, cls: Node, code: str) -> None:
        if not isinstance(cls, Global):
            raise _bad(code, f"a call of something that is not a name but {type(cls).__name__}")
        if not is_listed(cls):
            self._ledger.meet(cls, code=f"pickle.{code}")

    def _reduce(self) -> None:
        args, func = self._pop(), self._pop()
        self._checked_class(func, "forbidden_call")
        if not isinstance(args, PTuple):
            raise _bad("type_confusion", "REDUCE with arguments that are no tuple")
        self._push(rebuild.apply(func, args, self._limits), 64)

    def _newobj(self) -> None:
        args, cls = self._pop(), self._pop()
        self._object("newobj", cls, args, None)

    def _newobj_ex(self) -> None:
        kwargs, args, cls = self._pop(), self._pop(), self._pop()
        if not isinstance(kwargs, PDict):
            raise _bad("type_confusion", "NEWOBJ_EX with keyword arguments that are no dict")
        self._object("newobj_ex", cls, args, kwargs)

    def _object(self, how: str, cls: Node, args: Node, kwargs: Node) -> None:
        self._checked_class(cls, "forbidden_build")
        if not isinstance(args, PTuple):
            raise _bad("type_confusion", f"{how} with arguments that are no tuple")
        self._push(PObject(how, cls, args, kwargs, depth=self._depth([args, kwargs])), 128)

    def _inst(self) -> None:
        try:
            module, name = self._line().decode("utf-8"), self._line().decode("utf-8")
        except UnicodeDecodeError:
            raise _bad("forbidden_global", f"a name at byte {self._at} is not UTF-8") from None
        args = self._since_mark()
        self._object("inst", self._name(module, name), PTuple(tuple(args), self._depth(args)), None)

    def _obj(self) -> None:
        items = self._since_mark()
        if not items:
            raise _bad("malformed", "OBJ without a class")
        self._object("inst", items[0], PTuple(tuple(items[1:]), self._depth(items[1:])), None)

    def _build(self) -> None:
        state = self._pop()
        target = self._top()
        if isinstance(target, PTensor):
            # `_rebuild_from_type_v2` and hooks put attributes on tensors; none of them is data we carry.
            return
        if not isinstance(target, PObject):
            raise _bad("forbidden_build", f"BUILD on {type(target).__name__}")
        rebuild.check_state(target, state)
        target.state, target.has_state = state, True
        self._deepen(target, [state])

    def _binpersid(self) -> None:
        self._push(rebuild.storage_of(self._pop()), 64)

    def _forbidden_ext(self) -> None:
        raise _bad("ext_forbidden", "an extension registry code")

    def _forbidden_persid(self) -> None:
        raise _bad("bad_persistent_id", "a persistent id written as text")


def _table() -> list[Callable[[PickleMachine], None] | None]:
    m = PickleMachine
    take = m._take  # pyright: ignore[reportPrivateUsage]
    table: list[Callable[[PickleMachine], None] | None] = [None] * 256
    # fmt: off
    named: dict[bytes, Callable[[Any], None]] = {
        b"(": m._mark, b"0": m._pop_op, b"1": m._pop_mark, b"2": m._dup,
        b"N": lambda s: s._push(None), b"\x88": lambda s: s._push(True), b"\x89": lambda s: s._push(False),
        b"I": m._int_text, b"L": m._long_text, b"F": m._float_text,
        b"J": lambda s: s._push(_I32.unpack(take(s, 4))[0]), b"K": lambda s: s._push(take(s, 1)[0]),
        b"M": lambda s: s._push(_U16.unpack(take(s, 2))[0]), b"G": lambda s: s._push(_F64.unpack(take(s, 8))[0]),
        b"\x8a": lambda s: s._long(take(s, 1)[0]), b"\x8b": lambda s: s._long(_I32.unpack(take(s, 4))[0]),
        b"S": m._string_text, b"T": m._binstring, b"U": lambda s: s._latin(s._text(take(s, 1)[0])),
        b"V": m._unicode_text, b"X": lambda s: s._utf8(s._text(_U32.unpack(take(s, 4))[0])),
        b"\x8c": lambda s: s._utf8(s._text(take(s, 1)[0])),
        b"\x8d": lambda s: s._utf8(s._text(_U64.unpack(take(s, 8))[0])),
        b"B": lambda s: s._stack.append(s._text(_U32.unpack(take(s, 4))[0])),
        b"C": lambda s: s._stack.append(s._text(take(s, 1)[0])),
        b"\x8e": lambda s: s._stack.append(s._text(_U64.unpack(take(s, 8))[0])),
        b"\x96": lambda s: s._stack.append(PBytearray(s._text(_U64.unpack(take(s, 8))[0]))),
        b"]": lambda s: s._push(PList(), 56), b")": lambda s: s._push(PTuple(), 56), b"}": lambda s: s._push(PDict(), 64),
        b"\x8f": lambda s: s._push(PSet(), 64),
        b"\x85": lambda s: s._tuple_of(1), b"\x86": lambda s: s._tuple_of(2), b"\x87": lambda s: s._tuple_of(3),
        b"t": m._tuple, b"l": m._list, b"d": m._dict, b"\x91": m._frozenset,
        b"a": m._append, b"e": m._appends, b"s": m._setitem, b"u": m._setitems, b"\x90": m._additems,
        b"p": m._put_text, b"q": lambda s: s._put(take(s, 1)[0]), b"r": lambda s: s._put(_U32.unpack(take(s, 4))[0]),
        b"\x94": lambda s: s._put(len(s._memo)),
        b"g": m._get_text, b"h": lambda s: s._get(take(s, 1)[0]), b"j": lambda s: s._get(_U32.unpack(take(s, 4))[0]),
        b"c": m._global, b"\x93": m._stack_global, b"R": m._reduce, b"b": m._build, b"i": m._inst, b"o": m._obj,
        b"\x81": m._newobj, b"\x92": m._newobj_ex, b"Q": m._binpersid, b"P": m._forbidden_persid,
        b"\x82": m._forbidden_ext, b"\x83": m._forbidden_ext, b"\x84": m._forbidden_ext, b"\x95": m._frame,
    }
    # fmt: on
    for opcode, step in named.items():
        table[opcode[0]] = step
    return table


_DISPATCH = _table()


def parse_pickle(
    data: bytes | memoryview,
    ledger: OpaqueLedger,
    *,
    limits: PickleLimits = DEFAULT_LIMITS,
    allow_trailing: bool = False,
) -> tuple[Node, int]:
    """The value of a pickle as inert nodes, and the number of bytes the stream took.

    Args:
        data: The pickle, from its first byte.
        ledger: Policy for names that are not on the allow-list; collects them.
        limits: Bounds on work, memory and nesting.
        allow_trailing: Whether bytes may follow STOP (containers of several pickles).

    Raises:
        SourceError: `pickle.*` for anything malformed, hostile or beyond the limits.
    """
    value, used = PickleMachine(data, ledger, limits).run()
    if used != len(data) and not allow_trailing:
        raise _bad("trailing", f"{len(data) - used} bytes after the end of the pickle")
    if isinstance(value, PStorage):
        raise _bad("type_confusion", "the pickle is a bare storage")
    return value, used
