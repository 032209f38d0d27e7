"""The pickle interpreter and emitter against Python's own pickle and torch."""

from __future__ import annotations

import argparse
import collections
import gc
import io
import pickle
import pickletools
import struct
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from house.expected import raised, some
from house.speed import slowness
from reshard.choices import OpaquePolicy
from reshard.errors import ReshardError, SourceError
from reshard_engine.containers import torch_file as shared_pickles
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import SharedPickles, open_torch_file
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import (
    DEFAULT_LIMITS,
    PBytearray,
    PDict,
    PickleLimits,
    PList,
    PTensor,
    collector_paused,
    mapping_items,
)
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import rewrite
from reshard_engine.pickles.vm import parse_pickle
from reshard_engine.storage.local import LocalStore


def _parse(data: bytes, *, policy: OpaquePolicy = OpaquePolicy.REFUSE, limits: PickleLimits | None = None) -> Any:
    return parse_pickle(data, OpaqueLedger(policy), limits=limits or PickleLimits())[0]


def _refused(data: bytes, *, limits: PickleLimits | None = None) -> str:
    return raised(ReshardError, _parse, data, limits=limits).code


PLAIN: list[Any] = [
    None, True, False, 0, 255, 256, -1, 65535, 65536, 2**31 - 1, -(2**31), 2**31, 2**70, -(2**70), 1.5, float("inf"),
    "", "text", "uml\u00e4ut \U0001f600", b"", b"\x00\xff", bytearray(b"ab"), (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4),
    [], [1, [2, [3]]], {}, {"a": 1, 2: "b"}, {1, 2}, frozenset({3}), 1 + 2j,
    collections.OrderedDict(a=1, b=collections.OrderedDict()), argparse.Namespace(lr=1e-3, layers=[1, 2]),
    np.random.RandomState(3).get_state(), np.float64(2.5), [np.arange(3)],
]  # fmt: skip


def _is_plain(value: Any) -> bool:
    return type(value) in (type(None), bool, int, float, str, list, dict, tuple)


# Protocols 0 and 1 spell objects and bytes through copyreg, which no checkpoint writer uses: plain values only.
CASES = [(v, p) for v in PLAIN for p in range(6) if p >= 2 or (_is_plain(v) and "array" not in repr(v))]


@pytest.mark.parametrize(("value", "protocol"), CASES, ids=lambda v: repr(v)[:30])
def test_values_survive_parsing_and_emission(value: Any, protocol: int) -> None:
    again = pickle.loads(emit_pickle(_parse(pickle.dumps(value, protocol=protocol))))
    assert repr(again) == repr(value)


def test_objects_of_protocol_1_are_refused_with_a_code() -> None:
    assert _refused(pickle.dumps(argparse.Namespace(a=1), protocol=1)) == "pickle.forbidden_call"


def test_aliases_and_cycles_stay_what_they_are() -> None:
    shared: list[Any] = [1]
    cyclic: dict[str, Any] = {"a": shared, "b": shared}
    cyclic["self"] = [cyclic]
    node = _parse(pickle.dumps(cyclic, protocol=2))
    again = pickle.loads(emit_pickle(rewrite(node, lambda t: t, lambda f: f)))
    assert again["a"] is again["b"]
    assert again["self"][0] is again


def _torch_value() -> dict[str, Any]:
    base = torch.arange(12.0).view(3, 4)
    return {
        "plain": base,
        "view": base[1:, 1:],
        "transposed": base.t(),
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 5),
        "bool": torch.tensor([True, False]),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "uint16": torch.tensor([1, 2], dtype=torch.uint16),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "bytes": b"\x00\xff",
    }


def test_torch_reads_what_the_emitter_wrote(tmp_path: Path) -> None:
    value = _torch_value()
    path = tmp_path / "value.pt"
    torch.save(value, path)
    with zipfile.ZipFile(path) as archive:
        node = _parse(archive.read("value/data.pkl"))
        with zipfile.ZipFile(tmp_path / "again.pt", "w") as out:
            for name in archive.namelist():
                out.writestr(name, emit_pickle(node) if name.endswith("data.pkl") else archive.read(name))
    again = torch.load(tmp_path / "again.pt", weights_only=False)
    for key, expected in value.items():
        found = again[key]
        if isinstance(expected, torch.Tensor):
            assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
            assert found.untyped_storage().tolist() == expected.untyped_storage().tolist()
        else:
            assert found == expected


