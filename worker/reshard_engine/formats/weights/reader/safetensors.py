"""Weights as safetensors: `model.safetensors`, or shards with an index.

Source: huggingface_hub 2.4.0 `serialization/_torch.py` (tied aliases in the metadata), torch 2.13.0
`distributed/checkpoint/hf_storage.py` (`DCP_SHARDING_INFO`: the file's tensors are parts of larger ones).
"""

from __future__ import annotations

import re

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.safetensors_file import open_safetensors_file
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.reader import ReadOptions
from reshard_engine.formats.weights.reader.consolidated import HeldTensor, Shard, read_weights
from reshard_engine.formats.weights.reader.files import WeightFiles, weight_files
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing

_ANY_STEM = re.compile(r".+")


class SafetensorsReader:
    """Reads safetensors weights."""

    family = "safetensors"

    def recognises(self, listing: Listing) -> bool:
        """True if there are safetensors files, or an index of such files."""
        return _files(listing).present

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the weights of a directory; the stem `model` takes precedence over other names.

        Raises:
            SourceError: `safetensors.*`, `checkpoint.*`, `tensor.unsupported`, `source.unsupported`, `name.invalid`.
        """
        return read_weights(location, _files(listing), _parse, preferred="model", form="safetensors", options=options)


def _files(listing: Listing) -> WeightFiles:
    return weight_files(listing, ".safetensors", _ANY_STEM)


def _parse(file: SourceFile) -> Shard:
    parsed = open_safetensors_file(file)
    if "DCP_SHARDING_INFO" in parsed.metadata:
        raise SourceError(
            "source.unsupported",
            f"{printable(file.name)} holds parts of tensors, as PyTorch DCP writes them",
            fix="consolidate it with torch.distributed.checkpoint first",
        )
    tensors = [HeldTensor(t.name, t.dtype, t.shape, t.offset) for t in parsed.tensors]
    return Shard(file, tensors, {}, parsed.metadata)
