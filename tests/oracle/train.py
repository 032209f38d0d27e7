"""Functions that run inside the ranks: train and save, resume, and say what the state is.

Every function is collective, takes JSON-able arguments and returns a JSON-able summary; tensors go through files.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file, save_file

import reshard.deepspeed
from oracle.cases import Case, ds_config
from oracle.fastio import enable_fast_writer
from oracle.gather import gather_module, gather_states
from oracle.models import batch, build_model, client_optimizer, freeze_late, param_groups
from oracle.nvme import enable_swapping, swap_folder

SOURCE_SEED = 1234
RESUME_SEED = 98765  # other weights than the source's: what a loader does not load shows
CLIENT_STATE = {"note": "client state", "epoch": 1, "nested": {"list": [1, 2.5, None, True]}}


def start_world() -> tuple[int, int]:
    """Joins the process group; returns (rank, world)."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A file store instead of host and port: nothing else on the machine can take the port between launch and bind.
    deepspeed.init_distributed(
        dist_backend="gloo", init_method=os.environ["ORACLE_STORE"], rank=rank, world_size=world, verbose=False
    )
    return rank, world


def _allow_fp16() -> None:
    """The CPU accelerator denies fp16 without AMX; torch computes it anyway, slowly, which is all that a test needs."""
    accelerator: Any = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]


def build_engine(case: Case, world: int, *, seed: int, load_universal: bool = False) -> Any:
    """A DeepSpeed engine for ``case`` with freshly drawn weights."""
    if case.dtype == "fp16":
        _allow_fp16()
    if case.optimizer == "muon":
        dynamo: Any = importlib.import_module("torch._dynamo")
        dynamo.config.disable = True  # DeepSpeed compiles Muon's step, which takes longer than the whole test
    if case.writer == "fast":
        enable_fast_writer()
    config = ds_config(case, world, load_universal=load_universal)
    if case.nvme:
        enable_swapping()
        for section in config["zero_optimization"].values():
            if isinstance(section, dict):
                section["nvme_path"] = swap_folder()
    model = build_model(case, seed)
    groups = param_groups(case, model)
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(
        model=model,
        model_parameters=groups,
        optimizer=client_optimizer(case, groups),
        config=config,
    )
    return engine


def mean_losses(engine: Any, steps: int, loss_of: Callable[[int], torch.Tensor]) -> list[float]:
    """Global mean losses of the next ``steps`` steps; ``loss_of`` takes their data by ``engine.global_steps``."""
    losses = []
    engine.train()
    for _ in range(steps):
        loss = loss_of(engine.global_steps)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().to(torch.float64)
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def train_steps(engine: Any, steps: int, rank: int, world: int) -> list[float]:
    """Global mean losses of the next ``steps`` steps."""
    return mean_losses(engine, steps, lambda step: engine(*batch(step, rank, world)))


def dump_states(engine: Any, folder: Path, stem: str, extra: dict[str, Any]) -> None:
    """Writes ``<stem>.safetensors`` and ``<stem>.json`` (rank 0); collective."""
    gathered = gather_states(engine)
    tensors = gather_module(engine) | gathered.tensors
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    plain = getattr(engine.optimizer, "loss_scale_config", None)  # stage 0; counts only where it scales
    plain_scale = plain.cur_scale if plain is not None and plain.use_grad_scaling else None
    meta = {
        "scalars": gathered.scalars,
        "groups": gathered.groups,
        "flat_order": gathered.flat_order,
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "loss_scale": float(scaler.loss_scale) if scaler is not None else None,
        "plain_loss_scale": plain_scale,
        "optimizer_class": type(engine.optimizer).__name__,
        "world": dist.get_world_size(),
        **extra,
    }
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{stem}.safetensors")
        (folder / f"{stem}.json").write_text(json.dumps(meta, indent=1, sort_keys=True))
    dist.barrier()


def masters_match_weights(engine: Any) -> list[str]:
    """Names whose 16-bit weight is not the rounded master: must be none, else the gather walks wrong offsets."""
    masters = {k.removeprefix("fp32/"): v for k, v in gather_states(engine).tensors.items() if k.startswith("fp32/")}
    weights = {k.partition("/")[2]: v for k, v in gather_module(engine).items() if not k.startswith("buffer/")}
    return [name for name, master in masters.items() if not torch.equal(master.to(weights[name].dtype), weights[name])]


