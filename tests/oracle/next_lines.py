"""The lines that `reshard convert` prints after `next:`, run inside the ranks of DeepSpeed."""

from __future__ import annotations

import json
from typing import Any

from oracle.cases import CASES
from oracle.tags import digest_of
from oracle.train import RESUME_SEED, build_engine, start_world, train_steps


def run_lines(case: str, lines: list[str]) -> dict[str, Any]:
    """Applies a line of a configuration and runs a line of a script, as printed; trains two steps."""
    rank, world = start_world()
    config = [line.partition(": ")[2] for line in lines if line.startswith("in the DeepSpeed config: ")]
    universal = any(json.loads(f"{{{text}}}")["checkpoint"]["load_universal"] for text in config)
    engine = build_engine(CASES[case], world, seed=RESUME_SEED, load_universal=universal)
    (call,) = [line.removeprefix("in the script: ") for line in lines if line.startswith("in the script: ")]
    path, _ = eval(call, {"engine": engine})
    return {
        "found": path is not None,
        # DeepSpeed 0.19.8 restores neither buffers nor frozen weights of a universal checkpoint.
        "state": digest_of(engine, weights=False),
        "losses": train_steps(engine, 2, rank, world),
    }


def run_source(case: str, folder: str) -> dict[str, Any]:
    """Loads the source on its own ranks: the state and the next losses of the run that goes on."""
    rank, world = start_world()
    engine = build_engine(CASES[case], world, seed=RESUME_SEED)
    path, _ = engine.load_checkpoint(folder)
    return {
        "found": path is not None,
        "state": digest_of(engine, weights=False),
        "losses": train_steps(engine, 2, rank, world),
    }
