"""What every run shows at its end: the tables that tests made, in whichever process they ran."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import changed_tests
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import settings
from shares import OF_SHARES, Record, Selection, Shares, reach, share_name, shares_named

from house.budget import budget_lines
from house.launchers import no_launcher
from house.measured import said, say
from house.order import longest_first
from house.repository import ROOT
from house.seeds import commit_seed
from house.shares import ShareRuns
from house.subjects import SUBJECTS, mark_subjects
from house.tiers import STORES, one_of, sampling_turn, take_turns
from house.waiting import PATIENCE_S

__all__ = ["no_launcher"]

# A busy machine keeps a request waiting for longer than httpx's 5 s; requests without a timeout share this object.
for _phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _phase, PATIENCE_S)

# A busy machine keeps an example waiting for longer than Hypothesis's 200 ms. In CI its own profile has no deadline.
if settings.get_current_profile_name() == "default":
    settings.register_profile("default", deadline=None)

_DRIVERS = ("embedded", "celery")
TURNS = {"stack": _DRIVERS, "stacks": _DRIVERS, "api": _DRIVERS, "place": ("local", *STORES), "store": STORES}
"""Parameters of which each test gets one value, unless `full` asks for all: drivers of a service, kinds of storage."""


_SELECTION: pytest.StashKey[Selection] = pytest.StashKey()
_TABLE: pytest.StashKey[Shares] = pytest.StashKey()
_LONG = ("full", "gpu", "nightly")
_SHORT = " and ".join(f"not {marker}" for marker in _LONG)
"""The tests that a run selects, unless `-m` speaks of these markers; pyproject.toml has it too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run take shares of the tests, and the tests that a change reaches."""
    parser.addoption("--shares", help="run these shares of all tests: quick, next, 1 to 12, full, separated by commas")
    parser.addoption(
        "--reach-s",
        type=float,
        default=0,
        help="with --shares: and tests that the change reaches, of at most so many seconds",
    )
    parser.addoption("--base", help="the commit that the change is compared with; by default the last landing")
    parser.addoption("--one-of", type=int, default=1, help="of each file one test of so many; RESHARD_TURN draws")


def pytest_configure(config: pytest.Config) -> None:
    """Name the subjects; leave long tests, and those for a GPU, out of what `-m` selects, unless it speaks of them."""
    for subject, words in SUBJECTS.items():
        config.addinivalue_line("markers", f"{subject}: tests of a subject, whose names say {words}")
    chosen = config.option.markexpr
    if config.option.shares and chosen == _SHORT:
        config.option.markexpr = OF_SHARES
    elif not any(word in chosen for word in _LONG):
        config.option.markexpr = f"({chosen or 'True'}) and {_SHORT}"
    if (config.option.shares or config.option.one_of > 1) and "PYTEST_XDIST_WORKER" not in os.environ:
        # Worker processes of pytest-xdist draw as this process does.
        os.environ["RESHARD_TURN"] = str(sampling_turn())
        os.environ.setdefault("RESHARD_SEED", str(commit_seed()))
        say(f"drawn with RESHARD_TURN={os.environ['RESHARD_TURN']} and RESHARD_SEED={os.environ['RESHARD_SEED']}")
    if config.option.shares:
        # Worker processes of pytest-xdist run what this process has selected.
        config.stash[_TABLE] = Shares.read()
        received: dict[str, list[Any]] | None = getattr(config, "workerinput", {}).get("selection")
        config.stash[_SELECTION] = selection = _received(received) if received else _selection(config)
        if received is None and _runs_all(config):
            config.pluginmanager.register(ShareRuns(selection.shares))


def _runs_all(config: pytest.Config) -> bool:
    """True if no argument leaves tests of a share out."""
    options = config.option
    narrowed = options.keyword or options.markexpr != OF_SHARES or options.maxfail or options.deselect or options.ignore
    return not narrowed and config.args_source is not config.ArgsSource.ARGS


def _received(lists: dict[str, list[Any]]) -> Selection:
    return Selection(**{name: frozenset(values) for name, values in lists.items()})


def _selection(config: pytest.Config) -> Selection:
    record = Record.read()
    try:
        shares = shares_named(config.option.shares, record)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    say(f"shares of the tests: {', '.join(map(share_name, sorted(shares)))}; make full runs all of them")
    base = config.option.base or record.landed
    if not config.option.reach_s or base is None or not (ROOT / ".git").exists():
        return Selection(shares)
    changed = changed_tests.changed_files(ROOT, base)
    graph = changed_tests.ImportGraph(ROOT)
    distances = {file.removeprefix("tests/"): far for file, far in graph.tests_of(changed).items()}
    units, left_out = reach(distances, config.stash[_TABLE], shares, config.option.reach_s)
    say(f"{len(changed)} files changed since {base[:8]}; {len(distances)} files of tests reach them")
    if undecided := graph.undecided(changed):
        say("imports do not tell which tests use these changed files:", *(f"  {file}" for file in undecided))
    if left_out:
        say(f"tests that reach the change, and that the budget of {config.option.reach_s:.0f} s leaves out:")
        say(*(f"  {seconds:5.0f} s  {file}" for file, seconds in left_out.items()))
    return Selection(shares, frozenset(units), frozenset(file for file, far in distances.items() if far == 0))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the selection to a worker process."""
    if selection := node.config.stash.get(_SELECTION, None):
        node.workerinput["selection"] = {name: sorted(values) for name, values in asdict(selection).items()}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file without a selected test: to import all of them takes minutes of processor time."""
    selection = config.stash.get(_SELECTION, None)
    if selection is None or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    file = collection_path.relative_to(ROOT / "tests").as_posix()
    return None if selection.takes_file(file, config.stash[_TABLE]) else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the selected tests. Those of the whole service have one driver and one store each; other cases are `full`.

    A case that was asked for by its name runs.
    """
    if unstable := [item.nodeid for item in items if " object at 0x" in item.nodeid]:
        raise pytest.UsageError(f"each process has other addresses: give `ids` to the cases of {unstable[0]}")
    mark_subjects(items)
    selection = config.stash.get(_SELECTION, None)
    if not any("[" in argument for argument in config.args):
        for parameter, values in TURNS.items():
            take_turns(items, parameter, values)
    if config.option.one_of > 1:
        one_of(config.option.one_of, items, sampling_turn())
    if selection is not None:
        _keep_selected(config, items, selection)


def _keep_selected(config: pytest.Config, items: list[pytest.Item], selection: Selection) -> None:
    table = config.stash[_TABLE]
    full = {item.nodeid for item in items if item.get_closest_marker("full")}
    chosen = {item.nodeid for item in items if selection.takes(item.nodeid, table, full=item.nodeid in full)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
    longest_first(items, table)


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
