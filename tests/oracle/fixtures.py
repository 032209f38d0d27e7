"""Session fixtures of the oracles; ``conftest.py`` of a folder that wants them imports them from here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

from house.shared import made_once, started_once
from oracle.cases import CASES, STATE_DICT_CASES
from oracle.dcp_cases import RUNS, TITAN_FOLDER, FsdpRun, is_here
from oracle.dcp_driver import Framework, FsdpOracle, Saved as SavedByFsdp
from oracle.driver import Oracle, ParallelOracle, Saved, Trained
from oracle.launcher import Worlds
from oracle.parallel_cases import PARALLEL_CASES, Layout

TrainedFactory: TypeAlias = Callable[..., Trained]
TrainedOn: TypeAlias = Callable[[str, Layout], Saved]
SavedFactory: TypeAlias = Callable[..., SavedByFsdp]

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
def parallel(worlds: Worlds) -> ParallelOracle:
    """DeepSpeed on layouts."""
    return ParallelOracle(worlds)


@pytest.fixture(scope="session")
def fsdp(worlds: Worlds) -> FsdpOracle:
    """FSDP, its frameworks, and DeepSpeed on the same model."""
    return FsdpOracle(worlds)


def _saved_once(factory: pytest.TempPathFactory, name: str, train: Callable[[Path], Saved]) -> Saved:
    """What a training leaves in a folder, made once per test run."""

    def save(folder: Path) -> list[object]:
        run = train(folder)
        return [str(run.dir.relative_to(folder)), run.tag, run.losses_before, run.losses_after]

    folder, (saved, tag, before, after) = made_once(factory, name, save)
    return Saved(folder / saved, tag, tuple(before), tuple(after))


@pytest.fixture(scope="session")
def trained(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> TrainedFactory:
    """``trained(case_name, world=2)``: a real checkpoint, trained once per test run.  Read-only for all tests."""

    @cache
    def train(case_name: str, world: int = 2) -> Trained:
        case = (CASES | STATE_DICT_CASES)[case_name]
        name = f"{case_name}-{world}"
        run = _saved_once(tmp_path_factory, name, lambda folder: oracle.train(case, folder, world=world))
        return Trained(**vars(run), case=case, world=world)

    return train


@pytest.fixture(scope="session")
def trained_on(parallel: ParallelOracle, tmp_path_factory: pytest.TempPathFactory) -> TrainedOn:
    """A real checkpoint of a case on a layout, trained once per test run.  Read-only for all tests."""

    @cache
    def train(name: str, layout: Layout) -> Saved:
        case = PARALLEL_CASES[name]
        return _saved_once(tmp_path_factory, f"{name}-{layout}", lambda folder: parallel.train(case, layout, folder))

    return train


def need(framework: Framework) -> None:
    """Skips a test whose framework is not here: those that lie beside the environment may be missing."""
    package = {"titan": "torchtitan", "items": "torch_checkpointing"}.get(framework)
    if package is not None and not is_here(package):
        pytest.skip(f"{package} is not installed, and {TITAN_FOLDER} names no folder of it")


@pytest.fixture(scope="session")
def saved(fsdp: FsdpOracle, tmp_path_factory: pytest.TempPathFactory) -> SavedFactory:
    """``saved(run, framework="torch")``: real checkpoints, trained once per test run.  Read-only for all tests."""

    def train(run: FsdpRun | str, framework: Framework = "torch") -> SavedByFsdp:
        run = RUNS[run] if isinstance(run, str) else run
        need(framework)

        def save(folder: Path) -> list[float]:
            return list(fsdp.train(framework, run, folder))

        folder, losses = made_once(tmp_path_factory, f"dcp-{framework}-{run.name}-{run.mesh}", save)
        return SavedByFsdp(framework, run, folder, tuple(losses))

    return train
