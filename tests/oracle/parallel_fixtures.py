"""Session fixtures of the parallel oracles: worlds on layouts, each source trained once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from house.shared import made_once
from oracle.launcher import Worlds
from oracle.parallel_cases import AUTOEP_CASES, GPT_CASES, Layout
from oracle.parallel_driver import ParallelOracle, Saved

TrainedOn: TypeAlias = Callable[[str, Layout], Saved]


@pytest.fixture(scope="session")
def parallel(worlds: Worlds) -> ParallelOracle:
    """DeepSpeed on layouts."""
    return ParallelOracle(worlds)


@pytest.fixture(scope="session")
def trained_on(parallel: ParallelOracle, tmp_path_factory: pytest.TempPathFactory) -> TrainedOn:
    """A real checkpoint of a case on a layout, trained once per test run.  Read-only for all tests."""
    done: dict[tuple[str, Layout], Saved] = {}

    def train(name: str, layout: Layout) -> Saved:
        if (name, layout) not in done:

            def save(folder: Path) -> list[object]:
                run = parallel.train((GPT_CASES | AUTOEP_CASES)[name], layout, folder)
                return [str(run.dir.relative_to(folder)), run.tag, run.losses_before, run.losses_after]

            folder, (saved, tag, before, after) = made_once(tmp_path_factory, f"{name}-{layout}", save)
            done[name, layout] = Saved(folder / saved, tag, tuple(before), tuple(after))
        return done[name, layout]

    return train
