"""The layout of a safetensors file: an 8-byte length, a JSON header, then the tensors without holes.

Source: safetensors 0.6 README, "Format" (header padded with spaces; the reference writer aligns the
buffer to 8 bytes; tensors ordered by alignment, then name, which keeps them aligned).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from reshard.errors import SourceError
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.layout import Body, FileTemplate, require_distinct

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
