"""Memory does not grow with the checkpoint: 0.5 and 1 GB, in the long form 3 GB too, under one limit of 512 MiB."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from checkpoints import gpt_parameters, write_zero_checkpoint
from measure import Measured, measure

from house.measured import say
from reshard.choices import TargetFormat
from reshard.engine import load_engine
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec

LIMIT_BYTES = 512 << 20
LAYERS = [(2, 6), pytest.param((2, 6, 19), marks=pytest.mark.full)]
"""Of a GPT of width 1024, on 4 ranks: 0.5, 1.1 and 3.1 GB."""
FLAT = 1.10
ENV = {**os.environ, "RESHARD_DISABLE_PROGRESS_BARS": "1"}
RESHARD = (sys.executable, "-m", "reshard.cli.main")
# Grains of 16 MiB: the smallest checkpoint fills both threads, too, and the peak is reached at every size.
UNIVERSAL = ("--to", "universal", "--part-size", "16MiB", "--threads", "2")
# A cast's scratch is touched for milliseconds: with one thread no chance decides whether two fall together.
BF16 = ("--to", "safetensors", "--dtype", "bf16", "--part-size", "16MiB", "--threads", "1")


def convert(source: Path, target: Path, options: tuple[str, ...]) -> Measured:
    """One conversion in a process of its own; its output is removed."""
    command = [*RESHARD, "convert", str(source), str(target), *options, "--memory-limit", "512MiB", "-q"]
    run = measure(command, env=ENV)
    shutil.rmtree(target)
    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes_in_layers", LAYERS, ids=len)
def test_memory_is_within_the_limit_and_flat(sizes_in_layers: tuple[int, ...], tmp_path: Path) -> None:
    """Anonymous memory stays within the limit and what the interpreter takes; high-water marks differ by a tenth."""
    marks: dict[str, list[int]] = {"universal": [], "bf16": []}
    sizes: list[int] = []
    for layers in sizes_in_layers:
        source = tmp_path / "source"
        write_zero_checkpoint(source, gpt_parameters(1024, layers, 16_000), stage=3, ranks=4)
        sizes.append(sum(p.stat().st_size for p in source.rglob("*") if p.is_file()))
        base = measure([*RESHARD, "inspect", str(source)], env=ENV).peak_anonymous_bytes
        for name, options in (("universal", UNIVERSAL), ("bf16", BF16)):
            run = convert(source, tmp_path / "out", options)
            assert run.peak_anonymous_bytes <= base + LIMIT_BYTES
            assert run.peak_anonymous_bytes <= base + modelled(source, options)
            marks[name].append(run.high_water_bytes)
        shutil.rmtree(source)
    say(
        f"memory: {[f'{s / 1e9:.2f} GB' for s in sizes]} "
        + ", ".join(f"{name} {[f'{m >> 20} MiB' for m in found]}" for name, found in marks.items())
    )
    assert sizes[-1] >= (3_000_000_000 if len(sizes) > 2 else 2 * LIMIT_BYTES)
    for name, found in marks.items():
        assert max(found) <= FLAT * min(found), (name, found)


def modelled(source: Path, options: tuple[str, ...]) -> int:
    """The peak that the plan states for the same options."""
    threads = int(options[options.index("--threads") + 1])
    plan = load_engine().plan(
        ConvertRequest(
            source=SourceSpec(url=str(source)),
            target=str(source.parent / "planned"),
            to=TargetFormat(options[1]),
            dtype="bf16" if "bf16" in options else None,
            part_bytes=16 << 20,
            memory_limit_bytes=LIMIT_BYTES,
            threads=threads,
        )
    )
    return plan.peak_memory_bytes
