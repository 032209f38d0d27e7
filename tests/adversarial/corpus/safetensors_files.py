"""safetensors files whose header lies. Source: safetensors 0.6 README, "Format", and the attacks of its repository."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adversarial.corpus import archives, carriers, opcodes as op
from adversarial.corpus.entry import OK, Entry

_HEADER, _SIZE, _OFFSETS = "safetensors.header", "safetensors.header_size", "safetensors.offsets"
_TO = "safetensors"


def tensor(begin: Any = 0, end: Any = 12, shape: Any = (3,), dtype: Any = "F32") -> dict[str, Any]:
    """A tensor of the header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: Any, data: bytes = bytes(12), *, length: int | None = None) -> bytes:
    """A file with this header, as text or as a value."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def weights(data: bytes | Callable[[], bytes]) -> carriers.Build:
    """A directory of consolidated weights in one file."""

    def build(directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(data() if callable(data) else data)

    return build


def _entry(
    number: int, name: str, expected: str, data: bytes | Callable[[], bytes], *, why: str = "", **more: Any
) -> Entry:
    return Entry(number, name, expected, weights(data), to=_TO, why=why, **more)


def _good(**more: Any) -> dict[str, Any]:
    return {"w": tensor(), **more}


def _million_tensors() -> bytes:
    return b"{" + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % i for i in range(600_000)) + b"}"


ENTRIES = (
    _entry(98, "length-2-64", _SIZE, file_of(_good(), length=(1 << 64) - 1)),
    _entry(98, "length-over-limit", _SIZE, file_of(_good(), length=10**8 + 1)),
    _entry(98, "length-over-file", _SIZE, file_of(_good(), length=500)),
    _entry(98, "length-over-file-by-one", _SIZE, file_of(b"{}", b"", length=3)),
    *(_entry(99, f"length-{n}", _HEADER, file_of(b"{" + b" " * 6 + b"}", b"", length=n)) for n in range(8)),
    *(_entry(98, f"file-of-{n}-bytes", _SIZE, bytes(n)) for n in (0, 7)),
    _entry(99, "header-is-list", _HEADER, file_of(b"[]", b"")),
    _entry(99, "header-begins-with-space", _HEADER, file_of(b" {}", b"")),
    _entry(99, "header-not-utf8", _HEADER, file_of(b'{"\xff":1}', b"")),
    _entry(99, "header-utf16", _HEADER, file_of("{}".encode("utf-16"), b"")),
    _entry(99, "header-nul-padding", _HEADER, file_of(b"{}\0\0\0\0\0\0", b"")),
    _entry(99, "header-two-values", _HEADER, file_of(b"{}{}", b"")),
    _entry(99, "header-not-closed", _HEADER, file_of(b'{"w":{', b"")),
    _entry(99, "header-nan", _HEADER, file_of(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,12]}}')),
    _entry(99, "tensor-without-dtype", _HEADER, file_of({"w": {"shape": [3], "data_offsets": [0, 12]}})),
    _entry(99, "tensor-with-more", _HEADER, file_of({"w": {**tensor(), "url": "http://127.0.0.1/"}})),
    _entry(99, "tensor-is-null", _HEADER, file_of({"w": None})),
    _entry(100, "overlap", "safetensors.overlap", file_of({"a": tensor(), "b": tensor(4, 16)}, bytes(16))),
    _entry(100, "same-bytes-twice", "safetensors.overlap", file_of({"a": tensor(), "b": tensor()})),
    _entry(101, "hole", "safetensors.coverage", file_of({"a": tensor(), "b": tensor(16, 28)}, bytes(28))),
    _entry(101, "hole-at-start", "safetensors.coverage", file_of({"a": tensor(4, 16)}, bytes(16))),
    _entry(101, "bytes-after", "safetensors.coverage", file_of(_good(), bytes(12) + b"PK\x05\x06" + bytes(18))),
    _entry(101, "zip-after", "safetensors.coverage", file_of(_good(), bytes(12) + archives.archive(carriers.model_states().records()))),
    _entry(101, "data-short", "safetensors.coverage", file_of(_good(), bytes(8))),
    _entry(102, "end-before-begin", _OFFSETS, file_of({"w": tensor(12, 0)})),
    _entry(102, "begin-2-63", _OFFSETS, file_of({"w": tensor((1 << 63) + 1, (1 << 63) + 13)})),
    _entry(102, "begin-negative", _OFFSETS, file_of({"w": tensor(-12, 0)})),
    _entry(102, "begin-float", _OFFSETS, file_of({"w": tensor(0.0, 12.0)})),
    _entry(102, "begin-bool", _OFFSETS, file_of({"w": tensor(False, 12)})),
    _entry(102, "three-offsets", _OFFSETS, file_of({"w": {**tensor(), "data_offsets": [0, 12, 12]}})),
    _entry(102, "offset-million-digits", _HEADER, file_of(b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,' + b"9" * 1_000_000 + b"]}}"), why="Python's own limit of digits makes it no JSON number"),
    _entry(103, "size-differs", _OFFSETS, file_of({"w": tensor(shape=(4,))})),
    _entry(103, "product-overflow", _HEADER, file_of({"w": tensor(shape=(1 << 63, 1 << 63))}), why="a length beyond 2**62 is not a length"),
    _entry(103, "product-overflow-to-size", _OFFSETS, file_of({"w": tensor(shape=(1 << 32, 1 << 32, 3))})),
    _entry(103, "shape-negative", _HEADER, file_of({"w": tensor(shape=(-3,))}), why="no shape at all"),
    _entry(103, "shape-of-floats", _HEADER, file_of({"w": tensor(shape=(3.0,))}), why="no shape at all"),
    _entry(103, "shape-65-dims", _HEADER, file_of({"w": tensor(shape=(1,) * 64 + (3,))}), why="no shape at all"),
    _entry(104, "key-twice", _HEADER, file_of(b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}')),
    _entry(104, "key-twice-by-escape", _HEADER, file_of(b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"\\u0077":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}')),
    _entry(104, "metadata-twice", _HEADER, file_of(b'{"__metadata__":{},"__metadata__":{}}', b"")),
    _entry(104, "metadata-number", _HEADER, file_of(_good(__metadata__={"step": 3}))),
    _entry(104, "metadata-list", _HEADER, file_of(_good(__metadata__=["a"]))),
    _entry(104, "surrogate-key", _HEADER, file_of(b'{"\\ud800":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}')),
    _entry(105, "depth-100000", _HEADER, file_of(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""), why="no JSON that can be read"),
    _entry(105, "six-hundred-thousand-tensors", "checkpoint.too_large", lambda: file_of(_million_tensors(), b"")),
    _entry(105, "ninety-megabytes-of-spaces", OK, lambda: file_of(json.dumps(_good()).encode() + b" " * 90_000_000), why="the format pads with spaces, and allows 100 MB of header"),
    _entry(106, "dtype-unknown", "tensor.unsupported", file_of({"w": tensor(dtype="F5")})),
    _entry(106, "dtype-lower-case", "tensor.unsupported", file_of({"w": tensor(dtype="f32")})),
    _entry(107, "replaced-mid-job", "source.changed", file_of(_good()), inspect=OK, tamper="model.safetensors"),
    _entry(99, "name-parent", "name.invalid", file_of({"../../w": tensor()})),
    _entry(99, "name-terminal", "name.invalid", file_of({"\x1b[31m": tensor()})),
    _entry(99, "good", OK, file_of({"w": tensor(), "scalar": tensor(12, 16, ()), "none": tensor(16, 16, (0, 5)), "__metadata__": {"format": "pt"}}, bytes(16))),
    Entry(99, "pickle-named-safetensors", _SIZE, weights(op.stream({"w": 1}) + bytes(40)), to=_TO, why="its first eight bytes are a length that no file has"),
)  # fmt: skip
