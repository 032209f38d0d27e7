"""The fingerprint of a training state, from docs/formats/fingerprint.md alone: numpy, xxhash and nothing of reshard.

A state has parts: `model`, arrays by name; `moments`, arrays and numbers by name and state; `counters`, numbers by
name; and `groups`, the hyper-parameters of each trained parameter. The type of an array stands beside it, because
numpy has no bfloat16.
"""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import xxhash

TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
BLOCK = 262_144


def text(value):
    """JSON without spaces, sorted, in ASCII; a number without a fraction is an integer."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        items = sorted((k, text(v)) for k, v in value.items() if v is not None)
        return "{" + ",".join(f"{json.dumps(k)}:{v}" for k, v in items) + "}"
    return f"[{','.join(map(text, value))}]" if isinstance(value, list) else json.dumps(value)


def tensor(dtype, shape, data):
    """Type, shape and digest of packed little-endian bytes in row-major order."""
    blocks = (xxhash.xxh3_64_intdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    return [dtype, list(shape), xxhash.xxh3_128_hexdigest(b"".join(b.to_bytes(8, "little") for b in blocks))]


def component(lines):
    """The digest of a component; None if it has no lines."""
    joined = "".join(f"{line}\n" for line in sorted(map(text, lines)))
    return hashlib.sha256(joined.encode()).hexdigest() if joined else None


def whole(model, moments, counters, groups):
    """The digest of the whole, of components that are digests or None."""
    named = {"model": model, "moments": moments, "counters": counters, "groups": groups}
    lines = [["reshard-fingerprint", 1], *([name, digest] for name, digest in named.items() if digest)]
    return hashlib.sha256("".join(f"{text(line)}\n" for line in lines).encode()).hexdigest()


def read_safetensors(path: Path):
    """The tensors of a file as (type, shape, bytes), by name."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), memoryview(raw)[8 + length :]
    header.pop("__metadata__", None)
    spans = {name: slice(*held["data_offsets"]) for name, held in header.items()}
    # A view of numpy reads the bytes as they are stored: NaNs keep their payloads, and zeros their signs.
    packed = {name: np.frombuffer(data[span], dtype=np.uint8).tobytes() for name, span in spans.items()}
    return {name: (TYPES[h["dtype"]], h["shape"], packed[name]) for name, h in header.items()}
