"""A whole distributed checkpoint of which one part is any bytes: metadata, a file, or the pickle of a record."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from adversarial.corpus import opcodes as op
from adversarial.corpus.carriers import f32, floats
from adversarial.corpus.distributed import FILES, REST, TOP, Draft, record
from house.requests import asked
from reshard.choices import OpaquePolicy
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.registry import writer_of
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.operations.inspection import describe
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.testing.stores import MemoryStore

_VALUES = ("optimizer.param_groups.0.lr", "optimizer.param_groups.0.params", "user_state")
_CHUNKS = (("model.w", TOP), ("model.w", REST), ("optimizer.state.v.exp_avg", TOP))
_PARTS = 2 + len(_VALUES) + len(_CHUNKS)


@lru_cache(maxsize=1)
def _good() -> dict[str, bytes]:
    return Draft().files()


def _spoilt(which: int, data: bytes) -> dict[str, bytes]:
    """The files with one part replaced; records keep right CRC-32s and places."""
    if which < 2:
        return {**_good(), (".metadata", FILES[1])[which]: data}
    draft = Draft()
    if which < 2 + len(_VALUES):
        draft.entries[_VALUES[which - 2]].records[None] = record(data)
    else:
        key, box = _CHUNKS[which - 2 - len(_VALUES)]
        draft.entries[key].records[box] = record(data, floats(6))
    return draft.files()


def fuzz_dcp(data: bytes) -> None:
    """A checkpoint up to the layout of a target; what it holds lies inside of its files."""
    store = MemoryStore()
    for name, content in _spoilt(data[0] % _PARTS if data else 0, data[1:]).items():
        store.put(f"b/{name}", content, metadata={}, if_absent=False)
    checkpoint = read_checkpoint(Location(store, "b", "mem://b"), None, OpaqueLedger(OpaquePolicy.DROP))
    lies_inside(checkpoint)
    describe(checkpoint).model_dump_json()
    fields = {"source": {"url": "/data/in"}, "target": "/data/out", "to": "dcp", "opaque": "drop"}
    request = asked(**fields)
    writer_of("dcp").lay_out(checkpoint, request, name="out")


def lies_inside(checkpoint: Checkpoint) -> None:
    """Fail if a piece that is packed begins or ends outside of its file."""
    found = checkpoint.shard_map
    sizes = np.array([f.size_bytes for f in checkpoint.files], dtype=np.int64)
    widths = np.array([t.dtype.itemsize_bytes for t in found.tensors], dtype=np.int64)
    ends = found.offset + (found.end - found.begin) * widths[found.tensor]
    if (found.offset < 0).any() or (ends > sizes[found.file])[found.strides_of < 0].any():
        raise AssertionError("a piece lies outside of its file")


def seeds() -> list[bytes]:
    """The parts as they are, each behind its number."""
    values = [0.001, ["w", "v"], {"a": (1, "x"), "b": [2.5, None]}]
    chunks = [f32("0", 2, 3)] * len(_CHUNKS)
    pickles = [op.stream(value) for value in (*values, *chunks)]
    parts = [_good()[".metadata"], _good()[FILES[1]], *pickles]
    return [bytes([number]) + part for number, part in enumerate(parts)]
