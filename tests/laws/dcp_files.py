"""State dicts as `torch.distributed.checkpoint.save` writes them, on meshes that exist on paper only.

Planner, deduplication, records and metadata are torch's own: only the collectives between ranks are left out. A
sharded tensor is cut by the function by which a DTensor is.

Source: torch 2.13.0 `distributed/checkpoint/state_dict_saver.py` (`_save_state_dict`: the order of these calls),
`distributed/tensor/_utils.py` (`_compute_local_shape_and_global_offset`).
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path, PosixPath
from typing import Any, cast

import torch
from torch.distributed.checkpoint import (
    _nested_dict,  # pyright: ignore[reportPrivateUsage]
    _traverse,  # pyright: ignore[reportPrivateUsage]
    _version,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.tensor.placement_types import (
    Placement,
    Replicate,
    Shard,
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

StridedShard = _StridedShard
ALL_ATTRIBUTES = ("planner_data", "storage_data", "storage_meta", "version")
_PLACE = "/runs/demo/step-3"


@dataclass(frozen=True, eq=False)
class Sharded:
    """A tensor that the ranks of a mesh hold together.

    Attributes:
        whole: all of it.
        placements: one for each axis of the mesh.
    """

    whole: torch.Tensor
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Save:
    """How a state dict is saved.

    Attributes:
        mesh: sizes of the axes.
        threads: files of each rank.
        file_per_item: one file for each chunk and value.
        collectives: the ranks agree; else each writes its own metadata.
        lowest_rank: of copies, the lowest rank's is kept; else that of the rank with the least to write.
        empty_chunks: ranks without rows write a chunk without elements, as DTensors do; ShardedTensors do not.
        flatten: nested values become entries; else the state dict must be flat.
        whole_dicts: dicts without tensors are one value, as up to torch 2.3.
        attributes: what the metadata have: earlier versions of torch wrote fewer.
        protocol: of the metadata's pickle: Python's default is 4, and 5 from 3.14 on.
        stale: files of an earlier save that lie there still.
    """

    mesh: tuple[int, ...] = (1,)
    threads: int = 1
    file_per_item: bool = False
    collectives: bool = True
    lowest_rank: bool = False
    empty_chunks: bool = True
    flatten: bool = True
    whole_dicts: bool = False
    attributes: tuple[str, ...] = ALL_ATTRIBUTES
    protocol: int = 4
    stale: int = 0

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        """The coordinates of each rank."""
        return list(product(*map(range, self.mesh)))

    @property
    def replicated(self) -> tuple[Placement, ...]:
        """The placements of a tensor that every rank has."""
        return (Replicate(),) * len(self.mesh)


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


@lru_cache(maxsize=10_000)
def box_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...], placements: tuple[Placement, ...]
) -> Box:
    """The part of a tensor that the rank with these coordinates holds."""
    if not any(isinstance(p, Shard) for p in placements):
        return (0,) * len(shape), shape
    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(at), placements)
    return tuple(offsets), tuple(sizes)


class _Local(torch.Tensor):
    """One rank's part of a tensor, with the two methods that torch's planner calls of a DTensor."""

    part: torch.Tensor
    box: Box
    whole_shape: tuple[int, ...]
    empty_chunks: bool

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        offsets, sizes = map(torch.Size, self.box)
        if 0 in sizes and not self.empty_chunks:
            return []
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes),
            TensorProperties.create_from_tensor(self.part),
            torch.Size(self.whole_shape),
        )
        return [WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, _: MetadataIndex) -> torch.Tensor:
        return self.part


def _local(sharded: Sharded, save: Save, at: tuple[int, ...]) -> torch.Tensor:
    shape = tuple(sharded.whole.shape)
    box = box_of(shape, save.mesh, at, sharded.placements)
    part = sharded.whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]
    part = part if part.shape == sharded.whole.shape else part.clone(memory_format=torch.contiguous_format)
    local: Any = torch.Tensor._make_subclass(_Local, part.detach())  # pyright: ignore[reportPrivateUsage]
    local.part, local.box, local.whole_shape, local.empty_chunks = part, box, shape, save.empty_chunks
    return local


def _of_rank(value: Any, save: Save, at: tuple[int, ...]) -> Any:
    if isinstance(value, Sharded):
        return _local(value, save, at)
    if not isinstance(value, dict):
        return value
    return {k: _of_rank(v, save, at) for k, v in cast("dict[Any, Any]", value).items()}


def save(state_dict: Mapping[str, Any], directory: Path, how: Save, **writer: Any) -> None:
    """Save a state dict, whose tensors may be `Sharded`, as all ranks of a mesh would.

    Args:
        state_dict: As a script hands it to `dcp.save`.
        directory: A directory; it need not exist.
        how: Mesh and options.
        writer: Further arguments of torch's `FileSystemWriter`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    states = [_of_rank(dict(state_dict), how, at) for at in how.coordinates]
    planners = [_planner(state, how, rank) for rank, state in enumerate(states)]
    if how.collectives:
        _save_together(planners, directory, how, None, **writer)
    else:
        for rank, planner in enumerate(planners):
            _save_together([planner], directory, how, rank, **writer)
    for number in range(how.stale):
        (directory / f"__{len(states) + number}_0.distcp").write_bytes(b"of an earlier save")


