"""Conversion on a machine without a GPU never imports torch: the CPU image has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from house.repository import ROOT

CHECKPOINT = ROOT / "tests" / "data" / "zero3_tiny"
CODE = """
import sys
sys.modules["torch"] = None
from reshard.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "options", [("universal",), ("safetensors", "--dtype", "bf16"), ("torch", "--dtype", "fp16")], ids=lambda o: o[0]
)
def test_convert_and_verify(tmp_path: Path, options: tuple[str, ...]) -> None:
    target = tmp_path / "out" / "result"
    env = {**os.environ, "RESHARD_DEVICE": "cpu"}
    for arguments in (["convert", str(CHECKPOINT), str(target), "--to", *options], ["verify", str(target)]):
        done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
