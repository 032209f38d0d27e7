"""The files that a target's loader needs: writers write them last, and `--overwrite` and `prune` remove them first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_zero_checkpoint

from house.megatron_runs import MegatronRun
from house.requests import asked
from reshard.options import SourceSpec
from reshard_engine.formats.registry import known_files
from reshard_engine.operations.conversion import Conversion

PARAMETERS = [("embed.weight", (40, 32)), ("bias", (7,))]
ADAPTER = [("up.lora_A.default.weight", (4, 32)), ("up.lora_B.default.weight", (40, 4))]
SOURCES = {"megatron": "megatron", "peft": "adapter"}
"""The source of a target that not every checkpoint becomes."""
TARGETS: dict[str, dict[str, Any]] = {
    **{f"zero {stage}": {"to": "zero", "dp": 2, "zero_stage": stage} for stage in "0123"},
    "universal": {"to": "universal"},
    "one file of safetensors": {"to": "safetensors"},
    "shards of safetensors": {"to": "safetensors", "max_shard_bytes": 4000},
    "one torch file": {"to": "torch"},
    "shards of torch files": {"to": "torch", "max_shard_bytes": 4000},
    "peft": {"to": "peft", "lora_alpha": 8.0},
    **{
        f"dcp of {framework}": {"to": "dcp", "framework": framework}
        for framework in ("state-dict", "torchtitan", "accelerate", "trainer", "lightning")
    },
    "whole files of accelerate": {"to": "torch_save", "framework": "accelerate"},
    "whole files of the Trainer": {"to": "torch_save", "framework": "trainer"},
    "the Trainer's file of numbers": {"to": "torch_save", "framework": "trainer", "torch_file": "optimizer.pt"},
    **{
        f"ranks of {framework}": {"to": "fsdp_ranks", "dp": 2, "rank_framework": framework, "device_type": "cpu"}
        for framework in ("verl", "skyrl", "accelerate")
    },
    "torch_checkpointing": {"to": "torch_checkpointing", "dp": 2, "device_type": "cpu"},
    "megatron": {"to": "megatron"},
    "ranks of megatron": {"to": "megatron", "tp": 2, "dp": 2, "vocab_divisor": 6, "ckpt_format": "torch"},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of ZeRO-3, whole and of an adapter, and ranks of Megatron-core."""
    root = tmp_path_factory.mktemp("sources")
    write_zero_checkpoint(root / "run", PARAMETERS, stage=3, ranks=2)
    write_zero_checkpoint(root / "adapter", ADAPTER, stage=3, ranks=2)
    said = {"accumulate_allreduce_grads_in_fp32": True}
    MegatronRun(tensor=2, layers=1, hidden=6, said=said).save_legacy(root / "megatron")
    return root


@pytest.mark.parametrize("name", TARGETS)
def test_known_files_need_the_commit_files_and_no_others(sources: Path, tmp_path: Path, name: str) -> None:
    options = TARGETS[name]
    source = sources / SOURCES.get(options["to"], "run")
    target = tmp_path / ("iter_0000007" if options["to"] == "megatron" else "tag")
    plan = Conversion.prepare(asked(source=SourceSpec(url=str(source)), target=str(target), **options)).plan
    commits = [file.path for file in plan.files if file.commit]
    assert commits
    assert [file.path for file in plan.files if known_files().needs(file.path)] == commits
