"""Session fixtures of the FSDP oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from house.shared import made_once
from oracle.dcp_cases import RUNS, TITAN_FOLDER, FsdpRun, titan_is_here
from oracle.dcp_driver import Framework, FsdpOracle, Saved
from oracle.launcher import Worlds

SavedFactory: TypeAlias = Callable[..., Saved]


def need(framework: Framework) -> None:
    """Skips a test whose framework is not here: torchtitan is the only one that may be missing."""
    if framework == "titan" and not titan_is_here():
        pytest.skip(f"torchtitan is not installed, and {TITAN_FOLDER} names no folder of it")


@pytest.fixture(scope="session")
def fsdp(worlds: Worlds) -> FsdpOracle:
    """FSDP, its frameworks, and DeepSpeed on the same model."""
    return FsdpOracle(worlds)


@pytest.fixture(scope="session")
def saved(fsdp: FsdpOracle, tmp_path_factory: pytest.TempPathFactory) -> SavedFactory:
    """``saved(run, framework="torch")``: real checkpoints, trained once per test run.  Read-only for all tests."""

    def train(run: FsdpRun | str, framework: Framework = "torch") -> Saved:
        run = RUNS[run] if isinstance(run, str) else run
        need(framework)

        def save(folder: Path) -> list[float]:
            return list(fsdp.train(framework, run, folder))

        folder, losses = made_once(tmp_path_factory, f"dcp-{framework}-{run.name}-{run.mesh}", save)
        return Saved(framework, run, folder, tuple(losses))

    return train
