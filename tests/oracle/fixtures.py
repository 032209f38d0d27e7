"""Session fixtures of the oracle; ``conftest.py`` of a folder that wants them imports them from here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from house.shared import made_once, started_once
from oracle.cases import CASES, STATE_DICT_CASES
from oracle.driver import Oracle, Trained
from oracle.launcher import Worlds

TrainedFactory: TypeAlias = Callable[..., Trained]


_WORLDS = pytest.StashKey[Worlds]()


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest) -> Worlds:
    """The fork-server, started when the first test needs it."""
    return started_once(request.config, _WORLDS, Worlds)


@pytest.fixture(scope="session")
def oracle(worlds: Worlds) -> Oracle:
    """DeepSpeed itself."""
    return Oracle(worlds)


@pytest.fixture(scope="session")
def trained(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> TrainedFactory:
    """``trained(case_name, world=2)``: a real checkpoint, trained once per test run.  Read-only for all tests."""
    done: dict[tuple[str, int], Trained] = {}

    def train(case_name: str, world: int = 2) -> Trained:
        if (case_name, world) not in done:
            case = (CASES | STATE_DICT_CASES)[case_name]

            def save(folder: Path) -> list[object]:
                run = oracle.train(case, folder, world=world)
                return [str(run.dir.relative_to(folder)), run.tag, run.losses_before, run.losses_after]

            folder, (saved, tag, before, after) = made_once(tmp_path_factory, f"{case_name}-{world}", save)
            done[case_name, world] = Trained(case, world, folder / saved, tag, tuple(before), tuple(after))
        return done[case_name, world]

    return train
