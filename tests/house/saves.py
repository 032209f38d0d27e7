"""Save directories for tests of `reshard.ensure`: two ranks, stage 2, bf16, three steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from house.repository import DATA
from reshard.engine import load_engine
from reshard.ensuring.world import Wanted
from reshard.models.reports import DiffOptions
from reshard.options import SourceSpec


def make_save(place: Path, *, source: str = "zero2_tiny") -> Path:
    """A save directory as DeepSpeed's engine leaves it."""
    place.mkdir(parents=True)
    shutil.copytree(DATA / source / "global_step3", place / "global_step3")
    (place / "latest").write_text("global_step3")
    return place


def make_checkpoint(place: Path) -> Path:
    """The same as a Trainer's `checkpoint-3`, with an adapter."""
    make_save(place)
    for name in ("trainer_state.json", "scheduler.pt", "config.json", "rng_state_0.pth", "rng_state_1.pth"):
        (place / name).write_text(f"content of {name}")
    (place / "adapter").mkdir()
    (place / "adapter" / "adapter_config.json").write_text("{}")
    return place


def same(a: Path | str, b: Path | str) -> bool:
    """Whether two checkpoints hold the same training state."""
    return load_engine().diff(SourceSpec(url=str(a)), SourceSpec(url=str(b)), DiffOptions()).equal


def wanted(**options: Any) -> Wanted:
    """What `ensure` makes of its arguments."""
    others = {name: options.pop(name) for name in ("choices", "environ", "loader") if name in options}
    return Wanted.of(options, **others)
