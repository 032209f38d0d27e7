"""`getattr` and plain values of the standard library in pickles: read as data, also in hostile streams."""

from __future__ import annotations

import collections
import enum
import pickle
import struct
from pathlib import PurePosixPath
from typing import Any

import pytest

from house.expected import raised
from reshard.choices import OpaquePolicy
from reshard.errors import ReshardError
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import Global, PBytearray, PickleLimits, PList, PObject, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger, is_listed
from reshard_engine.pickles.rebuild import MEMBERS
from reshard_engine.pickles.vm import parse_pickle

GETATTR = b"cbuiltins\ngetattr\n"
STAGE = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"
NAME = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _getattr(owner: bytes, name: str | bytes) -> bytes:
    return GETATTR + owner + (name if isinstance(name, bytes) else _text(name)) + b"\x86R"


def _parse(code: bytes, policy: OpaquePolicy = OpaquePolicy.REFUSE, **limits: int) -> Any:
    return parse_pickle(b"\x80\x04" + code + b".", OpaqueLedger(policy), limits=PickleLimits(**limits))[0]


def _refused(code: bytes, policy: OpaquePolicy = OpaquePolicy.REFUSE, **limits: int) -> str:
    return raised(ReshardError, _parse, code, policy, **limits).code


def test_the_enums_of_the_table_are_on_the_allow_list() -> None:
    for dotted, members in MEMBERS.items():
        module, _, name = dotted.rpartition(".")
        assert is_listed(Global(module, name)), dotted
        by_name = enum.Enum(name, members)  # what the class itself makes of names and values
        assert all(by_name[member].value == value for member, value in members.items())


def test_no_name_within_a_class_is_on_the_allow_list() -> None:
    """One dotted text may name two things: a class of a module, and a class within a class."""
    assert is_listed(Global("torch.storage", "UntypedStorage"))
    assert not is_listed(Global("torch", "storage.UntypedStorage"))


def test_the_table_has_the_members_of_deepspeed_itself() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    found = {name: member.value for name, member in config.ZeroStageEnum.__members__.items()}
    assert found == MEMBERS[NAME.dotted]


@pytest.mark.parametrize(
    "code",
    [_getattr(STAGE, "weights"), _getattr(STAGE, "weights").replace(b"cbuiltins", b"c__builtin__")],
    ids=["builtins", "__builtin__"],
)
def test_a_member_by_name_is_the_member_by_value(code: bytes) -> None:
    node = _parse(code)
    assert (node.how, node.cls, node.args.items) == ("reduce", NAME, (3,))
    assert emit_pickle(node) == emit_pickle(_parse(STAGE + b"K\x03\x85R"))


HOSTILE = {
    "of a function": (_getattr(b"cos\nsystem\n", "mro"), "forbidden_global"),
    "of a function, called": (_getattr(b"cos\nsystem\n", "mro") + b")R", "forbidden_call"),
    "of no member": (_getattr(STAGE, "optimizer"), "forbidden_global"),
    "of no member, called": (_getattr(STAGE, "mro") + b")R", "forbidden_call"),
    "of a listed class that is not an enum": (_getattr(b"ctorch\nSize\n", "mro"), "forbidden_global"),
    "of a value": (_getattr(b"]", "append"), "forbidden_call"),
    "of a text": (_getattr(_text("os"), "system"), "forbidden_call"),
    "chain": (_getattr(_getattr(b"cos\npath\n", "os"), "system") + b")R", "forbidden_call"),
    "chain from a member": (_getattr(_getattr(STAGE, "weights"), "name"), "forbidden_call"),
    "instantiated": (_getattr(b"cacme\nOuter\n", "Inner") + b")\x81", "forbidden_build"),
    "mentioned": (GETATTR, "forbidden_global"),
    "mentioned beside a use": (_getattr(STAGE, "weights") + GETATTR + b"\x86", "forbidden_global"),
    "mentioned from the memo": (GETATTR + b"q\x01h\x01" + STAGE + _text("weights") + b"\x86R\x86", "forbidden_global"),
    "mentioned in state": (b"cargparse\nNamespace\n)\x81}" + _text("a") + GETATTR + b"sb", "forbidden_global"),
    "a newobj": (GETATTR + b")\x81", "forbidden_build"),
}
ALWAYS = {
    "name no text": (_getattr(STAGE, b"K\x01"), "forbidden_call"),
    "name a list": (_getattr(STAGE, b"]"), "forbidden_call"),
    "name dunder": (_getattr(STAGE, "__members__"), "forbidden_call"),
    "name dunder of a foreign class": (_getattr(b"cacme\nColor\n", "__subclasses__"), "forbidden_call"),
    "name with dots": (_getattr(STAGE, "a.b"), "forbidden_call"),
    "name empty": (_getattr(STAGE, ""), "forbidden_call"),
    "one argument": (GETATTR + STAGE + b"\x85R", "forbidden_call"),
    "default": (GETATTR + STAGE + _text("x") + b"N\x87R", "forbidden_call"),
    "member called": (_getattr(STAGE, "weights") + b")R", "forbidden_call"),
    "member instantiated": (_getattr(STAGE, "weights") + b")\x81", "forbidden_build"),
    "member with dunder state": (_getattr(STAGE, "weights") + b"}" + _text("__class__") + b"Nsb", "forbidden_build"),
    "name with state": (_getattr(b"cacme\nColor\n", "RED") + b"}b", "forbidden_build"),
    "name too deep": (_getattr(b"ca\n" + b".".join([b"b"] * 65) + b"\n", "c"), "forbidden_global"),
    "ordered dict by OBJ": (b"(ccollections\nOrderedDict\n](](NNeeo", "forbidden_build"),
    "ordered dict of threes": (b"ccollections\nOrderedDict\n](](NNNee\x85R", "forbidden_call"),
    "deque with a bound below 0": (b"ccollections\ndeque\n)J\xff\xff\xff\xff\x86R", "forbidden_call"),
    "path of numbers": (b"cpathlib\nPosixPath\nK\x01\x85R", "forbidden_call"),
    "path too long": (b"cpathlib\nPosixPath\n" + _text("a" * 40_000) + b"\x85R", "forbidden_call"),
    "date of text": (b"cdatetime\ndate\n" + _text("2024-01-01") + b"\x85R", "forbidden_call"),
    "zone of a number": (b"cdatetime\ntimezone\nK\x01\x85R", "forbidden_call"),
    "zone by a name": (b"cdatetime\ndatetime\nC\x0a" + b"\x01" * 10 + STAGE + b"\x86R", "forbidden_call"),
    "a factory called": (b"cbuiltins\nlist\n)R", "forbidden_call"),
    "bytes that are not latin-1": (
        b"cbuiltins\nbytearray\n" + b"X\x03\x00\x00\x00\xe2\x82\xac" + _text("latin-1") + b"\x86R",
        "forbidden_call",
    ),
}


