"""What every run shows at its end: the tables that tests made, in whichever process they ran."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

from house.budget import budget_lines
from house.measured import said, say
from house.order import longest_first
from house.subjects import SUBJECTS, mark_subjects
from house.tiers import SHARES, STORES, sample_files, sampling_turn, take_turns

# A busy machine keeps an example waiting for longer than Hypothesis's 200 ms. In CI its own profile has no deadline.
if settings.get_current_profile_name() == "default":
    settings.register_profile("default", deadline=None)

_DRIVERS = ("embedded", "celery")
TURNS = {"stack": _DRIVERS, "stacks": _DRIVERS, "api": _DRIVERS, "place": ("local", *STORES), "store": STORES}
"""Parameters of which each test gets one value, unless `full` asks for all: drivers of a service, kinds of storage."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run take the sample of `make test`."""
    parser.addoption("--sampled", action="store_true", help="of long files a sample, which RESHARD_TURN=N draws again")
    parser.addoption("--share", type=int, default=1, help="of other files one test of so many, with --sampled")


def pytest_configure(config: pytest.Config) -> None:
    """Name the subjects; leave long tests, and those for a GPU, out of what `-m` selects, unless it speaks of them."""
    for subject, words in SUBJECTS.items():
        config.addinivalue_line("markers", f"{subject}: tests of a subject, whose names say {words}")
    chosen = config.option.markexpr
    if not any(word in chosen for word in ("full", "gpu")):
        config.option.markexpr = f"({chosen or 'True'}) and not full and not gpu"
    if config.option.sampled and "PYTEST_XDIST_WORKER" not in os.environ:
        # Worker processes of pytest-xdist take the sample of this one.
        os.environ["RESHARD_TURN"] = str(sampling_turn())
        say(f"the sample of RESHARD_TURN={os.environ['RESHARD_TURN']}; make full runs all tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of the whole service run with one driver and one kind of storage each; `make full` runs all cases.

    A case that was asked for by its name runs.
    """
    mark_subjects(items)
    if not any("[" in argument for argument in config.args):
        for parameter, values in TURNS.items():
            take_turns(items, parameter, values)
    if config.option.sampled:
        sample_files(items, SHARES, sampling_turn(), others=config.option.share)
        longest_first(items)


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
