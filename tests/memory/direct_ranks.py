"""What one rank of a direct load reads and holds; runs in a process of its own, without DeepSpeed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import reshard


def _process(file: str, field: str) -> int:
    """A number that the kernel keeps of this process."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def _storages(value: Any) -> dict[int, int]:
    """The bytes of every storage in a state, by address."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return {at: size for item in items for at, size in _storages(item).items()}


def read(source: str) -> dict[str, int]:
    """Loads the files that DeepSpeed's loader opens on this rank, and holds them all.

    Returns:
        ``files``: bytes of these files; ``tensors``: bytes that were read of the source's tensors; ``read``: all bytes
        that this process read by system calls meanwhile; ``held``: bytes of the loaded tensors; ``peak``: the most
        memory of the process above what it had before.
    """
    rank, dp = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with reshard.open_layout(source, to="zero", dp=dp, compare=False) as layout:
        layout.read(layout.files[0].path, 0, 1)  # imports what is needed
    Path("/proc/self/clear_refs").write_text("5")
    before, memory_kb = _process("io", "rchar"), _process("status", "VmRSS")
    with reshard.open_layout(source, to="zero", dp=dp, compare=False) as layout:
        own = [f for f in layout.files if f.path.startswith("mp_rank_") or f"zero_pp_rank_{rank}_mp_" in f.path]
        states = []
        for file in own:
            with layout.open(file.path) as opened:
                states.append(torch.load(opened, weights_only=False))
        tensors = layout.read_bytes
    return {
        "files": sum(f.size_bytes for f in own),
        "tensors": tensors,
        "read": _process("io", "rchar") - before,
        "held": sum(_storages(states).values()),
        "peak": (_process("status", "VmHWM") - memory_kb) << 10,
    }
