"""Tensors that one torch file holds whole: their places in the file, and aliases among them."""

from __future__ import annotations

from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.pickles.nodes import PTensor
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import ShardMapBuilder


def add_whole_tensor(
    builder: ShardMapBuilder, name: str, state: str, tensor: PTensor, *, torch_file: TorchFile, file: int
) -> int:
    """Register a tensor that one file holds whole, packed or strided; returns its number."""
    index = builder.tensor(name, state, BY_NAME[tensor.dtype], tensor.shape)
    if tensor.numel:
        builder.whole(index, file=file, offset=torch_file.tensor_offset(tensor), stride=tensor.stride)
    return index


def place_of(tensor: PTensor) -> tuple[object, ...]:
    """A key that is equal for two tensors of one file if they are the same elements in the same order."""
    stride = tuple(s for n, s in zip(tensor.shape, tensor.stride, strict=True) if n != 1)
    return (tensor.storage.key, tensor.dtype, tensor.offset, tensor.shape, stride)
