"""Runs with two of something: moving averages, two models, two optimizers; and numbers without names.

Runs inside the ranks. A kind is trained three steps and saved in each of its layouts, with the truth beside them; what
a consumer loads of a layout on another mesh is dumped, and trained on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict as states

from oracle.dcp_accelerate import join_as_accelerate, plugin_of
from oracle.dcp_cases import EMA_LAYOUTS, FsdpRun
from oracle.dcp_grammars import FLAT
from oracle.dcp_models import (
    RESUME_SEED,
    SOURCE_SEED,
    STEPS,
    Running,
    device_mesh,
    start,
    start_world,
    train_steps,
    wrap_fsdp2,
)
from oracle.dcp_truth import _whole, dump
from oracle.models import Block, build_model

State = dict[str, Any]
DECAY = 0.5


def _averaged(running: Running) -> State:
    """A moving average as a state dict of its own, before any step."""
    return {name: value.detach().clone() for name, value in states.get_model_state_dict(running.model).items()}


@torch.no_grad()
def _average(ema: State, running: Running) -> None:
    for name, value in states.get_model_state_dict(running.model).items():
        ema[name].mul_(DECAY).add_(value.detach(), alpha=1 - DECAY)


def _parts(running: Running, ema: State) -> dict[str, Any]:
    model, optimizer = states.get_state_dict(running.model, running.optimizer)
    flat = states.get_optimizer_state_dict(running.model, running.optimizer, options=FLAT)
    return {"M": model, "E": ema, "O": optimizer, "F": flat, "R": running.optimizer.state_dict()}


def laid_out(layout: Any, parts: dict[str, Any]) -> Any:
    """The state dict of a layout: texts stand for parts, `**` merges one into its dict."""
    if isinstance(layout, str):
        return parts.get(layout, layout)
    if not isinstance(layout, dict):
        return layout
    found: dict[str, Any] = {}
    for key, value in layout.items():
        made = laid_out(value, parts)
        found |= made if key == "**" else {key: made}
    return found


def _with_rates(layout: State, running: Running, parts: dict[str, Any]) -> State:
    return {**laid_out(layout, parts), "lr_scheduler": running.scheduler.state_dict()}


def ema(run: dict[str, Any], folder: str) -> dict[str, Any]:
    """Trains with a moving average and saves every layout of ``EMA_LAYOUTS``."""
    start_world()
    running = start(FsdpRun.of(run), seed=SOURCE_SEED)
    average = _averaged(running)
    before = []
    for _ in range(STEPS):
        before += train_steps(running, 1)
        _average(average, running)
    for name, layout in EMA_LAYOUTS.items():
        dcp.save(_with_rates(layout.state, running, _parts(running, average)), checkpoint_id=str(Path(folder, name)))
    _save_whole(average, Path(folder, "ema.safetensors"))
    dump(running.model, running.optimizer, running.scheduler, Path(folder), "truth", {"losses_before": before})
    return {"losses_after": train_steps(running)}


def resume_ema(run: dict[str, Any], layouts: list[str], folder: str, out: str) -> list[dict[str, Any]]:
    """Loads each layout below ``folder`` as the script that saved it would, and trains on."""
    start_world()
    results = []
    for name in layouts:
        running = start(FsdpRun.of(run), seed=RESUME_SEED)
        parts = _parts(running, _averaged(running))
        wanted = _with_rates(EMA_LAYOUTS[name].state, running, parts)
        dcp.load(wanted, checkpoint_id=str(Path(folder, name)))
        running.scheduler.load_state_dict(wanted["lr_scheduler"])
        options = FLAT if EMA_LAYOUTS[name].flat else None
        optimizer = parts["F" if EMA_LAYOUTS[name].flat else "O"]
        states.set_state_dict(
            running.model, running.optimizer, model_state_dict=parts["M"], optim_state_dict=optimizer, options=options
        )
        _save_whole(parts["E"], Path(out, name, "ema.safetensors"))
        dump(running.model, running.optimizer, running.scheduler, Path(out, name), "resumed")
        running.steps = STEPS
        results.append({"losses": train_steps(running)})
    return results


def _save_whole(state: State, path: Path) -> None:
    whole = {name: _whole(value).contiguous().clone() for name, value in state.items()}
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(whole, path)
    dist.barrier()


# Two models with their optimizers and schedulers.


def _pair(run: FsdpRun, seed: int) -> tuple[Running, Running]:
    """Two models of which the second one has some of the first one's names, with other shapes."""
    first = start(run, seed=seed)
    small = replace(run, model=replace(run.model, tiny=True))
    model = build_model(small.model, seed + 1)
    wrap_fsdp2(model, device_mesh(run.mesh)["shard"], None)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9)
    second = Running(small, model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7))
    return first, second


def _of_pair(first: Running, second: Running, extra: State) -> State:
    one = states.get_state_dict(first.model, first.optimizer)
    two = states.get_state_dict(second.model, second.optimizer)
    found = {"gen": one[0], "disc": two[0], "opt_g": one[1], "opt_d": two[1]}
    schedulers = {"sched_g": first.scheduler.state_dict(), "sched_d": second.scheduler.state_dict()}
    return found | schedulers | extra


