"""Session fixtures of the parallel oracles: worlds on layouts, each source trained once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from oracle.launcher import Worlds
from oracle.parallel_cases import GPT_CASES, Layout
from oracle.parallel_driver import ParallelOracle, Saved

TrainedOn: TypeAlias = Callable[[str, Layout], Saved]


@pytest.fixture(scope="session")
def parallel(worlds: Worlds) -> ParallelOracle:
    """DeepSpeed on layouts."""
    return ParallelOracle(worlds)


@pytest.fixture(scope="session")
def trained_3d(parallel: ParallelOracle, tmp_path_factory: pytest.TempPathFactory) -> TrainedOn:
    """A real checkpoint of a case on a layout, trained once per session.  Read-only for all tests."""
    done: dict[tuple[str, Layout], Saved] = {}

    def train(name: str, layout: Layout) -> Saved:
        if (name, layout) not in done:
            done[name, layout] = parallel.train_3d(GPT_CASES[name], layout, tmp_path_factory.mktemp(f"{name}-{layout}"))
        return done[name, layout]

    return train
