"""`make test-changed` finds the tests that reach a change, on a small repository and on this one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from house.repository import ROOT

SCRIPT = ROOT / "scripts" / "changed_tests.py"
FILES = {
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
    for name, text in FILES.items():
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
    assert found["tests/packaging/test_changed_tests.py"] == 1
    assert list(found.values()) == sorted(found.values())
    done = subprocess.run([sys.executable, SCRIPT, "--base", "HEAD"], capture_output=True, text=True, check=True)
    assert "files changed since HEAD" in done.stderr
    assert all((ROOT / line).is_file() for line in done.stdout.splitlines())
