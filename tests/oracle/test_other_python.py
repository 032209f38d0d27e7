"""A checkpoint that DeepSpeed saved under one CPython resumes under another, converted in between.

CPython 3.11.0 to 3.11.3 pickle `ZeroStageEnum.gradients` by name, all others by value. Two checkpoints of 3.11.2 are
frozen in `tests/data`. With a second interpreter that has DeepSpeed, both ways are trained here: `RESHARD_OTHER_PYTHON`
names it, else an environment of `make setup PYTHON=...` is one.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from oracle.cases import CASES
from oracle.driver import Oracle, Trained
from oracle.launcher import Worlds
from oracle.outputs import convert
from oracle.truth import Resumed, Truth, differences, meta_differences
from reshard.options import RunLayout

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT / "tests" / "data"
SPREAD = 0.0025
"""Of losses of one bf16 run on 1 to 4 ranks within DeepSpeed itself: 0.0017, see `oracle.conversions.bf16_spread`."""


def _version(python: str) -> str:
    """The interpreter's version; nothing if it has no DeepSpeed."""
    look = "import deepspeed, platform; print(platform.python_version())"
    run = subprocess.run([python, "-c", look], capture_output=True, text=True, check=False)
    return run.stdout.split()[-1] if run.returncode == 0 else ""


def _other_python() -> str | None:
    named = os.environ.get("RESHARD_OTHER_PYTHON")
    found = [named] if named else sorted(str(p) for p in ROOT.glob(".venv*/bin/python"))
    return next((p for p in found if _version(p) not in ("", platform.python_version())), None)


@pytest.fixture(scope="module")
def other() -> Iterator[Oracle]:
    """DeepSpeed under another Python."""
    python = _other_python()
    if python is None:
        pytest.skip("no other Python with DeepSpeed: make setup PYTHON=..., or set RESHARD_OTHER_PYTHON")
    with Worlds(python=python) as worlds:
        yield Oracle(worlds)


def _frozen(name: str, case: str, folder: Path) -> Trained:
    shutil.copytree(DATA / name, folder / "ckpt")
    truth = Truth(folder / "truth.safetensors", folder / "truth.json")
    shutil.move(folder / "ckpt" / "expected.safetensors", truth.tensors_path)
    shutil.move(folder / "ckpt" / "expected.json", truth.meta_path)
    meta = truth.meta
    return Trained(folder / "ckpt", meta["tag"], meta["losses_before"], tuple(meta["losses_after"]), CASES[case], 2)


def _resume(run: Trained, oracle: Oracle, folder: Path, world: int) -> Resumed:
    convert(run.dir, folder / "out" / run.tag, "zero", layout=RunLayout(dp=world))
    return oracle.resume_native(run.case, folder / "out", folder / "state", world=world)


def _assert_continues(run: Trained, resumed: Resumed) -> None:
    assert differences(run.truth, resumed.state) == []
    assert meta_differences(run.truth, resumed.state) == []
    assert resumed.wrong_weights == []
    assert resumed.losses == pytest.approx(run.losses_after, rel=0, abs=SPREAD)


@pytest.mark.parametrize(("name", "case"), [("zero2_python3112", "zero2_tiny"), ("zero3_python3112", "zero3_tiny")])
def test_a_checkpoint_of_python_3_11_2_resumes_here(name: str, case: str, oracle: Oracle, tmp_path: Path) -> None:
    run = _frozen(name, case, tmp_path)
    _assert_continues(run, _resume(run, oracle, tmp_path, world=3))


@pytest.mark.parametrize("case", ["zero2_tiny", "zero3_tiny"])
def test_a_checkpoint_of_another_python_resumes_here(case: str, other: Oracle, oracle: Oracle, tmp_path: Path) -> None:
    run = other.train(CASES[case], tmp_path)
    _assert_continues(run, _resume(run, oracle, tmp_path, world=3))


@pytest.mark.parametrize("case", ["zero2_tiny", "zero3_tiny"])
def test_a_checkpoint_of_this_python_resumes_there(case: str, other: Oracle, oracle: Oracle, tmp_path: Path) -> None:
    run = oracle.train(CASES[case], tmp_path)
    _assert_continues(run, _resume(run, other, tmp_path, world=3))
