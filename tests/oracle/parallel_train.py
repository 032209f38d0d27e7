"""Functions that run inside the ranks of a 3D world: train and save, resume, and say what the state is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from safetensors.torch import save_file

from oracle.parallel_cases import GptCase, Layout, gpt_config
from oracle.parallel_gather import LocalState, all_states, joined, local_state
from oracle.parallel_gpt import build_gpt, micro_batches, param_groups, universal_info
from oracle.train import CLIENT_STATE, RESUME_SEED, SOURCE_SEED, start_world


def dump(engine: Any, mine: LocalState, folder: Path, stem: str, extra: dict[str, Any]) -> None:
    """Writes the joined state of all ranks as ``<stem>.safetensors`` and ``<stem>.json`` (rank 0); collective."""
    states = all_states(mine)
    scheduler = engine.lr_scheduler
    if states is not None:
        state = joined(states)
        meta = {
            **state.notes,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "skipped_steps": engine.skipped_steps,
            "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
            "optimizer_class": type(engine.optimizer).__name__,
            "world": dist.get_world_size(),
            **extra,
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {key: value.contiguous().clone() for key, value in state.tensors.items()}, folder / f"{stem}.safetensors"
        )
        (folder / f"{stem}.json").write_text(json.dumps(meta, indent=1, sort_keys=True))
    dist.barrier()


def add_to_meta(path: Path, extra: dict[str, Any]) -> None:
    """Adds keys to a dump's companion (rank 0)."""
    if dist.get_rank() == 0:
        path.write_text(json.dumps(json.loads(path.read_text()) | extra, indent=1, sort_keys=True))


def save_with_truth(
    engine: Any,
    state_of: Callable[[], LocalState],
    train: Callable[[int], list[float]],
    *,
    save_dir: str,
    truth_dir: str,
    steps: int,
    steps_after: int,
    client_state: dict[str, Any],
    notes: dict[str, Any],
) -> dict[str, Any]:
    """Dumps the first state, trains, saves, dumps the truth about what was saved, trains on.

    What all parallel oracles share; the dumps are ``truth_dir/initial.*`` and ``truth_dir/truth.*``.

    Returns:
        ``tag``, ``losses_before``, and ``losses_after`` of the uninterrupted run.
    """
    dump(engine, state_of(), Path(truth_dir), "initial", {})
    before = train(steps)
    tag = f"global_step{engine.global_steps}"
    engine.save_checkpoint(save_dir, tag=tag, client_state=CLIENT_STATE | client_state)
    extra = {"tag": tag, "client_state": CLIENT_STATE, "losses_before": before, "ds_version": deepspeed.__version__}
    dump(engine, state_of(), Path(truth_dir), "truth", extra | notes)
    after = train(steps_after)
    add_to_meta(Path(truth_dir, "truth.json"), {"losses_after": after})
    return {"tag": tag, "losses_before": before, "losses_after": after}


def load_and_dump(
    engine: Any, state_of: Callable[[], LocalState], load_dir: str, tag: str | None, out: str
) -> dict[str, Any]:
    """Plain ``engine.load_checkpoint``, then a dump of what is there as ``out/resumed.*``; returns the client state."""
    path, client_state = engine.load_checkpoint(load_dir, tag=tag)
    if path is None:
        raise FileNotFoundError(f"DeepSpeed found no checkpoint {tag!r} in {load_dir}")
    kept = {key: value for key, value in client_state.items() if key in CLIENT_STATE}
    dump(engine, state_of(), Path(out), "resumed", {"client_state": kept})
    found: dict[str, Any] = client_state
    return found


def build_engine_3d(case: GptCase, layout: Layout, *, seed: int, load_universal: bool = False) -> Any:
    """A pipeline engine for ``case`` on this layout with freshly drawn weights."""
    model = build_gpt(case, layout, seed)
    config = gpt_config(case, layout.dp)
    if load_universal:
        config["checkpoint"] = {"load_universal": True}
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(model=model, model_parameters=param_groups(model), config=config)
    return engine


def train_steps_3d(engine: Any, steps: int) -> list[float]:
    """Losses of the next ``steps`` global batches, equal on all ranks; the data follow ``engine.global_steps``."""
    grid = engine.grid
    losses = []
    for _ in range(steps):
        rows = micro_batches(engine.global_steps, grid.get_data_parallel_rank(), grid.get_data_parallel_world_size())
        losses.append(float(engine.train_batch(data_iter=iter(rows))))
    return losses


def state_3d(engine: Any) -> LocalState:
    """This rank's part of the logical state; collective over its data-parallel peers."""
    grid = engine.grid
    place = (grid.get_slice_parallel_rank(), grid.get_stage_id())
    return local_state(engine, place, grid.get_data_parallel_rank())


def train_and_save_3d(
    case: dict[str, Any], layout: dict[str, int], save_dir: str, truth_dir: str, steps_after: int
) -> dict[str, Any]:
    """Trains ``case.steps`` steps on ``layout``, saves a checkpoint and the truth about it, trains on.

    Args:
        case: a ``GptCase`` as plain data.
        layout: a ``Layout`` as plain data; its product is the world.
        save_dir: DeepSpeed's save folder.
        truth_dir: folder for ``initial.*`` and ``truth.*``.
        steps_after: steps after the save.

    Returns:
        See ``save_with_truth``.
    """
    start_world()
    parsed, ranks = GptCase(**case), Layout(**layout)
    engine = build_engine_3d(parsed, ranks, seed=SOURCE_SEED)
    info = {"universal_checkpoint_info": universal_info(parsed, ranks)} if parsed.info else {}
    return save_with_truth(
        engine,
        lambda: state_3d(engine),
        lambda steps: train_steps_3d(engine, steps),
        save_dir=save_dir,
        truth_dir=truth_dir,
        steps=parsed.steps,
        steps_after=steps_after,
        client_state=info,
        notes={"case": case, "layout": layout, "parts": [int(layer) for layer in engine.module.parts]},
    )


def resume_3d(
    case: dict[str, Any],
    layout: dict[str, int],
    load_dir: str,
    tag: str | None,
    out: str,
    steps: int,
    load_universal: bool = False,
) -> dict[str, Any]:
    """A new engine with other weights on ``layout`` loads plainly, dumps ``out/resumed.*``, trains ``steps`` steps.

    Args:
        case: the target run.
        layout: its ranks.
        load_dir: the folder above the tag.
        tag: folder name; ``latest`` decides if None.
        out: folder for the dump.
        steps: steps to train afterwards.
        load_universal: loads a universal checkpoint instead.
    """
    start_world()
    engine = build_engine_3d(GptCase(**case), Layout(**layout), seed=RESUME_SEED, load_universal=load_universal)
    load_and_dump(engine, lambda: state_3d(engine), load_dir, tag, out)
    return {"losses": train_steps_3d(engine, steps)}
