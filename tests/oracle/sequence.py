"""Training under DeepSpeed's sequence parallelism; runs inside the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.runtime.sequence_parallel import parallel_state_sp

from oracle.cases import Case, ds_config
from oracle.models import batch, build_model, param_groups
from oracle.train import SOURCE_SEED, dump_states, start_world

SEQUENCE_RANKS = 2


def train(case: dict[str, Any], save_dir: str, truth_dir: str, tag: str) -> int:
    """One step on pairs of ranks that share their rows, and a save; the ranks that share ZeRO's partitions.

    The model itself attends to nothing: what is looked at is how ZeRO cuts and which files it saves.
    """
    rank, world = start_world()
    parallel_state_sp.initialize_sequence_parallel(SEQUENCE_RANKS)
    parsed, pairs = Case(**case), world // SEQUENCE_RANKS
    model = build_model(parsed, SOURCE_SEED)
    initialize: Any = deepspeed.initialize
    config, groups = ds_config(parsed, pairs), param_groups(parsed, model)
    engine, *_ = initialize(model=model, model_parameters=groups, config=config, mpu=parallel_state_sp)
    engine.backward(engine(*batch(0, rank // SEQUENCE_RANKS, pairs)))
    engine.step()
    engine.save_checkpoint(save_dir, tag=tag)
    dump_states(engine, Path(truth_dir), "truth", {"client_state": {}})
    found: int = engine.seq_dp_world_size
    return found
