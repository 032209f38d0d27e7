"""docs/recipes/airflow.md: the tasks of the very DAG, against a real service, with a stand-in for Airflow."""

from __future__ import annotations

import inspect
import runpy
import shutil
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import reshard
from house.repository import ROOT
from servers.process import free_port
from servers.stack import Stack

DAG = ROOT / "docs" / "recipes" / "airflow_dag.py"


class FailedForGoodError(Exception):
    """In place of `airflow.sdk.exceptions.AirflowFailException`."""


class Airflow:
    """In place of `airflow.sdk`: a DAG is its function, and a task is called with what Airflow would give it."""

    def __init__(self) -> None:
        self.tasks: dict[str, Callable[..., Any]] = {}
        self.retries: dict[str, int] = {}
        self.params: dict[str, Any] = {}

    def param(self, default: object, **_schema: object) -> object:
        return default

    def dag(self, *, schedule: None, params: dict[str, Any]) -> Callable[[Callable[[], None]], Callable[[], None]]:
        assert schedule is None
        self.params = params
        return lambda function: function

    def task(self, function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        if function is None:

            def decorate(found: Callable[..., Any]) -> Callable[..., Any]:
                return self.task(found, **options)

            return decorate
        # What Airflow 3.3.2 gives by its name must have the default None, or the DAG does not parse.
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.name not in {"params", "run_id"} or parameter.default is None
        self.tasks[function.__name__] = function
        self.retries[function.__name__] = options.get("retries", 0)
        return lambda *arguments: ("XCom", function.__name__, *arguments)


@pytest.fixture
def airflow(monkeypatch: pytest.MonkeyPatch) -> Airflow:
    """The DAG's tasks."""
    found = Airflow()
    sdk, exceptions = ModuleType("airflow.sdk"), ModuleType("airflow.sdk.exceptions")
    sdk.Param, sdk.dag, sdk.task = found.param, found.dag, found.task  # pyright: ignore[reportAttributeAccessIssue]
    exceptions.AirflowFailException = FailedForGoodError  # pyright: ignore[reportAttributeAccessIssue]
    for module in (ModuleType("airflow"), sdk, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    runpy.run_path(str(DAG))
    return found


@pytest.fixture
def run1(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    return Path(shutil.copytree(ROOT / "tests" / "data" / "zero2_tiny", tmp_path / "run1"))


@pytest.fixture
def served(make_stack: Callable[[str], Stack], monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """A service with one worker, which the task finds by its variables."""
    stack = make_stack("embedded")
    stack.scripted = False
    with stack.api() as url, stack.worker():
        monkeypatch.setenv("RESHARD_URL", url)
        yield


def params(run1: Path) -> dict[str, Any]:
    return {"source": str(run1), "target": str(run1.parent / "run1-dp3" / "global_step3"), "dp": 3}


@pytest.mark.usefixtures("served")
def test_the_next_task_gets_a_checkpoint_for_its_number_of_gpus(airflow: Airflow, run1: Path) -> None:
    assert set(airflow.params) == set(params(run1))
    path = airflow.tasks["convert"](params=params(run1), run_id="manual__1")
    assert path == params(run1)["target"]
    assert len(list(Path(path).glob("*_optim_states.pt"))) == 3
    # A task that Airflow starts again: the same job.
    assert airflow.tasks["convert"](params=params(run1), run_id="manual__1") == path
    with reshard.Client() as client:
        assert len(client.list().jobs) == 1


@pytest.mark.usefixtures("served")
def test_a_missing_rank_fails_the_task_for_good(airflow: Airflow, run1: Path) -> None:
    next(run1.glob("*/*zero_pp_rank_1*optim_states.pt")).unlink()
    with pytest.raises(FailedForGoodError, match=r"checkpoint[.]incomplete"):
        airflow.tasks["convert"](params=params(run1), run_id="manual__2")


def test_a_service_that_is_away_is_worth_a_retry(airflow: Airflow, run1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_URL", f"http://127.0.0.1:{free_port()}")
    assert airflow.retries == {"convert": 5, "train": 0}
    with pytest.raises(reshard.ReshardError) as caught:
        airflow.tasks["convert"](params=params(run1), run_id="manual__3")
    assert caught.value.retryable
