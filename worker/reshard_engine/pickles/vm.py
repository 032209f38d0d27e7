"""The pickle interpreter: turns opcodes into inert nodes, under bounds, and imports and calls nothing.

Overriding `find_class` of Python's unpickler is not a security boundary: it hashes untrusted values, allocates
gigabytes from eight bytes and crashes on deep keys. Therefore this is an interpreter of its own. It executes
the data opcodes and records the code opcodes (GLOBAL, REDUCE, BUILD, ...) as data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from reshard.errors import SourceError, printable
from reshard_engine.pickles import policy, rebuild
from reshard_engine.pickles.nodes import (
    DEFAULT_LIMITS,
    Global,
    Node,
    PBytearray,
    PDict,
    PickleLimits,
    PList,
    PObject,
    PSet,
    PStorage,
    PTensor,
    PTuple,
    collector_paused,
)
from reshard_engine.pickles.policy import OpaqueLedger, is_listed

# The bounded state of a run of the pickle interpreter: position, stack, memo and costs.

MARK = object()
COST_BYTES = 64
"""Bytes that every value counts, in addition to its content."""
CONTAINERS = frozenset((PList, PTuple, PDict, PSet, PObject))


def bad(code: str, message: str) -> SourceError:
    """The error `pickle.<code>`."""
    return SourceError(f"pickle.{code}", message)


class PickleMachine:
    """The state of one run over one stream: reading position, stack, memo, and the costs so far."""

    __slots__ = (
        "_extra_work", "at", "boundary", "cost_bytes", "cost_limit", "data", "end", "in_frame", "ledger", "limits",
        "marks", "memo", "names_getattr", "stack", "storages", "unlisted",
    )  # fmt: skip

    def __init__(self, data: bytes | memoryview, ledger: OpaqueLedger, limits: PickleLimits) -> None:
        if len(data) > limits.stream_bytes:
            raise bad("too_large", f"the pickle has {len(data)} bytes, the limit is {limits.stream_bytes}")
        self.data = bytes(data)
        self.end = len(data)
        self.at = 0
        self.boundary = self.end
        """The end of the frame, or of the stream if there is no frame. An opcode beyond it needs a check."""
        self.in_frame = False
        self.ledger = ledger
        self.limits = limits
        self.stack: list[Any] = []
        self.marks: list[int] = []
        """The positions of the marks in the stack. No opcode takes values from below an open mark."""
        self.memo: dict[int, Any] = {}
        self.cost_bytes = 0
        self.cost_limit = limits.node_bytes
        self.unlisted: dict[str, Global] = {}
        self.names_getattr = False
        self.storages: dict[str, tuple[str, int]] = {}
        self._extra_work = 0

    def take(self, count: int) -> bytes:
        """The next bytes, exactly so many."""
        at = self.at
        if count > self.end - at:
            raise bad("truncated", f"{count} bytes wanted at byte {at}, {self.end - at} left")
        self.at = at + count
        return self.data[at : at + count]

    def text(self, count: int) -> bytes:
        """The bytes of a text whose length the stream states."""
        if count > self.end - self.at:
            raise bad("truncated", f"a text of {count} bytes at byte {self.at}, {self.end - self.at} left")
        if count > self.limits.text_bytes:
            raise bad("too_large", f"a text of {count} bytes, the limit is {self.limits.text_bytes}")
        self.charge(count)
        at = self.at
        self.at = at + count
        return self.data[at : at + count]

    def line(self) -> bytes:
        """The bytes up to the next newline."""
        stop = self.data.find(b"\n", self.at, self.at + self.limits.line_bytes)
        if stop < 0:
            raise bad("truncated", f"a line at byte {self.at} does not end within {self.limits.line_bytes} bytes")
        line = self.data[self.at : stop]
        self.at = stop + 1
        return line

    def charge(self, count: int) -> None:
        """Count the memory that a value takes."""
        self.cost_bytes += COST_BYTES + count
        if self.cost_bytes > self.cost_limit:
            raise self._overspent()

    def _overspent(self) -> SourceError:
        return bad("too_much_memory", f"the values take more than {self.cost_limit} bytes")

    def work(self, count: int) -> None:
        """Count additional steps of an opcode, such as a check of every argument."""
        self._extra_work += count
        if self._extra_work > self.limits.opcodes:
            raise bad("too_much_work", f"more than {self.limits.opcodes} steps inside opcodes")

    def pop(self) -> Node:
        """The value on top, removed."""
        if not self.stack:
            raise bad("malformed", f"stack underflow at byte {self.at}")
        value = self.stack.pop()
        if value is MARK:
            raise bad("malformed", f"a mark where a value was wanted at byte {self.at}")
        return value

    def top(self) -> Node:
        """The value on top."""
        if not self.stack or self.stack[-1] is MARK:
            raise bad("malformed", f"no value on the stack at byte {self.at}")
        return self.stack[-1]

    def since_mark(self) -> list[Node]:
        """The values above the last mark, removed with it."""
        if not self.marks:
            raise bad("malformed", f"no mark on the stack at byte {self.at}")
        mark = self.marks.pop()
        items = self.stack[mark + 1 :]
        del self.stack[mark:]
        return items

    def push(self, value: Node, cost: int = 0) -> None:
        """Put a value on the stack."""
        self.cost_bytes += COST_BYTES + cost
        if self.cost_bytes > self.cost_limit:
            raise self._overspent()
        self.stack.append(value)

    def depth(self, children: list[Node] | tuple[Node, ...]) -> int:
        """The depth of a container with these children."""
        depth = 1
        for child in children:
            if type(child) in CONTAINERS and child.depth >= depth:
                depth = child.depth + 1
        if depth > self.limits.value_depth:
            raise bad("too_deep", f"values nested deeper than {self.limits.value_depth}")
        return depth

    def deepen(self, parent: Any, children: list[Node]) -> None:
        """Update the depth of a container that got more children."""
        depth = self.depth(children)
        parent.depth = max(parent.depth, depth)


# Opcodes for frames, marks, the memo and scalars.
#
# Source: CPython 3.11 `Lib/pickletools.py`.

_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")

# Frames, marks and the memo.


def op_stop(m: PickleMachine) -> tuple[Node, int]:
    """STOP: the one remaining value, and the end of the stream."""
    value = m.pop()
    if m.stack:
        raise bad("malformed", f"{len(m.stack)} values left on the stack at STOP")
    # Names that are called were checked at their calls. This checks names that are only mentioned.
    if m.names_getattr and rebuild.is_mentioned(value):
        m.unlisted["getattr"] = Global("builtins", "getattr")
    for name in m.unlisted.values():
        m.ledger.meet(name, code="pickle.forbidden_global")
    return value, m.at


def op_proto(m: PickleMachine, count: int) -> None:
    """PROTO: known version, first opcode only."""
    version = m.take(1)[0]
    if count != 0 or version > 5:
        raise bad("malformed", f"PROTO {version} as opcode number {count}")


def op_frame(m: PickleMachine) -> None:
    """FRAME: inside the stream, not nested."""
    length = _U64.unpack(m.take(8))[0]
    if m.in_frame or length > m.end - m.at:
        raise bad("bad_frame", f"a frame of {length} bytes at byte {m.at}, {m.end - m.at} left")
    m.in_frame, m.boundary = True, m.at + length


def leave_frame(m: PickleMachine, count: int) -> None:
    """Check the end of a stream or frame: it must lie between two opcodes."""
    if m.at >= m.end:
        raise bad("truncated", f"the pickle ends after {count} opcodes without STOP")
    if m.at > m.boundary:
        raise bad("bad_frame", f"an opcode crosses the end of its frame at byte {m.boundary}")
    m.in_frame, m.boundary = False, m.end


def op_mark(m: PickleMachine) -> None:
    """MARK."""
    m.marks.append(len(m.stack))
    if len(m.marks) > m.limits.mark_depth:
        raise bad("too_deep", f"more than {m.limits.mark_depth} open marks")
    m.stack.append(MARK)


def op_pop_op(m: PickleMachine) -> None:
    """POP."""
    if not m.stack:
        raise bad("malformed", "POP on an empty stack")
    if m.stack.pop() is MARK:
        m.marks.pop()


def op_pop_mark(m: PickleMachine) -> None:
    """POP_MARK."""
    m.since_mark()


def op_dup(m: PickleMachine) -> None:
    """DUP."""
    m.push(m.top())


def op_put(m: PickleMachine, index: int) -> None:
    """Store the top value in the memo."""
    m.charge(0)
    m.memo[index] = m.top()


def op_put_text(m: PickleMachine) -> None:
    """PUT."""
    line = m.line()
    if not line.isdigit() or len(line) > 10 or int(line) >= 1 << 32:
        raise bad("bad_memo", f"PUT {printable(line)}")
    op_put(m, int(line))


def op_get(m: PickleMachine, index: int) -> None:
    """Push a value of the memo."""
    if index not in m.memo:
        raise bad("bad_memo", f"GET of memo {index}, which was never set")
    m.push(m.memo[index])


def op_get_text(m: PickleMachine) -> None:
    """GET."""
    line = m.line()
    if not line.isdigit() or len(line) > 10:
        raise bad("bad_memo", f"GET {printable(line)}")
    op_get(m, int(line))


# Scalars.


def op_int_text(m: PickleMachine) -> None:
    """INT, with the two spellings of booleans."""
    line = m.line()
    if line in (b"00", b"01"):
        m.push(line == b"01")
        return
    m.push(op_digits(m, line))


def op_long_text(m: PickleMachine) -> None:
    """LONG."""
    line = m.line()
    m.push(op_digits(m, line.removesuffix(b"L")))


def op_digits(m: PickleMachine, line: bytes) -> int:
    """A decimal integer of bounded length."""
    body = line[1:] if line[:1] in (b"-", b"+") else line
    if not body.isdigit() or len(body) > m.limits.digits:
        raise bad("bad_number", f"an integer written as {printable(line)}")
    return int(line)


def op_long(m: PickleMachine, count: int) -> None:
    """LONG1, LONG4: little-endian two's complement."""
    if count < 0 or count > m.limits.long_bytes:
        raise bad("bad_number", f"an integer of {count} bytes, the limit is {m.limits.long_bytes}")
    m.push(int.from_bytes(m.text(count), "little", signed=True))


