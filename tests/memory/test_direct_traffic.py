"""Ranks that load directly read what their own files hold, and need no memory beside it, however many they are.

The ranks are real processes that read at the same time, each the files that DeepSpeed's loader opens on it: its own
optimizer file, and that of the model states. They load nothing into an engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import gpt_parameters, write_zero_checkpoint

from house.measured import say
from house.tiers import rest_full
from oracle.launcher import Worlds

RANKS = (2, 4, 8)
MOST_READ = 1.05
"""Bytes read of the source's tensors, by the bytes of the files that are read of the target."""
MOST_METADATA_BYTES = 4 << 20
"""Of a rank, which reads the source's metadata itself: 1.2 MB here."""
MOST_BESIDE_BYTES = 24 << 20
FLAT_BYTES = 4 << 20
_MIB = 1 << 20


@pytest.mark.parametrize("stage", rest_full((1, 2, 3), 3))
def test_ranks_read_their_own_files_in_flat_memory(stage: int, worlds: Worlds, tmp_path: Path) -> None:
    write_zero_checkpoint(tmp_path / "run", gpt_parameters(512, 3, 9_000), stage=stage, ranks=4)
    beside: list[int] = []
    for ranks in RANKS:
        found = worlds.run("memory.direct_ranks:read", world=ranks, source=str(tmp_path / "run"))
        files, tensors, read = (sum(one[key] for one in found) for key in ("files", "tensors", "read"))
        beside.append(max(one["peak"] - one["held"] for one in found))
        say(
            f"direct load of ZeRO-{stage} by {ranks} ranks: {tensors / _MIB:.0f} MiB of tensors for {files / _MIB:.0f} "
            f"MiB of files ({tensors / files:.3f}), {(read - tensors) / _MIB:.1f} MiB of metadata, "
            f"{beside[-1] / _MIB:.1f} MiB beside what a rank holds"
        )
        assert files <= tensors + (1 << 20) * ranks, "less was read than the files hold"
        assert tensors <= MOST_READ * files
        assert read - tensors <= MOST_METADATA_BYTES * ranks
    assert max(beside) <= MOST_BESIDE_BYTES
    assert max(beside) - min(beside) <= FLAT_BYTES, beside
