"""An upload to the hub holds neither the model nor a file of it: not in memory, and not on a disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from servers import hub as stand_in

_RUN = """
import sys
from pathlib import Path
import reshard
source, target = sys.argv[1:]
reshard.convert(source, target, to="safetensors", max_shard_size="96MB", progress=False)
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


def test_an_upload_holds_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """192 MiB in shards of 96: the peak is that of a conversion to a disk and at most 48 MiB more."""
    source, scratch = tmp_path / "source", tmp_path / "scratch"
    source.mkdir()
    scratch.mkdir()
    save_file({f"t{i}": np.full(6 << 20, i, np.float32) for i in range(8)}, source / "model.safetensors")
    monkeypatch.setattr(stand_in, "PART_BYTES", 16 << 20)
    peaks: dict[str, int] = {}
    with stand_in.hub_server() as hub:
        for target in (str(tmp_path / "out"), "hf://org/name"):
            command = [sys.executable, "-c", _RUN, str(source), target]
            env = {**hub.env(), "TMPDIR": str(scratch), "HF_HOME": str(scratch)}
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
            peaks[target] = int(done.stdout.split()[-1]) >> 10
        assert hub.uploaded_bytes > 192 << 20
    print(f"peaks in MiB: {peaks}")
    assert peaks["hf://org/name"] <= peaks[str(tmp_path / "out")] + 48, peaks
    assert sum(p.stat().st_size for p in scratch.rglob("*") if p.is_file()) < 1 << 20