def op_float_text(m: PickleMachine) -> None:
    """FLOAT."""
    line = m.line()
    if len(line) > 64 or b"_" in line:
        raise bad("bad_number", f"a float written as {printable(line)}")
    try:
        m.push(float(line))
    except ValueError:
        raise bad("bad_number", f"a float written as {printable(line)}") from None


def op_utf8(m: PickleMachine, raw: bytes) -> None:
    """Push a text."""
    try:
        m.stack.append(raw.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        raise bad("malformed", f"a text at byte {m.at} is not UTF-8") from None


def op_binunicode(m: PickleMachine) -> None:
    """BINUNICODE."""
    op_utf8(m, m.text(_U32.unpack(m.take(4))[0]))


def op_unicode_text(m: PickleMachine) -> None:
    """UNICODE."""
    line = m.line()
    m.charge(len(line))
    try:
        m.stack.append(line.decode("raw-unicode-escape"))
    except UnicodeDecodeError:
        raise bad("malformed", f"a text at byte {m.at} is not escaped Unicode") from None


def op_string_text(m: PickleMachine) -> None:
    """STRING without escapes."""
    line = m.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"') or b"\\" in line:
        raise bad("malformed", f"a quoted string at byte {m.at} is not plain")
    m.charge(len(line))
    op_latin(m, line[1:-1])


def op_latin(m: PickleMachine, raw: bytes) -> None:
    """Push a Python 2 string."""
    # Python 2 strings: ASCII stays text, anything else stays bytes.
    m.stack.append(raw.decode("ascii") if raw.isascii() else raw)


def op_binstring(m: PickleMachine) -> None:
    """BINSTRING, whose length is signed."""
    count = _I32.unpack(m.take(4))[0]
    if count < 0:
        raise bad("truncated", f"a string of {count} bytes")
    op_latin(m, m.text(count))


# Opcodes that build containers, and opcodes that name, call and instantiate, which are only recorded as data.
#
# Source: CPython 3.11 `Lib/pickletools.py`; torch 2.13.0 `torch/serialization.py` (persistent ids).


# Containers.


def op_tuple_of(m: PickleMachine, count: int) -> None:
    """TUPLE1 to TUPLE3."""
    items = tuple(m.stack[-count:])
    if len(items) != count or MARK in items:
        for _ in range(count):
            m.pop()  # One of these raises.
    del m.stack[-count:]
    m.push(PTuple(items, m.depth(items)), 8 * count)


def op_tuple(m: PickleMachine) -> None:
    """TUPLE."""
    items = tuple(m.since_mark())
    m.push(PTuple(items, m.depth(items)), 8 * len(items))


def op_list(m: PickleMachine) -> None:
    """LIST."""
    items = m.since_mark()
    m.push(PList(items, m.depth(items)), 8 * len(items))


def op_dict(m: PickleMachine) -> None:
    """DICT."""
    items = m.since_mark()
    if len(items) % 2:
        raise bad("type_confusion", "a dict from an odd number of values")
    m.push(PDict(items, m.depth(items)), 16 * len(items))


def op_frozenset(m: PickleMachine) -> None:
    """FROZENSET."""
    items = m.since_mark()
    m.push(PSet(items, frozen=True, depth=m.depth(items)), 8 * len(items))


def op_append(m: PickleMachine) -> None:
    """APPEND."""
    value = m.pop()
    op_extend(m, [value])


def op_appends(m: PickleMachine) -> None:
    """APPENDS."""
    op_extend(m, m.since_mark())


def op_extend(m: PickleMachine, values: list[Node]) -> None:
    """Add values to a list, or to an object that takes them."""
    target = m.top()
    if isinstance(target, PList):
        target.items.extend(values)
    elif isinstance(target, PObject):
        target.appends.extend(values)
    else:
        raise bad("type_confusion", f"APPEND to {type(target).__name__}")
    m.charge(8 * len(values))
    m.deepen(target, values)


def op_setitem(m: PickleMachine) -> None:
    """SETITEM."""
    value = m.pop()
    key = m.pop()
    op_update(m, [key, value])


def op_setitems(m: PickleMachine) -> None:
    """SETITEMS."""
    op_update(m, m.since_mark())


def op_update(m: PickleMachine, pairs: list[Node]) -> None:
    """Add pairs to a dict, or to an object that takes them."""
    if len(pairs) % 2:
        raise bad("type_confusion", "SETITEMS with an odd number of values")
    target = m.top()
    if isinstance(target, PDict):
        target.pairs.extend(pairs)
    elif isinstance(target, PObject):
        target.items.extend(pairs)
    else:
        raise bad("type_confusion", f"SETITEM on {type(target).__name__}")
    m.charge(16 * len(pairs))
    m.deepen(target, pairs)


def op_additems(m: PickleMachine) -> None:
    """ADDITEMS."""
    values = m.since_mark()
    target = m.top()
    if not isinstance(target, PSet) or target.frozen:
        raise bad("type_confusion", f"ADDITEMS to {type(target).__name__}")
    target.items.extend(values)
    m.charge(8 * len(values))
    m.deepen(target, values)


# Names, calls, objects: recorded as data.


def op_name(m: PickleMachine, module: object, name: object) -> Global:
    """A checked name; never imported."""
    limits = m.limits
    for part in (module, name):
        if not isinstance(part, str) or not part or len(part) > limits.name_chars:
            raise bad("forbidden_global", f"a name that is {printable(part)!r}")
        if part.count(".") >= limits.name_dots or not part.isascii() or not all(map(str.isidentifier, part.split("."))):
            raise bad("forbidden_global", f"a name that is {printable(part)!r}")
    found = Global(str(module), str(name))
    if found.dotted in rebuild.GETATTR:
        m.names_getattr = True
    elif not is_listed(found):
        m.unlisted[found.dotted] = found
        if len(m.unlisted) > limits.foreign_names:
            raise bad("too_much_work", f"more than {limits.foreign_names} names that are not on the allow-list")
    return found


def op_name_lines(m: PickleMachine) -> tuple[str, str]:
    """The module and the name of a global, from two lines."""
    try:
        return m.line().decode("utf-8"), m.line().decode("utf-8")
    except UnicodeDecodeError:
        raise bad("forbidden_global", f"a name at byte {m.at} is not UTF-8") from None


def op_global(m: PickleMachine) -> None:
    """GLOBAL."""
    m.push(op_name(m, *op_name_lines(m)))


def op_stack_global(m: PickleMachine) -> None:
    """STACK_GLOBAL."""
    name, module = m.pop(), m.pop()
    m.push(op_name(m, module, name))


def op_checked_class(m: PickleMachine, cls: Node, code: str) -> None:
    """Refuse or record a callee that is not on the allow-list."""
    if not isinstance(cls, Global):
        raise bad(code, f"a call of something that is not a name but {type(cls).__name__}")
    if not is_listed(cls):
        m.ledger.meet(cls, code=f"pickle.{code}")


def op_reduce(m: PickleMachine) -> None:
    """REDUCE."""
    args, func = m.pop(), m.pop()
    if isinstance(func, Global) and func.dotted in rebuild.GETATTR and isinstance(args, PTuple):
        m.push(op_attribute(m, func, args), 128)
        return
    op_checked_class(m, func, "forbidden_call")
    if not isinstance(args, PTuple):
        raise bad("type_confusion", "REDUCE with arguments that are not a tuple")
    m.work(len(args.items))
    result = rebuild.apply(func, args, m.limits)
    if type(result) is not PTensor and (steps := policy.steps_of(result)):
        m.work(steps)
        m.charge(8 * steps)
    m.push(result, 64)


def op_attribute(m: PickleMachine, func: Global, args: PTuple) -> Node:
    """REDUCE of `getattr`: an enum's member, a name within a named class, or an opaque object by policy."""
    owner, name = rebuild.checked_arguments(args)
    if isinstance(owner, Global):
        return rebuild.member(owner, name) or op_name(m, owner.module, f"{owner.name}.{name}")
    # Pickle writes bound methods in this form.
    op_checked_class(m, func, "forbidden_call")
    return PObject("reduce", func, args, depth=args.depth + 1)


def op_newobj(m: PickleMachine) -> None:
    """NEWOBJ."""
    args, cls = m.pop(), m.pop()
    op_object(m, "newobj", cls, args, None)


def op_newobj_ex(m: PickleMachine) -> None:
    """NEWOBJ_EX."""
    kwargs, args, cls = m.pop(), m.pop(), m.pop()
    if not isinstance(kwargs, PDict):
        raise bad("type_confusion", "NEWOBJ_EX with keyword arguments that are not a dict")
    op_object(m, "newobj_ex", cls, args, kwargs)


def op_object(m: PickleMachine, how: str, cls: Node, args: Node, kwargs: Node) -> None:
    """Push an object node."""
    op_checked_class(m, cls, "forbidden_build")
    if not isinstance(args, PTuple):
        raise bad("type_confusion", f"{how} with arguments that are not a tuple")
    if isinstance(cls, Global):
        rebuild.check_instance(cls, args)
    m.push(PObject(how, cls, args, kwargs, depth=m.depth([args, kwargs])), 128)


def op_inst(m: PickleMachine) -> None:
    """INST."""
    module, name = op_name_lines(m)
    args = m.since_mark()
    op_object(m, "inst", op_name(m, module, name), PTuple(tuple(args), m.depth(args)), None)


def op_obj(m: PickleMachine) -> None:
    """OBJ."""
    items = m.since_mark()
    if not items:
        raise bad("malformed", "OBJ without a class")
    op_object(m, "inst", items[0], PTuple(tuple(items[1:]), m.depth(items[1:])), None)


def op_build(m: PickleMachine) -> None:
    """BUILD."""
    state = m.pop()
    target = m.top()
    if isinstance(target, PTensor):
        # `_rebuild_from_type_v2` and hooks set attributes on tensors. None of them is written to a target.
        return
    if not isinstance(target, PObject):
        raise bad("forbidden_build", f"BUILD on {type(target).__name__}")
    m.work(rebuild.check_state(target, state))
    target.state, target.has_state = state, True
    m.deepen(target, [state])


def op_binpersid(m: PickleMachine) -> None:
    """BINPERSID: a storage.

    torch refuses to save one storage as two types, and would load the second reference as the first one's type.
    """
    storage = rebuild.storage_of(m.pop())
    kind = (storage.dtype, storage.root_numel)
    if m.storages.setdefault(storage.key, kind) != kind:
        raise SourceError("tensor.bad_extent", f"storage {printable(storage.key)} has two types or sizes")
    m.push(storage, 64)


def op_forbidden_ext(m: PickleMachine) -> None:
    """EXT1, EXT2, EXT4."""
    raise bad("ext_forbidden", "an extension registry code")


def op_forbidden_persid(m: PickleMachine) -> None:
    """PERSID."""
    raise bad("bad_persistent_id", "a persistent id written as text")


# The table of all opcodes, and the loop that runs them.

_U16 = struct.Struct("<H")
_F64 = struct.Struct(">d")
_STOP, _PROTO, _MARK, _BININT1 = 0x2E, 0x80, 0x28, 0x4B
_BINPUT, _LONG_BINPUT, _MEMOIZE, _BINGET = 0x71, 0x72, 0x94, 0x68
Step = Callable[[PickleMachine], None]


def _table() -> list[Step | None]:
    take = PickleMachine.take
    table: list[Step | None] = [None] * 256
    named: dict[bytes, Step] = {
        b"(": op_mark,
        b"0": op_pop_op,
        b"1": op_pop_mark,
        b"2": op_dup,
        b"N": lambda s: s.push(None),
        b"\x88": lambda s: s.push(True),
        b"\x89": lambda s: s.push(False),
        b"I": op_int_text,
        b"L": op_long_text,
        b"F": op_float_text,
        b"J": lambda s: s.push(_I32.unpack(take(s, 4))[0]),
        b"K": lambda s: s.push(take(s, 1)[0]),
        b"M": lambda s: s.push(_U16.unpack(take(s, 2))[0]),
        b"G": lambda s: s.push(_F64.unpack(take(s, 8))[0]),
        b"\x8a": lambda s: op_long(s, take(s, 1)[0]),
        b"\x8b": lambda s: op_long(s, _I32.unpack(take(s, 4))[0]),
        b"S": op_string_text,
        b"T": op_binstring,
        b"U": lambda s: op_latin(s, s.text(take(s, 1)[0])),
        b"V": op_unicode_text,
        b"X": op_binunicode,
        b"\x8c": lambda s: op_utf8(s, s.text(take(s, 1)[0])),
        b"\x8d": lambda s: op_utf8(s, s.text(_U64.unpack(take(s, 8))[0])),
        b"B": lambda s: s.stack.append(s.text(_U32.unpack(take(s, 4))[0])),
        b"C": lambda s: s.stack.append(s.text(take(s, 1)[0])),
        b"\x8e": lambda s: s.stack.append(s.text(_U64.unpack(take(s, 8))[0])),
        b"\x96": lambda s: s.stack.append(PBytearray(s.text(_U64.unpack(take(s, 8))[0]))),
        b"]": lambda s: s.push(PList(), 56),
        b")": lambda s: s.push(PTuple(), 56),
        b"}": lambda s: s.push(PDict(), 64),
        b"\x8f": lambda s: s.push(PSet(), 64),
        b"\x85": lambda s: op_tuple_of(s, 1),
        b"\x86": lambda s: op_tuple_of(s, 2),
        b"\x87": lambda s: op_tuple_of(s, 3),
        b"t": op_tuple,
        b"l": op_list,
        b"d": op_dict,
        b"\x91": op_frozenset,
        b"a": op_append,
        b"e": op_appends,
        b"s": op_setitem,
        b"u": op_setitems,
        b"\x90": op_additems,
        b"p": op_put_text,
        b"q": lambda s: op_put(s, take(s, 1)[0]),
        b"r": lambda s: op_put(s, _U32.unpack(take(s, 4))[0]),
        b"\x94": lambda s: op_put(s, len(s.memo)),
        b"g": op_get_text,
        b"h": lambda s: op_get(s, take(s, 1)[0]),
        b"j": lambda s: op_get(s, _U32.unpack(take(s, 4))[0]),
        b"c": op_global,
        b"\x93": op_stack_global,
        b"R": op_reduce,
        b"b": op_build,
        b"i": op_inst,
        b"o": op_obj,
        b"\x81": op_newobj,
        b"\x92": op_newobj_ex,
        b"Q": op_binpersid,
        b"P": op_forbidden_persid,
        b"\x82": op_forbidden_ext,
        b"\x83": op_forbidden_ext,
        b"\x84": op_forbidden_ext,
        b"\x95": op_frame,
    }
    for opcode, step in named.items():
        table[opcode[0]] = step
    return table


_DISPATCH = _table()


def _run(m: PickleMachine) -> tuple[Node, int]:  # noqa: C901, PLR0912, PLR0915 - a loop of short cuts, see below
    """The value and the number of bytes read up to and including STOP.

    Two of three opcodes of a real checkpoint store a memo value, get one, open a mark or push a small integer. These
    run inline, without a call and on local variables, if they are valid. All other opcodes, and invalid ones, are left
    to their step of the table: only steps raise errors.
    """
    data, end, budget = m.data, m.end, m.limits.opcodes
    stack, memo, marks = m.stack, m.memo, m.marks
    dearest, mark_depth = m.cost_limit - COST_BYTES, m.limits.mark_depth
    at, cost, boundary = m.at, m.cost_bytes, m.boundary
    for count in range(budget + 1):
        if at >= boundary:
            m.at = at
            leave_frame(m, count)
            boundary = m.boundary
        opcode = data[at]
        at += 1
        if not stack or cost > dearest:
            pass
        elif opcode == _LONG_BINPUT and at + 4 <= end and stack[-1] is not MARK:
            memo[_U32.unpack_from(data, at)[0]] = stack[-1]
            at += 4
            cost += COST_BYTES
            continue
        elif opcode == _BINGET and at < end and data[at] in memo:
            stack.append(memo[data[at]])
            at += 1
            cost += COST_BYTES
            continue
        elif opcode == _BININT1 and at < end:
            stack.append(data[at])
            at += 1
            cost += COST_BYTES
            continue
        elif opcode == _MARK and len(marks) < mark_depth:
            marks.append(len(stack))
            stack.append(MARK)
            continue
        elif opcode == _BINPUT and at < end and stack[-1] is not MARK:
            memo[data[at]] = stack[-1]
            at += 1
            cost += COST_BYTES
            continue
        elif opcode == _MEMOIZE and stack[-1] is not MARK:
            memo[len(memo)] = stack[-1]
            cost += COST_BYTES
            continue
        m.at, m.cost_bytes = at, cost
        if opcode == _STOP:
            return op_stop(m)
        if opcode == _PROTO:
            op_proto(m, count)
        else:
            step = _DISPATCH[opcode]
            if step is None:
                raise bad("unsupported_op", f"opcode 0x{opcode:02x} at byte {at - 1}")
            step(m)
        at, cost, boundary = m.at, m.cost_bytes, m.boundary
    raise bad("too_much_work", f"more than {budget} opcodes")


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
        allow_trailing: True if bytes may follow STOP (containers of several pickles).

    Raises:
        SourceError: `pickle.*` for anything malformed, hostile or beyond the limits.
    """
    with collector_paused():
        value, used = _run(PickleMachine(data, ledger, limits))
    if used != len(data) and not allow_trailing:
        raise bad("trailing", f"{len(data) - used} bytes after the end of the pickle")
    if isinstance(value, PStorage):
        raise bad("type_confusion", "the pickle is a bare storage")
    return value, used
