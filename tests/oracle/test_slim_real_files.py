"""Files that real DeepSpeed saves made too large: `slim` leaves their tensors, and little else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import gpt_parameters, write_zero_checkpoint

from oracle.launcher import Worlds
from reshard.engine import load_engine
from reshard.models.jobs import SlimResult
from reshard.options import SourceSpec

_SCRIPT = (
    "import sys; from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert; "
    "convert(sys.argv[1], sys.argv[2], max_shard_size='4MB')"
)


def _slim(source: Path, target: Path) -> SlimResult:
    return load_engine().slim(SourceSpec(url=str(source)), str(target))


def _unique_bytes(state: dict[str, torch.Tensor]) -> int:
    """Bytes of the tensors, tied ones once."""
    return sum({(t.data_ptr(), t.dtype): t.nbytes for t in state.values()}.values())


def _same(path: Path, other: Path) -> dict[str, torch.Tensor]:
    found: Any = torch.load(path, weights_only=True)
    expected: Any = torch.load(other, weights_only=True)
    assert list(found) == list(expected)
    assert all(torch.equal(found[n], expected[n]) and found[n].dtype is expected[n].dtype for n in found)
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_model_that_a_real_engine_holds_in_flat_buffers(stage: int, worlds: Worlds, tmp_path: Path) -> None:
    """`torch.save(engine.module.state_dict())`: every parameter is a view of the engine's flat group."""
    worlds.run("oracle.slim_source:save_module", world=2, stage=stage, folder=str(tmp_path))
    source, target = tmp_path / "module.pt", tmp_path / "slim.pt"
    done = _slim(source, target)
    found = _same(target, source)
    held = _unique_bytes(found)
    assert done.source_bytes > 1.9 * held, "the file is bloated"
    assert done.target_bytes == target.stat().st_size <= 1.01 * held


def test_shards_that_zero_to_fp32_wrote(tmp_path: Path) -> None:
    """Each drags the whole flat group behind it."""
    source, out = tmp_path / "save", tmp_path / "out"
    write_zero_checkpoint(source, gpt_parameters(256, 2, 2_000), stage=2, ranks=2)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", _SCRIPT, str(source), str(out)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    done = _slim(out, tmp_path / "slim")
    names = sorted(p.name for p in out.glob("*.bin"))
    assert len(names) >= 2
    held = sum(_unique_bytes(_same(tmp_path / "slim" / name, out / name)) for name in names)
    assert done.source_bytes > 1.9 * held
    assert sum((tmp_path / "slim" / name).stat().st_size for name in names) <= 1.01 * held
    index = "pytorch_model.bin.index.json"
    assert (tmp_path / "slim" / index).read_bytes() == (out / index).read_bytes()
