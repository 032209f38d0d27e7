"""The short form of `make fuzz`: every target, a few seconds each, and nothing found."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from adversarial.fuzz.run import SHARES, fuzz, fuzz_all
from adversarial.fuzz.targets import TARGETS
from reshard.errors import ReshardError

pytestmark = pytest.mark.skipif(find_spec("atheris") is None, reason="atheris has no build for this platform")


RUNS = {"dcp": 60, "checkpoint": 500, "dcp_metadata": 500}
RUNS |= dict.fromkeys(("fsdp_ranks", "torch_checkpointing", "full_state_dict", "megatron"), 20)
"""Runs of targets that take longer: those of whole directories also lay out a target, in 20 to 200 ms."""
LIKE_FSDP_RANKS = ("torch_checkpointing", "full_state_dict", "megatron")
"""Their start alone takes 15 s of processor time, and most of what they reach `fsdp_ranks` reaches, too."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=pytest.mark.full) if t in LIKE_FSDP_RANKS else t for t in TARGETS]
)
def test_no_target_finds_anything(target: str, tmp_path: Path) -> None:
    runs = RUNS.get(target, 2_000)
    report = fuzz(target, 60.0, tmp_path, runs=runs)
    assert report.finds == (), report.log
    assert report.executions >= runs
    assert report.edges > 0, "the engine is instrumented"


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_reach_what_is_fuzzed(target: str) -> None:
    work, seeds = TARGETS[target]
    accepted = 0
    for seed in seeds():
        try:
            work(seed)
            accepted += 1
        except ReshardError:
            continue
    assert accepted, "a fuzzer that starts from refusals stays there"


def test_the_table_of_shares_is_the_table_of_targets() -> None:
    assert SHARES.keys() == TARGETS.keys()


def test_a_planted_find_is_found(tmp_path: Path) -> None:
    """The control: an exception that is not ours is reported, with the input that made it."""
    (report,) = fuzz_all(["latest"], 20, 1, tmp_path, planted=True)
    assert report.finds
    assert "planted" in report.log
