"""Hostile and damaged `.metadata` of distributed checkpoints: each is refused with its code, and nothing of it runs."""

from __future__ import annotations

import io
import os
import pickle
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from house import dcp_stand_ins as d, dcp_streams as streams
from house.dcp_mutations import agree
from reshard.errors import SourceError
from reshard_engine.formats.dcp_files.metadata.parse import parse_metadata
from reshard_engine.pickles.nodes import PickleLimits

Make = Callable[[], Any]
"""Makes metadata as objects, or a pickle."""
SECONDS = 20.0
"""Processor time that a large file may take: ten times what it takes on a slow machine."""


def of(shape: Any = (7, 3), chunks: Any = None, **attributes: Any) -> Any:
    """One tensor, of two chunks unless told otherwise, with a place for each of its regular chunks."""
    regular = [d.chunk((0, 0), (4, 3)), d.chunk((4, 0), (3, 3))]
    meta = d.tensor(shape, regular if chunks is None else chunks, **attributes)
    return with_places(d.Metadata(state_dict_metadata={"w": meta}, planner_data=None))


def with_places(value: Any, places: dict[Any, Any] | None = None) -> Any:
    value.storage_data = {index(0): d.place(), index(4): d.place("__1_0.distcp")} if places is None else places
    return value


def index(row: Any = 0, column: Any = 0, fqn: Any = "w", hint: Any = 0) -> Any:
    return d.index(fqn, (row, column), hint)


def placed(**attributes: Any) -> Any:
    """The first chunk has this place."""
    where = d.Place(**({"relative_path": "__0_0.distcp", "offset": 0, "length": 5} | attributes))
    return with_places(of(), {index(0): where, index(4): d.place()})


def named(path: Any) -> Make:
    return lambda: placed(relative_path=path)


def chunk(offsets: Any, sizes: Any) -> Make:
    """The second chunk is this one."""
    return lambda: of(chunks=[d.chunk((0, 0), (4, 3)), d.Chunk(offsets=offsets, sizes=sizes)])


def keyed(*keys: Any) -> Make:
    """Values with these keys."""
    return lambda: with_places(
        d.Metadata(state_dict_metadata={k: d.Bytes() for k in keys}), {d.index(k): d.place() for k in keys}
    )


def planned(value: Any) -> Make:
    def make() -> Any:
        found = of()
        found.planner_data = value() if callable(value) else value
        return found

    return make


def of_state(*state: Any) -> Make:
    """Properties with this state."""
    return lambda: of(properties=d.Properties(*state))


