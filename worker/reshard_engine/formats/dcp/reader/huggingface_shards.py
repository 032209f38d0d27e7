"""Reads the sharded files of torch's Hugging Face storage writer: safetensors whose tensors are boxes of larger ones.

Each file lists the offset of each of its tensors in the global tensor. Nothing states the global shapes, so the loss
of all shards that are last along a dimension cannot be noticed.

Source: torch 2.13.0 `distributed/checkpoint/hf_storage.py` (`HuggingFaceStorageWriter`, `save_distributed=True`),
`distributed/checkpoint/_hf_utils.py` (`_gen_file_name`, `DCP_SHARDING_INFO`); verified by running.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import numpy as np

from reshard.dcp_options import Framework
from reshard.errors import SourceError, listed, printable
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.containers.safetensors import SafetensorsEntry, SafetensorsFile, open_safetensors_file
from reshard_engine.containers.source_file import SourceFile, open_all, parse_json
from reshard_engine.formats.carried import named
from reshard_engine.formats.dcp.facts import SHARD_FILE, DcpFacts, names_of
from reshard_engine.formats.format import ReadOptions
from reshard_engine.formats.model_weights import checked_name
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing
from reshard_engine.tensors.shard_map import Boxes, LogicalTensor, ShardMapBuilder, add_boxes

_INFO = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"
_MOST = 1 << 62
_FIX = "the files are of different saves: copy the checkpoint again"
_STATE = "it is an optimizer's state, and this writer keeps none of its param groups"
_NOT_PROVEN = (
    "the files do not state global shapes: if all shards that are last along a dimension were lost, nothing would tell"
)


class HuggingFaceShardsReader:
    """Reads weights in shards of each rank, `shard-00001-model-00001-of-00001.safetensors`."""

    family = "dcp"

    def recognises(self, listing: Listing) -> bool:
        """True if there are files with such names."""
        return any(map(SHARD_FILE.fullmatch, names_of(listing)))

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the weights of a directory.

        Raises:
            SourceError: `safetensors.*`, `checkpoint.coverage`, `checkpoint.malformed`, `checkpoint.mixed`,
                `name.invalid`.
        """
        numbers = {n: i for n, i in names_of(listing).items() if SHARD_FILE.fullmatch(n)}
        sources = [SourceFile(location.store, n, (listing.files[i],)) for n, i in sorted(numbers.items())]
        found: dict[str, list[tuple[int, SafetensorsEntry, tuple[int, ...]]]] = {}
        shards = open_all(sources, open_safetensors_file)
        for number, shard in enumerate(shards):
            offsets = _offsets(shard)
            for entry in shard.tensors:
                found.setdefault(checked_name(entry.name), []).append((number, entry, offsets[entry.name]))
        builder = ShardMapBuilder()
        states = _states(found)
        parameters = [_parameter(builder, name, parts) for name, parts in found.items() if name not in states]
        return Checkpoint(
            url=location.url,
            tag=options.tag,
            format="dcp-safetensors",
            framework_version=None,
            world={},
            files=tuple(sources),
            shard_map=builder.build(),
            parameters=tuple(parameters),
            buffers=(),
            shared={},
            optimizer=None,
            foreign_globals=(),
            warnings=(_NOT_PROVEN,),
            facts=DcpFacts(Framework.STATE_DICT),
            not_carried=named(states, _STATE),
        )


def _states(names: Collection[str]) -> list[str]:
    """The names that are of an optimizer's states: `state.`, the end of another name, and the state's name."""
    ends = {name[at:] for name in names for at in _starts(name)}
    found: list[str] = []
    for name in names:
        parts = name.split(".")
        below = [i + 1 for i, part in enumerate(parts[:-2]) if part == "state"]
        if any(".".join(parts[at:-1]) in ends for at in below):
            found.append(name)
    return found


def _starts(name: str) -> list[int]:
    """The places in a name at which a part of it begins."""
    return [0, *(i + 1 for i, char in enumerate(name) if char == ".")]


def _offsets(shard: SafetensorsFile) -> dict[str, tuple[int, ...]]:
    """The offset of each tensor of a file in its global tensor."""
    name = printable(shard.file.name)
    text = shard.metadata.get(_INFO)
    if text is None:
        raise SourceError("checkpoint.malformed", f"{name} has no {_INFO} in its header", fix=_FIX)
    info = parse_json(text.encode(), code="checkpoint.malformed", what=f"{_INFO} of {name}")
    entries = cast("dict[str, Any]", info) if isinstance(info, dict) else {}
    found: dict[str, tuple[int, ...]] = {}
    for tensor in shard.tensors:
        entry: Any = entries.get(tensor.name)
        offsets: Any = cast("dict[str, Any]", entry).get(_OFFSETS) if isinstance(entry, dict) else None
        numbers = cast("list[Any]", offsets) if isinstance(offsets, list) else []
        if len(numbers) != len(tensor.shape) or not all(type(n) is int and 0 <= n < _MOST for n in numbers):
            raise SourceError(
                "checkpoint.malformed",
                f"{name}: {printable(tensor.name)} has no offsets for its {len(tensor.shape)} dimensions",
            )
        found[tensor.name] = tuple(numbers)
    return found


def _parameter(
    builder: ShardMapBuilder, name: str, parts: list[tuple[int, SafetensorsEntry, tuple[int, ...]]]
) -> Parameter:
    dtypes = {entry.dtype.name for _, entry, _ in parts}
    if len(dtypes) > 1 or len({len(entry.shape) for _, entry, _ in parts}) > 1:
        text = f"the shards of {printable(name)} have several types or numbers of dimensions: {listed(sorted(dtypes))}"
        raise SourceError("checkpoint.mixed", text, fix=_FIX)
    dims = len(parts[0][2])
    shape = tuple(max(offsets[d] + entry.shape[d] for _, entry, offsets in parts) for d in range(dims))
    full = [p for p in parts if 0 not in p[1].shape]
    boxes = np.array([[offsets, entry.shape] for _, entry, offsets in full], dtype=np.int64).reshape(len(full), 2, dims)
    file = np.array([number for number, _, _ in full], dtype=np.int64)
    offset = np.array([entry.offset for _, entry, _ in full], dtype=np.int64)
    tensor = LogicalTensor(name, "weight", parts[0][1].dtype, shape)
    return Parameter(name, shape, None, add_boxes(builder, tensor, Boxes(boxes, file, offset)))
