"""Anonymous memory of a whole conversion process stays within the budget plus what the interpreter takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from checkpoints import gpt_parameters
from measure import measure

from house.sources import zero_source

LIMIT_BYTES = 64 << 20
SLACK_BYTES = 24 << 20
"""Metadata of the checkpoint, thread stacks and allocator rounding."""


source = zero_source(gpt_parameters(512, 5, 18_000), stage=3)
"""A ZeRO-3 checkpoint of about 300 MB on two ranks."""


@pytest.mark.parametrize("options", [["--to", "universal"], ["--to", "safetensors", "--dtype", "bf16"]])
def test_peak_is_within_the_limit(source: Path, tmp_path: Path, options: list[str]) -> None:
    reshard = [sys.executable, "-m", "reshard.cli.main"]
    env = {**os.environ, "RESHARD_DISABLE_PROGRESS_BARS": "1"}
    base = measure([*reshard, "inspect", str(source)], env=env)
    command = [*reshard, "convert", str(source), str(tmp_path / "out"), *options, "--memory-limit", "64MiB", "-q"]
    run = measure(command, env=env)
    allowed = base.peak_anonymous_bytes + LIMIT_BYTES + SLACK_BYTES
    assert run.peak_anonymous_bytes <= allowed, f"{run.peak_anonymous_bytes >> 20} MiB, allowed {allowed >> 20}"
