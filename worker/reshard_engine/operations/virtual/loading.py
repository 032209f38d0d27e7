"""Virtual checkpoints for loaders of frameworks: a `StorageReader` of torch, and DeepSpeed's `load_checkpoint`.

No file of a target is written. torch's loader asks for boxes of tensors, and gets them from the source's extents.
DeepSpeed's loader opens files by path, looks whether some exist, and reads each with the engine's own
`checkpoint_engine`: so it is given a temporary directory of empty stubs with the right names, and a checkpoint engine
that reads a stub's file from the virtual checkpoint.

Source: torch 2.13.0 `distributed/checkpoint/storage.py` (`StorageReader`), `distributed/checkpoint/filesystem.py`
(`FileSystemReader`), `distributed/checkpoint/state_dict_loader.py` (errors of any rank end the call on all);
deepspeed 0.19.8 `runtime/engine.py` (`load_checkpoint`), `runtime/checkpoint_engine/checkpoint_engine.py`.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from importlib import import_module
from math import prod
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem
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

from reshard.choices import TargetFormat
from reshard.errors import JobError, ReshardError, SourceError, printable
from reshard.models.jobs import ConvertRequest
from reshard_engine.execute.gather import ReadItem as Elements, TensorReader
from reshard_engine.formats.dcp_files.metadata.model import METADATA_FILE
from reshard_engine.formats.dcp_files.metadata.parse import parse_metadata
from reshard_engine.operations.virtual.checkpoint import VirtualCheckpoint
from reshard_engine.plan.budget import READ_BATCH_BYTES
from reshard_engine.storage.urls import is_within
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.layout import ZEROS
from reshard_engine.tensors.views import Box, View

# torch: a storage reader of the records of a distributed checkpoint that is never written.


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
        """Read boxes, each as a tensor that is made of one box; small ones together."""
        checkpoint = self.layout.checkpoint
        tensors = checkpoint.shard_map.tensors
        first = len(tensors)
        parts = [(replace(tensors[b.tensor], shape=b.view.grid), b.view) for b in boxes]
        whole = replace(checkpoint, shard_map=checkpoint.shard_map.with_derived(parts))

        def read(batch: Sequence[tuple[int, _Box]]) -> list[torch.Tensor]:
            with self.layout.reader_of(whole) as reader:
                return _read_batch(reader, batch)

        batches = _batches(list(enumerate(boxes, first)))
        with ThreadPoolExecutor(1 if checkpoint.is_local else _BATCHES_AT_ONCE) as pool:
            for at in range(0, len(batches), _BATCHES_AT_ONCE):
                some = batches[at : at + _BATCHES_AT_ONCE]
                for batch, found in zip(some, pool.map(read, some), strict=True):
                    for (_, box), part in zip(batch, found, strict=True):
                        target = planner.resolve_tensor(box.item).detach()
                        target.copy_(part.reshape(target.shape))
                        planner.commit_tensor(box.item, target)


_BATCHES_AT_ONCE = 4


def _batches(boxes: Sequence[tuple[int, _Box]]) -> list[list[tuple[int, _Box]]]:
    """Boxes that are read together: in the order of their tensors, of 16 MiB or of one box."""
    found: list[list[tuple[int, _Box]]] = []
    held = 0
    for number, box in sorted(boxes, key=lambda b: (b[1].tensor, b[0])):
        if not found or held + box.size_bytes > READ_BATCH_BYTES:
            found.append([])
            held = 0
        found[-1].append((number, box))
        held += box.size_bytes
    return found


def _read_batch(reader: TensorReader, batch: Sequence[tuple[int, _Box]]) -> list[torch.Tensor]:
    """The elements of boxes, packed."""
    memory = np.empty(sum(box.room_bytes for _, box in batch), dtype=np.uint8)
    items: list[Elements] = []
    found: list[torch.Tensor] = []
    at = 0
    for number, box in batch:
        items.append(Elements(number, box.dtype, 0, prod(box.view.grid), at))
        data: torch.Tensor = torch.from_numpy(memory[at : at + box.size_bytes])  # pyright: ignore[reportUnknownMemberType]
        found.append(data.view(getattr(torch, box.dtype.name)))
        at += box.room_bytes
    reader.read(items, memory)
    return found


def reader(request: ConvertRequest, *, compare: bool) -> Reader:
    """A storage reader over the distributed checkpoint that the request asks for."""
    return Reader(lambda: VirtualCheckpoint.prepare(request, compare=False), compare=compare)


# Agreement of the processes of a run: what one of them cannot do, none of them does.

_Value = TypeVar("_Value")


def together(do: Callable[[], _Value]) -> _Value:
    """Run a step, and return its value on this process when it has succeeded on all processes of the run.

    Raises:
        ReshardError: The error of this process, or else that of the first process that has one.
        JobError: `job.peer_failed` if a process has died meanwhile, or failed otherwise.
    """
    value: _Value | None = None
    error: BaseException | None = None
    try:
        value = do()
    except Exception as caught:  # noqa: BLE001 - every process hears of it, and this one raises it again
        error = caught
    told = _told(error)
    if error is not None:
        raise error
    for rank, other in enumerate(told):
        if isinstance(other, ReshardError):
            other.details["rank"] = rank
            raise other
        if other is not None:
            raise _peer(f"process {rank} of the run failed: {other}")
    return value  # type: ignore[return-value]


def _is_run() -> bool:
    """True if this process is one of several that torch has joined."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _gathered(value: _Value) -> list[_Value]:
    """The values of all processes of the run, by rank."""
    if not _is_run():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)  # pyright: ignore[reportUnknownMemberType]
    return found


