"""The pickle interpreter: turns opcodes into inert nodes, under bounds, and imports and calls nothing.

Overriding `find_class` of Python's unpickler is no security boundary: it hashes untrusted values, allocates gigabytes
from eight bytes and crashes on deep keys. Therefore this is an interpreter of its own. It
executes the data opcodes and records the code opcodes (GLOBAL, REDUCE, BUILD, ...) as data.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from reshard_engine.pickles import opcodes_objects as objects, opcodes_values as values
from reshard_engine.pickles.collector import collector_paused
from reshard_engine.pickles.limits import DEFAULT_LIMITS, PickleLimits
from reshard_engine.pickles.machine import COST_BYTES, MARK, PickleMachine, bad
from reshard_engine.pickles.nodes import Node, PBytearray, PDict, PList, PSet, PStorage, PTuple
from reshard_engine.pickles.policy import OpaqueLedger

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct(">d")
_STOP, _PROTO, _MARK, _BININT1 = 0x2E, 0x80, 0x28, 0x4B
_BINPUT, _LONG_BINPUT, _MEMOIZE, _BINGET = 0x71, 0x72, 0x94, 0x68
Step = Callable[[PickleMachine], None]


def _table() -> list[Step | None]:
    take = PickleMachine.take
    table: list[Step | None] = [None] * 256
    named: dict[bytes, Step] = {
        b"(": values.op_mark,
        b"0": values.op_pop_op,
        b"1": values.op_pop_mark,
        b"2": values.op_dup,
        b"N": lambda s: s.push(None),
        b"\x88": lambda s: s.push(True),
        b"\x89": lambda s: s.push(False),
        b"I": values.op_int_text,
        b"L": values.op_long_text,
        b"F": values.op_float_text,
        b"J": lambda s: s.push(_I32.unpack(take(s, 4))[0]),
        b"K": lambda s: s.push(take(s, 1)[0]),
        b"M": lambda s: s.push(_U16.unpack(take(s, 2))[0]),
        b"G": lambda s: s.push(_F64.unpack(take(s, 8))[0]),
        b"\x8a": lambda s: values.op_long(s, take(s, 1)[0]),
        b"\x8b": lambda s: values.op_long(s, _I32.unpack(take(s, 4))[0]),
        b"S": values.op_string_text,
        b"T": values.op_binstring,
        b"U": lambda s: values.op_latin(s, s.text(take(s, 1)[0])),
        b"V": values.op_unicode_text,
        b"X": values.op_binunicode,
        b"\x8c": lambda s: values.op_utf8(s, s.text(take(s, 1)[0])),
        b"\x8d": lambda s: values.op_utf8(s, s.text(_U64.unpack(take(s, 8))[0])),
        b"B": lambda s: s.stack.append(s.text(_U32.unpack(take(s, 4))[0])),
        b"C": lambda s: s.stack.append(s.text(take(s, 1)[0])),
        b"\x8e": lambda s: s.stack.append(s.text(_U64.unpack(take(s, 8))[0])),
        b"\x96": lambda s: s.stack.append(PBytearray(s.text(_U64.unpack(take(s, 8))[0]))),
        b"]": lambda s: s.push(PList(), 56),
        b")": lambda s: s.push(PTuple(), 56),
        b"}": lambda s: s.push(PDict(), 64),
        b"\x8f": lambda s: s.push(PSet(), 64),
        b"\x85": lambda s: objects.op_tuple_of(s, 1),
        b"\x86": lambda s: objects.op_tuple_of(s, 2),
        b"\x87": lambda s: objects.op_tuple_of(s, 3),
        b"t": objects.op_tuple,
        b"l": objects.op_list,
        b"d": objects.op_dict,
        b"\x91": objects.op_frozenset,
        b"a": objects.op_append,
        b"e": objects.op_appends,
        b"s": objects.op_setitem,
        b"u": objects.op_setitems,
        b"\x90": objects.op_additems,
        b"p": values.op_put_text,
        b"q": lambda s: values.op_put(s, take(s, 1)[0]),
        b"r": lambda s: values.op_put(s, _U32.unpack(take(s, 4))[0]),
        b"\x94": lambda s: values.op_put(s, len(s.memo)),
        b"g": values.op_get_text,
        b"h": lambda s: values.op_get(s, take(s, 1)[0]),
        b"j": lambda s: values.op_get(s, _U32.unpack(take(s, 4))[0]),
        b"c": objects.op_global,
        b"\x93": objects.op_stack_global,
        b"R": objects.op_reduce,
        b"b": objects.op_build,
        b"i": objects.op_inst,
        b"o": objects.op_obj,
        b"\x81": objects.op_newobj,
        b"\x92": objects.op_newobj_ex,
        b"Q": objects.op_binpersid,
        b"P": objects.op_forbidden_persid,
        b"\x82": objects.op_forbidden_ext,
        b"\x83": objects.op_forbidden_ext,
        b"\x84": objects.op_forbidden_ext,
        b"\x95": values.op_frame,
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
            values.leave_frame(m, count)
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
            return values.op_stop(m)
        if opcode == _PROTO:
            values.op_proto(m, count)
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
