"""What `inspect` says that a real checkpoint can become: every conversion that it promises is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from house.promises import broken_promises
from oracle.cases import CASES, STATE_DICT_CASES, Case
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.real_folders import EXPECTED, PEER_UNREADABLE, real_folder

REFUSED_IN_PART = ("z0_before_first_step", "z1_elastic", "z2_extra_states", "z2_lion", "z3_nested")
"""Runs of which some target is refused, or that a conversion needs an option for."""
OTHERS = [name for name in (*CASES, *STATE_DICT_CASES) if name not in REFUSED_IN_PART]


@pytest.mark.parametrize("name", [*REFUSED_IN_PART, *(pytest.param(n, marks=pytest.mark.full) for n in OTHERS)])
def test_of_the_zoo(name: str, trained: TrainedFactory, tmp_path: Path) -> None:
    assert broken_promises(trained(name).dir, tmp_path) == []


@pytest.mark.parametrize("optimizer", ["adafactor", "plain_sgd"])
def test_of_unusual_optimizers(optimizer: str, oracle: Oracle, tmp_path: Path) -> None:
    case = Case(optimizer, 2, "fp32", optimizer=optimizer, unused=False)  # type: ignore[arg-type]
    run = oracle.train(case, tmp_path, steps_after=0)
    assert broken_promises(run.dir, tmp_path) == []


@pytest.mark.parametrize("name", [*EXPECTED, PEER_UNREADABLE])
def test_of_megatron(name: str, tmp_path: Path) -> None:
    assert broken_promises(real_folder(name) / "src", tmp_path) == []
