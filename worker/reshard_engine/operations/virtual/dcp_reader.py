"""A `StorageReader` of torch over a distributed checkpoint that is never written.

torch's loader asks for boxes of tensors, and gets them from the source's extents.

Source: torch 2.13.0 `distributed/checkpoint/storage.py` (`StorageReader`), `distributed/checkpoint/filesystem.py`
(`FileSystemReader`), `distributed/checkpoint/state_dict_loader.py` (errors of any rank end the call on all).
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from reshard.dcp_options import DcpOptions, Framework
from reshard.errors import RequestError
from reshard.models.jobs import ConvertRequest
from reshard_engine.execute.gather import ReadItem as Elements, TensorReader
from reshard_engine.formats.dcp_files.metadata.model import METADATA_FILE
from reshard_engine.formats.dcp_files.metadata.parse import parse_metadata
from reshard_engine.operations.virtual.checkpoint import VirtualCheckpoint
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.layout import ZEROS
from reshard_engine.tensors.views import Box, View


@dataclass(frozen=True, slots=True)
class _Record:
    """The place of a record, and the sizes of its chunk; of a value there are none."""

    path: str
    offset: int
    length: int
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Box:
    """A box of a tensor of the shard map, which an item of a plan wants."""

    item: ReadItem
    tensor: int
    view: View
    dtype: Dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, as they are loaded."""
        return prod(self.view.grid) * self.dtype.itemsize_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes of memory with which the next box begins where elements of any type may."""
        return -(-self.size_bytes // 16) * 16


class Reader(StorageReader):
    """Reads any checkpoint for `torch.distributed.checkpoint.load`, as if it were a distributed one.

    Each rank reads the elements that its placements need, also where they are a part of a record. A problem on one rank
    ends the call on all of them: torch raises a `CheckpointException` with the `reshard.ReshardError` of each rank.
    """

    def __init__(self, open_: Callable[[], VirtualCheckpoint], *, compare: bool) -> None:
        """Take the function that opens the source; it is called when the metadata is asked for."""
        self._open, self._compare = open_, compare
        self._layout: VirtualCheckpoint | None = None
        self._records: dict[MetadataIndex, _Record] = {}

    @property
    def layout(self) -> VirtualCheckpoint:
        """The distributed checkpoint that is read; it counts the bytes of the source that this rank has read."""
        if self._layout is None:
            self._layout = self._open()
        return self._layout

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin again. The source is the one of the constructor, and is opened anew."""
        self._close()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Lay the checkpoint out and describe it.

        Raises:
            ReshardError: As `reshard.open_layout`.
        """
        self._close()
        found = parse_metadata(self.layout.read(METADATA_FILE), METADATA_FILE)
        described: dict[str, Any] = {}
        self._records = {}
        files: list[int] = found.file.tolist()
        offsets: list[int] = found.offset.tolist()
        lengths: list[int] = found.length.tolist()
        for entry in found.tensors:
            boxes: list[list[list[int]]] = entry.boxes.tolist()
            chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
            properties = TensorProperties(dtype=getattr(torch, entry.dtype.name), requires_grad=entry.requires_grad)
            described[entry.key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            for number, chunk in enumerate(chunks):
                row, index = entry.first + number, MetadataIndex(entry.key, chunk.offsets, number)
                self._records[index] = _Record(found.files[files[row]], offsets[row], lengths[row], tuple(chunk.sizes))
        for value in found.values:
            described[value.key] = BytesStorageMetadata()
            self._records[MetadataIndex(value.key)] = _Record(found.files[value.file], value.offset, value.length)
        paths = {key: tuple(path) for key, path in (found.paths or {}).items()}
        return Metadata(described, paths, dict(self._records), StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:  # noqa: FBT001
        """Compare what must agree in the source, on the coordinator alone: all ranks read the same source."""
        if self._compare and is_coordinator:
            self.layout.compare()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs.

        Raises:
            SourceError: `source.changed`, or an error of the storage.
        """
        boxes: list[_Box] = []
        for item in plan.items:
            record = self._records[item.storage_index]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self.layout.read(record.path, record.offset, record.length)))
            elif (box := self._box(record, item)) is not None:
                boxes.append(box)
            else:
                self._load_record(record, item, planner)
        self._read_boxes(boxes, planner)
        self.layout.prove_unchanged()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003 - torch's signature
        """True: the source is named in the constructor."""
        return True

    def _close(self) -> None:
        if self._layout is not None:
            self._layout.close()
            self._layout = None

    def _box(self, record: _Record, item: ReadItem) -> _Box | None:
        """The box that an item wants of the tensor that fills its record; None for records that no one tensor fills."""
        file = self.layout.file(record.path)
        bodies = file.template.bodies_in(record.offset, record.offset + record.length)
        if len(bodies) != 1 or (number := file.tensors[bodies[0].slot]) == ZEROS:
            return None
        shard_map = self.layout.checkpoint.shard_map
        shape, more = shard_map.tensors[number].shape, len(record.sizes) - len(shard_map.tensors[number].shape)
        # A chunk is some rows of the tensor; of a stack of tensors, some rows of one of them.
        row = prod(shape[1:])
        if more < 0 or record.sizes[more + 1 :] != shape[1:] or set(record.sizes[:more]) > {1} or bodies[0].begin % row:
            return None
        offsets, lengths = tuple(item.storage_offsets)[more:], tuple(item.lengths)[more:]
        begin = (offsets[0] + bodies[0].begin // row, *offsets[1:]) if shape else ()
        inner = shard_map.derived.get(number)
        if isinstance(inner, View) and inner.grid != shape:
            return None
        part = Box(number, grid=shape, source=begin, offset=(0,) * len(shape), lengths=lengths)
        return _Box(item, number, View(lengths, (part,)), bodies[0].dtype)

    def _load_record(self, record: _Record, item: ReadItem, planner: LoadPlanner) -> None:
        """Load a record as torch's own reader does, and take a box of it."""
        data = io.BytesIO(self.layout.read(record.path, record.offset, record.length))
        part = torch.load(data, map_location="cpu", weights_only=True)
        for dim, (start, count) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, start, count)
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)

    def _read_boxes(self, boxes: Sequence[_Box], planner: LoadPlanner) -> None:
        """Read boxes, each as a tensor that is made of one box: large ones into their targets, small ones together."""
        checkpoint = self.layout.checkpoint
        tensors = checkpoint.shard_map.tensors
        first = len(tensors)
        parts = [(replace(tensors[b.tensor], shape=b.view.grid), b.view) for b in boxes]
        whole = replace(checkpoint, shard_map=checkpoint.shard_map.with_derived(parts))

        def read(batch: _Batch) -> None:
            with self.layout.reader_of(whole) as reader:
                batch.read(reader)

        batches = _batches([_Target(n, b, planner.resolve_tensor(b.item).detach()) for n, b in enumerate(boxes, first)])
        with ThreadPoolExecutor(1 if checkpoint.is_local else _BATCHES_AT_ONCE) as pool:
            for at in range(0, len(batches), _BATCHES_AT_ONCE):
                some = batches[at : at + _BATCHES_AT_ONCE]
                for batch, _ in zip(some, pool.map(read, some), strict=True):
                    batch.commit(planner)


