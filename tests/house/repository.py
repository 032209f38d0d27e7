"""The repository as its files say it is."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
REAL_CHECKPOINTS = ROOT.parent / "shared" / "checkpoints"
"""Checkpoints of real frameworks, which lie outside the project."""
SOURCE_ROOTS = ("client", "service", "worker")


def real_checkpoint(name: str) -> Path:
    """A file or folder of real checkpoints; the test is skipped if it is not here."""
    found = REAL_CHECKPOINTS / name
    if not found.exists():
        pytest.skip(f"the real checkpoint {name} is not here: it lies outside the project")
    return found


def pyproject() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> list[str]:
    """Folders one level below a source root that are import packages."""
    return sorted(
        f"{root}/{path.name}"
        for root in SOURCE_ROOTS
        for path in (ROOT / root).iterdir()
        if (path / "__init__.py").exists()
    )


def modules() -> list[str]:
    """Dotted names of all modules of the product, packages included."""
    names: list[str] = []
    for root in SOURCE_ROOTS:
        for path in sorted((ROOT / root).rglob("*.py")):
            parts = list(path.relative_to(ROOT / root).with_suffix("").parts)
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def head_commit() -> str:
    """The commit of the working tree; empty where there is no git, as in an unpacked sdist."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def files() -> list[Path]:
    """Every file that git tracks or would track; none that is ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def pages() -> list[Path]:
    """Every Markdown page."""
    return [path for path in files() if path.suffix == ".md"]


def code_blocks(page: Path, *languages: str) -> Iterator[str]:
    """Fenced code of a page in these languages."""
    for language, code in re.findall(
        r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        if language in languages:
            yield code
