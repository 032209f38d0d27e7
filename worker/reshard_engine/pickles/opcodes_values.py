"""Opcodes for frames, marks, the memo and scalars.

Source: CPython 3.11 `Lib/pickletools.py`.
"""

from __future__ import annotations

import struct

from reshard.errors import printable
from reshard_engine.pickles import attributes
from reshard_engine.pickles.machine import MARK, PickleMachine, bad
from reshard_engine.pickles.nodes import Global, Node

_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")

# -- opcodes: framing, marks, memo -------------------------------------------------------------


def op_stop(m: PickleMachine) -> tuple[Node, int]:
    """STOP: the one remaining value, and the end of the stream."""
    value = m.pop()
    if m.stack:
        raise bad("malformed", f"{len(m.stack)} values left on the stack at STOP")
    # Names that are called were checked at their calls. This checks names that are only mentioned.
    if m.names_getattr and attributes.is_mentioned(value):
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
