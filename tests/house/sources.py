"""Fixtures of the checkpoints that tests convert: `source = zero_source(PARAMETERS, stage=2)` in a test module."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from house.repository import DATA


def zero_source(parameters: Sequence[tuple[str, tuple[int, ...]]], *, stage: int, ranks: int = 2) -> Any:
    """A fixture that writes a ZeRO checkpoint of random values once for the module."""

    @pytest.fixture(scope="module")
    def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
        from checkpoints import write_zero_checkpoint  # it needs torch

        directory = tmp_path_factory.mktemp("source") / "run"
        write_zero_checkpoint(directory, list(parameters), stage=stage, ranks=ranks)
        return directory

    return source


def copied_source(name: str, folder: str = "source") -> Any:
    """A fixture that copies one of the real checkpoints in `tests/data`, for a test that may damage the copy."""

    @pytest.fixture
    def source(tmp_path: Path) -> Path:
        return Path(shutil.copytree(DATA / name, tmp_path / folder))

    return source