def _planner(state: Mapping[str, Any], how: Save, rank: int) -> DefaultSavePlanner:
    # No value here is a ShardedTensor: looking for some would enter dicts that earlier versions kept whole.
    planner = DefaultSavePlanner(how.flatten, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=how.lowest_rank)
    try:
        _version._derived_version = "2_3" if how.whole_dicts else None  # pyright: ignore[reportPrivateUsage]
        cast("Any", planner).set_up_planner(dict(state), is_coordinator=not rank)
    finally:
        _version._derived_version = None  # pyright: ignore[reportPrivateUsage]
    return planner


def _save_together(
    planners: Sequence[DefaultSavePlanner], directory: Path, how: Save, alone: int | None, **options: Any
) -> None:
    """The steps of `_save_state_dict`, for all ranks or for one that saves without collectives."""
    writers = [
        FileSystemWriter(directory, not how.file_per_item, sync_files=False, thread_count=how.threads, **options)
        for _ in planners
    ]
    for rank, writer in enumerate(writers):
        writer.set_up_storage_writer(not rank, rank=rank if alone is None else alone, use_collectives=alone is None)
    with warnings.catch_warnings():  # without collectives, torch takes the files of other ranks for an earlier save
        warnings.simplefilter("ignore")
        plans = [w.prepare_local_plan(p.create_local_plan()) for w, p in zip(writers, planners, strict=True)]
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [w.write_data(p.finish_plan(plan), p).wait() for w, p, plan in zip(writers, planners, plans, strict=True)]
    # Threads end in any order.
    ordered = [sorted(r, key=lambda one: (one.storage_data.relative_path, one.storage_data.offset)) for r in results]
    writers[0].finish(metadata, ordered)
    name = ".metadata" if alone is None else f"__{alone}.metadata"
    edit_metadata(directory / name, partial(_as_of, how), protocol=how.protocol)


def _as_of(how: Save, metadata: Metadata) -> None:
    """The metadata without the attributes that the version of torch did not know, and without what chance drew."""
    metadata.storage_meta = StorageMeta(PosixPath(_PLACE), "5b0c", None, [])
    for name in set(ALL_ATTRIBUTES) - set(how.attributes):
        del metadata.__dict__[name]


def flattened(state_dict: Mapping[str, Any], *, whole_dicts: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries that torch makes of a state dict, by flat key, and the path of each.

    Raises:
        ValueError: for two entries of one key.
    """
    if not whole_dicts:
        return cast("Any", _nested_dict).flatten_state_dict(dict(state_dict))
    flat: dict[str, Any] = {}
    paths: dict[str, Any] = {}

    def visit(path: Sequence[str | int], value: object) -> None:
        key = ".".join(map(str, path))
        flat[key], paths[key] = value, path

    cast("Any", _traverse).traverse_state_dict_v_2_3(dict(state_dict), visit)
    return flat, paths


def nested(flat: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that torch makes of such entries."""
    return cast("Any", _nested_dict).unflatten_state_dict(dict(flat), dict(paths))


def read_metadata(path: Path) -> Metadata:
    """The metadata of a test's own save."""
    found: Metadata = pickle.loads(path.read_bytes())
    return found


def edit_metadata(path: Path, change: Callable[[Metadata], object], *, protocol: int = 4) -> None:
    """Change the metadata of a save."""
    metadata = read_metadata(path)
    change(metadata)
    path.write_bytes(pickle.dumps(metadata, protocol=protocol))


def torch_bytes(value: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
