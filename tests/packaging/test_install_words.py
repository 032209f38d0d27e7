"""Pages that tell how to install: the package is on no index yet, so every command installs a directory."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from house.repository import ROOT

PAGES = sorted(p for p in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")))
_COMMAND = re.compile(r"pip install [^\n`#]+")


def commands(page: Path) -> list[list[str]]:
    """The words behind `pip install` of each such command on a page."""
    # errors.md lists the fixes of those who have the package already: pip takes the one that is installed.
    text = "" if page.name == "errors.md" else page.read_text(encoding="utf-8")
    return [shlex.split(found)[2:] for found in _COMMAND.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_page_installs_what_is_not_published(page: Path) -> None:
    for words in commands(page):
        assert not [w for w in words if re.match(r"reshard(\W|$)", w)], words


def test_the_readme_names_extras_that_there_are() -> None:
    """And it says how the command gets onto the PATH, and how to take PyTorch's CPU build."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    installed = [w for words in commands(ROOT / "README.md") for w in words]
    named = {e for w in installed if "[" in w for e in re.sub(r".*\[|\]", "", w).split(",")}
    assert "." in installed
    assert named
    assert named <= extras
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "source .venv/bin/activate" in text
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in text
