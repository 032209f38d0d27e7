"""What the ranks of `bench/direct.py` do: save a run of DeepSpeed or torch, and load one in each way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import reshard.dcp
import reshard.deepspeed
from oracle.train import start_world

WIDTH = 1024


def _engine(layers: int, stage: int, *, universal: bool = False) -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=n % 2 == 0) for n in range(layers)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }
    initialize: Any = deepspeed.initialize
    return initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def save(layers: int, stage: int, folder: str) -> None:
    """One step, and `save_checkpoint`."""
    start_world()
    engine = _engine(layers, stage)
    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().mean())
    engine.step()
    engine.save_checkpoint(folder, tag="step1")


def _read_bytes() -> int:
    """Bytes that this process has read by system calls, also from the page cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def _memory_bytes(what: str) -> int:
    """The memory of this process: now (`VmRSS`), or the most since `_forget_peak` (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def _forget_peak() -> int:
    """Begin a new peak; returns the memory of this process now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory_bytes("VmRSS")


def load(layers: int, stage: int, folder: str, way: str) -> dict[str, Any]:
    """Load by `plain`, `universal` or `direct`.

    Returns:
        ``seconds`` from the call until all ranks have a loaded engine, ``read`` bytes of this rank, the ``peak``
        of its memory above what it had before, and ``sum``, which is the same for equal masters.
    """
    start_world()
    engine = _engine(layers, stage, universal=way == "universal")
    before, held = _read_bytes(), _forget_peak()
    dist.barrier()
    begun = time.perf_counter()
    if way == "direct":
        reshard.deepspeed.load_checkpoint(engine, folder)
    else:
        engine.load_checkpoint(folder)
    dist.barrier()
    seconds, peak = time.perf_counter() - begun, _memory_bytes("VmHWM") - held
    flat = (
        engine.optimizer.fp32_partitioned_groups_flat
        if stage == 3
        else engine.optimizer.single_partition_of_fp32_groups
    )
    total = torch.stack([f.detach().double().sum() for f in flat]).sum()
    dist.all_reduce(total)
    return {"seconds": seconds, "read": _read_bytes() - before, "peak": peak, "sum": float(total)}


def _sharded(layers: int, dim: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(2)
    return {f"{n}.weight": distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(dim)]) for n in range(layers)}


def save_distributed(layers: int, folder: str) -> None:
    """`dcp.save` of matrices that are cut by rows."""
    start_world()
    dcp.save(_sharded(layers, 0), checkpoint_id=folder)


def load_distributed(layers: int, folder: str, way: str, dim: int) -> dict[str, Any]:
    """`dcp.load` into matrices that are cut along `dim`, through torch's own reader or ours; as `load`."""
    start_world()
    wanted = _sharded(layers, dim)
    for tensor in wanted.values():
        tensor.zero_()
    before, held = _read_bytes(), _forget_peak()
    dist.barrier()
    begun = time.perf_counter()
    reader = dcp.FileSystemReader(folder) if way == "torch" else reshard.dcp.Reader(folder)
    dcp.load(wanted, storage_reader=reader)
    dist.barrier()
    seconds, peak = time.perf_counter() - begun, _memory_bytes("VmHWM") - held
    total = torch.stack([t.to_local().double().sum() for t in wanted.values()]).sum()
    dist.all_reduce(total)
    return {"seconds": seconds, "read": _read_bytes() - before, "peak": peak, "sum": float(total)}
