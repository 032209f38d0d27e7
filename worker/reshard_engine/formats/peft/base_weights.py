"""Joins the files of the base model and those of a run into one shard map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.tensors.shard_map import ShardMap


def with_files_of(checkpoint: Checkpoint, base: Checkpoint) -> tuple[Checkpoint, list[Parameter], Mapping[str, str]]:
    """Add another checkpoint's files and tensors to a checkpoint's map; also returns its parameters and tied names.

    Parameters keep their own names and have the numbers that their tensors have in the joined map.
    """
    first, file = len(checkpoint.shard_map.tensors), len(checkpoint.files)
    files = tuple(replace(f, name=f"base/{f.name}") for f in base.files)
    joined = replace(
        checkpoint,
        files=(*checkpoint.files, *files),
        shard_map=joined_maps(checkpoint.shard_map, base.shard_map, first_file=file),
        warnings=(*checkpoint.warnings, *(f"base model: {w}" for w in base.warnings)),
    )
    weights = [replace(p, weight=p.value() + first) for p in base.parameters]
    return joined, weights, base.shared


def joined_maps(one: ShardMap, other: ShardMap, *, first_file: int) -> ShardMap:
    """Join two maps; the tensors of the second are numbered after those of the first.

    Args:
        one: The first map.
        other: The second map; files hold each of its tensors whole: none is derived.
        first_file: Number of the other's first file.

    Raises:
        ValueError: The second map has tensors that are computed from others.
    """
    if other.derived:
        raise ValueError("tensors that are made of others")
    strides = np.where(other.strides_of >= 0, other.strides_of + len(one.strides), -1)
    return replace(
        one,
        tensors=(*one.tensors, *other.tensors),
        tensor=np.concatenate([one.tensor, other.tensor + len(one.tensors)], dtype=np.int32),
        begin=np.concatenate([one.begin, other.begin]),
        end=np.concatenate([one.end, other.end]),
        file=np.concatenate([one.file, other.file + first_file], dtype=np.int32),
        offset=np.concatenate([one.offset, other.offset]),
        strides_of=np.concatenate([one.strides_of, strides], dtype=np.int32),
        strides=(*one.strides, *other.strides),
    )
