"""What a hostile checkpoint names never reaches our output unasked; what is kept on request is listed."""

from __future__ import annotations

import argparse
import json
import pickletools
import zipfile
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from adversarial.corpus.children import Children, Job
from adversarial.corpus.entry import OK, Entry
from adversarial.corpus.table import ENTRIES
from adversarial.corpus.write import write_entry
from reshard_engine.pickles.nodes import Global
from reshard_engine.pickles.policy import is_listed

FOREIGN = [e for e in ENTRIES if e.inspect_code == OK and e.code.startswith("pickle.forbidden_")]
"""What `inspect` reads and `convert` refuses: values that name classes or functions off the allow-list."""
WEIGHTS = ("torch", "safetensors")


HOLDS_A_STORAGE = {"quantized"}
"""Entries with an object over a bare storage: it cannot be written out again, and is refused by name."""


def _name(entry: Entry) -> str:
    return f"{entry.number:03}-{entry.name}"


@pytest.fixture(scope="module")
def children() -> Generator[Children]:
    with Children() as started:
        yield started


def _pickles(target: Path) -> Generator[bytes]:
    for path in sorted(p for p in target.rglob("*") if p.suffix in {".pt", ".bin"}):
        with zipfile.ZipFile(path) as archive:
            yield archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl")))


def _globals(target: Path) -> set[Global]:
    """Names in the output's pickles, as Python's own lister finds them."""
    return {name for data in _pickles(target) for name in _named(data)}


def _named(data: bytes) -> list[Global]:
    """Names of a pickle, those within a class (`getattr(Outer, "Inner")`, as protocol 2 spells them) whole."""
    found: list[Global] = []
    pushed: list[Global | str | None] = [None]
    memo: dict[object, Global | str | None] = {}
    for opcode, argument, _ in pickletools.genops(data):
        assert opcode.name not in {"STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}, "we write names as GLOBAL only"
        if opcode.name == "GLOBAL":
            found.append(Global(*str(argument).split(" ", 1)))
            pushed.append(found[-1])
        elif opcode.name in {"BINPUT", "LONG_BINPUT"}:
            memo[argument] = pushed[-1]
        elif opcode.name in {"BINUNICODE", "BINGET", "LONG_BINGET"}:
            pushed.append(str(argument) if opcode.name == "BINUNICODE" else memo.get(argument))
        elif opcode.name == "REDUCE" and Global("__builtin__", "getattr") in pushed[-3:-2]:
            owner, name = pushed[-2:]
            assert isinstance(owner, Global)
            pushed[-3:] = [Global(owner.module, f"{owner.name}.{name}")]
            found = [n for n in found if n not in {owner, Global("__builtin__", "getattr")}] + pushed[-1:]
    return found


def _foreign(target: Path) -> set[str]:
    return {g.dotted for g in _globals(target) if not is_listed(g)}


def _convert(children: Children, place: Path, opaque: str, to: str) -> Path:
    target = f"{to}-{opaque}"
    outcome = children.run(Job("convert", str(place), to=to, opaque=opaque, target=target))
    assert outcome.code == OK, outcome.message
    assert outcome.events == []
    return place / target


@pytest.mark.parametrize("entry", FOREIGN, ids=_name)
def test_foreign_names_are_dropped_or_listed(entry: Entry, children: Children, tmp_path: Path) -> None:
    place = write_entry(entry, tmp_path)
    formats = ("universal", *WEIGHTS) if FOREIGN.index(entry) % 8 == 0 else ("universal",)
    for to in formats:
        refused = children.run(Job("convert", str(place), to=to, target=f"{to}-refuse"))
        assert refused.code == entry.code
        assert not (place / f"{to}-refuse").exists()
        dropped = _convert(children, place, "drop", to)
        assert _foreign(dropped) == set()
        for path in dropped.rglob("*.pt"):
            with torch.serialization.safe_globals([argparse.Namespace]):  # on our list, plain data, not on torch's
                torch.load(path, weights_only=True)
        if entry.name in HOLDS_A_STORAGE and to != "safetensors":
            kept_outcome = children.run(Job("convert", str(place), to=to, opaque="keep", target=f"{to}-keep"))
            assert kept_outcome.code == "source.unsupported", kept_outcome.message
            assert not (place / f"{to}-keep").exists()
            continue
        kept = _convert(children, place, "keep", to)
        listed = json.loads((kept / "reshard.json").read_bytes())["foreign_globals"]
        assert listed, "the source names something foreign"
        # Weights hold tensors, their names, and extra states of modules.
        assert _foreign(kept) <= set(listed)


def test_what_is_kept_is_there() -> None:
    """The control of the test above: there are enough entries, and they name much."""
    assert len(FOREIGN) >= 50