def _told(error: BaseException | None) -> Sequence[ReshardError | str | None]:
    """The errors of all processes, by rank."""
    told = error if error is None or isinstance(error, ReshardError) else printable(f"{type(error).__name__}: {error}")
    try:
        return _gathered(told)
    except RuntimeError as lost:
        if isinstance(error, ReshardError):
            raise error from lost
        raise _peer(f"a process of the run is gone: {printable(str(error or lost))}") from lost


def _peer(text: str) -> JobError:
    return JobError("job.peer_failed", text, fix="read that process's log; then start the run again: nothing was kept")


# DeepSpeed: a directory of stubs that stand for the files of a native target.


class StubDirectory:
    """A directory with the names of a virtual checkpoint's files, for loaders that open files by path.

    Small files whose bytes are all known are real. The others are holes of the right size, and `open` has their bytes.
    """

    def __init__(self, directory: str, layout: VirtualCheckpoint, to: str) -> None:
        """Make the files. `directory` is that of the target, of the format `to`; it must not exist."""
        self.to = to
        self.directory = os.path.abspath(directory)
        self.layout = layout
        self._errors: list[ReshardError] | None = None
        for file in layout.layout.files:
            path = os.path.join(directory, file.path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as stub:
                if file.template.filled_bodies or file.template.crc_slots:
                    stub.truncate(file.size_bytes)
                else:
                    stub.write(layout.read(file.path))
        pointer = layout.layout.pointer
        if pointer is not None:
            beside = pointer.directory(directory)
            for name, content in (*pointer.beside, (pointer.name, pointer.content)):
                with open(os.path.join(beside, name), "wb") as small:
                    small.write(content)

    def file_of(self, path: str | os.PathLike[str]) -> str | None:
        """The file of the virtual checkpoint that a path stands for; None for other paths."""
        name = os.path.relpath(os.path.abspath(os.fspath(path)), self.directory)
        return name if name in self.layout.sizes else None

    def open(self, name: str) -> BinaryIO:
        """A file of the virtual checkpoint, whose reads keep their errors."""
        return self.layout.open(name, partial(self._read, name))

    def lies_in(self, directory: str | os.PathLike[str]) -> bool:
        """True if this is the directory, or lies in it."""
        return is_within(self.directory, os.path.abspath(os.fspath(directory)))

    @contextmanager
    def keeping_errors(self) -> Generator[None]:
        """Keep errors of reads for `prove`, and read zeros in place of what was not read.

        A loader that stopped on one process would leave the others waiting in a collective call.
        """
        self._errors = []
        try:
            yield
        except BaseException:
            self._errors = None
            raise

    def prove(self) -> None:
        """Prove that what was read was the source's, and that the source is what it was.

        Raises:
            ReshardError: The first error that a read has kept; `source.changed`.
        """
        errors, self._errors = self._errors, None
        if errors:
            raise errors[0]
        self.layout.prove_unchanged()

    def _read(self, name: str, offset: int, buffer: memoryview) -> None:
        try:
            self.layout.read_into(name, offset, buffer)
        except ReshardError as error:
            if self._errors is None:
                raise
            self._errors.append(error)
            self.layout.read_known(name, offset, buffer)


class StubEngine:
    """A checkpoint engine of DeepSpeed that loads stubs from their virtual checkpoint, and all else as before."""

    def __init__(self, engine: Any, made: StubDirectory) -> None:
        """Take the engine's own checkpoint engine, which loads the files' contents, too."""
        self._engine, self._made = engine, made

    def load(self, path: str, map_location: Any = None) -> Any:
        """The contents of a file of `torch.save`."""
        name = self._made.file_of(path)
        if name is None:
            return self._engine.load(path, map_location)
        with self._made.open(name) as file:
            return self._engine.load(file, map_location)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the engine's own."""
        return getattr(self._engine, name)


def layout_of(engine: Any) -> dict[str, Any]:
    """The options of a native target that this engine of DeepSpeed loads, by their names in `DeepSpeedOptions`.

    Source: deepspeed 0.19.8 `runtime/engine.py` (`seq_dp_world_size`, `mp_world_size`), `runtime/pipe/engine.py`
    (`PipelineEngine.grid`), `runtime/pipe/module.py` (`PipelineModule.parts`: the first layer of each stage, and the
    number of layers), `moe/layer.py` (`MoE.ep_size`),
    `module_inject/auto_ep_layer.py` (`AutoEPMoELayer.ep_size`).
    """
    grid = getattr(engine, "grid", None)
    pp = 1 if grid is None else int(grid.pipe_parallel_size)
    stage = str(int(engine.zero_optimization_stage()))
    found: dict[str, Any] = {
        "dp": int(engine.seq_dp_world_size),
        "tp": int(engine.mp_world_size) if grid is None else int(grid.get_slice_parallel_world_size()),
        "pp": pp,
        "zero_stage": "bf16" if type(engine.optimizer).__name__ == "BF16_Optimizer" else stage,
    }
    if pp > 1:
        found["partition_method"] = ",".join(str(first) for first in engine.module.parts[:-1])
    if engine.has_moe_layers:
        found["ep"] = max(int(m.ep_size) for m in engine.module.modules() if hasattr(m, "ep_size"))
    if stage == "3":
        found["sub_group_size"] = int(engine.zero_sub_group_size())
    if stage in ("1", "2"):
        found["round_robin_gradients"] = bool(engine.zero_round_robin_gradients())
    return found


def load_into_deepspeed(
    engine: Any, request: ConvertRequest, arguments: Mapping[str, Any], *, compare: bool
) -> tuple[Any, Any]:
    """Call the `load_checkpoint` of an engine of DeepSpeed on a target that is never written.

    All processes of the run call it, and all of them raise if one does. Rank 0 compares what must agree in the source.

    Args:
        engine: The engine.
        request: A conversion into the layout of the engine.
        arguments: Further arguments of `load_checkpoint`.
        compare: Compare copies and rounded masters of the source first.

    Returns:
        What `load_checkpoint` returns.

    Raises:
        ReshardError: See `together`. After an error of the source the engine holds no state to train on.
    """
    own = engine.checkpoint_engine
    with tempfile.TemporaryDirectory(prefix="reshard-", ignore_cleanup_errors=True) as place:
        made = stubs(request, compare=compare, home=place)
        try:
            engine.checkpoint_engine = StubEngine(own, made)
            tag = os.path.basename(made.directory)
            return _load_all(lambda: engine.load_checkpoint(place, tag, **arguments), [made])
        finally:
            engine.checkpoint_engine = own
            made.layout.close()


def stubs(request: ConvertRequest, *, compare: bool, home: str | None = None) -> StubDirectory:
    """Make a directory of stubs for the target of a request, on all processes of a run.

    Args:
        request: The conversion; its target is the directory, unless `home` is given.
        compare: Compare copies and rounded masters of the source first, on rank 0.
        home: A directory in which that of the stubs is made, with the tag of the target as its name.

    Raises:
        ReshardError: See `together`.
    """
    layout = together(lambda: VirtualCheckpoint.prepare(request, compare=False))
    try:
        together(lambda: _same_source(layout))
        together(lambda: layout.compare() if compare and _rank() == 0 else None)
        pointer = layout.layout.pointer
        tag = pointer.tag if pointer is not None else "checkpoint"
        return StubDirectory(request.target if home is None else os.path.join(home, tag), layout, request.to)
    except BaseException:
        layout.close()
        raise


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    told = os.environ.get("RANK", "")
    return int(told) if told.isdecimal() else 0


def _load_all(load: Callable[[], _Value], made: Sequence[StubDirectory]) -> _Value:
    """Load stubs on all processes of a run; zeros stand for what one of them could not read, and then all raise."""
    with ExitStack() as kept:
        for one in made:
            kept.enter_context(one.keeping_errors())
        result = together(load)
    for one in made:
        together(one.prove)
    return result


# Programs that load by path: stubs are served to all that `torch.load` and torch's distributed checkpoints open.


@contextmanager
def serving(made: Sequence[StubDirectory]) -> Generator[None]:
    """Let `torch.load`, torch's distributed checkpoints and engines of DeepSpeed load stubs as if they were files.

    Args:
        made: The directories. They are closed after the block.
    """

    def found(path: object) -> tuple[StubDirectory, str] | None:
        if not isinstance(path, str | os.PathLike):
            return None
        place = cast("str | os.PathLike[str]", path)
        return next(((one, name) for one in made if (name := one.file_of(place)) is not None), None)

    load: Callable[..., Any] = torch.load
    create_stream: Any = FileSystem.create_stream  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    @wraps(load)
    def load_stub(f: Any, *arguments: Any, **more: Any) -> Any:
        stub = found(f)
        if stub is None:
            return load(f, *arguments, **more)
        with stub[0].open(stub[1]) as file:
            return load(file, *arguments, **{**more, "mmap": None})

    @contextmanager
    def stream_of_stub(self: FileSystem, path: str | os.PathLike[str], mode: str) -> Generator[Any]:
        stub = found(path) if mode == "rb" else None
        if stub is None:
            with create_stream(self, path, mode) as stream:
                yield stream
            return
        with stub[0].open(stub[1]) as file:
            yield file

    with ExitStack() as undo:
        undo.enter_context(_set(torch, "load", load_stub))
        undo.enter_context(_set(FileSystem, "create_stream", stream_of_stub))
        if any(one.to is TargetFormat.ZERO for one in made):
            undo.enter_context(_agreeing(made))
        try:
            yield
        finally:
            for one in made:
                one.layout.close()


@contextmanager
def _agreeing(made: Sequence[StubDirectory]) -> Generator[None]:
    """Have `load_checkpoint` of DeepSpeed's engines raise on all processes what a stub's reads raise on one."""
    engine: Any = import_module("deepspeed").DeepSpeedEngine
    load: Callable[..., Any] = engine.load_checkpoint

    @wraps(load)
    def load_checkpoint(self: Any, load_dir: str, *arguments: Any, **more: Any) -> Any:
        inside = [one for one in made if one.lies_in(load_dir)]
        call = partial(load, self, load_dir, *arguments, **more)
        return _load_all(call, inside) if inside else call()

    with _set(engine, "load_checkpoint", load_checkpoint):
        yield


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Generator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _same_source(layout: VirtualCheckpoint) -> None:
    """Refuse to go on if another process has found another checkpoint at the same place.

    Raises:
        SourceError: `source.changed`.
    """
    digests = set(_gathered(layout.plan.content_digest))
    if len(digests) > 1:
        raise SourceError(
            "source.changed",
            f"the processes of the run have found {len(digests)} different checkpoints at {layout.checkpoint.url}",
            fix="wait until the training run has finished saving, then load again",
        )
