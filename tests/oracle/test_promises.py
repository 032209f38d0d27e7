"""What `inspect` says that a real checkpoint can become: every conversion that it promises is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from house.promises import broken_promises
from house.repository import real_checkpoint
from house.tiers import rest_full
from oracle.cases import CASES, STATE_DICT_CASES, Case
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.real_folders import EXPECTED, PEER_UNREADABLE

REFUSED_IN_PART = ("z0_before_first_step", "z1_elastic", "z2_extra_states", "z2_lion", "z3_nested")
"""Runs of which some target is refused, or that a conversion needs an option for."""
OTHERS = [name for name in (*CASES, *STATE_DICT_CASES) if name not in REFUSED_IN_PART]


@pytest.mark.parametrize("name", rest_full([*REFUSED_IN_PART, *OTHERS], *REFUSED_IN_PART))
def test_of_the_zoo(name: str, trained: TrainedFactory, tmp_path: Path) -> None:
    assert broken_promises(trained(name).dir, tmp_path) == []


@pytest.mark.parametrize("optimizer", ["adafactor", "plain_sgd"])
def test_of_unusual_optimizers(optimizer: str, oracle: Oracle, tmp_path: Path) -> None:
    case = Case(optimizer, 2, "fp32", optimizer=optimizer, unused=False)  # type: ignore[arg-type]
    run = oracle.train(case, tmp_path, steps_after=0)
    assert broken_promises(run.dir, tmp_path) == []


# Of every stage, with pipelines and without, of each model, and of experts; the others differ from these in one thing.
@pytest.mark.parametrize(
    "name",
    rest_full(
        [*EXPECTED, PEER_UNREADABLE],
        "gpt_bf16_z2_nopipe_tp2dp2",
        "llama_bf16_z3_nopipe_tp2dp2",
        "llama_fp32_z1_tp2pp2dp2",
        PEER_UNREADABLE,
    ),
)
def test_of_megatron(name: str, tmp_path: Path) -> None:
    assert broken_promises(real_checkpoint(name) / "src", tmp_path) == []
