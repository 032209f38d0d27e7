"""What every run shows at its end: the tables that tests made, in whichever process they ran."""

from __future__ import annotations

from typing import Any

import pytest

from house.budget import budget_lines
from house.measured import said, say
from house.tiers import take_turns

_DRIVERS = ("embedded", "celery")
TURNS = {"stack": _DRIVERS, "stacks": _DRIVERS, "api": _DRIVERS, "place": ("local", "s3")}
"""Parameters of which each test gets one value, unless `full` asks for all: drivers of a service, kinds of storage."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the whole service run with one driver and one kind of storage each; `make full` runs all cases.

    A case that was asked for by its name runs.
    """
    if not any("[" in argument for argument in config.args):
        for parameter, values in TURNS.items():
            take_turns(items, parameter, values)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker process of pytest-xdist hands its tables over."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["said"] = list(said())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the tables of a worker process; one that crashed left none."""
    say(*getattr(node, "workeroutput", {}).get("said", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables, counts and seeds, and where the time went."""
    reports = [r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)]
    for title, lines in (("measured", said()), ("time, of all processes together", budget_lines(reports))):
        if lines := list(lines):
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.write_line(line)
