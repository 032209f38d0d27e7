"""Real checkpoints with one file for each rank, or full files, which lie outside the project: else tests skip."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from house.repository import real_checkpoint


@dataclass(frozen=True)
class RankCase:
    """One checkpoint, and the state of the run that saved it."""

    folder: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        """World, hyper-parameters of the groups, names of buffers, second names of tied pairs."""
        return dict(json.loads((self.folder / "expected.json").read_text()))

    @property
    def truth(self) -> Path:
        """The live run's tensors: `NAME/fp32`, `NAME/exp_avg`, ..., `NAME/buffer`."""
        return self.folder / "expected.safetensors"

    @property
    def checkpoint(self) -> Path:
        """The directory with the files of the ranks: that of the last step where a trainer made one for each."""
        place = self.folder / "ckpt" / self.facts.get("load_from", "")
        return max(place.glob("checkpoint-*"), default=place)

    @property
    def file(self) -> Path:
        """The only file of the checkpoint."""
        (found,) = (self.folder / "ckpt").iterdir()
        return found


def rank_case(name: str, place: Path, *, folder: str = "rank_files") -> RankCase:
    """The checkpoint with this name, unpacked in `place`; the test is skipped if it is not here."""
    archive = real_checkpoint(f"{folder}/{name}.tar.xz")
    if not (place / name).exists():
        with tarfile.open(archive) as files:
            files.extractall(place, filter="data")
    return RankCase(place / name)