_BATCHES_AT_ONCE = 4
_STRAIGHT_BYTES = 256 << 10
"""Boxes of this size are read into the memory of their targets; for smaller ones a read of their own costs more."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A box, the number of the tensor that is made of it, and the memory that it goes to."""

    number: int
    box: _Box
    tensor: torch.Tensor

    @property
    def is_straight(self) -> bool:
        """True if the box's bytes can be read into the memory of its target."""
        same = self.tensor.dtype is getattr(torch, self.box.dtype.name) and self.tensor.device.type == "cpu"
        return same and self.tensor.is_contiguous() and self.box.size_bytes >= _STRAIGHT_BYTES

    def elements(self, at: int) -> Elements:
        """The elements of the box, at a place in memory."""
        return Elements(self.number, self.box.dtype, 0, prod(self.box.view.grid), at)


class _Batch:
    """Targets that are read by one call: one alone, straight, or several by way of memory of their own."""

    def __init__(self, *, straight: bool) -> None:
        self.straight = straight
        self.targets: list[_Target] = []
        self.size_bytes = 0

    def add(self, target: _Target) -> None:
        self.targets.append(target)
        self.size_bytes += target.box.room_bytes

    def read(self, reader: TensorReader) -> None:
        """Read the elements, and fill the targets with them."""
        if self.straight:
            (target,) = self.targets
            memory = target.tensor.reshape(-1).view(torch.uint8).numpy()  # pyright: ignore[reportUnknownMemberType]
            reader.read([target.elements(0)], memory)
            return
        memory = np.empty(self.size_bytes, dtype=np.uint8)
        ends = list(accumulate((t.box.room_bytes for t in self.targets), initial=0))
        reader.read([t.elements(at) for t, at in zip(self.targets, ends, strict=False)], memory)
        for target, at in zip(self.targets, ends, strict=False):
            data: torch.Tensor = torch.from_numpy(memory[at : at + target.box.size_bytes])  # pyright: ignore[reportUnknownMemberType]
            part = data.view(getattr(torch, target.box.dtype.name))
            target.tensor.copy_(part.reshape(target.tensor.shape))

    def commit(self, planner: LoadPlanner) -> None:
        """Tell the planner that the targets are filled."""
        for target in self.targets:
            planner.commit_tensor(target.box.item, target.tensor)


