"""What `make newest` says: which versions it ran with, and which failures come from them."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from house.repository import ROOT


@pytest.fixture(scope="module")
def newest() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "newest.py"))


def test_each_framework_of_the_makefile_is_pinned(newest: dict[str, Any]) -> None:
    frames = re.search(r"^FRAMES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert frames is not None
    pinned = newest["pinned_versions"](ROOT / "constraints.txt")
    assert {"torch", "deepspeed"} < set(frames[1].split()) <= set(pinned)
    assert all(re.fullmatch(r"\d[\w.+]*", version) for version in pinned.values())


def test_a_failure_with_both_versions_is_told_from_one_of_the_newest(newest: dict[str, Any], tmp_path: Path) -> None:
    test = tmp_path / "test_two.py"
    test.write_text("def test_a():\n    assert False\n\ndef test_b():\n    assert False\n\ndef test_c():\n    pass\n")
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    # pytest's own interpreter, under the name that an environment has it.
    (environment / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (environment / "bin" / "python").chmod(0o755)
    run = newest["run_tests"]
    first = run(environment, [str(test), "-q", f"--rootdir={tmp_path}"], tmp_path / "first")
    assert (first.status, first.counts) == (1, {"passed": 1, "failed": 2, "errors": 0, "skipped": 0})
    assert [name.rpartition("::")[2] for name in first.failed] == ["test_a", "test_b"]
    test.write_text(test.read_text().replace("assert False", "pass", 1))
    second = run(environment, [str(test), "-q", f"--rootdir={tmp_path}"], tmp_path / "second")
    lines = newest["differences"](first, second)
    assert lines[0] == "With the newest versions: 1 passed, 2 failed."
    assert [line.split(" | ")[1] for line in lines[4:]] == ["passes |", "fails |"]