def pair(run: dict[str, Any], folder: str) -> dict[str, Any]:
    """Two models, two optimizers, two schedulers, saved in one state dict; ``truth`` is of the first."""
    start_world()
    both = _pair(FsdpRun.of(run), SOURCE_SEED)
    before = [train_steps(running) for running in both]
    dcp.save(_of_pair(*both, {"epoch": 4}), checkpoint_id=str(Path(folder, "pair")))
    dump(both[0].model, both[0].optimizer, both[0].scheduler, Path(folder), "truth", {"losses_before": before})
    dump(both[1].model, both[1].optimizer, both[1].scheduler, Path(folder), "second")
    after = [train_steps(running) for running in both]
    return {"losses_after": [loss for losses in after for loss in losses]}


def resume_pair(run: dict[str, Any], path: str, out: str) -> dict[str, Any]:
    """Loads both, and trains on."""
    start_world()
    both = _pair(FsdpRun.of(run), RESUME_SEED)
    wanted = _of_pair(*both, {"epoch": 0})
    dcp.load(wanted, checkpoint_id=path)
    assert wanted["epoch"] == 4
    for running, model, optimizer, scheduler in zip(
        both, ("gen", "disc"), ("opt_g", "opt_d"), ("sched_g", "sched_d"), strict=True
    ):
        states.set_state_dict(
            running.model, running.optimizer, model_state_dict=wanted[model], optim_state_dict=wanted[optimizer]
        )
        running.scheduler.load_state_dict(wanted[scheduler])
        running.steps = STEPS
    dump(both[0].model, both[0].optimizer, both[0].scheduler, Path(out), "resumed")
    dump(both[1].model, both[1].optimizer, both[1].scheduler, Path(out), "second")
    return {"losses": [loss for running in both for loss in train_steps(running)]}


# Two optimizers of one model.