def test_emission_is_deterministic_and_a_fixed_point() -> None:
    data = io.BytesIO()
    torch.save(_torch_value(), data)
    with zipfile.ZipFile(data) as archive:
        stream = archive.read(archive.namelist()[0])
    once = emit_pickle(_parse(stream))
    assert emit_pickle(_parse(once)) == once
    assert {op.name for op, _, _ in pickletools.genops(once)} <= {
        *(
            "PROTO",
            "STOP",
            "EMPTY_DICT",
            "EMPTY_LIST",
            "EMPTY_TUPLE",
            "MARK",
            "SETITEMS",
            "APPENDS",
            "BINPUT",
            "BINGET",
        ),
        *("GLOBAL", "REDUCE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINUNICODE", "BININT", "BININT1", "BININT2"),
        *(
            "BINPERSID",
            "NEWTRUE",
            "NEWFALSE",
            "NONE",
            "LONG1",
            "BINFLOAT",
            "LONG_BINPUT",
            "LONG_BINGET",
            "BUILD",
            "NEWOBJ",
        ),
    }


SMALL = PickleLimits(opcodes=10_000, node_bytes=1 << 20, mark_depth=100, value_depth=50)
HOSTILE = {
    "empty": (b"", "truncated"),
    "no stop": (b"\x80\x02N", "truncated"),
    "underflow": (b"\x80\x020.", "malformed"),
    "two values": (b"\x80\x02NN.", "malformed"),
    "trailing": (b"\x80\x02N.N.", "trailing"),
    "protocol 6": (b"\x80\x06N.", "malformed"),
    "late protocol": (b"N\x80\x020.", "malformed"),
    "unknown opcode": (b"\x80\x02\xff.", "unsupported_op"),
    "next buffer": (b"\x80\x05\x97.", "unsupported_op"),
    "unset memo": (b"\x80\x02h\x05.", "bad_memo"),
    "huge text memo": (b"\x80\x02Np" + b"9" * 30 + b"\n.", "bad_memo"),
    "long claim": (b"\x80\x02\x8d" + struct.pack("<Q", 1 << 63) + b".", "truncated"),
    "negative string": (b"\x80\x02T" + struct.pack("<i", -1) + b".", "truncated"),
    "negative long": (b"\x80\x02\x8b" + struct.pack("<i", -1) + b".", "bad_number"),
    "million digits": (b"I" + b"9" * 3000 + b"9" * 3000 + b"\n.", "truncated"),
    "underscored digits": (b"I1_0\n.", "bad_number"),
    "hexadecimal digits": (b"L0x10\n.", "bad_number"),
    "line without end": (b"c" + b"a" * 10_000, "truncated"),
    "extension": (b"\x80\x02\x82\x01.", "ext_forbidden"),
    "text persistent id": (b"\x80\x02Pabc\n.", "bad_persistent_id"),
    "persistent id no tuple": (b"\x80\x02NQ.", "bad_persistent_id"),
    "append to tuple": (b"\x80\x02)Na.", "type_confusion"),
    "setitem on list": (b"\x80\x02]NNs.", "type_confusion"),
    "odd setitems": (b"\x80\x02}(Nu.", "type_confusion"),
    "build on dict": (b"\x80\x02}}b.", "forbidden_build"),
    "frame too long": (b"\x80\x04\x95" + struct.pack("<Q", 100) + b"N.", "bad_frame"),
    "frames nested": (b"\x80\x04\x95" + struct.pack("<Q", 20) + b"\x95" + struct.pack("<Q", 1) + b"N.", "bad_frame"),
    "os.system": (b"cos\nsystem\n(S'id'\ntR.", "forbidden_call"),
    "inst": (b"(S'id'\nios\nsystem\n.", "forbidden_build"),
    "newobj": (b"\x80\x02csubprocess\nPopen\n)\x81.", "forbidden_build"),
    "stack global": (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.", "forbidden_call"),
    "dotted global": (b"ctorch.serialization\nos.system\n(S'id'\ntR.", "forbidden_call"),
    "getattr": (b"cbuiltins\ngetattr\n(NNtR.", "forbidden_call"),
    "look-alike module": ("cco\u0301llections\nOrderedDict\n)R.".encode(), "forbidden_global"),
    "payload then garbage": (b"cos\nsystem\n(S'id'\ntR\xff\xff", "forbidden_call"),
    "call then pop": (b"cos\nsystem\n(S'id'\ntR0N.", "forbidden_call"),
    "mention only": (b"\x80\x02cos\nsystem\n.", "forbidden_global"),
    "dunder state": (b"\x80\x02ccollections\nOrderedDict\n)R}X\x09\x00\x00\x00__class__Nsb.", "forbidden_build"),
    "marks": (b"\x80\x02" + b"(" * 200 + b".", "too_deep"),
    "nested lists": (b"\x80\x02" + b"]" * 60 + b"a" * 59 + b".", "too_deep"),
    "nested tuples": (b"\x80\x02)" + b"\x85" * 60 + b".", "too_deep"),
    "work": (b"\x80\x02" + b"N0" * 6_000 + b"N.", "too_much_work"),
    "memory": (b"\x80\x02(" + (b"X" + struct.pack("<I", 60_000) + b"a" * 60_000) * 40 + b"l.", "too_much_memory"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_streams_are_refused_with_their_code(name: str) -> None:
    data, code = HOSTILE[name]
    assert _refused(data, limits=SMALL) == f"pickle.{code}"


def test_huge_memo_index_costs_nothing() -> None:
    # Eight bytes that make CPython's unpickler allocate 2 GiB.
    assert _parse(b"\x80\x02Nr\xff\xff\xff\x0f.") is None


def test_every_truncation_is_typed() -> None:
    data = pickle.dumps({"a": [1, 2.5, "x"], "b": collections.OrderedDict(c=(1,))}, protocol=2)
    for length in range(len(data)):
        assert _refused(data[:length]) in {"pickle.truncated", "pickle.malformed"}


def _tensor(numel: int, offset: int, size: list[int], stride: list[int]) -> bytes:
    def tuple_of(values: list[int]) -> bytes:
        return b"(" + b"".join(b"\x8a\x09" + v.to_bytes(9, "little", signed=True) for v in values) + b"t"

    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    storage += b"\x8a\x09" + numel.to_bytes(9, "little", signed=True) + b"tQ"
    rest = b"\x8a\x09" + offset.to_bytes(9, "little", signed=True) + tuple_of(size) + tuple_of(stride)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"\x89ccollections\nOrderedDict\n)RtR."


@pytest.mark.parametrize(
    ("numel", "offset", "size", "stride", "code"),
    [
        (4, 0, [5], [1], "tensor.bad_extent"),
        (4, 1, [4], [1], "tensor.bad_extent"),
        (4, 0, [2, 2], [3, 1], "tensor.bad_extent"),
        (4, -1, [2], [1], "tensor.bad_extent"),
        (4, 0, [-2], [1], "tensor.bad_extent"),
        (4, 0, [2], [-1], "tensor.bad_extent"),
        (4, 0, [1 << 40, 1 << 40], [1, 1], "tensor.bad_extent"),
        (4, 0, [1] * 65, [1] * 65, "tensor.bad_extent"),
        (1, 0, [1 << 40], [0], "tensor.amplification"),
        (4, 0, [2], [1, 1], "pickle.type_confusion"),
        (-1, 0, [2], [1], "pickle.bad_persistent_id"),
    ],
)
def test_tensors_that_leave_their_storage(
    numel: int, offset: int, size: list[int], stride: list[int], code: str
) -> None:
    assert _refused(_tensor(numel, offset, size, stride)) == code


@pytest.mark.parametrize(
    ("size", "stride"), [([], []), ([0, 7], [7, 1]), ([2, 2], [1, 2]), ([4], [1]), ([1, 4], [99, 1])]
)
def test_unusual_but_valid_tensors(size: list[int], stride: list[int]) -> None:
    node = _parse(_tensor(4, 0, size, stride))
    assert isinstance(node, PTensor)
    assert node.shape == tuple(size)


def test_interpreted_mappings_refuse_keys_that_python_would_merge() -> None:
    assert raised(ReshardError, mapping_items, PDict(["a", 1, "a", 2]), what="it").code == "pickle.ambiguous_key"
    assert raised(ReshardError, mapping_items, PDict([True, 1]), what="it").code == "checkpoint.malformed"
    with pytest.raises(ReshardError):
        mapping_items(PList([1]), what="it")


def _with_attributes(attributes: dict[Any, Any]) -> PTensor:
    tensor = torch.zeros(0)
    tensor.__dict__.update(attributes)
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    with zipfile.ZipFile(buffer) as archive:
        found = _parse(archive.read("archive/data.pkl"))
    assert isinstance(found, PTensor)
    return found


def test_short_texts_that_were_set_on_a_tensor_are_kept() -> None:
    assert _with_attributes({"ds_id": "0_7"}).attributes == (("ds_id", "0_7"),)
    assert _with_attributes({}).attributes == ()
    kept = _with_attributes({"number": 3, "list": ["x"], "long": "x" * 65, "ds_id": "0_7"})
    assert kept.attributes == (("ds_id", "0_7"),)
    assert len(_with_attributes({f"name{i}": "x" for i in range(100)}).attributes) == 8


def test_attributes_of_many_tensors_cost_no_more_than_opcodes() -> None:
    """One long state that each of many tensors has was walked for each of them: 6 bytes took 40 ms."""
    tensor = torch.zeros(0)
    tensor.__dict__.update({f"name{i}": "x" for i in range(100_000)})
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    with zipfile.ZipFile(buffer) as archive:
        data = archive.read("archive/data.pkl")
    arguments = [arg for op, arg, _ in pickletools.genops(data) if op.name.endswith("BINPUT")][-2]
    again = b"h\0" + b"j" + struct.pack("<I", arguments) + b"R0"
    begin = time.process_time()
    _parse(data[:-1] + b"0" + 2_000 * again + b"N.")
    assert time.process_time() - begin < 5.0 * slowness()


# Equal pickles of a checkpoint's files are interpreted once, and nothing can be told from it but the time.


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each interpretation."""
    found: list[int] = []
    real = shared_pickles.parse_pickle

    def counting(data: bytes, *args: object, **kwargs: object) -> object:
        found.append(len(data))
        return real(data, *args, **kwargs)

    monkeypatch.setattr(shared_pickles, "parse_pickle", counting)
    return found


def _file(path: Path, value: object) -> SourceFile:
    torch.save(value, path)
    store = LocalStore()
    info = some(store.stat(str(path)))
    return SourceFile(store, path.name, (info,))


def _pickles() -> SharedPickles:
    return SharedPickles(OpaqueLedger(OpaquePolicy.KEEP))


def test_ranks_share_the_skeleton_and_keep_their_bytes(tmp_path: Path, runs: list[int]) -> None:
    pickles = _pickles()
    files: list[SourceFile] = []
    for rank in range(4):
        (tmp_path / str(rank)).mkdir()
        files.append(_file(tmp_path / str(rank) / "x.pt", {"w": torch.full((3,), rank)}))
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda f: open_torch_file(f, pickles.ledger, pickles=pickles), files))
    assert len(runs) == 1
    assert len({id(o.root) for o in opened}) == 1
    tensor = opened[0].root.pairs[1]
    for rank, torch_file in enumerate(opened):
        assert torch_file.file.read(torch_file.tensor_offset(tensor), 8) == rank.to_bytes(8, "little")


def test_one_byte_makes_another_pickle(runs: list[int]) -> None:
    pickles = _pickles()
    values = [pickles.parse(pickle.dumps(v, 2), DEFAULT_LIMITS) for v in ([1, 2], [1, 3], [1, 2])]
    assert len(runs) == 2
    assert values[0] is values[2]
    assert values[1].items == [1, 3]


def test_only_the_latest_are_kept(runs: list[int]) -> None:
    pickles = _pickles()
    for number in [*range(100), *range(90, 100), 0]:
        pickles.parse(pickle.dumps([number], 2), DEFAULT_LIMITS)
    assert len(runs) == 101


def test_what_is_refused_is_refused_each_time(runs: list[int]) -> None:
    pickles = SharedPickles(OpaqueLedger(OpaquePolicy.REFUSE))
    for _ in range(2):
        error = raised(SourceError, pickles.parse, b"\x80\x02cos\nsystem\n)R.", DEFAULT_LIMITS)
        assert error.code == "pickle.forbidden_call"
    assert len(runs) == 2


def test_bytes_after_the_pickle_are_refused() -> None:
    assert raised(SourceError, _pickles().parse, pickle.dumps([1], 2) + b".", DEFAULT_LIMITS).code == "pickle.trailing"


def test_what_is_written_does_not_show_what_was_shared() -> None:
    shared = PBytearray(b"state")
    copies = [rewrite(PList([shared]), lambda t: t, lambda f: f) for _ in range(2)]
    apart = [PList([PBytearray(b"state")]) for _ in range(2)]
    assert emit_pickle(PList(list(copies))) == emit_pickle(PList(list(apart)))
    alias = rewrite(PList([shared, shared]), lambda t: t, lambda f: f)
    assert alias.items[0] is alias.items[1]


def test_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
