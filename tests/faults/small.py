"""A small conversion in which everything happens: multipart uploads, small files, commit files, a pointer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints import write_zero_checkpoint

from house.megatron_runs import MegatronRun
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
EVERY_LAYOUT, ONE_LAYOUT, BUCKETS = "megatron: torch_dist", "megatron: ranks", "megatron: buckets"
"""Megatron-core's distributed checkpoint, directories of two ranks, and optimizers in buckets of two."""
INT8 = "safetensors: int8"
"""A quantized matrix with its scales beside weights, and a `config.json` that says so."""
STEP = "iter_0000007"
"""The name that Megatron-core's tracker names."""
MEGATRON_RUN = MegatronRun(tensor=2, layers=1, hidden=6, said={"accumulate_allreduce_grads_in_fp32": True})
_TWO_RANKS = {"layout": {"tp": 2, "dp": 2}, "vocab_divisor": 6}
OPTIONS: dict[str, dict[str, Any]] = {
    TargetFormat.UNIVERSAL: {"part_bytes": 4096},
    TargetFormat.SAFETENSORS: {"part_bytes": 1024, "max_shard_bytes": 4000},
    TargetFormat.TORCH: {"part_bytes": 2048, "max_shard_bytes": 4000},
    INT8: {
        "to": "safetensors", "part_bytes": 1024, "verify": "full",
        "options": {"weights": {"quantize": "int8", "quantize_layers": "embed.weight"}},
    },
    STATE_DICT: {"to": "dcp", "part_bytes": 8192, "options": {"dcp": {"framework": "state-dict", "files": 2}}},
    RANKS: {
        "to": "fsdp_ranks", "part_bytes": 4096,
        "layout": {"dp": 2}, "options": {"fsdp_ranks": {"rank_framework": "verl", "device_type": "cpu"}},
    },
    ACCELERATE: {"to": "dcp", "part_bytes": 8192, "options": {"dcp": {"framework": "accelerate", "files": 2}}},
    EVERY_LAYOUT: {"to": "megatron", "part_bytes": 8192},
    ONE_LAYOUT: {
        "to": "megatron", "part_bytes": 8192, **_TWO_RANKS, "options": {"megatron": {"ckpt_format": "torch"}},
    },
    BUCKETS: {
        "to": "megatron", "part_bytes": 8192,
        **_TWO_RANKS, "options": {"megatron": {"optimizer_sharding": "dp_reshardable"}},
    },
}  # fmt: skip


def write_sources(root: Path) -> Path:
    """Every checkpoint that `sources_of` names, below a directory."""
    write_source(root / "run")
    write_source(root / "other", seed=1)
    for number, name in enumerate(("config_run", "config_other")):
        (write_source(root / name, seed=number) / "config.json").write_text('{"model_type": "of ours"}')
    write_megatron_source(root / "megatron_run")
    write_megatron_source(root / "megatron_other", seed=1)
    return root


def write_source(directory: Path, *, seed: int = 0) -> Path:
    """A ZeRO-3 checkpoint of 1,287 elements on two ranks."""
    write_zero_checkpoint(directory, PARAMETERS, stage=3, ranks=2, seed=seed)
    return directory


def write_megatron_source(directory: Path, *, seed: int = 0) -> Path:
    """A run of Megatron-core on two tensor-parallel ranks, as directories of ranks."""
    replace(MEGATRON_RUN, seed=seed).save_legacy(directory)
    return directory


def sources_of(to: str) -> tuple[str, str]:
    """The names of two checkpoints that such a target is made of."""
    kind = "megatron_" if to.startswith("megatron") else "config_" if to == INT8 else ""
    return f"{kind}run", f"{kind}other"


def name_of(request: ConvertRequest) -> str:
    """The target's name in its parent."""
    return request.target.rpartition("/")[2]


def small_request(source: str, parent: str, to: str, **options: Any) -> ConvertRequest:
    """One unit at a time, so that operations have the same numbers each time."""
    wanted = {"to": to, **OPTIONS[to], "threads": 1, **options}
    if to == INT8:
        wanted["model_files"] = source
    name = STEP if to.startswith("megatron") else NAME
    return asked(source=SourceSpec(url=source), target=f"{parent}/{name}", **wanted)