class _Both:
    """Two optimizers as the one that a step needs."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.each = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]
        self.state = {param: state for each in optimizers for param, state in each.state.items()}

    def step(self) -> None:
        for each in self.each:
            each.step()
        self.state = {param: state for each in self.each for param, state in each.state.items()}

    def zero_grad(self) -> None:
        for each in self.each:
            each.zero_grad()


def _with_muon(run: FsdpRun, seed: int) -> tuple[Running, list[torch.optim.Optimizer]]:
    running = start(run, seed=seed)
    hidden = [p for n, p in running.model.named_parameters() if p.ndim == 2 and "layers" in n]
    others = [p for n, p in running.model.named_parameters() if p.ndim != 2 or "layers" not in n]
    optimizers = [torch.optim.Muon(hidden, lr=2e-2), torch.optim.AdamW(others, lr=1e-2, weight_decay=0.1)]
    running.optimizer = _Both(*optimizers)  # type: ignore[assignment]
    running.scheduler = None
    return running, optimizers


MUON = ("muon", "muon_flat", "muon_apart")


def _muon_state(kind: str, running: Running, optimizers: list[torch.optim.Optimizer]) -> State:
    if kind == "muon_apart":
        model, _ = states.get_state_dict(running.model, optimizers)
        each = [states.get_optimizer_state_dict(running.model, [o]) for o in optimizers]
        return {"model": model, "muon": each[0], "adamw": each[1]}
    options = FLAT if kind == "muon_flat" else None
    model, optimizer = states.get_state_dict(running.model, optimizers, options=options)
    return {"model": model, "optimizer": optimizer} if options is None else {**model, "optimizer": optimizer}


def muon(run: dict[str, Any], folder: str) -> dict[str, Any]:
    """Muon for the matrices of layers, AdamW for the rest: in one state dict, flattened, and in two."""
    start_world()
    running, optimizers = _with_muon(FsdpRun.of(run), SOURCE_SEED)
    before = train_steps(running)
    for kind in MUON:
        dcp.save(_muon_state(kind, running, optimizers), checkpoint_id=str(Path(folder, kind)))
    dump(running.model, _Both(*optimizers), None, Path(folder), "truth", {"losses_before": before})
    return {"losses_after": train_steps(running)}


def resume_muon(run: dict[str, Any], kinds: list[str], folder: str, out: str) -> list[dict[str, Any]]:
    """Loads each kind below ``folder``, and trains on."""
    start_world()
    results = []
    for kind in kinds:
        running, optimizers = _with_muon(FsdpRun.of(run), RESUME_SEED)
        wanted = _muon_state(kind, running, optimizers)
        dcp.load(wanted, checkpoint_id=str(Path(folder, kind)))
        model = wanted.get("model") or {k: v for k, v in wanted.items() if k != "optimizer"}
        if kind == "muon_apart":
            for optimizer, key in zip(optimizers, ("muon", "adamw"), strict=True):
                states.set_optimizer_state_dict(running.model, [optimizer], wanted[key])
            states.set_model_state_dict(running.model, model)
        else:
            options = FLAT if kind == "muon_flat" else None
            states.set_state_dict(
                running.model,
                optimizers,
                model_state_dict=model,
                optim_state_dict=wanted["optimizer"],
                options=options,
            )
        running.optimizer = _Both(*optimizers)  # type: ignore[assignment]
        dump(running.model, running.optimizer, None, Path(out, kind), "resumed")
        running.steps = STEPS
        results.append({"losses": train_steps(running)})
    return results


# Numbers in another order than the model's, and a run in bf16 alone.


def _turned(run: FsdpRun, seed: int) -> Running:
    """A run whose optimizer was made of the last layer's parameters first."""
    running = start(run, seed=seed)
    turned = list(running.model.parameters())[::-1]
    running.optimizer = torch.optim.AdamW(turned, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    running.scheduler = None
    return running


def turned(run: dict[str, Any], folder: str) -> dict[str, Any]:
    """The optimizer's own state dict; ``order.txt`` has the names in its order."""
    start_world()
    running = _turned(FsdpRun.of(run), SOURCE_SEED)
    before = train_steps(running)
    raw = {"model": running.model.state_dict(), "optimizer": running.optimizer.state_dict()}
    dcp.save(raw, checkpoint_id=str(Path(folder, "raw")))
    names = [name for name, _ in running.model.named_parameters()][::-1]
    Path(folder, "order.txt").write_text("\n".join(names) + "\n")
    dump(running.model, running.optimizer, None, Path(folder), "truth", {"losses_before": before})
    return {"losses_after": train_steps(running)}


def compiled(run: dict[str, Any], folder: str) -> dict[str, Any]:
    """The model's own state dict under ``torch.compile``: each name begins with that of its wrapper."""
    start_world()
    running = start(FsdpRun.of(run), seed=SOURCE_SEED)
    before = train_steps(running)
    optimizer = states.get_optimizer_state_dict(running.model, running.optimizer)
    wrapped: Any = torch.compile(running.model, backend="eager")
    state = {"model": wrapped.state_dict(), "optimizer": optimizer, "lr_scheduler": running.scheduler.state_dict()}
    assert all(name.startswith("_orig_mod.") for name in state["model"])
    dcp.save(state, checkpoint_id=str(Path(folder, "compiled")))
    dump(running.model, running.optimizer, running.scheduler, Path(folder), "truth", {"losses_before": before})
    return {"losses_after": train_steps(running)}


def bf16(run: dict[str, Any], folder: str) -> dict[str, Any]:
    """A model and its moments in bf16, without masters; a float64 buffer beside them."""
    start_world()
    running = _in_bf16(FsdpRun.of(run), SOURCE_SEED)
    before = train_steps(running)
    model, optimizer = states.get_state_dict(running.model, running.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(Path(folder, "bf16")))
    _save_whole(model, Path(folder, "model.safetensors"))
    dump(running.model, running.optimizer, None, Path(folder), "truth", {"losses_before": before})
    return {"losses_after": train_steps(running)}


def _in_bf16(run: FsdpRun, seed: int) -> Running:
    torch.manual_seed(seed)
    model: Any = build_model(run.model, seed).to(torch.bfloat16)
    model.register_buffer("scale", torch.full((3,), 1 / 3, dtype=torch.float64))
    wrap_fsdp2(model, device_mesh(run.mesh)["shard"], None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return Running(run, model, optimizer, None)


def resume_bf16(run: dict[str, Any], path: str, out: str) -> dict[str, Any]:
    """Loads it by torch, and trains on."""
    start_world()
    running = _in_bf16(FsdpRun.of(run), RESUME_SEED)
    model, optimizer = states.get_state_dict(running.model, running.optimizer)
    wanted = {"model": model, "optimizer": optimizer}
    dcp.load(wanted, checkpoint_id=path)
    states.set_state_dict(running.model, running.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    dump(running.model, running.optimizer, None, Path(out), "resumed")
    running.steps = STEPS
    return {"losses": train_steps(running)}


def accelerate(run: dict[str, Any], folder: str) -> dict[str, Any]:
    """Two models with their optimizers under Accelerate and FSDP1 (FSDP2 takes one model), by ``save_state``."""
    join_as_accelerate()
    parsed = FsdpRun.of(run)
    plugin = plugin_of(1, [Block.__name__], use_orig_params=True)
    accelerator = Accelerator(fsdp_plugin=plugin, step_scheduler_with_optimizer=False)
    both: list[Running] = []
    for number, case in enumerate((parsed.model, replace(parsed.model, tiny=True))):
        model: Any = build_model(case, SOURCE_SEED + number)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2 / (number + 1), weight_decay=0.1)
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
        prepared = accelerator.prepare(model, optimizer, scheduler)
        both.append(Running(replace(parsed, model=case), *prepared))
    before = [train_steps(running) for running in both]
    accelerator.save_state(str(Path(folder, "accelerate")))
    for running, stem in zip(both, ("truth", "second"), strict=True):
        dump(running.model, running.optimizer, running.scheduler, Path(folder), stem, {"losses_before": before})
    return {"losses_after": [loss for running in both for loss in train_steps(running)]}