def lists(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def laughs() -> Any:
    """Forty levels of twice the same list: a terabyte, if it were written out."""
    value: Any = ["ha"]
    for _ in range(40):
        value = [value, value]
    return {"w": tuple(value)}


def raw(body: bytes) -> Make:
    return lambda: b"\x80\x04" + body


def root(value: Any) -> Make:
    return lambda: value


def spliced(old: bytes, new: bytes) -> Make:
    """A good file without frames in which one place is another."""

    def make() -> bytes:
        data = d.dumped(of())
        data = data[:2] + data[11:]
        assert data.count(old) == 1
        return data.replace(old, new)

    return make


def doubled() -> Any:
    """Two equal keys in one dict, which no dict has."""
    one, other = index(0), index(0)
    return with_places(of(), {one: d.place(), other: d.place(), index(4): d.place()})


_LENGTH = b"\x8c\x06length\x94M\xdc\x05"
_CODE = d.called("posix.system", "touch stolen")
_SIZE = d.size(7, 3)
HOSTILE: dict[str, tuple[Make, str]] = {
    # Numbers of chunks and places.
    "an offset outside": (chunk(d.size(5, 0), d.size(3, 3)), "tensor.bad_extent"),
    "an offset at the end of a chunk with rows": (chunk(d.size(7, 0), d.size(1, 3)), "tensor.bad_extent"),
    "an empty chunk outside": (chunk(d.size(8, 0), d.size(0, 3)), "tensor.bad_extent"),
    "a chunk larger than its tensor": (chunk(d.size(0, 0), d.size(8, 3)), "tensor.bad_extent"),
    "a negative offset": (chunk(d.size(-1, 0), d.size(3, 3)), "tensor.bad_extent"),
    "a negative size": (chunk(d.size(4, 0), d.size(-3, 3)), "tensor.bad_extent"),
    "sums that overflow": (chunk(d.size((1 << 62) - 1, 0), d.size((1 << 62) - 1, 3)), "tensor.bad_extent"),
    "an offset of 2**62": (chunk(d.size(1 << 62, 0), d.size(3, 3)), "tensor.bad_extent"),
    "an offset of 2**600": (chunk(d.size(1 << 600, 0), d.size(3, 3)), "tensor.bad_extent"),
    "a chunk of fewer dimensions": (chunk(d.size(4), d.size(3)), "tensor.bad_extent"),
    "a chunk of more dimensions": (chunk(d.size(4, 0, 0), d.size(3, 3, 1)), "tensor.bad_extent"),
    "offsets and sizes of different dimensions": (chunk(d.size(4, 0), d.size(3)), "tensor.bad_extent"),
    "65 dimensions": (lambda: of((1,) * 65, []), "tensor.bad_extent"),
    "a shape of 2**80 elements": (lambda: of((1 << 40, 1 << 40), []), "tensor.bad_extent"),
    "a negative shape": (lambda: of((-7, 3), []), "tensor.bad_extent"),
    "a negative place": (lambda: placed(offset=-1), "tensor.bad_extent"),
    "a negative length": (lambda: placed(length=-5), "tensor.bad_extent"),
    "a length of 2**62": (lambda: placed(length=1 << 62), "tensor.bad_extent"),
    "a place that ends at 2**62": (lambda: placed(offset=1 << 61, length=1 << 61), "tensor.bad_extent"),
    "a negative hint": (
        lambda: with_places(of(), {index(0, hint=-1): d.place(), index(4): d.place()}),
        "tensor.bad_extent",
    ),
    # Paths.
    "a path upwards": (named("../../etc/shadow"), "name.invalid"),
    "a path upwards in the middle": (named("a/../../b"), "name.invalid"),
    "an absolute path": (named("/etc/shadow"), "name.invalid"),
    "a path of Windows": (named("..\\secret"), "name.invalid"),
    "a drive": (named("C:secret"), "name.invalid"),
    "a URL": (named("file://a/b"), "name.invalid"),
    "an empty path": (named(""), "name.invalid"),
    "the directory itself": (named("."), "name.invalid"),
    "an empty part": (named("a//b"), "name.invalid"),
    "a path that ends in a slash": (named("a/"), "name.invalid"),
    "a path of 513 characters": (named("a" * 513), "name.invalid"),
    "a path with a NUL": (named("a\0b"), "name.invalid"),
    "a path for a terminal": (named("a\x1b[2J"), "name.invalid"),
    "a path with a lone surrogate": (named("a\ud800"), "name.invalid"),
    "a path that is bytes": (named(b"a"), "checkpoint.malformed"),
    "a path that is an object": (named(d.called("pathlib.PosixPath", "a")), "checkpoint.malformed"),
    # Keys.
    "a key of 4,097 characters": (keyed("a" * 4_097), "name.invalid"),
    "a key that is a number": (keyed(7), "checkpoint.malformed"),
    "a key that is a tuple": (keyed(("a",)), "checkpoint.malformed"),
    "a key that comes twice": (
        spliced(b"\x8c\x0cplanner_data\x94", b"\x8c\x13state_dict_metadata\x94"),
        "pickle.ambiguous_key",
    ),
    # Chunks and places that do not fit together.
    "two chunks at one offset": (chunk(d.size(0, 0), d.size(2, 3)), "checkpoint.ambiguous"),
    "two places of one chunk": (doubled, "checkpoint.ambiguous"),
    "a chunk without a place": (lambda: with_places(of(), {index(0): d.place()}), "checkpoint.incomplete"),
    "no places": (lambda: with_places(of(), {}), "checkpoint.incomplete"),
    "no storage_data": (lambda: d.Metadata(state_dict_metadata=of().state_dict_metadata), "checkpoint.incomplete"),
    "a value without a place": (
        lambda: with_places(d.Metadata(state_dict_metadata={"v": d.Bytes()}), {}),
        "checkpoint.incomplete",
    ),
    "a place without a chunk": (
        lambda: with_places(of(), {index(0): d.place(), index(4): d.place(), index(5): d.place()}),
        "checkpoint.malformed",
    ),
    "a place outside of its tensor": (
        lambda: with_places(of(), {index(0): d.place(), index(4): d.place(), index(9): d.place()}),
        "checkpoint.malformed",
    ),
    "a place of an unknown key": (lambda: with_places(of(), {index(fqn="x"): d.place()}), "checkpoint.malformed"),
    "a place of other dimensions": (
        lambda: with_places(of(), {d.index("w", (0,), 0): d.place(), index(4): d.place()}),
        "checkpoint.malformed",
    ),
    "a place of a tensor without an offset": (
        lambda: with_places(of(), {d.index("w"): d.place(), index(4): d.place()}),
        "checkpoint.malformed",
    ),
    "a place of a value with an offset": (
        lambda: with_places(d.Metadata(state_dict_metadata={"v": d.Bytes()}), {d.index("v", (), 0): d.place()}),
        "checkpoint.malformed",
    ),
    # Values of wrong kinds.
    "a root of another class": (root(d.StorageMeta(save_id="x")), "checkpoint.malformed"),
    "a root that is a dict": (root({"state_dict_metadata": {}}), "checkpoint.malformed"),
    "a root without state": (root(d.Metadata()), "checkpoint.malformed"),
    "a root that is a class": (root(d.Metadata), "checkpoint.malformed"),
    "state_dict_metadata is a list": (root(d.Metadata(state_dict_metadata=[])), "checkpoint.malformed"),
    "no state_dict_metadata": (root(d.Metadata(storage_data={})), "checkpoint.malformed"),
    "storage_data is a list": (lambda: with_places(of(), [index(0), d.place()]), "checkpoint.malformed"),  # type: ignore[arg-type]
    "storage_data by text": (lambda: with_places(of(), {"w": d.place()}), "checkpoint.malformed"),
    "a place that is a tuple": (lambda: with_places(of(), {index(0): ("a", 0, 5)}), "checkpoint.malformed"),
    "a place without a length": (
        lambda: with_places(of(), {index(0): d.Place(relative_path="a", offset=0)}),
        "checkpoint.malformed",
    ),
    "a place with another attribute": (lambda: placed(encryption="rot13"), "checkpoint.malformed"),
    "a length that is a float": (lambda: placed(length=5.0), "checkpoint.malformed"),
    "a length that is true": (lambda: placed(length=True), "checkpoint.malformed"),
    "a name that is None": (lambda: with_places(of(), {index(fqn=None): d.place()}), "checkpoint.malformed"),
    "a hint that is a text": (lambda: with_places(of(), {index(hint="0"): d.place()}), "checkpoint.malformed"),
    "an entry that is a text": (root(d.Metadata(state_dict_metadata={"w": "tensor"})), "checkpoint.malformed"),
    "a value with attributes": (root(d.Metadata(state_dict_metadata={"v": d.Bytes(a=1)})), "checkpoint.malformed"),
    "chunks in a tuple": (lambda: of_chunks(()), "checkpoint.malformed"),
    "chunks in a dict": (lambda: of_chunks({}), "checkpoint.malformed"),
    "a chunk that is None": (lambda: of_chunks([None]), "checkpoint.malformed"),
    "a chunk that is a place": (lambda: of_chunks([d.place()]), "checkpoint.malformed"),
    "sizes that are a list": (chunk(d.size(4, 0), [3, 3]), "checkpoint.malformed"),
    "sizes that are floats": (chunk(d.size(4, 0), d.size(3.0, 3)), "checkpoint.malformed"),
    "sizes that are flags": (chunk(d.size(4, 0), d.size(True, 3)), "checkpoint.malformed"),
    "sizes that are texts": (chunk(d.size(4, 0), d.size("3", 3)), "checkpoint.malformed"),
    "no sizes": (lambda: of_chunks([d.Chunk(offsets=d.size(0, 0))]), "checkpoint.malformed"),
    "no size": (lambda: of(size=None), "checkpoint.malformed"),
    "no properties": (lambda: of(properties=None), "checkpoint.malformed"),
    "a version that is a number": (root(d.Metadata(state_dict_metadata={}, version=1)), "checkpoint.malformed"),
    "a version of the future": (
        root(d.Metadata(state_dict_metadata={}, version="2.0.0")),
        "source.unsupported_version",
    ),
    # Types and layouts.
    "a dtype that is a text": (of_state("float32", d.STRIDED, False, d.CONTIGUOUS, False), "checkpoint.malformed"),
    "a dtype that is a class": (of_state(d.Size, d.STRIDED, False, d.CONTIGUOUS, False), "checkpoint.malformed"),
    "a dtype that is a function": (
        of_state(d.function("torch.load"), d.STRIDED, False, d.CONTIGUOUS, False),
        "pickle.forbidden_global",
    ),
    "quantized elements": (lambda: of(properties=d.properties("quint8")), "tensor.unsupported"),
    "elements of four bits": (lambda: of(properties=d.properties("float4_e2m1fn_x2")), "tensor.unsupported"),
    "a sparse layout": (
        lambda: of(properties=d.properties(layout=d.called("torch.serialization._get_layout", "torch.sparse_coo"))),
        "tensor.unsupported",
    ),
    "a layout that is a text": (lambda: of(properties=d.properties(layout="torch.strided")), "checkpoint.malformed"),
    "properties of four": (of_state(d.dtype(), d.STRIDED, False, False), "checkpoint.malformed"),
    "properties in a dict": (of_state({"dtype": d.dtype()}), "checkpoint.malformed"),
    "requires_grad is a number": (of_state(d.dtype(), d.STRIDED, 0, d.CONTIGUOUS, False), "checkpoint.malformed"),
    "a memory format of its own": (of_state(d.dtype(), d.STRIDED, False, 0, False), "checkpoint.malformed"),
    # Transforms.
    "a transform that is code": (
        lambda: placed(transform_descriptors=[d.function("posix.system")]),
        "pickle.forbidden_global",
    ),
    "a transform that is a number": (lambda: placed(transform_descriptors=[1]), "checkpoint.malformed"),
    "a transform with a space": (lambda: placed(transform_descriptors=["a b"]), "checkpoint.malformed"),
    "transforms in a text": (lambda: placed(transform_descriptors="stream.zstd/1"), "checkpoint.malformed"),
    "nine transforms": (lambda: placed(transform_descriptors=["a"] * 9), "checkpoint.malformed"),
    # Key paths.
    "planner_data in a list": (planned([]), "checkpoint.malformed"),
    "a path in a list": (planned({"w": ["w"]}), "checkpoint.malformed"),
    "an empty key path": (planned({"w": ()}), "checkpoint.malformed"),
    "a part that is None": (planned({"w": (None,)}), "checkpoint.malformed"),
    "a part that is a float": (planned({"w": (1.0,)}), "checkpoint.malformed"),
    "a part of 2**70": (planned({"w": (1 << 70,)}), "checkpoint.malformed"),
    "65 parts": (planned({"w": ("a",) * 65}), "checkpoint.malformed"),
    "a billion laughs": (planned(laughs), "checkpoint.malformed"),
    # Code.
    "a call of a shell": (planned({"w": _CODE}), "pickle.forbidden_global"),
    "a call in a skipped attribute": (lambda: skipped(_CODE), "pickle.forbidden_global"),
    "a name in a skipped attribute": (lambda: skipped(d.function("posix.system")), "pickle.forbidden_global"),
    "a call as the root": (root(_CODE), "pickle.forbidden_global"),
    "eval in the storage_meta": (lambda: skipped(d.called("builtins.eval", "1")), "pickle.forbidden_global"),
    "getattr of a module": (
        lambda: skipped(d.called("builtins.getattr", d.function("os.path"), "os")),
        "pickle.forbidden_global",
    ),
    "GLOBAL": (raw(b"cposix\nsystem\n\x8c\x04true\x85R."), "pickle.forbidden_global"),
    "INST": (raw(b"(\x8c\x04trueiposix\nsystem\n."), "pickle.forbidden_global"),
    "an extension": (raw(b"\x82\x01."), "pickle.ext_forbidden"),
    "a persistent id": (raw(b"Px\n."), "pickle.bad_persistent_id"),
    # The stream.
    "nothing": (lambda: b"", "pickle.truncated"),
    "a truncated file": (lambda: d.dumped(of())[:-40], "pickle.bad_frame"),
    "a truncated file without frames": (lambda: spliced(_LENGTH, _LENGTH)()[:-40], "pickle.truncated"),
    "bytes behind the end": (lambda: d.dumped(of()) + b"x", "pickle.trailing"),
    "a value of the memo that is not there": (
        spliced(_LENGTH, b"\x8c\x06length\x94j\xff\xff\xff\xff"),
        "pickle.bad_memo",
    ),
    "a number of 2**31 bytes": (spliced(_LENGTH, b"\x8c\x06length\x94\x8b\xff\xff\xff\x7f"), "pickle.bad_number"),
    "a text of 2**60 bytes": (
        spliced(_LENGTH, b"\x8c\x06length\x94\x8d" + struct.pack("<Q", 1 << 60)),
        "pickle.truncated",
    ),
    "a name that is not UTF-8": (spliced(b"__1_0.distcp", b"__1_0.\xff\xff\xff\xff\xff\xff"), "pickle.malformed"),
    "state with a name of Python's": (lambda: placed(__class__="x"), "pickle.forbidden_build"),
    "lists in lists": (lambda: skipped(lists(250)), "pickle.too_deep"),
    "marks": (raw(b"(" * 2_000), "pickle.too_deep"),
    "a list that grows from itself": (raw(b"]\x94" + b"(h\x00" * 900 + b"e" * 900 + b"."), "pickle.too_deep"),
}


def of_chunks(chunks: Any) -> Any:
    """A tensor with something in the place of its chunks."""
    value = of()
    value.state_dict_metadata["w"].chunks = chunks
    return value


def skipped(content: Any) -> Any:
    value = of()
    value.all_local_plans = content
    return value


def written(make: Make) -> bytes:
    made = make()
    return made if isinstance(made, bytes) else d.dumped(made)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, code = HOSTILE[name]
    data = written(make)
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    with pytest.raises(SourceError) as caught:
        parse_metadata(data, ".metadata")
    assert caught.value.code == code
    assert time.process_time() - started < 1.0
    assert len(str(caught.value)) < 1_500
    assert str(caught.value).isprintable()
    assert not os.listdir()
    agree(data)


BOUNDS = PickleLimits(stream_bytes=1 << 30, opcodes=100_000)
"""Opcodes for what is not a run of records: a node for each chunk would take fifty million."""


def _refusal(data: bytes) -> str:
    started = time.process_time()
    with pytest.raises(SourceError) as caught:
        parse_metadata(data, ".metadata", limits=BOUNDS)
    assert time.process_time() - started < SECONDS
    return caught.value.code


def test_a_million_chunks_of_one_tensor() -> None:
    data = streams.crowd(1_000_000)
    started = time.process_time()
    found = parse_metadata(data, ".metadata", limits=BOUNDS)
    assert time.process_time() - started < SECONDS
    assert found.tensors[0].count == len(found.length) == 1_000_000
    assert np.array_equal(found.tensors[0].boxes[:, 0, 0], np.arange(1_000_000))


def test_a_million_chunks_at_one_offset() -> None:
    assert _refusal(streams.crowd(1_000_000, step=0)) == "checkpoint.ambiguous"


def test_a_million_chunks_outside() -> None:
    assert _refusal(streams.crowd(1_000_000, step=2)) == "tensor.bad_extent"


def test_records_that_stop_to_be_regular_cost_little() -> None:
    """Every run of records ends at once, so that each attempt to read one is for nothing."""
    ranks = range(4_000)
    places = {d.index("w", (r,), None): d.place("a", r, 1.5 if r % 2 else 5) for r in ranks}
    chunks = [d.chunk((r,), (1,)) for r in ranks]
    data = d.dumped(with_places(d.Metadata(state_dict_metadata={"w": d.tensor((4_000,), chunks)}), places))
    started = time.process_time()
    with pytest.raises(SourceError):
        parse_metadata(data, ".metadata")
    assert time.process_time() - started < SECONDS


def test_empty_frames_by_the_thousand() -> None:
    """Windows of records look past the ends of frames, but not past many."""
    data = streams.stream(streams.model(2), 300)
    start = data.index(b"storage_data")
    frames = b"\x95" + bytes(8)
    assert data[2:3] == b"\x95"
    body = data[11:]
    cut = start - 11 + 100
    for at in (cut, cut + 1, cut + 2, cut + 3):
        spoilt = data[:2] + b"\x95" + struct.pack("<Q", at) + body[:at] + frames * 20_000 + body[at:]
        started = time.process_time()
        with suppress(SourceError):
            parse_metadata(spoilt, ".metadata")
        assert time.process_time() - started < SECONDS


@pytest.mark.parametrize("name", ["a call of a shell", "eval in the storage_meta", "GLOBAL"])
def test_the_files_would_run_code(name: str) -> None:
    """They are hostile: Python's own unpickler asks for what they name."""
    asked: list[str] = []

    class Anything:
        def __init__(self, *_: Any) -> None: ...

        def __setstate__(self, state: Any) -> None: ...

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            asked.append(f"{module}.{name}")
            return Anything

    Unpickler(io.BytesIO(written(HOSTILE[name][0]))).load()
    assert {"posix.system", "builtins.eval"} & set(asked)
