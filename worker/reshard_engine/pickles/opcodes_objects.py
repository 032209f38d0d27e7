"""Opcodes that build containers, and opcodes that name, call and instantiate, which are only recorded as data.

Source: CPython 3.11 `Lib/pickletools.py`; torch 2.13.0 `torch/serialization.py` (persistent ids).
"""

from __future__ import annotations

from reshard.errors import SourceError, printable
from reshard_engine.pickles import attributes, calls, rebuild, stdlib
from reshard_engine.pickles.machine import MARK, PickleMachine, bad
from reshard_engine.pickles.nodes import Global, Node, PDict, PList, PObject, PSet, PTensor, PTuple
from reshard_engine.pickles.policy import is_listed

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
    if found.dotted in attributes.GETATTR:
        m.names_getattr = True
    elif not is_listed(found):
        m.unlisted[found.dotted] = found
        if len(m.unlisted) > limits.foreign_names:
            raise bad("too_much_work", f"more than {limits.foreign_names} names that are not on the allow-list")
    return found


def op_global(m: PickleMachine) -> None:
    """GLOBAL."""
    try:
        module, name = m.line().decode("utf-8"), m.line().decode("utf-8")
    except UnicodeDecodeError:
        raise bad("forbidden_global", f"a name at byte {m.at} is not UTF-8") from None
    m.push(op_name(m, module, name))


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
    if isinstance(func, Global) and func.dotted in attributes.GETATTR and isinstance(args, PTuple):
        m.push(op_attribute(m, func, args), 128)
        return
    op_checked_class(m, func, "forbidden_call")
    if not isinstance(args, PTuple):
        raise bad("type_confusion", "REDUCE with arguments that are not a tuple")
    m.work(len(args.items))
    result = rebuild.apply(func, args, m.limits)
    if type(result) is not PTensor and (steps := stdlib.steps_of(result)):
        m.work(steps)
        m.charge(8 * steps)
    m.push(result, 64)


def op_attribute(m: PickleMachine, func: Global, args: PTuple) -> Node:
    """REDUCE of `getattr`: an enum's member, a name within a named class, or an opaque object by policy."""
    owner, name = attributes.checked_arguments(args)
    if isinstance(owner, Global):
        return attributes.member(owner, name) or op_name(m, owner.module, f"{owner.name}.{name}")
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
        calls.check_instance(cls, args)
    m.push(PObject(how, cls, args, kwargs, depth=m.depth([args, kwargs])), 128)


def op_inst(m: PickleMachine) -> None:
    """INST."""
    try:
        module, name = m.line().decode("utf-8"), m.line().decode("utf-8")
    except UnicodeDecodeError:
        raise bad("forbidden_global", f"a name at byte {m.at} is not UTF-8") from None
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