def _batches(targets: Sequence[_Target]) -> list[_Batch]:
    """Targets by what is read together, in the order of the source's tensors; small ones up to 16 MiB."""
    found: list[_Batch] = []
    open_: _Batch | None = None
    for target in sorted(targets, key=lambda t: (t.box.tensor, t.number)):
        if target.is_straight:
            found.append(_Batch(straight=True))
            found[-1].add(target)
            continue
        if open_ is None or open_.size_bytes + target.box.room_bytes > READ_BATCH_BYTES:
            open_ = _Batch(straight=False)
            found.append(open_)
        open_.add(target)
    return found


def reader(request: ConvertRequest, *, compare: bool) -> Reader:
    """A storage reader over the distributed checkpoint that the request asks for."""
    return Reader(lambda: _in_one_directory(request), compare=compare)


def _in_one_directory(request: ConvertRequest) -> VirtualCheckpoint:
    """The distributed checkpoint, with the `.metadata` that `dcp.load` reads.

    Accelerate and the Trainer save the model and the optimizer as two checkpoints in directories. A source of theirs is
    read under the keys of a plain state dict, unless the request names the framework.

    Raises:
        RequestError: `request.unsatisfiable` for a framework with two directories.
    """
    layout = VirtualCheckpoint.prepare(request, compare=False)
    if METADATA_FILE in layout.sizes:
        return layout
    layout.close()
    options = request.options.of(DcpOptions)
    if options.framework is not None:
        raise RequestError(
            "request.unsatisfiable",
            f"framework={options.framework.value!r}: the model and the optimizer are checkpoints in two directories, "
            "and dcp.load reads one",
            fix=f"leave it out, or take framework={Framework.STATE_DICT.value!r}; for accelerator.load_state or the "
            "Trainer: reshard.direct",
        )
    own = options.model_copy(update={"framework": Framework.STATE_DICT})
    changed = request.options.model_copy(update={"dcp": own})
    return VirtualCheckpoint.prepare(request.model_copy(update={"options": changed}), compare=False)
