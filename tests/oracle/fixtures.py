"""Session fixtures of the oracle; ``conftest.py`` of a folder that wants them imports them from here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest

from oracle.cases import CASES, STATE_DICT_CASES
from oracle.driver import Oracle, Trained
from oracle.launcher import Worlds

TrainedFactory: TypeAlias = Callable[..., Trained]


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """The fork-server, started when the first test needs it."""
    with Worlds() as started:
        yield started


@pytest.fixture(scope="session")
def oracle(worlds: Worlds) -> Oracle:
    """DeepSpeed itself."""
    return Oracle(worlds)


@pytest.fixture(scope="session")
def trained(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> TrainedFactory:
    """``trained(case_name, world=2)``: a real checkpoint, trained once per session.  Read-only for all tests."""
    done: dict[tuple[str, int], Trained] = {}

    def train(case_name: str, world: int = 2) -> Trained:
        if (case_name, world) not in done:
            folder = tmp_path_factory.mktemp(f"{case_name}-{world}")
            done[case_name, world] = oracle.train((CASES | STATE_DICT_CASES)[case_name], folder, world=world)
        return done[case_name, world]

    return train
