"""Bounds leave room: whatever real frameworks write passes a tenth of each."""

from __future__ import annotations

import dataclasses
import pickletools
from pathlib import Path

import pytest

from adversarial.skeletons import skeletons
from house.measured import say
from reshard.choices import OpaquePolicy
from reshard.errors import ReshardError, SourceError
from reshard_engine.containers import zip_reader
from reshard_engine.containers.source_file import CachedFile, SourceFile
from reshard_engine.containers.torch_file import open_torch_file
from reshard_engine.pickles import vm
from reshard_engine.pickles.nodes import PickleLimits, configured_limits
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.vm import PickleMachine, parse_pickle
from reshard_engine.storage.local import LocalStore

ROOT = Path(__file__).parents[2]
ROOM = 10
BOUNDS = PickleLimits()
TENTH = PickleLimits(**{f.name: getattr(BOUNDS, f.name) // ROOM for f in dataclasses.fields(PickleLimits)})
SHARED = ROOT.parent / "shared" / "checkpoints"


def _torch_files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file() and p.suffix in {".pt", ".bin"})


def _source(path: Path) -> SourceFile:
    store = LocalStore()
    info = store.stat(str(path))
    assert info is not None
    return SourceFile(store, path.name, (info,))


def _roomy(path: Path) -> None:
    file = _source(path)
    parsed = open_torch_file(file, OpaqueLedger(OpaquePolicy.KEEP), limits=TENTH)
    if parsed.kind == "zip":
        entries = zip_reader.read_zip_directory(CachedFile(file)).entries
        assert len(entries) * ROOM <= zip_reader.MAX_ENTRIES
        assert max(len(n) for n in entries) * ROOM <= zip_reader.MAX_NAME_BYTES


@pytest.mark.parametrize("path", _torch_files(ROOT / "tests" / "data"), ids=lambda p: p.name)
def test_frozen_checkpoints(path: Path) -> None:
    _roomy(path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the large real checkpoints are not on this machine")
def test_real_checkpoints() -> None:
    files = _torch_files(SHARED)
    assert len(files) > 20
    for path in files:
        _roomy(path)


@pytest.mark.timeout(600)
def test_skeletons() -> None:
    """20,000 parameters on 64 ranks, 405B dense, a trillion in experts: none is refused by a tenth of any bound."""
    rows = [f"{'skeleton':45} {'stream':>12} {'node bytes':>13}"]
    for name, data in skeletons():
        machine = PickleMachine(data, OpaqueLedger(OpaquePolicy.REFUSE), TENTH)
        vm._run(machine)
        assert len(machine.storages) * ROOM <= zip_reader.MAX_ENTRIES
        rows.append(f"{name:45} {len(data):12,} {machine.cost_bytes:13,}")
    rows.append(f"{'bound':45} {BOUNDS.stream_bytes:12,} {BOUNDS.node_bytes:13,}")
    say(*rows)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_table_of_every_bound() -> None:
    """What the largest skeleton and the largest real file take of each bound, counted by Python's own lister."""
    streams = dict(skeletons())
    for path in [*_torch_files(ROOT / "tests" / "data"), *(_torch_files(SHARED) if SHARED.is_dir() else ())]:
        file = _source(path)
        entry = zip_reader.read_zip_directory(CachedFile(file)).entries["data.pkl"]
        streams[path.name] = zip_reader.read_record(CachedFile(file), entry, limit_bytes=BOUNDS.stream_bytes)
    most = dict.fromkeys(("opcodes", "text_bytes", "line_bytes", "long_bytes"), 0)
    for data in streams.values():
        count = 0
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data), 1):  # noqa: B007 - the count is used
            if opcode.name in {"BINUNICODE", "SHORT_BINSTRING", "BINBYTES"}:
                most["text_bytes"] = max(most["text_bytes"], len(argument))
            elif opcode.name == "GLOBAL":
                most["line_bytes"] = max(most["line_bytes"], len(argument))
            elif opcode.name == "LONG1":
                most["long_bytes"] = max(most["long_bytes"], (argument.bit_length() + 7) // 8)
        most["opcodes"] = max(most["opcodes"], count)
    for key, value in most.items():
        say(f"{key:12} {value:12,} of {getattr(BOUNDS, key):14,}: {getattr(BOUNDS, key) / max(1, value):8.1f}x")
    assert all(value * ROOM <= getattr(BOUNDS, key) for key, value in most.items())


def test_bounds_bind() -> None:
    """The control: a bound below what a skeleton takes refuses it."""
    _, data = next(iter(skeletons()))
    for bound in ("stream_bytes", "opcodes", "node_bytes"):
        with pytest.raises(SourceError):
            parse_pickle(data, OpaqueLedger(OpaquePolicy.REFUSE), limits=PickleLimits(**{bound: 1_000}))


def test_bounds_are_settings() -> None:
    assert configured_limits({}) == BOUNDS
    assert configured_limits({"RESHARD_PICKLE_OPCODES": "7", "OTHER": "x"}) == PickleLimits(opcodes=7)
    for text in ("", "0", "-1", "1e9", "many", "\u0663", "9" * 30):
        with pytest.raises(ReshardError) as caught:
            configured_limits({"RESHARD_PICKLE_NODE_BYTES": text})
        assert caught.value.code == "request.invalid"
        assert "RESHARD_PICKLE_NODE_BYTES" in caught.value.fix
