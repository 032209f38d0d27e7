"""Functions that run inside the ranks of a parallel run: train and save, resume, and say what the state is."""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import reshard.deepspeed
from oracle.parallel_cases import Layout, case_of
from oracle.parallel_gather import LocalState, all_states, joined
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


@dataclass(frozen=True)
class Run:
    """A run inside a rank.

    Attributes:
        engine: DeepSpeed's.
        state: this rank's part of the logical state; collective.
        train: the global mean losses of the next steps; the data follow ``engine.global_steps``.
        client_state: what the run saves beside ``CLIENT_STATE``.
        notes: what the truth says besides.
        differing: names of the arguments that differ from those in a loaded client state.
    """

    engine: Any
    state: Callable[[], LocalState]
    train: Callable[[int], list[float]]
    client_state: dict[str, Any] = field(default_factory=dict[str, Any])
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    differing: Callable[[dict[str, Any]], list[str]] = lambda _: []


def initialized(model: Any, params: Any, config: dict[str, Any], load_universal: bool = False, **more: Any) -> Any:
    """DeepSpeed's engine of a model."""
    if load_universal:
        config["checkpoint"] = {"load_universal": True}
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(model=model, model_parameters=params, config=config, **more)
    return engine


def draw(
    model: torch.nn.Module, seed: int, *, std: float = 0.3, known: Callable[[str], str] = lambda name: name
) -> None:
    """Weights that follow from the seed and the name alone that ``known`` gives: the same model on every layout."""
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{known(name)}".encode()))
        drawn = torch.randn(param.shape, generator=generator)
        with torch.no_grad():
            param.copy_(drawn * std if param.ndim > 1 else drawn * 0.1 + (1.0 if "norm" in name else 0.0))


def _started(case: dict[str, Any], layout: dict[str, int], seed: int, load_universal: bool = False) -> Run:
    """The run of a case on these ranks with freshly drawn weights."""
    start_world()
    module = importlib.import_module(f"oracle.parallel_{case['kind']}")
    run: Run = module.start(case_of(case), Layout(**layout), seed=seed, load_universal=load_universal)
    return run


def train_and_save(
    case: dict[str, Any], layout: dict[str, int], save_dir: str, truth_dir: str, steps_after: int
) -> dict[str, Any]:
    """Dumps the first state, trains ``case.steps`` steps, saves, dumps the truth about what was saved, trains on.

    Args:
        case: a ``ParallelCase`` as plain data.
        layout: a ``Layout`` as plain data; its product is the world.
        save_dir: DeepSpeed's save folder.
        truth_dir: folder for ``initial.*`` and ``truth.*``.
        steps_after: steps after the save.

    Returns:
        ``tag``, ``losses_before``, and ``losses_after`` of the uninterrupted run.
    """
    run = _started(case, layout, SOURCE_SEED)
    engine = run.engine
    dump(engine, run.state(), Path(truth_dir), "initial", {})
    before = run.train(case["steps"])
    tag = f"global_step{engine.global_steps}"
    engine.save_checkpoint(save_dir, tag=tag, client_state=CLIENT_STATE | run.client_state)
    extra = {"tag": tag, "client_state": CLIENT_STATE, "losses_before": before, "ds_version": deepspeed.__version__}
    dump(engine, run.state(), Path(truth_dir), "truth", extra | {"case": case, "layout": layout} | run.notes)
    after = run.train(steps_after)
    add_to_meta(Path(truth_dir, "truth.json"), {"losses_after": after})
    return {"tag": tag, "losses_before": before, "losses_after": after}


def resume(
    case: dict[str, Any],
    layout: dict[str, int],
    load_dir: str,
    tag: str | None,
    out: str,
    steps: int,
    load_universal: bool,
    direct: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A new engine with other weights loads plainly, dumps ``out/resumed.*``, trains ``steps`` steps.

    Args:
        case: the target run.
        layout: its ranks.
        load_dir: the folder above the tag.
        tag: folder name; ``latest`` decides if None.
        out: folder for the dump.
        steps: steps to train afterwards.
        load_universal: loads a universal checkpoint instead.
        direct: loads by `reshard.deepspeed.load_checkpoint` with these options, from any layout.

    Returns:
        ``losses``, and ``differing_args``: of the arguments that Megatron compares.
    """
    run = _started(case, layout, RESUME_SEED, load_universal)
    if direct is None:
        path, client_state = run.engine.load_checkpoint(load_dir, tag=tag)
    else:
        path, client_state = reshard.deepspeed.load_checkpoint(run.engine, load_dir, tag, **direct)
    if path is None:
        raise FileNotFoundError(f"DeepSpeed found no checkpoint {tag!r} in {load_dir}")
    kept = {key: value for key, value in client_state.items() if key in CLIENT_STATE}
    dump(run.engine, run.state(), Path(out), "resumed", {"client_state": kept})
    return {"losses": run.train(steps), "differing_args": run.differing(client_state)}
