"""safetensors headers: what the format forbids has a code, what we accept the reference accepts, and reads alike."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from house.expected import raised, some
from reshard.errors import SourceError
from reshard_engine.containers.safetensors import SafetensorsFile, open_safetensors_file
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.storage.local import LocalStore

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
# What the reference reads and we refuse: readers disagree about it, or no writer writes it.
STRICTER = {"safetensors.header", "tensor.unsupported"}


def _open(path: Path, data: bytes) -> SafetensorsFile:
    path.write_bytes(data)
    info = some(LocalStore().stat(str(path)))
    return open_safetensors_file(SourceFile(LocalStore(), path.name, (info,)))


def _code(path: Path, data: bytes) -> str:
    return raised(SourceError, _open, path, data).code


def _file(header: object, body: bytes = bytes(8), *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def _with(**fields: object) -> bytes:
    return _file({"a": ONE | fields})


TWO = {"a": ONE, "b": ONE | {"data_offsets": [8, 16]}}
BAD: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "safetensors.header_size"),
    "seven bytes": (bytes(7), "safetensors.header_size"),
    "length of 2**64 - 1": (b"\xff" * 8 + b"{}", "safetensors.header_size"),
    "length past the file": (_file(b"{}", b"", length=3), "safetensors.header_size"),
    "length of 0": (bytes(16), "safetensors.header"),
    "length of 1": (_file(b"{", b""), "safetensors.header"),
    "no object": (_file(b"[]", b""), "safetensors.header"),
    "space before": (_file(b" {}", b""), "safetensors.header"),
    "no UTF-8": (_file(b'{"\xff":1}', b""), "safetensors.header"),
    "padded with NUL": (_file(b"{}\0\0", b""), "safetensors.header"),
    "two documents": (_file(b"{}{}", b""), "safetensors.header"),
    "NaN": (_file(b'{"a":NaN}', b""), "safetensors.header"),
    "number of 5,000 digits": (_file(b'{"a":' + b"9" * 5_000 + b"}", b""), "safetensors.header"),
    "depth 100,000": (_file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""), "safetensors.header"),
    "a lone surrogate": (_file(b'{"\\ud800":' + json.dumps(ONE).encode() + b"}"), "safetensors.header"),
    "a name twice": (_file(b'{"a":%b,"a":%b}' % ((json.dumps(ONE).encode(),) * 2)), "safetensors.header"),
    "__metadata__ twice": (_file(b'{"__metadata__":{},"__metadata__":{}}', b""), "safetensors.header"),
    "a field twice": (
        _file(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
        "safetensors.header",
    ),
    "metadata that is not text": (_file({"__metadata__": {"n": 1}}, b""), "safetensors.header"),
    "metadata that is a list": (_file({"__metadata__": []}, b""), "safetensors.header"),
    "a tensor that is a number": (_file({"a": 1}, b""), "safetensors.header"),
    "a field too few": (_file({"a": {"dtype": "F32", "shape": [2]}}), "safetensors.header"),
    "a field too many": (_with(strides=[1]), "safetensors.header"),
    "a type that is not text": (_with(dtype=["F32"]), "safetensors.header"),
    "a negative length": (_with(shape=[-2]), "safetensors.header"),
    "a float length": (_with(shape=[2.0]), "safetensors.header"),
    "a length of true": (_with(shape=[2, True]), "safetensors.header"),
    "65 dimensions": (_with(shape=[1] * 64 + [2]), "safetensors.header"),
    "an unknown type": (_with(dtype="F32\n"), "tensor.unsupported"),
    "four-bit floats": (_with(dtype="F4", shape=[16]), "tensor.unsupported"),
    "overlap": (_file({"a": ONE, "b": ONE}), "safetensors.overlap"),
    "part overlap": (_file({"a": ONE, "b": ONE | {"data_offsets": [4, 12]}}, bytes(12)), "safetensors.overlap"),
    "hole": (_file({"a": ONE, "b": ONE | {"data_offsets": [12, 20]}}, bytes(20)), "safetensors.coverage"),
    "hole at the start": (_with(data_offsets=[4, 12]), "safetensors.coverage"),
    "bytes behind": (_file({"a": ONE}, bytes(9)), "safetensors.coverage"),
    "no tensors but bytes": (_file({}, bytes(1)), "safetensors.coverage"),
    "truncated": (_file(TWO, bytes(15)), "safetensors.coverage"),
    "end before begin": (_with(data_offsets=[8, 0]), "safetensors.offsets"),
    "begin of 2**63": (_with(data_offsets=[1 << 63, (1 << 63) + 8]), "safetensors.offsets"),
    "float offsets": (_with(data_offsets=[0.0, 8.0]), "safetensors.offsets"),
    "negative offsets": (_with(data_offsets=[-8, 0]), "safetensors.offsets"),
    "one offset": (_with(data_offsets=[0]), "safetensors.offsets"),
    "three offsets": (_with(data_offsets=[0, 4, 8]), "safetensors.offsets"),
    "size of another shape": (_with(shape=[3]), "safetensors.offsets"),
    "size of another type": (_with(dtype="F64"), "safetensors.offsets"),
    "a product past 2**64": (_with(shape=[1 << 61, 1 << 61, 4]), "safetensors.offsets"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_format_forbids(name: str, tmp_path: Path) -> None:
    data, code = BAD[name]
    assert _code(tmp_path / "x", data) == code


def test_a_header_of_more_than_the_format_allows(tmp_path: Path) -> None:
    length = 100_000_001
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + b"{}")
        file.truncate(8 + length)
    info = some(LocalStore().stat(str(path)))
    error = raised(SourceError, open_safetensors_file, SourceFile(LocalStore(), "x", (info,)))
    assert error.code == "safetensors.header_size"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"{}" + b" " * 50_000_000, None),
        (b'{"a":[' + b"0," * 20_000_000 + b"0]}", "checkpoint.too_large"),
        (b'{"a":' + b"[]," * 15_000_000 + b"}", "checkpoint.too_large"),
        (b'{"a":"' + b"x" * 40_000_000 + b'"}', "safetensors.header"),
    ],
    ids=["spaces", "numbers", "lists", "one text"],
)
def test_long_headers_take_memory_in_proportion(text: bytes, code: str | None, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(_file(text, b""))
    info = some(LocalStore().stat(str(path)))
    file = SourceFile(LocalStore(), "x", (info,))
    tracemalloc.start()
    try:
        found = open_safetensors_file(file).tensors if code is None else None
        if code is not None:
            assert raised(SourceError, open_safetensors_file, file).code == code
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert found in (None, ())
    assert peak < 3.2 * len(text)


def _small() -> bytes:
    tensors = {"a.b": torch.arange(6.0).reshape(2, 3), "c": torch.tensor(7), "e": torch.zeros(0, 4)}
    return save(tensors, metadata={"format": "pt", "tied": "c"})


def _theirs(data: bytes) -> dict[str, Any] | None:
    try:
        return {name: (v["dtype"], tuple(v["shape"]), bytes(v["data"])) for name, v in deserialize(data)}
    except SafetensorError:
        return None


def _ours(path: Path, data: bytes) -> dict[str, Any] | str:
    try:
        found = _open(path, data)
    except SourceError as error:
        return error.code
    sizes = {t.name: t.dtype.itemsize_bytes * torch.Size(t.shape).numel() for t in found.tensors}
    return {t.name: (t.dtype.safetensors, t.shape, data[t.offset :][: sizes[t.name]]) for t in found.tensors}


def test_every_byte_of_a_header_changed(tmp_path: Path) -> None:
    data = _small()
    assert _ours(tmp_path / "x", data) == _theirs(data)
    header = 8 + int.from_bytes(data[:8], "little")
    trials = refused = 0
    for at in range(header):
        for value in {data[at] ^ 1 << bit for bit in range(8)} | set(b'\0 "0{}[],:\xff'):
            mutated = data[:at] + bytes([value]) + data[at + 1 :]
            ours, theirs = _ours(tmp_path / "x", mutated), _theirs(mutated)
            trials += 1
            refused += isinstance(ours, str)
            if isinstance(ours, dict):
                assert ours == theirs, f"byte {at} as {value}"
            else:
                assert theirs is None or ours in STRICTER, f"byte {at} as {value}: {ours}, and they read it"
    assert trials > 3_000
    assert 0 < refused < trials


def test_truncated_at_every_byte(tmp_path: Path) -> None:
    data = _small()
    for length in range(len(data)):
        assert _code(tmp_path / "x", data[:length]).startswith("safetensors.")


def test_many_tensors(tmp_path: Path) -> None:
    count = 50_000
    header = {f"layers.{i}.w": {"dtype": "U8", "shape": [1, 1], "data_offsets": [i, i + 1]} for i in range(count)}
    assert len(_open(tmp_path / "x", _file(header, bytes(count))).tensors) == count
