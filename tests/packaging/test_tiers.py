"""Which tests a run has, and in which order: samples, subjects, and the longest files first."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from shares import (
    NUMBERS,
    QUICK,
    UNKNOWN_S,
    Record,
    Run,
    Selection,
    Shares,
    Unit,
    deal,
    estimates,
    keep_seconds,
    reach,
    shares_named,
)

from house.order import WAITING, longest_first
from house.repository import ROOT
from house.seeds import commit_seed
from house.shares import Tally
from house.subjects import SUBJECTS, subjects_of
from house.tiers import one_of, sampling_turn

FILES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]


TABLE = Shares(
    {
        "far/test_long.py::test_a": Unit(1, 40.0),
        "far/test_long.py::test_b[x]": Unit(2, 50.0),
        "far/test_long.py::test_b[y]": Unit(3, 60.0),
        "far/test_short.py": Unit(2, 10.0, measured=False),
        "unit/test_small.py": Unit(QUICK, 1.0),
    }
)
RUN = Run("c" * 40, "2026-11-28T06:00:00+00:00", tests=3, skipped=1, seconds=9.0)


@pytest.mark.parametrize(
    ("nodeid", "unit", "share"),
    [
        ("far/test_long.py::test_a[1]", "far/test_long.py::test_a", 1),
        ("far/test_long.py::test_b[y]", "far/test_long.py::test_b[y]", 3),
        ("far/test_short.py::test_any[z]", "far/test_short.py", 2),
        # New tests: in a file that the table knows, in a quick folder, and elsewhere.
        ("far/test_long.py::test_new", "far/test_long.py::test_new", 3),
        ("unit/test_new.py::test_it", "unit/test_new.py", QUICK),
        ("far/test_new.py::test_it", "far/test_new.py", 9),
    ],
)
def test_the_share_of_a_test(nodeid: str, unit: str, share: int) -> None:
    assert TABLE.unit_of(f"tests/{nodeid}") == unit
    assert TABLE.share_of(f"tests/{nodeid}") == share
    assert Selection(frozenset({share})).takes_file(nodeid.partition("::")[0], TABLE)


@given(
    seconds=st.dictionaries(st.from_regex(r"\Atests/[ab]/test_[a-e]\.py::test_[a-c]\[[0-9]\]\Z"), st.floats(0.5, 50))
)
def test_each_measured_test_has_one_share_and_shares_differ_by_at_most_a_unit(seconds: dict[str, float]) -> None:
    table = deal(seconds, Shares({}), quick_s=0, unit_s=20)
    totals = dict.fromkeys(NUMBERS, 0.0)
    for name, unit in table.units.items():
        totals[unit.share] += unit.seconds
        assert not any(other.startswith((f"{name}::", f"{name}[")) for other in table.units), "units do not overlap"
    assert {table.unit_of(nodeid) for nodeid in seconds} == table.units.keys()
    assert sum(totals.values()) == pytest.approx(sum(seconds.values()), abs=0.1 * len(table.units) + 0.1)
    longest = max((unit.seconds for unit in table.units.values()), default=0.0)
    assert max(totals.values()) - min(totals.values()) <= longest + 1


def test_a_new_test_moves_no_other_test_to_another_share() -> None:
    seconds = {f"tests/far/test_{n}.py::test_it": float(n) for n in range(40)}
    before = deal(seconds, Shares({}), quick_s=3, unit_s=90)
    after = deal(seconds | {"tests/far/test_new.py::test_it": 70.0}, before, quick_s=3, unit_s=90)
    assert {name: after.units[name].share for name in before.units} == {n: u.share for n, u in before.units.items()}
    assert sum(unit.share == QUICK for unit in before.units.values()) == 4


def test_tests_that_never_ran_have_the_mean_of_those_like_them_until_they_run() -> None:
    seconds = {
        "tests/a/test_x.py::test_f[1]": 2.0,
        "tests/a/test_x.py::test_f[2]": 4.0,
        "tests/a/test_y.py::test_g": 12.0,
    }
    names = (
        "tests/a/test_x.py::test_f[3]",
        "tests/a/test_x.py::test_new",
        "tests/a/test_z.py::test_h",
        "tests/b/test_w.py::test_i",
    )
    guesses = estimates([*seconds, *names], seconds)
    assert guesses == dict(zip(names, (3.0, 3.0, 6.0, UNKNOWN_S), strict=True))
    table = deal(seconds | guesses, Shares({}), quick_s=0, unit_s=90, estimated=guesses)
    assert table.units["a/test_y.py"] == Unit(table.units["a/test_y.py"].share, 12.0)
    assert table.units["a/test_z.py"] == Unit(table.units["a/test_z.py"].share, 6.0, measured=False)
    later = deal({"tests/a/test_z.py::test_h": 8.0}, table, quick_s=0, unit_s=90)
    assert later.units["a/test_z.py"] == Unit(table.units["a/test_z.py"].share, 8.0)
    guessed_again = deal(
        {"tests/a/test_y.py::test_g": 1.0}, later, quick_s=0, unit_s=90, estimated=["tests/a/test_y.py::test_g"]
    )
    assert guessed_again.units == later.units


def test_a_table_that_is_written_is_read_again(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "shares.tsv")
    assert Shares.read(tmp_path / "shares.tsv").units == TABLE.units


def test_the_nearest_tests_come_first_and_the_budget_leaves_the_others_out() -> None:
    distances = {"far/test_long.py": 2, "far/test_short.py": 1, "far/test_unmeasured.py": 3, "unit/test_small.py": 1}
    assert reach(distances, TABLE, {QUICK}, 1000)[1] == {}
    units, left_out = reach(distances, TABLE, {QUICK, 1}, 71)
    assert units == ["far/test_short.py", "far/test_long.py::test_b[x]", "far/test_unmeasured.py"]
    assert left_out == {"far/test_long.py": 60.0}


def test_a_selection_takes_new_tests_of_changed_files() -> None:
    selection = Selection(frozenset({QUICK}), frozenset({"far/test_short.py"}), frozenset({"far/test_long.py"}))
    tests = ("far/test_short.py::test_it", "far/test_long.py::test_new", "unit/test_small.py::test_it")
    assert [selection.takes(f"tests/{nodeid}", TABLE) for nodeid in tests] == [True] * 3
    assert not selection.takes("tests/far/test_long.py::test_a", TABLE)
    assert not selection.takes_file("far/test_other.py", TABLE)


def test_the_share_with_the_oldest_pass_is_next_and_a_failed_one_stays_next() -> None:
    record = Record()
    assert record.in_line() == list(NUMBERS)
    for day, share in enumerate((3, 1, 2, *range(4, 13)), start=10):
        record.note(share, replace(RUN, at=f"2026-11-{day}T06:00:00+00:00"))
    assert record.in_line()[:3] == [3, 1, 2]
    for _ in range(2):
        record.note(5, replace(RUN, at="2026-11-29T06:00:00+00:00", failed=("tests/x.py::test_y",)))
        assert record.in_line()[:2] == [5, 3]
        assert record.runs[5].passed_at == "2026-11-14T06:00:00+00:00"
    assert shares_named("quick,next,7", record) == {QUICK, 5, 7}
    record.note(5, replace(RUN, at="2026-11-30T06:00:00+00:00"))
    assert record.in_line()[0] == 3
    assert record.in_line()[-1] == 5


def test_a_record_that_is_written_is_read_again_and_printed(tmp_path: Path) -> None:
    record = Record("a" * 40, {QUICK: RUN, 4: Run("b" * 40, RUN.at)})
    record.note(9, replace(RUN, failed=("tests/x.py::test_y",)))
    record.write(tmp_path / "shares.json")
    again = Record.read(tmp_path / "shares.json")
    assert (again.landed, again.runs) == (record.landed, record.runs)
    lines = record.lines()
    assert "1 failed" in next(line for line in lines if line.startswith("9 "))
    assert "        failed: tests/x.py::test_y" in lines
    assert lines[-2].split() == ["12", "never", "ran"]


@pytest.mark.parametrize("names", ["13", "0", "fast", "quick,,1"])
def test_an_unknown_share_is_rejected_with_the_names(names: str) -> None:
    with pytest.raises(ValueError, match=r"no such share: .*; there are quick, full, next, 1, 2"):
        shares_named(names, Record())


def test_a_run_is_recorded_with_its_failures(tmp_path: Path) -> None:
    tally = Tally()
    for when, outcome in (("setup", "passed"), ("call", "failed"), ("teardown", "passed")):
        tally.add("tests/far/test_short.py::test_it", outcome, 0.5 if when == "call" else 0.25)
    tally.add("tests/far/test_short.py::test_other", "skipped", 0.0)
    tally.add("tests/far/test_long.py::test_a", "passed", 7.0)
    run = tally.run_of(2, TABLE, "c" * 40, RUN.at)
    assert run is not None
    assert (run.tests, run.skipped, run.failed, run.seconds) == (2, 1, ("tests/far/test_short.py::test_it",), 1.0)
    assert tally.run_of(3, TABLE, "c" * 40, RUN.at) is None
    keep_seconds(tally.seconds, tmp_path / "build" / "seconds.json")
    keep_seconds({"tests/far/test_long.py::test_a": 8.0}, tmp_path / "build" / "seconds.json")
    kept = json.loads((tmp_path / "build" / "seconds.json").read_text())
    assert kept["tests/far/test_long.py::test_a"] == 8.0
    assert len(kept) == 3


# A run of pytest itself, in a repository of its own.


FAILING = "import pathlib\ndef test_it():\n    assert not pathlib.Path(__file__).with_name('red').exists()\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a quick test and one test in each of two shares; that of share 2 fails beside a file `red`."""
    tests = tmp_path / "tests"
    for folder in ("house", "unit", "far"):
        (tests / folder).mkdir(parents=True)
    for name in ("conftest.py", *(f"house/{path.name}" for path in (ROOT / "tests" / "house").glob("*.py"))):
        (tests / name).write_text((ROOT / "tests" / name).read_text())
    (tmp_path / "scripts").mkdir()
    for name in ("changed_tests.py", "shares.py"):
        (tmp_path / "scripts" / name).write_text((ROOT / "scripts" / name).read_text())
    for root in ("client", "worker", "service", "bench"):
        (tmp_path / root).mkdir()
    (tmp_path / "client" / "thing.py").write_text("VALUE = 1\n")
    (tests / "unit" / "test_small.py").write_text("def test_it():\n    pass\n")
    (tests / "far" / "test_one.py").write_text("from thing import VALUE\ndef test_it():\n    assert VALUE == 1\n")
    (tests / "far" / "test_two.py").write_text(FAILING)
    (tests / "shares.tsv").write_text("1\t5.0\tfar/test_one.py\n2\t5.0\tfar/test_two.py\n")
    options = '["--import-mode=importlib", "-m", "not full and not gpu and not nightly", "-p", "no:cacheprovider"]'
    markers = '["full: long", "gpu: device", "nightly: hour"]'
    paths = '["tests", "scripts", "client"]'
    lines = ["[tool.pytest.ini_options]", 'testpaths = ["tests"]', f"pythonpath = {paths}", f"addopts = {options}"]
    (tmp_path / "pyproject.toml").write_text("\n".join([*lines, f"markers = {markers}"]))
    (tmp_path / ".gitignore").write_text("__pycache__/\n/build/\n.hypothesis/\nred\n")
    _git(tmp_path, "init", "--initial-branch=main")
    _commit(tmp_path)
    return tmp_path


