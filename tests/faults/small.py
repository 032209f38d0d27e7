"""A small conversion in which everything happens: multipart uploads, small files, commit files, a pointer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoints import write_zero_checkpoint

from house.requests import asked
from reshard.choices import TargetFormat
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec

PARAMETERS = [("embed.weight", (40, 32)), ("bias", (7,))]
NAME = "tag"
STATE_DICT, ACCELERATE = "dcp: state-dict", "dcp: accelerate"
"""Distributed checkpoints of one directory, and of two with a commit file each."""
RANKS = "fsdp_ranks: verl"
"""Two files for each of two ranks, and a description that verl's merger reads."""
OPTIONS: dict[str, dict[str, Any]] = {
    TargetFormat.UNIVERSAL: {"part_bytes": 4096},
    TargetFormat.SAFETENSORS: {"part_bytes": 1024, "max_shard_bytes": 4000},
    TargetFormat.TORCH: {"part_bytes": 2048, "max_shard_bytes": 4000},
    STATE_DICT: {"to": "dcp", "part_bytes": 8192, "options": {"dcp": {"framework": "state-dict", "files": 2}}},
    RANKS: {
        "to": "fsdp_ranks", "part_bytes": 4096,
        "options": {"deepspeed": {"dp": 2}, "fsdp_ranks": {"rank_framework": "verl", "device_type": "cpu"}},
    },
    ACCELERATE: {"to": "dcp", "part_bytes": 8192, "options": {"dcp": {"framework": "accelerate", "files": 2}}},
}  # fmt: skip


def write_source(directory: Path, *, seed: int = 0) -> Path:
    """A ZeRO-3 checkpoint of 1,287 elements on two ranks."""
    write_zero_checkpoint(directory, PARAMETERS, stage=3, ranks=2, seed=seed)
    return directory


def small_request(source: str, parent: str, to: str, **options: Any) -> ConvertRequest:
    """One unit at a time, so that operations have the same numbers each time."""
    wanted = {"to": to, **OPTIONS[to], "threads": 1, **options}
    return asked(source=SourceSpec(url=source), target=f"{parent}/{NAME}", **wanted)