@pytest.mark.parametrize("name", [*HOSTILE, *ALWAYS])
def test_hostile_forms_are_refused(name: str) -> None:
    code, expected = {**HOSTILE, **ALWAYS}[name]
    assert _refused(code) == f"pickle.{expected}"


@pytest.mark.parametrize("name", ALWAYS)
def test_what_no_writer_gives_is_refused_under_every_policy(name: str) -> None:
    code, expected = ALWAYS[name]
    for policy in (OpaquePolicy.KEEP, OpaquePolicy.DROP):
        assert _refused(code, policy) == f"pickle.{expected}"


def test_nothing_is_looked_up() -> None:
    """A kept name is what the stream says, not what an import would find."""
    node = _parse(_getattr(_getattr(b"cno.such.module\nOuter\n", "Inner"), "FIRST"), OpaquePolicy.KEEP)
    assert node == Global("no.such.module", "Outer.Inner.FIRST")


def test_names_within_classes_are_read_again_as_they_were() -> None:
    twice = _parse(_getattr(b"cacme\nOuter\n", "Inner") + b"q\x01h\x01\x86", OpaquePolicy.KEEP)
    again = parse_pickle(emit_pickle(twice, keep_foreign=True), OpaqueLedger(OpaquePolicy.KEEP))[0]
    assert again.items == (Global("acme", "Outer.Inner"),) * 2


def test_entries_that_python_2_gave_as_arguments_are_entries() -> None:
    node = _parse(b"ccollections\nOrderedDict\n](](" + _text("a") + b"K\x01e](" + _text("b") + b"K\x02ee\x85R")
    assert mapping_items(node, what="it") == {"a": 1, "b": 2}
    assert pickle.loads(emit_pickle(node)) == collections.OrderedDict(a=1, b=2)


@pytest.mark.parametrize(
    ("call", "size"),
    [
        (b"cbuiltins\nbytearray\n" + _text("a" * 50_000) + _text("latin-1") + b"\x86", 50_000),
        (b"cpathlib\nPosixPath\n" + _text("a" * 30_000) + b"\x85", 30_000),
        (b"ccollections\ndeque\n](" + b"N" * 30_000 + b"e\x85", 30_000),
    ],
    ids=["bytearray", "path", "deque"],
)
def test_arguments_given_to_many_calls_count_each_time(call: bytes, size: int) -> None:
    name, rest = (
        call[: call.index(b"\n", call.index(b"\n") + 1) + 1],
        call[call.index(b"\n", call.index(b"\n") + 1) + 1 :],
    )
    again = b"h\x01h\x02R0"
    code = name + b"q\x01" + rest + b"q\x02R0" + again * 40 + b"N"
    assert _parse(code) is None
    assert _refused(code, opcodes=30 * size) == "pickle.too_much_work"
    assert _refused(code, node_bytes=30 * size * 8) == "pickle.too_much_memory"


def test_types_of_the_one_form() -> None:
    assert isinstance(_parse(b"cbuiltins\nbytearray\n)R"), PBytearray)
    path = _parse(b"cpathlib._local\nPurePosixPath\n" + _text("/a") + _text("b") + b"\x86R")
    assert isinstance(path, PObject)
    assert (path.cls, path.args.items) == (Global("pathlib", "PurePosixPath"), ("/a/b",))
    assert pickle.loads(emit_pickle(path)) == PurePosixPath("/a/b")
    assert isinstance(_parse(b"](" + _getattr(STAGE, "disabled") + b"e"), PList)
