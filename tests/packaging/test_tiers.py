"""Which tests a run has, and in which order: samples, subjects, and the longest files first."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from house.order import LONG_S, WAITING, longest_first
from house.repository import ROOT
from house.subjects import SUBJECTS, subjects_of
from house.tiers import SHARES, sample_files, sampling_turn

FILES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]


class Item:
    """A test, as far as samples look at it."""

    def __init__(self, nodeid: str, *markers: str) -> None:
        self.nodeid = nodeid
        self.markers = list(markers)

    def get_closest_marker(self, name: str) -> object | None:
        return name if name in self.markers else None

    def add_marker(self, marker: Any) -> None:
        self.markers.append(marker.name)


def sample(turn: int, count: int) -> set[str]:
    items: list[Any] = [Item(f"tests/far/test_it.py::test_{n}") for n in range(count)]
    items += [Item(f"tests/near/test_it.py::test_{n}") for n in range(5)]
    items += [Item("tests/far/test_it.py::test_long", "full"), Item("tests/far/test_it.py::test_device", "gpu")]
    sample_files(items, {"far": 4, "near": 4, "near/test_it.py": 1}, turn)
    assert [i.nodeid for i in items if "::test_long" in i.nodeid and i.markers != ["full"]] == []
    return {i.nodeid for i in items if not i.markers}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 40])
def test_as_many_turns_as_the_share_have_every_test(count: int) -> None:
    turns = [{n for n in sample(turn, count) if "/far/" in n} for turn in range(4)]
    assert len(set().union(*turns)) == count
    assert all(count // 4 <= len(turn) <= -(-count // 4) for turn in turns)
    assert sample(0, count) == sample(0, count)


def test_a_file_can_have_another_share_than_its_folder() -> None:
    assert sum("/near/" in nodeid for nodeid in sample(0, 3)) == 5


def test_a_long_file_with_few_tests_takes_part_in_some_turns_only() -> None:
    def has(turn: int) -> set[str]:
        items: list[Any] = [Item(f"tests/far/test_it.py::test_{n}") for n in range(2)]
        sample_files(items, {"far": 1, "far/test_it.py": 4}, turn)
        return {item.nodeid[-1] for item in items if not item.markers}

    assert sorted("".join(sorted(has(turn))) for turn in range(4)) == ["", "", "0", "1"]


def test_other_files_can_have_a_share_as_well() -> None:
    items: list[Any] = [Item(f"tests/near/test_it.py::test_{n}") for n in range(6)]
    items += [Item("tests/near/test_other.py::test_0")]
    sample_files(items, {}, 1, others=3)
    assert [sum(name in i.nodeid for i in items if not i.markers) for name in ("_it.py", "_other.py")] == [2, 1]


def test_a_commit_has_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESHARD_TURN", raising=False)
    assert sampling_turn() == sampling_turn()
    monkeypatch.setenv("RESHARD_TURN", "7")
    assert sampling_turn() == 7


@pytest.mark.parametrize("name", [*SHARES, *LONG_S, *WAITING])
def test_tables_name_what_is_there(name: str) -> None:
    assert (ROOT / "tests" / name).exists()


def test_long_files_come_first_and_waiting_ones_take_turns_with_busy_ones() -> None:
    names = ("unit/test_a.py", "integration/test_z.py", "laws/test_laws.py", "integration/test_alive.py")
    items: list[Any] = [SimpleNamespace(nodeid=f"tests/{name}::test_{n}") for name in names for n in range(2)]
    longest_first(items)
    assert [item.nodeid for item in items] == [
        *(f"tests/integration/test_alive.py::test_{n}" for n in range(2)),
        *(f"tests/laws/test_laws.py::test_{n}" for n in range(2)),
        *(f"tests/integration/test_z.py::test_{n}" for n in range(2)),
        *(f"tests/unit/test_a.py::test_{n}" for n in range(2)),
    ]


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