def train_and_save(
    case: dict[str, Any], save_dir: str, truth_dir: str, steps_after: int, tag: str | None = None
) -> dict[str, Any]:
    """Trains ``case.steps`` steps, saves a checkpoint and the truth about it, trains on.

    Args:
        case: a ``Case`` as plain data.
        save_dir: DeepSpeed's save folder.
        truth_dir: folder for ``truth.safetensors`` and ``truth.json``.
        steps_after: steps after the save.
        tag: ``global_step<N>`` if None.

    Returns:
        ``tag``, ``losses_before``, and ``losses_after`` of the uninterrupted run.
    """
    rank, world = start_world()
    parsed = Case(**case)
    engine = build_engine(parsed, world, seed=SOURCE_SEED)
    before = []
    if parsed.frozen_late:
        before = train_steps(engine, 1, rank, world)  # so that moments are not all zero
        freeze_late(engine.module)
    before += train_steps(engine, parsed.steps - len(before), rank, world)
    wrong = masters_match_weights(engine)
    if wrong:
        raise AssertionError(f"gathered masters disagree with the weights of {wrong}")
    tag = tag or f"global_step{engine.global_steps}"
    engine.save_checkpoint(save_dir, tag=tag, client_state=dict(CLIENT_STATE))
    extra = {
        "tag": tag,
        "client_state": CLIENT_STATE,
        "losses_before": before,
        "aliases": _aliases(engine.module),
        "case": case,
        "ds_version": deepspeed.__version__,
        "torch_version": str(torch.__version__),
    }
    dump_states(engine, Path(truth_dir), "truth", extra)
    after = train_steps(engine, steps_after, rank, world)
    if rank == 0:
        meta = Path(truth_dir, "truth.json")
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"losses_after": after}, indent=1, sort_keys=True))
    return {"tag": tag, "losses_before": before, "losses_after": after}


def _aliases(module: torch.nn.Module) -> dict[str, str]:
    """Tied names, alias to owner; the owner is the name that ``named_parameters`` reports."""
    owners = {id(param): name for name, param in module.named_parameters()}
    everything = module.named_parameters(remove_duplicate=False)
    return {name: owners[id(param)] for name, param in everything if owners[id(param)] != name}


def _restore_unloaded(engine: Any, truth: Path) -> None:
    """Copies buffers and frozen weights from a truth file into the engine: universal loading leaves them as drawn."""
    wanted = load_file(truth)
    for name, buffer in engine.module.named_buffers():
        if f"buffer/{name}" in wanted:
            buffer.data.copy_(wanted[f"buffer/{name}"])
    for name, param in engine.module.named_parameters():
        if param.requires_grad or f"fp32/{name}" in wanted:
            continue
        whole = wanted[f"frozen/{name}"]
        if hasattr(param, "ds_id"):
            piece = param.ds_tensor.numel()
            mine = whole.flatten()[dist.get_rank() * piece : (dist.get_rank() + 1) * piece]
            param.ds_tensor.data[: mine.numel()].copy_(mine)
        else:
            param.data.copy_(whole)


def _resume(
    case: dict[str, Any],
    load_dir: str,
    tag: str | None,
    out: str,
    steps: int,
    restore_from: str | None,
    universal: bool,
    direct: dict[str, Any] | None = None,
    load: dict[str, Any] | None = None,
) -> dict[str, Any]:
    rank, world = start_world()
    engine = build_engine(Case(**case), world, seed=RESUME_SEED, load_universal=universal)
    if Case(**case).frozen_late:
        freeze_late(engine.module)
    if direct is None:
        path, client_state = engine.load_checkpoint(load_dir, tag=tag, **load or {})
    else:
        path, client_state = reshard.deepspeed.load_checkpoint(engine, load_dir, tag, **direct, **load or {})
    if path is None:
        raise FileNotFoundError(f"DeepSpeed found no checkpoint {tag!r} in {load_dir}")
    kept = {key: value for key, value in client_state.items() if key in CLIENT_STATE}
    dump_states(engine, Path(out), "resumed", {"client_state": kept, "wrong_weights": masters_match_weights(engine)})
    if restore_from is not None:
        _restore_unloaded(engine, Path(restore_from))
    return {"losses": train_steps(engine, steps, rank, world)}


def resume_universal(
    case: dict[str, Any], load_dir: str, tag: str | None, out: str, steps: int, restore_from: str | None = None
) -> dict[str, Any]:
    """Loads a universal checkpoint into a new engine, dumps ``out/resumed.*`` as loaded, trains ``steps`` steps.

    Args:
        case: the target run; its stage and options may differ from the source's.
        load_dir: folder that holds the tag's folder.
        tag: folder name; ``latest_universal`` decides if None.
        out: folder for the dump.
        steps: steps to train afterwards.
        restore_from: a ``truth.safetensors`` whose buffers and frozen weights are copied in after the dump and before
            training, because DeepSpeed's universal loader restores neither (0.19.8, engine.py ``_load_checkpoint``).
    """
    return _resume(case, load_dir, tag, out, steps, restore_from, universal=True)


def resume_native(
    case: dict[str, Any],
    load_dir: str,
    tag: str | None,
    out: str,
    steps: int,
    restore_from: str | None = None,
    direct: dict[str, Any] | None = None,
    load: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """As ``resume_universal`` by plain ``engine.load_checkpoint``, which restores buffers and frozen weights itself.

    With ``direct``, by `reshard.deepspeed.load_checkpoint` with these options, from a checkpoint of any layout.
    ``load`` has further arguments of either.
    """
    return _resume(case, load_dir, tag, out, steps, restore_from, universal=False, direct=direct, load=load)