def _git(repository: Path, *words: str) -> str:
    command = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _commit(repository: Path) -> None:
    _git(repository, "add", ".")
    _git(repository, "commit", "-m", "change")


def _run(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "RESHARD"))}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=250)


def _landed(checkout: Path) -> None:
    Record(_git(checkout, "rev-parse", "HEAD")).write(checkout / "tests" / "shares.json")


def test_full_runs_each_share_once_and_continues_with_a_red_one(checkout: Path) -> None:
    red = checkout / "tests" / "far" / "red"
    red.touch()
    done = _run(checkout, "scripts/shares.py", "--", "-q")
    record = Record.read(checkout / "tests" / "shares.json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert [share for share, run in sorted(record.runs.items()) if not run.failed] == [QUICK, 1]
    assert record.runs[2].failed == ("tests/far/test_two.py::test_it",)
    assert record.in_line()[0] == 2
    red.unlink()
    again = _run(checkout, "scripts/shares.py", "--", "-q")
    assert again.stdout.count("passed with these files") == 2, again.stdout
    assert again.stdout.index("== share 2") < again.stdout.index("== share 1 passed")
    assert not Record.read(checkout / "tests" / "shares.json").runs[2].failed
    (checkout / "client" / "thing.py").write_text("VALUE = 2\n")
    changed = _run(checkout, "scripts/shares.py")
    assert changed.returncode == 2
    assert "Tracked files differ from the commit" in changed.stdout


def test_a_bug_is_caught_by_the_share_of_its_test_and_by_what_the_change_reaches(checkout: Path) -> None:
    _landed(checkout)
    record = Record.read(checkout / "tests" / "shares.json")
    record.note(1, RUN)
    record.write(checkout / "tests" / "shares.json")
    (checkout / "client" / "thing.py").write_text("VALUE = 2\n")
    missed = _run(checkout, "-m", "pytest", "--shares", "quick,next")
    assert missed.returncode == 0, missed.stdout
    by_share = _run(checkout, "-m", "pytest", "--shares", "1")
    assert "FAILED tests/far/test_one.py::test_it" in by_share.stdout
    by_reach = _run(checkout, "-m", "pytest", "--shares", "quick,next", "--reach-s", "5")
    assert "FAILED tests/far/test_one.py::test_it" in by_reach.stdout
    assert "3 passed" not in by_reach.stdout
    outside = _run(checkout, "-m", "pytest", "--shares", "quick,next", "--reach-s", "4")
    assert outside.returncode == 0, outside.stdout
    assert "      5 s  far/test_one.py" in outside.stdout


def test_a_run_that_ends_early_or_leaves_tests_out_is_not_recorded(checkout: Path) -> None:
    _landed(checkout)
    (checkout / "tests" / "far" / "red").touch()
    for words in (["-k", "it"], ["tests/far", "-x"]):
        _run(checkout, "-m", "pytest", "--shares", "quick,2", *words)
        assert not Record.read(checkout / "tests" / "shares.json").runs, words


def test_a_landed_commit_passed_the_share_that_was_next_in_its_record(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-11-29T09:00:00+09:00")
    before = Record()
    for share in {*NUMBERS} - {6}:
        before.note(share, RUN)
    before.write(checkout / "tests" / "shares.json")
    _commit(checkout)
    done = _run(checkout, "scripts/shares.py", "--landed")
    assert done.returncode == 0, done.stderr
    after = Record.read(checkout / "tests" / "shares.json")
    assert (after.runs[6].commit, after.runs[QUICK].commit) == (after.landed, after.landed)
    assert after.in_line()[-1] == 6
    assert after.runs[6].at == "2026-11-29T00:00:00+00:00", "times are compared as texts, all in UTC"


@pytest.mark.parametrize("name", WAITING)
def test_tables_name_what_is_there(name: str) -> None:
    assert (ROOT / "tests" / name).exists()


def test_units_of_the_table_name_files_that_exist() -> None:
    table = Shares.read()
    gone = {name for name in table.units if not (ROOT / "tests" / name.partition("::")[0]).is_file()}
    assert not gone, "scripts/shares.py --deal drops units of tests that are gone"
    assert {unit.share for unit in table.units.values()} == {QUICK, *NUMBERS}


def test_one_of_many_tests_is_drawn_and_as_many_turns_have_every_test() -> None:
    def drawn(turn: int) -> set[str]:
        items: list[Any] = [Item(f"tests/near/test_it.py::test_{n}") for n in range(6)]
        items += [Item("tests/near/test_other.py::test_0"), Item("tests/near/test_it.py::test_long", "full")]
        one_of(3, items, turn)
        return {item.nodeid for item in items if not item.markers}

    assert [len(drawn(turn)) for turn in range(3)] == [3, 3, 3]
    assert len(set.union(*(drawn(turn) for turn in range(3)))) == 7


class Item:
    """A test, as far as samples look at it."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid = nodeid
        self.markers = list(markers)

    def get_closest_marker(self, name: str) -> object | None:
        return name if name in self.markers else None

    def add_marker(self, marker: Any) -> None:
        self.markers.append(marker.name)


def test_a_commit_has_one_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESHARD_TURN", raising=False)
    assert sampling_turn() == sampling_turn()
    monkeypatch.setenv("RESHARD_TURN", "7")
    assert sampling_turn() == 7


def test_a_run_of_shares_draws_with_the_seed_of_its_commit() -> None:
    """Whoever runs the tests of a commit draws what CI draws of it."""
    given_here = ("RESHARD_SEED", "RESHARD_TURN", "PYTEST_XDIST_WORKER")
    environment = {name: value for name, value in os.environ.items() if name not in given_here}
    command = [sys.executable, "-m", "pytest", __file__, "--shares", "quick", "-k", "no_such", "-p", "no:cacheprovider"]
    runs = [
        subprocess.run(command, cwd=ROOT, env=environment | given, capture_output=True, text=True, check=False).stdout
        for given in ({}, {}, {"RESHARD_SEED": "7"})
    ]
    seeds = [re.findall(r"RESHARD_SEED=(\d+)", run) for run in runs]
    assert seeds == [[str(commit_seed())], [str(commit_seed())], ["7"]]


def test_long_files_come_first_and_waiting_ones_take_turns_with_busy_ones() -> None:
    seconds = {"unit/test_a.py": 1, "integration/test_z.py": 30, "laws/test_l.py": 150, "integration/test_y.py": 159}
    items: list[Any] = [SimpleNamespace(nodeid=f"tests/{name}::test_{n}") for name in seconds for n in range(2)]
    longest_first(items, Shares({name: Unit(1, taken) for name, taken in seconds.items()}))
    files = [item.nodeid.partition("::")[0].removeprefix("tests/") for item in items[::2]]
    assert files == ["integration/test_y.py", "laws/test_l.py", "integration/test_z.py", "unit/test_a.py"]


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_subject_has_files(subject: str) -> None:
    assert [file for file in FILES if subject in subjects_of(file)]
    assert re.fullmatch("[a-z0-9]+", subject)


def test_subjects_of_tests() -> None:
    assert subjects_of("tests/oracle/test_dcp_in.py::test_it") == ["dcp"]
    assert subjects_of("tests/laws/test_laws.py::test_laws[ZeRO-1]") == ["deepspeed"]
    assert {"service", "webhooks"} <= set(subjects_of("tests/integration/test_webhooks.py::test_it"))


def test_what_a_subject_selects_is_the_short_form() -> None:
    """`-m` replaces the expression of pyproject.toml, which leaves long tests out."""
    file = "tests/packaging/test_tutorial.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", file, "-m"]
    listed = {
        expression: subprocess.run([*command, expression], cwd=ROOT, capture_output=True, text=True).stdout
        for expression in ("docs", "full and webhooks or full and docs")
    }
    assert "::test_the_page_has_steps" in listed["docs"]
    assert "empty_environment" not in listed["docs"]
    assert "empty_environment" in listed["full and webhooks or full and docs"]
    assert "::test_the_page_has_steps" not in listed["full and webhooks or full and docs"]


# `make test-changed` finds the tests that reach a change, on a small repository and on this one.


SCRIPT = ROOT / "scripts" / "changed_tests.py"
REPOSITORY = {
    "pyproject.toml": """
        [project.scripts]
        tool = "lib.main:main"
        [project.entry-points."lib.engine"]
        local = "engine.local:engine"
        [project.entry-points."lib.commands"]
        serve = "server.serve:serve"
        gc = "server.gc:gc"
    """,
    "client/lib/__init__.py": "",
    "client/lib/main.py": "from lib import numbers\nGROUPS = 'lib.engine', 'lib.commands'",
    "client/lib/numbers.py": "def late():\n    from lib.words import WORD",
    "client/lib/words.py": "WORD = 1",
    "client/lib/page.html": "",
    "worker/engine/__init__.py": "",
    "worker/engine/local.py": "",
    "service/server/__init__.py": "",
    "service/server/serve.py": "",
    "service/server/gc.py": "",
    "tests/conftest.py": "",
    "tests/house/shared.py": "import lib.words",
    "tests/unit/conftest.py": "from house.shared import thing",
    "tests/unit/test_near.py": "from lib.words import WORD",
    "tests/unit/test_own.py": "",
    "tests/far/test_numbers.py": "import lib.numbers",
    "tests/far/test_program.py": "argv = ['-m', 'lib.main', 'serve']",
    "tests/far/test_script.py": "SCRIPT = 'scripts/helper.py'",
    "tests/far/test_patched.py": "PATCHED = 'lib.numbers.late'",
    "scripts/helper.py": "",
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("changed_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(tmp_path: Path) -> Path:
    for name, text in REPOSITORY.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        # The nearest test first; a conftest of a folder counts for each file of it; imports within functions count.
        (
            "client/lib/words.py",
            ["unit/test_near", "far/test_numbers", "far/test_patched", "far/test_program", "unit/test_own"],
        ),
        ("client/lib/numbers.py", ["far/test_numbers", "far/test_patched", "far/test_program"]),
        ("tests/house/shared.py", ["unit/test_near", "unit/test_own"]),
        ("tests/unit/test_own.py", ["unit/test_own"]),
        # A program reaches the only entry point of a group, and of several the one that the test types.
        ("worker/engine/local.py", ["far/test_program"]),
        ("service/server/serve.py", ["far/test_program"]),
        ("service/server/gc.py", []),
        ("scripts/helper.py", ["far/test_script"]),
        ("client/lib/page.html", []),
    ],
)
def test_tests_that_reach_a_change(script: ModuleType, small: Path, changed: str, tests: list[str]) -> None:
    found = list(script.ImportGraph(small).tests_of([changed]))
    assert found == [f"tests/{name}.py" for name in tests]


def test_a_package_runs_before_all_that_is_in_it(script: ModuleType, small: Path) -> None:
    found = script.ImportGraph(small).tests_of(["client/lib/__init__.py"])
    assert {"tests/unit/test_near.py", "tests/far/test_numbers.py"} <= found.keys()
    assert set(found.values()) >= {1}


def test_changes_are_those_of_the_branch_and_of_the_working_tree(script: ModuleType, small: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-C", str(small), "-c", "user.name=a", "-c", "user.email=a@b", *words],
            check=True,
            capture_output=True,
        )

    git("init", "--initial-branch=main")
    git("add", ".")
    git("commit", "-m", "first")
    git("checkout", "-b", "branch")
    (small / "client" / "lib" / "words.py").write_text("WORD = 2")
    git("commit", "-am", "second")
    (small / "client" / "lib" / "page.html").write_text("changed")
    (small / "tests" / "unit" / "test_new.py").write_text("")
    assert script.changed_files(small, "main") == [
        "client/lib/page.html", "client/lib/words.py", "tests/unit/test_new.py",
    ]  # fmt: skip
    with pytest.raises(SystemExit, match="nowhere"):
        script.changed_files(small, "nowhere")


def test_the_script_knows_this_repository(script: ModuleType) -> None:
    """A test that imports a module of the engine itself is one import away, and comes before those further away."""
    found = script.ImportGraph(ROOT).tests_of(["tests/house/repository.py"])
    assert found["tests/packaging/test_tiers.py"] == 1
    assert list(found.values()) == sorted(found.values())
    done = subprocess.run([sys.executable, SCRIPT, "--base", "HEAD"], capture_output=True, text=True, check=True)
    assert "files changed since HEAD" in done.stderr
    assert all((ROOT / line).is_file() for line in done.stdout.splitlines())
