"""The hostile corpus: each checkpoint in a process of its own, with its exact code, and nothing run or written."""

from __future__ import annotations

import argparse
import json
import pickletools
import time
import zipfile
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from adversarial.corpus import carriers
from adversarial.corpus.children import Children, Job, Outcome
from adversarial.corpus.entry import OK, Entry
from adversarial.corpus.pickle_code import CANARY
from adversarial.corpus.table import ENTRIES, NUMBERS_ELSEWHERE
from adversarial.corpus.write import write_entry
from house.speed import slowness
from house.waiting import PATIENCE_S
from reshard.choices import OpaquePolicy
from reshard.errors import CODES, ReshardError
from reshard_engine.pickles.nodes import Global
from reshard_engine.pickles.policy import OpaqueLedger, is_listed
from reshard_engine.pickles.vm import parse_pickle

SCALED = {
    "RESHARD_PICKLE_OPCODES": "1000000",
    "RESHARD_PICKLE_NODE_BYTES": str(128 << 20),
    "RESHARD_PICKLE_STREAM_BYTES": str(128 << 20),
}
MAX_CPU_S = 2.0
"""Processor time, which depends less than the clock on who else is running; on a slow machine as many times more."""
MAX_RSS_BYTES = 256 << 20
BITES = [e for e in ENTRIES if e.runs is not None]


def _name(entry: Entry) -> str:
    return f"{entry.number:03}-{entry.name}"


@pytest.fixture(scope="module")
def ordinary() -> Generator[Children]:
    """Children with the default bounds."""
    with Children() as children:
        yield children


@pytest.fixture(scope="module")
def scaled() -> Generator[Children]:
    """Children with bounds of a million opcodes, set as an operator sets them."""
    with Children(**SCALED) as children:
        yield children


@pytest.fixture(scope="module")
def with_torch() -> Generator[Children]:
    """Children that have torch, for payloads that name it."""
    with Children(CORPUS_TORCH="1") as children:
        yield children


