"""Each interpreter has an environment of its own, and the quick tier names tests that are there."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def _commands(*arguments: str) -> str:
    """What make would run, were nothing installed."""
    environment = {
        k: v for k, v in os.environ.items() if k not in {"PYTHON", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES"}
    }
    command = ["make", "--no-print-directory", "-n", "-B", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_an_interpreter_that_is_named_gets_its_own_environment() -> None:
    ours = f".venv-{platform.python_version()}"
    named = _commands("test", f"PYTHON={sys.executable}")
    assert f"{sys.executable} -m venv {ours}\n" in named
    assert re.findall(r"(\S+) -m pytest", named) == [f"{ours}/bin/python"]
    assert re.findall(r"(\S+) -m pytest", _commands("test")) == [".venv/bin/python"]
    assert re.findall(r"(\S+) -m pytest", _commands("quick", f"PYTHON={sys.executable}")) == [
        f"{ours}-quick/bin/python"
    ]


def test_the_site_needs_the_extra_docs_alone() -> None:
    """All of them are gigabytes, for pages that a writer wants to look at."""
    commands = _commands("site")
    assert re.findall(r"install[.]py (\S+) '(\S+)'", commands) == [(".venv-docs", ".[docs]")]
    assert ".venv-docs/bin/python -m mkdocs build --strict" in commands


def test_the_demo_takes_arguments() -> None:
    assert "deploy/demo/run.py --stay\n" in _commands("demo", "ARGS=--stay")


def test_an_interpreter_that_does_not_run_is_an_error() -> None:
    run = subprocess.run(
        ["make", "-n", "test", "PYTHON=/no/python"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "PYTHON=/no/python does not run" in run.stderr


def test_the_quick_tier_names_tests_that_are_there() -> None:
    named = [line for line in (ROOT / "tests" / "quick.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(named) == len(set(named)) >= 20
    assert all((ROOT / line.partition("::")[0]).is_file() for line in named)


def test_the_metadata_name_the_pythons_that_ci_tries() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    tried = re.search(r"for minor in ([0-9. ]+);", (ROOT / "scripts" / "each_python.sh").read_text())
    assert tried is not None
    assert tried[1].split() == named
    last = int(named[-1].split(".")[1])
    assert project["requires-python"] == f">={named[0]},<3.{last + 1}"
