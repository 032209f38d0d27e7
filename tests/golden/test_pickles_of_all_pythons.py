"""Pickles as CPython 2.7 and 3.6 to 3.13 wrote them: read to one form, and written again to what they were."""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from data.pickles import make_pickles
from reshard.choices import OpaquePolicy
from reshard.errors import ReshardError
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import Global, Node, PList, PObject
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import compare_trees
from reshard_engine.pickles.vm import parse_pickle

STAND_INS = ("acme", "deepspeed", "megatron")


@dataclass(frozen=True)
class Entry:
    """The bytes that some Pythons write for a value."""

    value: str
    protocol: int
    writers: tuple[str, ...]
    data: bytes

    @property
    def foreign(self) -> bool:
        return self.value.startswith("foreign")


def _entries() -> list[Entry]:
    stored = json.loads((Path(make_pickles.__file__).parent / "pickles.json").read_text())
    return [
        Entry(e["value"], e["protocol"], tuple(e["writers"]), base64.b64decode(e["pickle"])) for e in stored["entries"]
    ]


ENTRIES = _entries()


def _name(entry: Entry) -> str:
    return f"{entry.value}-protocol {entry.protocol}-{entry.writers[0]}"


@pytest.fixture(scope="module")
def values() -> Iterator[dict[str, Any]]:
    """The values as this Python has them, and stand-ins for the packages whose classes they are of."""

    def is_one(module: str) -> bool:
        return module.split(".", maxsplit=1)[0] in STAND_INS

    before = {name: module for name, module in sys.modules.items() if is_one(name)}
    had_torch = "torch" in sys.modules
    for name in before:
        del sys.modules[name]
    # No package: the real one is not imported, because it takes seconds and warns.
    sys.modules["deepspeed"] = ModuleType("deepspeed")
    yield make_pickles.values()
    for name in [n for n in sys.modules if is_one(n)]:
        del sys.modules[name]
    if not had_torch and not hasattr(sys.modules["torch"], "__version__"):
        del sys.modules["torch"]
    sys.modules.update(before)


def _parse(entry: Entry, policy: OpaquePolicy = OpaquePolicy.REFUSE) -> tuple[Node, list[str]]:
    ledger = OpaqueLedger(policy)
    return parse_pickle(entry.data, ledger)[0], list(ledger.foreign)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.flags.f_contiguous == b.flags.f_contiguous
        return alike and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        default = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return default and _same([*a.items()], [*b.items()])
    if isinstance(a, argparse.Namespace):
        return _same(vars(a), vars(b))
    return bool(a == b) and getattr(a, "maxlen", None) == getattr(b, "maxlen", None)


def test_every_python_wrote_every_kind() -> None:
    """The control of what follows: the forms that differ between Pythons are there."""
    writers = {w for e in ENTRIES for w in e.writers}
    assert {"3.8.18", "3.9.18", "3.10.13", "3.11.2", "3.11.7", "3.12.1", "3.13.0"} <= writers
    by_name = [e for e in ENTRIES if b"getattr" in e.data and e.value.startswith("listed enum")]
    assert {e.protocol for e in by_name} == {2, 3, 4, 5}
    assert {w for e in by_name for w in e.writers} == {"3.11.2"}
    assert any(b"pathlib._local" in e.data for e in ENTRIES)
    assert any(b"numpy._core" in e.data for e in ENTRIES)


@pytest.mark.filterwarnings("ignore:numpy.core.numeric:DeprecationWarning")  # names are written again as they were
@pytest.mark.parametrize("entry", ENTRIES, ids=_name)
def test_what_is_written_again_loads_to_the_value(entry: Entry, values: dict[str, Any]) -> None:
    node, foreign = _parse(entry, OpaquePolicy.KEEP)
    again = pickle.loads(emit_pickle(node, keep_foreign=entry.foreign))
    expected = values[entry.value]
    assert _same(again, expected), f"{again!r} is not {expected!r}"
    assert bool(foreign) == entry.foreign
    if entry.value == "aliases":
        assert again[0] is again[1] is again[2][0]


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.foreign], ids=_name)
def test_classes_off_the_list_are_refused_by_name(entry: Entry) -> None:
    with pytest.raises(ReshardError) as caught:
        _parse(entry)
    assert caught.value.code in {"pickle.forbidden_call", "pickle.forbidden_build", "pickle.forbidden_global"}
    assert set(_parse(entry, OpaquePolicy.KEEP)[1]) - {"_operator.or_"} <= {
        f"acme.options.{name}"
        for name in (
            *("Color", "Color.RED", "Color.BLUE", "Level", "Level.HIGH", "Level.LOW", "Plain", "Run", "Frozen"),
            *("Rights", "Rights.READ", "Rights.WRITE", "Rights.RUN", "Bits", "Bits.ONE", "Bits.TWO"),
            *("Outer", "Outer.Kind", "Outer.Kind.FIRST"),
            *("Outer.Middle", "Outer.Middle.Kind", "Outer.Middle.Kind.SECOND"),
        )
    }


@pytest.mark.parametrize("name", sorted({e.value for e in ENTRIES if not e.foreign}))
def test_all_pythons_are_read_to_one_form(name: str) -> None:
    for protocol in (2, 3, 4, 5):
        # Python 2.7 has no bytes beside texts.
        written = [e for e in ENTRIES if (e.value, e.protocol) == (name, protocol) and e.writers != ("2.7.18",)]
        first, *others = [_parse(e)[0] for e in written]
        for other in others:
            assert list(compare_trees(first, other, name)) == []


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.value == "listed enum of DeepSpeed"], ids=_name)
def test_members_are_calls_with_their_value(entry: Entry) -> None:
    node, _ = _parse(entry)
    assert isinstance(node, PList)
    assert all(isinstance(item, PObject) for item in node.items)
    stage = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
    assert [(i.how, i.cls, i.args.items) for i in node.items] == [("reduce", stage, (n,)) for n in (3, 0, 2, 3)]