def _files(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def _harmless(outcome: Outcome) -> None:
    assert outcome.events == []
    assert outcome.modules == []
    assert outcome.message.isprintable(), "an error's text must not steer a terminal or break a log line"


def _run(entry: Entry, op: str, directory: Path, children: Children, **more: int) -> Outcome:
    tamper = entry.tamper if op == "convert" else ""
    return children.run(
        Job(op, str(directory), to=entry.to, verify=entry.verify, target=entry.target, tamper=tamper, **more)
    )


@pytest.mark.parametrize("entry", ENTRIES, ids=_name)
def test_entry(entry: Entry, ordinary: Children, scaled: Children, tmp_path: Path) -> None:
    place = write_entry(entry, tmp_path)
    before = _files(place)
    children = scaled if entry.scaled else ordinary
    for op, expected in (("inspect", entry.inspect_code), ("convert", entry.code)):
        outcome = _run(entry, op, place, children)
        assert outcome.code == expected, (op, outcome.message)
        _harmless(outcome)
        took_s = outcome.cpu_s
        if took_s > MAX_CPU_S:
            # Others on the host only ever make it longer: the shorter of two is nearer to what it takes.
            took_s = min(took_s, _run(entry, op, place, children).cpu_s)
        assert took_s <= MAX_CPU_S * slowness(), op
        assert outcome.rss_bytes <= MAX_RSS_BYTES, op
        if outcome.code != OK or op == "inspect":
            # What is refused after the first unit leaves a journal behind, to resume from, and nothing to load.
            late = bool(entry.tamper) or entry.verify == "full"
            after = [p for p in _files(place) if not (late and p.startswith(".out.reshard-"))]
            assert after == before, "nothing is written for a checkpoint that is refused"
    assert not (place / CANARY).exists()


def test_the_table_is_whole() -> None:
    names = [_name(e) for e in ENTRIES]
    assert len(set(names)) == len(names) >= 120
    assert {e.number for e in ENTRIES} | set(NUMBERS_ELSEWHERE) == set(range(1, 123))
    codes = {e.code for e in ENTRIES} | {e.inspect_code for e in ENTRIES} | {e.by_default or OK for e in ENTRIES}
    assert codes - set(CODES) == {OK}
    assert len([e for e in ENTRIES if e.code == OK]) >= 20, "controls: what is harmless must load"


@pytest.mark.parametrize("entry", BITES, ids=_name)
def test_payloads_bite_where_python_unpickles_them(entry: Entry, with_torch: Children, tmp_path: Path) -> None:
    """The control: without it, an entry that could not run anything would prove nothing."""
    place = write_entry(entry, tmp_path)
    outcome = with_torch.run(Job("unpickle", str(place)))
    deadline = time.monotonic() + PATIENCE_S
    while not (place / CANARY).exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # some start a process and do not wait for it
    assert (place / CANARY).exists(), outcome.message
    assert outcome.events, "and the audit hook sees it"


def test_a_pickle_cut_anywhere_is_refused() -> None:
    for file in (carriers.model_states(), carriers.optim_states(0)):
        data = file.data_pkl()
        for cut in range(len(data)):
            with pytest.raises(ReshardError) as caught:
                parse_pickle(data[:cut], OpaqueLedger(OpaquePolicy.REFUSE))
            assert caught.value.code == "pickle.truncated", cut


def test_an_archive_cut_anywhere_is_refused(ordinary: Children, tmp_path: Path) -> None:
    whole = carriers.model_states().bytes()
    for cut in range(0, len(whole), max(1, len(whole) // 40)):
        place = tmp_path / str(cut)
        carriers.raw(whole[:cut])(place / "source")
        outcome = ordinary.run(Job("inspect", str(place)))
        _harmless(outcome)
        assert outcome.code in {"zip.bad_directory", "checkpoint.incomplete", "source.unknown_kind"}, cut


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.scaled], ids=_name)
def test_exhaustion_under_the_default_bounds(entry: Entry, ordinary: Children, tmp_path: Path) -> None:
    place = write_entry(entry, tmp_path)
    outcome = _run(entry, "convert", place, ordinary, cpu_s=120)
    assert outcome.code == (entry.by_default or entry.code), outcome.message
    _harmless(outcome)
    assert outcome.rss_bytes <= 3 << 30


# What a hostile checkpoint names never reaches our output unasked; what is kept on request is listed.


FOREIGN = [e for e in ENTRIES if e.inspect_code == OK and e.code.startswith("pickle.forbidden_")]
"""What `inspect` reads and `convert` refuses: values that name classes or functions off the allow-list."""
WEIGHTS = ("torch", "safetensors")


HOLDS_A_STORAGE = {"quantized"}
"""Entries with an object over a bare storage: it cannot be written out again, and is refused by name."""


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
        if to == "universal":
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


NOT_OF_THE_STATE = {
    "call-then-memo", "call-then-pop", "call-then-pop-mark", "getattr-of-names", "megatron-args-of-another-class",
    "megatron-common-holds-a-call", "quantized", "sparse",
}  # fmt: skip
"""Entries that name something which is no value beside the model: a call whose result is thrown away, a tensor."""


@pytest.mark.parametrize("entry", FOREIGN, ids=_name)
def test_weights_get_nothing_of_the_runs_foreign_state(entry: Entry, children: Children, tmp_path: Path) -> None:
    """By default, too: what lies beside the model is left out unexecuted; all other names are refused."""
    place = write_entry(entry, tmp_path)
    to = WEIGHTS[FOREIGN.index(entry) % 2]
    if entry.name in NOT_OF_THE_STATE:
        refused = children.run(Job("convert", str(place), to=to, target="refused"))
        # Several names may be refused, and a call by another code than a mention; which comes first does not matter.
        assert refused.code.startswith("pickle.forbidden_")
        assert not (place / "refused").exists()
        return
    plain = _convert(children, place, "refuse", to)
    assert _foreign(plain) == set()
    assert json.loads((plain / "reshard.json").read_bytes())["foreign_globals"], "the source names something foreign"
    for path in plain.rglob("*.bin"):
        torch.load(path, weights_only=True)


def test_what_is_kept_is_there() -> None:
    """The control of the test above: there are enough entries, and they name much."""
    assert len(FOREIGN) >= 50
