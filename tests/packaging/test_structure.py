"""The script that counts how the product is cut into modules finds what it looks for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import structure

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A product of five modules: a circle of two, a lazy import, and a module that only its neighbour imports."""
    files = {
        "client/reshard/__init__.py": "",
        "client/reshard/one.py": "from reshard import two\nimport reshard.three\n",
        "client/reshard/two.py": "def f():\n    from reshard.one import g\n    return g\n",
        "client/reshard/three.py": "from reshard.cli.main import main\n",
        "client/reshard/cli/main.py": "main = 1\n",
        "tests/test_it.py": "\n\n",
    }
    for root in structure.ROOTS:
        (tmp_path / root).mkdir()
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_what_a_tree_has_is_counted(tree: Path) -> None:
    found = structure.numbers(tree)
    assert found["modules"] == 4
    assert found["modules with one importer, in the same package"] == 3  # one, two and three
    assert found["files in the largest folder"] == 4
    assert found["modules outside reshard.cli that import it"] == 1
    assert found["imports inside functions"] == 1
    assert found["modules of the client in circles"] == 2
    assert found["lines of tests"] == 2


def test_a_number_past_its_bound_is_said(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["structure.py", "--tree", str(tree)])
    assert structure.main() == 1
    assert "modules of the client in circles" in capsys.readouterr().out


def test_this_tree_keeps_the_bounds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["structure.py", "--tree", str(REPOSITORY)])
    assert structure.main() == 0, capsys.readouterr().out
