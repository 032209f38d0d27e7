"""Safetensors: the strict reader of a header, and the layout of a file that is written.

Source: safetensors 0.6 README, "Format", and its `safetensors/src/tensor.rs` (`read_metadata`, `validate`):
a header of at most 100,000,000 bytes that begins with `{`, string-to-string metadata, tensors that cover
the rest of the file without holes or overlaps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, cast

from reshard.errors import SourceError, counted, printable
from reshard_engine.containers.foreign import foreign_file
from reshard_engine.containers.source_file import CachedFile, SourceFile, parse_json
from reshard_engine.tensors.dtypes import BY_SAFETENSORS, Dtype
from reshard_engine.tensors.layout import Body, FileTemplate, require_distinct

# The layout of a safetensors file: an 8-byte length, a JSON header, then the tensors without holes.
#
# Source: safetensors 0.6 README, "Format" (header padded with spaces; the reference writer aligns the
# buffer to 8 bytes; tensors ordered by alignment, then name, which keeps them aligned).

MAX_HEADER_BYTES = 100_000_000
METADATA_KEY = "__metadata__"
"""The key of the header's own metadata."""


def safetensors_template(
    tensors: Sequence[tuple[str, Dtype, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> FileTemplate:
    """The template of a file with these tensors (name, dtype, shape, elements); slots follow the given order.

    The header follows it, too: readers sort by offset, and a program that shards the weights again finds the order
    of the model.

    Raises:
        SourceError: `tensor.unsupported` for a dtype that the format has no name for, `name.invalid` for a tensor
            with the name that the format reserves, `checkpoint.ambiguous` for two tensors of one name.
    """
    require_distinct([t[0] for t in tensors])
    if METADATA_KEY in {t[0] for t in tensors}:
        raise SourceError(
            "name.invalid", f"safetensors reserves the name {METADATA_KEY}", fix="write --to torch instead"
        )
    order = sorted(range(len(tensors)), key=lambda i: (-tensors[i][1].itemsize_bytes, tensors[i][0]))
    header: dict[str, object] = {METADATA_KEY: dict(metadata), **dict.fromkeys(t[0] for t in tensors)}
    placed: list[tuple[int, int]] = []
    at = 0
    for index in order:
        name, dtype, shape, numel = tensors[index]
        if dtype.safetensors is None:
            raise SourceError(
                "tensor.unsupported",
                f"{name}: safetensors has no type for {dtype.name}",
                fix="write --to torch instead",
            )
        length = numel * dtype.itemsize_bytes
        header[name] = {"dtype": dtype.safetensors, "shape": list(shape), "data_offsets": [at, at + length]}
        placed.append((index, at))
        at += length
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise SourceError(
            "safetensors.header_size", f"the header would take {len(text)} bytes", fix="use smaller shards"
        )
    head = len(text).to_bytes(8, "little") + text
    bodies = [
        Body(len(head) + offset, index, 0, tensors[index][3], tensors[index][1], None) for index, offset in placed
    ]
    return FileTemplate(len(head) + at, ((0, head),), tuple(bodies))


MAX_DIMS = 64
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor: packed, row-major, at an absolute byte offset of the file."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A parsed header."""

    file: SourceFile
    tensors: tuple[SafetensorsEntry, ...]
    """The tensors in the order of the header, which may differ from the order of the data."""
    metadata: Mapping[str, str]


def open_safetensors_file(file: SourceFile) -> SafetensorsFile:
    """Parse and check a header; no byte of a tensor is read.

    Raises:
        SourceError: `safetensors.header_size`, `safetensors.header`, `safetensors.offsets`, `safetensors.overlap`,
            `safetensors.coverage`, `tensor.unsupported` for an element type that is not known,
            `checkpoint.too_large` for more tensors than a header may list.
    """
    name = printable(file.name)
    cached = CachedFile(file)
    # The length of a header may have the first bytes of another kind of file, such as gzip; its text begins with `{`.
    head = cached.read(0, min(_LENGTH_BYTES + 1, file.size_bytes))
    if head[_LENGTH_BYTES:] != b"{" and (other := foreign_file(file, cached.read)) is not None:
        raise other
    if file.size_bytes < _LENGTH_BYTES:
        raise _bad(
            "header_size", f"{name} has {counted(file.size_bytes, 'byte')}; the length of its header alone takes 8"
        )
    length = int.from_bytes(cached.read(0, _LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES or length > file.size_bytes - _LENGTH_BYTES:
        raise _bad(
            "header_size",
            f"{name} says that its header has {length} bytes; the file has {file.size_bytes}, "
            f"the format allows {MAX_HEADER_BYTES}",
        )
    # A header of up to 100 MB is not kept in the cache as well.
    source = cached if cached.holds(_LENGTH_BYTES, length) else file
    header = _header(source.read(_LENGTH_BYTES, length), name)
    metadata = _metadata(header.pop(METADATA_KEY, None), name)
    spans: list[tuple[int, int, str]] = []
    tensors: list[SafetensorsEntry] = []
    for key, value in header.items():
        dtype, shape, begin, end = _entry(value, _Tensor(name, key))
        tensors.append(SafetensorsEntry(key, dtype, shape, _LENGTH_BYTES + length + begin))
        spans.append((begin, end, key))
    _prove_tiling(spans, file.size_bytes - _LENGTH_BYTES - length, name)
    return SafetensorsFile(file, tuple(tensors), metadata)


class _Tensor(NamedTuple):
    """The name of a tensor for errors. Its text is made only when an error is raised."""

    file: str
    key: str

    def __str__(self) -> str:
        return f"{self.file}: {printable(self.key)}"


def _bad(code: str, message: str) -> SourceError:
    return SourceError(
        f"safetensors.{code}", message, fix="the file is damaged, or is not a safetensors file: copy it again"
    )


def _header(data: bytes, name: str) -> dict[str, Any]:
    if data[:1] != b"{":
        raise _bad("header", f"the header of {name} begins with {data[:4].hex() or 'nothing'}, not with an object")
    # The format pads with spaces only. JSON would allow other white space, which no writer uses.
    value = parse_json(data.rstrip(b" "), code="safetensors.header", what=f"the header of {name}")
    return cast("dict[str, Any]", value)


def _metadata(value: object, name: str) -> dict[str, str]:
    if value is None:
        return {}
    entries = cast("dict[str, object]", value) if isinstance(value, dict) else None
    if entries is None or not all(isinstance(v, str) for v in entries.values()):
        raise _bad("header", f"{name}: __metadata__ does not map texts to texts")
    return cast("dict[str, str]", entries)


def _entry(value: object, what: _Tensor) -> tuple[Dtype, tuple[int, ...], int, int]:
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    if fields.keys() != {"dtype", "shape", "data_offsets"} or not isinstance(fields["dtype"], str):
        raise _bad("header", f"{what} does not have exactly dtype, shape and data_offsets")
    shape, offsets = _integers(fields["shape"]), _integers(fields["data_offsets"])
    if shape is None or len(shape) > MAX_DIMS:
        raise _bad("header", f"{what} does not have a shape of at most {MAX_DIMS} lengths")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad("offsets", f"{what}: data_offsets are not two integers of which the first is not above the second")
    dtype = BY_SAFETENSORS.get(fields["dtype"])
    if dtype is None:
        raise SourceError("tensor.unsupported", f"{what}: element type {printable(fields['dtype'])!r} is not supported")
    begin, end = offsets
    if prod(shape) * dtype.itemsize_bytes != end - begin:
        raise _bad("offsets", f"{what}: {end - begin} bytes for a {dtype.safetensors} of shape {list(shape)}")
    return dtype, shape, begin, end


def _integers(value: object) -> tuple[int, ...] | None:
    """The value as a tuple of integers from 0 to 2**62; None if it is anything else."""
    if not isinstance(value, list):
        return None
    items = tuple(cast("list[object]", value))
    # In Python `True` is an int, and a float may equal an int; neither is a valid length.
    return cast("tuple[int, ...]", items) if all(type(i) is int and 0 <= i < 1 << 62 for i in items) else None


def _prove_tiling(spans: list[tuple[int, int, str]], size_bytes: int, name: str) -> None:
    at = 0
    for begin, end, key in sorted(spans):
        if begin < at:
            raise _bad(
                "overlap", f"{_Tensor(name, key)} begins at {begin}, inside the tensor before it, which ends at {at}"
            )
        if begin > at:
            raise _bad("coverage", f"{name}: bytes {at} to {begin} of the data belong to no tensor")
        at = end
    if at != size_bytes:
        raise _bad("coverage", f"{name}: the tensors end at byte {at} of the data, which have {size_bytes} bytes")
