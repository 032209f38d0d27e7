"""Pages that tell how to install: the package is on no index yet, so every command installs a directory."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from house.fixes import fixes
from house.repository import ROOT
from reshard import local
from reshard.local import install_line

PAGES = sorted(p for p in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")))
_COMMAND = re.compile(r"pip install [^\n`#]+")


def commands(page: Path) -> list[list[str]]:
    """The words behind `pip install` of each such command on a page."""
    text = page.read_text(encoding="utf-8").replace("\\\n", "")
    # Into an environment that trains: there, the exact versions would replace those that train.
    text = re.sub(r"pip install '[.]\[worker\]' +# without -c.*", "", text)
    return [shlex.split(found)[2:] for found in _COMMAND.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_page_installs_what_is_not_published(page: Path) -> None:
    for words in commands(page):
        assert not [w for w in words if re.match(r"reshard(?!.* @ git\+)(\W|$)", w)], words
        if any("[" in w for w in words):
            # A newer torch is untested, and brings gigabytes of CUDA.
            assert words[0] == "-c", words


def test_the_readme_names_extras_that_there_are() -> None:
    """And it says how the command gets onto the PATH, and how to take PyTorch's CPU build."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    installed = [w for words in commands(ROOT / "README.md") for w in words]
    named = {e for w in installed if "[" in w for e in re.sub(r".*\[|\]", "", w).split(",")}
    assert named
    assert named <= extras
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "source .venv/bin/activate" in text
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in text


def test_no_fix_installs_what_is_not_published() -> None:
    """Nor a torch without its version: that is 5.6 GB of CUDA libraries, and untested."""
    assert not [fix for fix in fixes() if re.search(r"pip install '?(reshard|torch)\b", fix)]


class Installed(Distribution):
    """A package with a note of where it came from."""

    def __init__(self, note: object) -> None:
        self._note = note if isinstance(note, str) else json.dumps(note)

    def read_text(self, filename: str) -> str | None:
        return self._note if filename == "direct_url.json" else None

    def locate_file(self, path: object) -> Path:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError


def line_of(note: object, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def installed(name: str) -> Distribution:
        assert name == "reshard"
        return Installed(note)

    monkeypatch.setattr("importlib.metadata.distribution", installed)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    return shlex.split(install_line("worker"))


@pytest.mark.parametrize("editable", [False, True])
def test_the_line_names_the_clone_that_was_installed(
    editable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    (clone / "constraints.txt").touch()
    words = line_of({"url": clone.as_uri(), "dir_info": {"editable": editable} if editable else {}}, monkeypatch)
    flag = ["-e"] if editable else []
    assert words == ["pip", "install", "-c", f"{clone}/constraints.txt", *flag, f"{clone}[worker]"]


@pytest.mark.parametrize(
    "note",
    [
        "null",
        "{",
        "[]",
        {"url": "file:///gone", "dir_info": {}},
        {"url": "https://x/y.whl", "archive_info": {}},
        {"url": 1},
        {"url": "file:///tmp", "dir_info": 3},
    ],
)
def test_without_the_clone_the_line_makes_one(note: object, monkeypatch: pytest.MonkeyPatch) -> None:
    words = line_of(note, monkeypatch)
    assert words[:3] == ["git", "clone", local.REPOSITORY]
    assert words[3:] == ["&&", "pip", "install", "-c", "reshard/constraints.txt", "./reshard[worker]"]


def test_another_pip_on_the_path_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line_of("null", monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shlex.split(install_line("worker"))[4:8] == [sys.executable, "-m", "pip", "install"]


def test_the_repository_is_that_of_the_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"] == local.REPOSITORY
