"""Whole directories of files of ranks, and full files, of which one part is any bytes: a pickle, metadata or JSON.

The formats that trainers leave without DeepSpeed and DCP: verl's and Accelerate's files of FSDP's ranks, the items of
torch_checkpointing, files with whole tensors, and Megatron-core's directories.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from adversarial.corpus.archives import archive, torch_records
from adversarial.fuzz.distributed import lies_inside
from house.megatron_runs import MegatronRun
from house.megatron_saves import common_state, entries, save_torch_dist, small_model as small_megatron
from house.requests import asked
from laws.item_files import Items, save_items
from laws.rank_files import FSDP1, World, save_accelerate, save_verl, small_model
from reshard.choices import OpaquePolicy
from reshard_engine.formats.registry import writer_of
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.operations.inspection import describe
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.testing.stores import MemoryStore

_PICKLES = (".pt", ".bin", ".ckpt")
_TWO = World((2,))
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class _Directory:
    """A checkpoint that is read, and the files of it that are spoilt."""

    files: Mapping[str, bytes]
    parts: Sequence[str]

    def part(self, name: str) -> bytes:
        """The pickle of a torch file; another file as it is."""
        return _opened(self.files[name])[0] if name.endswith(_PICKLES) else self.files[name]

    def spoilt(self, name: str, data: bytes) -> dict[str, bytes]:
        """The files with one part replaced; a torch file keeps its storages, and CRC-32s that are right."""
        file = data
        if name.endswith(_PICKLES):
            file = archive(torch_records(data, _opened(self.files[name])[1]))
        return {**self.files, name: file}


def _opened(data: bytes) -> tuple[bytes, dict[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        inside = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    storages = {n.removeprefix("data/"): content for n, content in inside.items() if n.startswith("data/")}
    return inside["data.pkl"], storages


def _made(save: Callable[[Path], Any], *parts: str) -> _Directory:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        files = {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
    return _Directory(files, parts)


@cache
def _of_ranks() -> tuple[_Directory, ...]:
    """verl's numbers, and the names and sharded tensors of FSDP1 under Accelerate."""

    def verl(folder: Path) -> None:
        save_verl(small_model(), folder, _TWO, extra=extra)
        (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 2}')

    extra = {"lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1]}, "rng": {"cpu": torch.zeros(8, dtype=torch.uint8)}}
    model, optimizer = "model_world_size_2_rank_1.pt", "optim_world_size_2_rank_0.pt"
    return (
        _made(verl, model, optimizer, "extra_state_world_size_2_rank_0.pt", "fsdp_config.json"),
        _made(
            lambda folder: save_accelerate(small_model(FSDP1), folder, World((2,), None)),
            *("pytorch_model_fsdp_0_rank1.bin", "optimizer_0_rank0.bin"),
        ),
    )


@cache
def _of_items() -> tuple[_Directory, ...]:
    """Items with their metadata, and the same without."""
    items = Items(others={"train_state": {"step": 3}, "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1]}})
    bare = Items(described=(), numbers=True)
    return (
        _made(lambda f: save_items(small_model(), f, _TWO, items), "metadata.pkl", "model_1.pt", "optimizer_0.pt"),
        _made(lambda f: save_items(small_model(), f, _TWO, bare), "model_0.pt", "optimizer_1.pt"),
    )


def _whole(*, numbers: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model and its optimizer in two groups, with numbers as torch gives them, or with names."""
    tensors = small_model()
    model = {n: whole for n, (whole, _) in tensors.parameters.items()}
    groups = (list(model)[:2], list(model)[2:])
    order = [n for group in groups for n in group]
    key_of: Callable[[str], Any] = order.index if numbers else str
    lists = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [key_of(n) for n in group]} for group in groups]
    return model, {"state": {key_of(n): tensors.states_of(n) for n in order}, "param_groups": lists}


@cache
def _of_whole_tensors() -> tuple[_Directory, ...]:
    """A script's file, one of Lightning, and Accelerate's full files."""

    def script(folder: Path) -> None:
        model, optimizer = _whole(numbers=True)
        torch.save({"model": model, "optimizer": optimizer, "scheduler": {"last_epoch": 3}}, folder / "step.pt")

    def lightning(folder: Path) -> None:
        model, optimizer = _whole(numbers=True)
        about = {"epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.6.6", "loops": {}, "callbacks": {}}
        states = {"state_dict": model, "optimizer_states": [optimizer], "lr_schedulers": [{"last_epoch": 3}]}
        torch.save(about | states, folder / "last.ckpt")

    def accelerate(folder: Path) -> None:
        model, optimizer = _whole(numbers=False)
        torch.save(model, folder / "pytorch_model_fsdp.bin")
        torch.save(optimizer, folder / "optimizer.bin")
        torch.save({"last_epoch": 3, "_last_lr": [0.1]}, folder / "scheduler.bin")

    return (
        _made(script, "step.pt"),
        _made(lightning, "last.ckpt"),
        _made(accelerate, "pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin"),
    )


@cache
def _of_megatron() -> tuple[_Directory, ...]:
    """Buckets of `torch_dist`, directories of two tensor-parallel ranks, and a run with optimizers by parameters."""
    run = MegatronRun(tensor=2)

    def inside(save: Callable[[Path], Path]) -> Callable[[Path], None]:
        def into(folder: Path) -> None:
            for found in [*save(folder / "run").iterdir()]:
                found.rename(folder / found.name)

        return into

    def tracked(folder: Path) -> None:
        save_torch_dist(folder / "iter_0000007", entries(small_megatron(experts=2)), common_state())
        (folder / TRACKER).write_text("7")

    model, optimizer = "mp_rank_01/model_optim_rng.pt", "mp_rank_00/distrib_optim.pt"
    return (
        _made(inside(run.save_torch_dist), ".metadata", "common.pt", "metadata.json"),
        _made(inside(run.save_legacy), model, optimizer),
        _made(tracked, TRACKER, "iter_0000007/.metadata", "iter_0000007/common.pt", "iter_0000007/metadata.json"),
    )


def _fuzz(directories: Sequence[_Directory], data: bytes, *, also: str | None = None) -> None:
    """One part of one directory, up to the layout of a target; what was read lies inside of its files."""
    parts = [(directory, name) for directory in directories for name in directory.parts]
    directory, name = parts[data[0] % len(parts) if data else 0]
    store = MemoryStore()
    for path, content in directory.spoilt(name, data[1:]).items():
        store.put(f"b/{path}", content, metadata={}, if_absent=False)
    checkpoint = read_checkpoint(Location(store, "b", "mem://b"), None, OpaqueLedger(OpaquePolicy.DROP))
    lies_inside(checkpoint)
    describe(checkpoint).model_dump_json()
    fields = {"source": {"url": "/data/in"}, "target": "/data/out", "to": "dcp", "opaque": "drop"}
    request = asked(**fields, options={"dcp": {"framework": "state-dict"}})
    writer_of("dcp").lay_out(checkpoint, request, name="out")
    if also is not None:
        writer_of(also).lay_out(checkpoint, asked(**fields | {"to": also}), name="out")


def _seeds(directories: Sequence[_Directory]) -> list[bytes]:
    parts = [directory.part(name) for directory in directories for name in directory.parts]
    return [bytes([number]) + part for number, part in enumerate(parts)]


def fuzz_fsdp_ranks(data: bytes) -> None:
    """A file of one of FSDP's ranks, beside those of the others."""
    _fuzz(_of_ranks(), data)


def fuzz_items(data: bytes) -> None:
    """An item of torch_checkpointing, or the metadata of all."""
    _fuzz(_of_items(), data)


def fuzz_whole_tensors(data: bytes) -> None:
    """A training file with whole tensors."""
    _fuzz(_of_whole_tensors(), data)


def fuzz_megatron(data: bytes) -> None:
    """A file of Megatron-core beside the others of its save; it is laid out for Megatron-core, too."""
    _fuzz(_of_megatron(), data, also="megatron")


def seeds_of_ranks() -> list[bytes]:
    """The parts as they are, each behind its number; as for the others."""
    return _seeds(_of_ranks())


def seeds_of_items() -> list[bytes]:
    """The parts of torch_checkpointing."""
    return _seeds(_of_items())


def seeds_of_whole_tensors() -> list[bytes]:
    """The parts of full files."""
    return _seeds(_of_whole_tensors())


def seeds_of_megatron() -> list[bytes]:
    """The parts of Megatron-core's directories."""
    return _seeds(_of_megatron())
