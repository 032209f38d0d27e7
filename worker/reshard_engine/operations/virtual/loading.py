"""Virtual checkpoints for programs that load files by path: DeepSpeed's `load_checkpoint`, and trainers around it.

No file of a target is written. Loaders open files by path, look whether some exist, and read each with `torch.load`: so
they are given a temporary directory of empty stubs with the right names, and a `torch.load` that reads a stub's file
from the virtual checkpoint. DeepSpeed's `checkpoint_engine` does not see all of them: at ZeRO-3 without optimizer
states, `load_checkpoint` takes the weights from `utils/zero_to_fp32.py`, which calls `torch.load` itself.

Source: torch 2.13.0 `serialization.py` (`load`), `distributed/checkpoint/filesystem.py` (`FileSystem`); deepspeed
0.19.8 `runtime/engine.py` (`load_checkpoint`), `runtime/checkpoint_engine/torch_checkpoint_engine.py`.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from reshard.choices import TargetFormat
from reshard.errors import JobError, RequestError, ReshardError, SourceError, printable
from reshard.models.jobs import ConvertRequest
from reshard_engine.execute.sinks.leftovers import locked, remove_unless_held
from reshard_engine.formats.registry import format_writing
from reshard_engine.operations.virtual.checkpoint import VirtualCheckpoint
from reshard_engine.storage.urls import is_within

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


def _identity(file: int | str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_dev, status.st_ino


class StubDirectory:
    """A directory with the names of a virtual checkpoint's files, for loaders that open files by path.

    Small files whose bytes are all known are real. The others are holes of the right size, and `open` has their bytes.
    """

    def __init__(self, directory: str, layout: VirtualCheckpoint, to: str) -> None:
        """Make the files. `directory` is that of the target, of the format `to`; it must not exist."""
        self.to = to
        self.directory = os.path.realpath(directory)
        self.layout = layout
        self._names: dict[tuple[int, int], str] = {}
        """The names of the files by device and inode, for loaders that open a file themselves."""
        self._errors: list[ReshardError] | None = None
        self._replicas: Any = None
        self._kept: tuple[str, Any] | None = None
        for file in layout.layout.files:
            path = os.path.join(directory, file.path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as stub:
                self._names[_identity(stub.fileno())] = file.path
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
        # A temporary directory may be a link, and a relative path begins at the end of all links.
        name = os.path.relpath(os.path.realpath(os.fspath(path)), self.directory)
        return name if name in self.layout.sizes else None

    def opened_file(self, file: io.IOBase) -> str | None:
        """The file of the virtual checkpoint whose stub is open at its beginning; None for other files."""
        try:
            opened = _identity(file.fileno())
            name = self._names.get(opened)
            # The system gives the inode of a removed file to another one.
            is_stub = name is not None and _identity(os.path.join(self.directory, name)) == opened
            return name if is_stub and file.tell() == 0 else None
        except (OSError, ValueError):  # no file of the system, or a closed one
            return None

    @contextmanager
    def open(self, name: str) -> Generator[io.RawIOBase]:
        """Open a file of the virtual checkpoint, whose reads keep their errors.

        torch answers an error of `readinto` by a call of `read`, whose error is another one. So whatever the block
        raises after a failed read is raised as the error of that read.

        Source: torch 2.13.0 `torch/csrc/jit/python/init.cpp` (`BufferAdapter::getBytes`); verified by running.

        Raises:
            ReshardError: The error of the first read that failed.
        """
        failed: list[ReshardError] = []

        def read(offset: int, buffer: memoryview) -> None:
            try:
                self._read(name, offset, buffer)
            except ReshardError as error:
                failed.append(error)
                raise

        with self.layout.open_raw(name, read) as file:
            try:
                yield file
            except Exception as error:
                if failed and error is not failed[0]:
                    raise failed[0] from error
                raise

    def load(self, name: str, load: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """The contents of a file, as `torch.load` with these arguments makes them.

        DeepSpeed loads the first file of weights twice in a row: to look at one entry, and to take its weights. The
        second call returns what the first has loaded.

        Source: deepspeed 0.19.8 `runtime/state_dict_factory.py` (`SDLoaderBase.check_ckpt_list`, `load`).
        """
        kept, self._kept = self._kept, None
        is_twice = self._errors is not None and callable(more.get("map_location"))
        if kept is not None and kept[0] == name and is_twice:
            return kept[1]
        del kept  # its memory is for the next one
        more["mmap"] = None
        if self._errors is None or not format_writing(self.to).replicas_load(name):
            with self.open(name) as file:
                return load(file, *arguments, **more)
        contents = self._load_together(name, partial(load, *arguments, **more))
        if is_twice:
            self._kept = name, contents
        return contents

    def _load_together(self, name: str, load: Callable[[Any], Any]) -> Any:
        """The contents of a file that all replicas load. From a store each of them reads a part of it for all."""
        if self._replicas is None:
            with self.open(name) as file:
                return load(file)
        shared = _SharedReads(self._replicas, partial(self._read, name), self.layout.file(name).size_bytes)
        with closing(shared), self.layout.open_raw(name, shared.read_into) as file:
            return load(file)

    def lies_in(self, directory: str | os.PathLike[str]) -> bool:
        """True if this is the directory, or lies in it."""
        return is_within(self.directory, os.path.realpath(os.fspath(directory)))

    @contextmanager
    def loading(self, engine: Any) -> Generator[None]:
        """Keep errors of reads for `prove` while an engine of DeepSpeed loads, and read zeros where reading failed.

        A loader that stopped on one process would leave the others waiting in a collective call. What all
        data-parallel ranks of the engine load comes once from a store. From a local source each rank reads it itself,
        as in any load: the page cache holds it.
        """
        self._errors = []
        group = None if self.layout.checkpoint.is_local or not _is_run() else engine.seq_data_parallel_group
        self._replicas = group if group is not None and dist.get_world_size(group) > 1 else None
        try:
            yield
        except BaseException:
            self._errors = None
            raise
        finally:
            self._replicas = self._kept = None

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


_WINDOW_BYTES = 32 << 20
_OWN_BYTES = 256 << 10
"""Reads that are shorter, and outside of the window, are made by each process: they cost less than to hear of them."""


class _SharedReads:
    """Reads of a file that all processes of a group read in the same way; each reads a part of the source for all.

    The file passes through a window, of which a process reads its part while the one before is used. `read` keeps its
    errors, so that each process takes part in every exchange.
    """

    def __init__(self, group: Any, read: Callable[[int, memoryview], None], size_bytes: int) -> None:
        self._group, self._read, self._size_bytes = group, read, size_bytes
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._begin = self._end = 0
        self._window = torch.empty(0, dtype=torch.uint8)
        self._next: tuple[int, Future[torch.Tensor]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="part")

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with bytes of the file from `offset` on."""
        done = 0
        while done < len(buffer):
            at, some = offset + done, buffer[done:]
            if not self._begin <= at < self._end:
                if at != self._end and len(some) < _OWN_BYTES:
                    self._read(at, some)
                    return
                self._move(at)
            some = some[: self._end - at]
            target: torch.Tensor = torch.frombuffer(some, dtype=torch.uint8)
            target.copy_(self._window[at - self._begin :][: len(some)])
            done += len(some)

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._thread.shutdown(cancel_futures=True)

    def _move(self, begin: int) -> None:
        ahead, self._next = self._next, None
        own = ahead[1].result() if ahead is not None and ahead[0] == begin else self._part(begin)
        end = min(begin + _WINDOW_BYTES, self._size_bytes)
        if end < self._size_bytes:
            self._next = end, self._thread.submit(self._part, end)
        told = own.to(_device_of(self._group))
        window = torch.empty(len(own) * self._ranks, dtype=torch.uint8, device=told.device)
        dist.all_gather(list(window.chunk(self._ranks)), told, group=self._group)  # pyright: ignore[reportUnknownMemberType]
        self._begin, self._end, self._window = begin, end, window.cpu()

    def _part(self, begin: int) -> torch.Tensor:
        """This process's part of the window at `begin`; parts are equally long."""
        end = min(begin + _WINDOW_BYTES, self._size_bytes)
        own = torch.zeros(-(-(end - begin) // self._ranks), dtype=torch.uint8)
        low = begin + self._rank * len(own)
        if low < end:
            self._read(low, own.numpy().data[: end - low])
        return own


def _device_of(group: Any) -> torch.device:
    """The device whose tensors a group of processes exchanges."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None or "cpu:" in dist.get_backend_config(group) else accelerator


_OPTIMIZERS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "DeepSpeedZeRoOffload")
"""The classes of DeepSpeed that partition an optimizer's states, or parameters alone, as native files have them."""


def layout_of(engine: Any) -> dict[str, Any]:
    """The options of a native target that an engine of DeepSpeed loads, by the names of `convert`'s options.

    All processes of the run call it. A stage of a pipeline may have none of the model's experts.

    Raises:
        RequestError: `request.unsatisfiable`: the engine loads no native files, or its layout is not one of theirs.
    """
    found = together(lambda: _layout_here(engine))
    return {**found, "ep": max(_gathered(found["ep"]))}


def _layout_here(engine: Any) -> dict[str, Any]:
    """The options, as far as this process sees them.

    Source: deepspeed 0.19.8 `runtime/engine.py` (`seq_dp_world_size`, `mp_world_size`, `_get_zero_ckpt_prefix`),
    `runtime/pipe/engine.py` (`PipelineEngine.grid`), `runtime/pipe/module.py` (`PipelineModule.parts`: the first layer
    of each stage, and the number of layers).
    """
    _refuse_other_files(engine)
    grid = getattr(engine, "grid", None)
    pp = 1 if grid is None else int(grid.pipe_parallel_size)
    stage = str(int(engine.zero_optimization_stage()))
    found: dict[str, Any] = {
        "dp": int(engine.seq_dp_world_size),
        "tp": int(engine.mp_world_size) if grid is None else int(grid.get_slice_parallel_world_size()),
        "pp": pp,
        "ep": _expert_ranks(engine),
        "zero_stage": "bf16" if type(engine.optimizer).__name__ == "BF16_Optimizer" else stage,
        "dtype": "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
    }
    if pp > 1:
        found["partition_method"] = ",".join(str(first) for first in engine.module.parts[:-1])
    if stage == "3":
        found["sub_group_size"] = int(engine.zero_sub_group_size())
    if stage in ("1", "2"):
        found["round_robin_gradients"] = bool(engine.zero_round_robin_gradients())
        # Versions that have no such setting align nothing.
        aligned: Callable[[], Any] = getattr(engine, "zero_parameter_alignment", lambda: False)
        found["parameter_alignment"] = bool(aligned())
    return found


def _refuse_other_files(engine: Any) -> None:
    """Refuse engines that load other files than native ones, or into states that lie in another way.

    Source: deepspeed 0.19.8 `runtime/engine.py` (`load_checkpoint`: with states on NVMe it reads nothing but swap
    files, `offloaded_tensors/rankNN`, of a run with the same ranks), `runtime/zero/stage3.py` (`_rigid_load_state_dict`
    falls over parameters on NVMe, verified by running), `runtime/zenflow` (matrices are transposed),
    `runtime/superoffload/superoffload_stage3.py` (`_create_fp16_sub_groups` cuts sub-groups in its own way).

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    kind, zero = type(engine.optimizer).__name__, "zero_optimization of the run's config"
    if engine.load_universal_checkpoint():
        raise RequestError(
            "request.unsatisfiable",
            "the engine loads universal checkpoints alone",
            fix='set "load_universal": false in the section checkpoint of the run\'s config',
        )
    on_nvme = {"offload_optimizer": engine.zero_nvme_offload_optimizer(), "offload_param": _swaps(engine)}
    if held := [name for name, swapped in on_nvme.items() if swapped]:
        parts = ", ".join(f'"{name}": {{"device": "cpu"}}' for name in held)
        raise RequestError(
            "request.unsatisfiable",
            f"the engine has {' and '.join(held)} on NVMe, where DeepSpeed loads nothing that other ranks saved",
            fix=f"set {parts} in {zero}",
        )
    zenflow = getattr(engine, "zenflow", False)
    if engine.zero_optimization() and (kind not in _OPTIMIZERS or zenflow):
        name = "ZenFlow" if zenflow else kind
        raise RequestError(
            "request.unsatisfiable",
            f"the engine's optimizer is {name}, whose states lie in a way of its own",
            fix=f"take zenflow and super_offload out of {zero}",
        )


def _swaps(engine: Any) -> bool:
    """True if an engine keeps parameters on NVMe."""
    offloaded = engine.zero_offload_param()
    return offloaded is not None and bool(offloaded.device == "nvme")


def _expert_ranks(engine: Any) -> int:
    """The number of expert-parallel ranks of an engine; 1 without experts.

    Source: deepspeed 0.19.8 `moe/layer.py` (`MoE.ep_size`), `module_inject/auto_ep_layer.py`
    (`AutoEPMoELayer.ep_size`), `runtime/engine.py` (`_configure_distributed_model`: these classes make
    `has_moe_layers`; other classes of a model may have an attribute of that name).

    Raises:
        RequestError: `request.unsatisfiable` if layers have different numbers.
    """
    if not engine.has_moe_layers:
        return 1
    kinds = [("deepspeed.moe.layer", "MoE"), ("deepspeed.module_inject.auto_ep_layer", "AutoEPMoELayer")]
    known = tuple(getattr(import_module(module), name) for module, name in kinds if find_spec(module) is not None)
    sizes = sorted({int(m.ep_size) for m in engine.module.modules() if isinstance(m, known)})
    if len(sizes) > 1:
        raise RequestError(
            "request.unsatisfiable",
            f"the model has layers with experts over {', '.join(map(str, sizes))} ranks, and native files are written "
            "for one number",
            fix="give all MoE layers of the model one ep_size",
        )
    return sizes[0]


def _prove_order_of_experts(engine: Any, layout: VirtualCheckpoint) -> None:
    """Refuse an engine in which other ranks share experts than in the files: these have the order of the source's run.

    Source: deepspeed 0.19.8 `utils/groups.py` (`_create_expert_and_data_parallel`).

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    name = "use_data_before_expert_parallelism"
    ep, dp = _expert_ranks(engine), int(engine.seq_dp_world_size)
    said = format_writing(TargetFormat.ZERO).presentation.settings_kept(layout.checkpoint).get(name, False)
    if 1 < ep < dp and bool(engine._config.use_data_before_expert_parallel_) is not said:  # noqa: SLF001 - no other way
        word = "true" if said else "false"
        raise RequestError(
            "request.unsatisfiable",
            f"experts lie on ranks in the order of {name}: {word}, which the source's run had, and this run has not",
            fix=f'set "{name}": {word} in the run\'s config',
        )


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
    with stub_home() as place:
        made = stubs(request, compare=compare, home=place)
        with serving([made]):
            together(lambda: _prove_order_of_experts(engine, made.layout))
            return cast("tuple[Any, Any]", engine.load_checkpoint(place, os.path.basename(made.directory), **arguments))


_HOME = "reshard-stubs-"
_JOURNAL = ".journal"
"""The file beside a directory that a process locks as long as it uses it (`remove_unless_held`)."""


@contextmanager
def stub_home() -> Generator[str]:
    """A temporary directory for stubs. What processes that were killed left of theirs is removed first.

    The process that made it removes it, and no process that was forked from that one.
    """
    owner = os.getpid()
    parent = tempfile.gettempdir()
    _remove_abandoned(parent)
    place = os.path.join(parent, f"{_HOME}{secrets.token_hex(8)}")
    while (lock := locked(place + _JOURNAL)) < 0:  # another process that cleans up is faster than this one
        place = os.path.join(parent, f"{_HOME}{secrets.token_hex(8)}")
    try:
        os.mkdir(place, 0o700)
        yield place
    finally:
        if os.getpid() == owner:
            shutil.rmtree(place, ignore_errors=True)
            with suppress(OSError):
                os.unlink(place + _JOURNAL)
        os.close(lock)


def _remove_abandoned(parent: str) -> None:
    """Remove directories of stubs of this user whose processes are gone: the lock tells."""
    with suppress(OSError):
        for name in {n.removesuffix(_JOURNAL) for n in os.listdir(parent) if n.startswith(_HOME)}:
            place = os.path.join(parent, name)
            if all(_is_own(path) for path in (place, place + _JOURNAL) if os.path.lexists(path)):
                with suppress(OSError):
                    remove_unless_held(place)


def _is_own(path: str) -> bool:
    """True for a directory or a file of this user; a link may lead anywhere."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)


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


def _load_all(engine: Any, load: Callable[[], _Value], made: Sequence[StubDirectory]) -> _Value:
    """Load stubs on all processes of a run; zeros stand for what one of them could not read, and then all raise."""
    with ExitStack() as kept:
        for one in made:
            kept.enter_context(one.loading(engine))
        result = together(load)
    for one in made:
        together(one.prove)
    return result


# Programs that load by path: stubs are served to all that `torch.load` and torch's distributed checkpoints open.


@contextmanager
def serving(made: Sequence[StubDirectory]) -> Generator[None]:
    """Let `torch.load`, torch's distributed checkpoints and engines of DeepSpeed load stubs as if they were files.

    Blocks may overlap, in one thread or several: all of them share one set of patches, which the last one removes.

    Args:
        made: The directories. They are closed after the block, by the process that began it alone.
    """
    owner = os.getpid()
    try:
        _SERVED.enter(made)
        yield
    finally:
        # A process that was forked in the block shares the files of its parent, and may have inherited locks that no
        # thread of its own holds.
        if os.getpid() == owner:
            _SERVED.leave(made)
            for one in made:
                one.layout.close()


class _Served:
    """The directories of stubs that this process serves at the moment, and the patches that serve them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._directories: tuple[StubDirectory, ...] = ()
        self._undo: dict[str, Callable[[], None]] = {}

    def enter(self, made: Sequence[StubDirectory]) -> None:
        with self._lock:
            if "torch" not in self._undo:
                self._undo["torch"] = self._patch_torch()
            if "deepspeed" not in self._undo and any(one.to is TargetFormat.ZERO for one in made):
                self._undo["deepspeed"] = self._patch_deepspeed()
            self._directories += tuple(made)

    def leave(self, made: Sequence[StubDirectory]) -> None:
        with self._lock:
            self._directories = tuple(d for d in self._directories if all(d is not one for one in made))
            while not self._directories and self._undo:
                self._undo.popitem()[1]()

    def _find(self, path: object) -> tuple[StubDirectory, str] | None:
        if isinstance(path, io.IOBase):
            return next(((one, stub) for one in self._directories if (stub := one.opened_file(path)) is not None), None)
        if not isinstance(path, str | os.PathLike):
            return None
        place = cast("str | os.PathLike[str]", path)
        return next(((one, name) for one in self._directories if (name := one.file_of(place)) is not None), None)

    def _patch_torch(self) -> Callable[[], None]:
        load: Callable[..., Any] = torch.load
        create_stream: Any = FileSystem.create_stream  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

        @wraps(load)
        def load_stub(f: Any, *arguments: Any, **more: Any) -> Any:
            stub = self._find(f)
            if stub is None:
                return load(f, *arguments, **more)
            return stub[0].load(stub[1], load, *arguments, **more)

        @contextmanager
        def stream_of_stub(file_system: FileSystem, path: str | os.PathLike[str], mode: str) -> Generator[Any]:
            stub = self._find(path) if mode == "rb" else None
            if stub is None:
                with create_stream(file_system, path, mode) as stream:
                    yield stream
                return
            with stub[0].open(stub[1]) as file:
                yield io.BufferedReader(file)

        undo_load = _set(torch, "load", load_stub)
        undo_stream = _set(FileSystem, "create_stream", stream_of_stub)

        def undo() -> None:
            undo_load()
            undo_stream()

        return undo

    def _patch_deepspeed(self) -> Callable[[], None]:
        """Have `load_checkpoint` of DeepSpeed's engines raise on all processes what a stub's reads raise on one."""
        engine: Any = import_module("deepspeed").DeepSpeedEngine
        load: Callable[..., Any] = engine.load_checkpoint

        @wraps(load)
        def load_checkpoint(self_: Any, load_dir: str, *arguments: Any, **more: Any) -> Any:
            inside = [one for one in self._directories if one.lies_in(load_dir)]
            call = partial(load, self_, load_dir, *arguments, **more)
            return _load_all(self_, call, inside) if inside else call()

        return _set(engine, "load_checkpoint", load_checkpoint)


_SERVED = _Served()


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Replace an attribute; returns the function that puts it back, unless somebody else has replaced it since.

    A patch of somebody else calls ours, which without directories calls what was there before.
    """
    before = getattr(owner, name)
    setattr(owner, name, value)

    def undo() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, before)

    return undo


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
