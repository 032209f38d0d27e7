"""Which tests a run has, and in which order: samples, subjects, and the longest files first."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
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
    assert all(0 < len(turn) <= -(-count // min(4, count)) for turn in turns)
    assert sample(0, count) == sample(0, count)


def test_a_file_can_have_another_share_than_its_folder() -> None:
    assert sum("/near/" in nodeid for nodeid in sample(0, 3)) == 5


def test_other_files_can_have_a_share_as_well() -> None:
    items: list[Any] = [Item(f"tests/near/test_it.py::test_{n}") for n in range(6)]
    sample_files(items, {}, 1, others=3)
    assert sum(not item.markers for item in items) == 2


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
