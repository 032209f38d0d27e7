"""Functions that run inside the ranks: load checkpoints into sharded tensors or a model of a world of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from oracle.dcp_models import start_world
from oracle.gather import gather_states
from oracle.rank_runs import loss_of


def load(path: str, expected: str, tied: dict[str, str], out: str) -> dict[str, int]:
    """Loads every tensor that the truth names into zeros that this world shards by rows, and gathers them.

    Args:
        path: The distributed checkpoint, with the keys of `dcp.save({"model": ..., "optimizer": ...})`.
        expected: The file of the truth, whose names and shapes are those to load.
        tied: Second names of tied pairs, which the checkpoint has as well.
        out: Where the first rank leaves what came in, by the truth's names.
    """
    start_world()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}

    def empty(tensor: torch.Tensor) -> Any:
        zeros = torch.zeros_like(tensor)
        return distribute_tensor(zeros, mesh, [Shard(0)]) if tensor.dim() else zeros

    wanted = load_file(expected)
    for key, tensor in wanted.items():
        name, _, kind = key.rpartition("/")
        if kind in ("fp32", "buffer"):
            model[name] = torch.zeros_like(tensor) if kind == "buffer" else empty(tensor)
        else:
            states.setdefault(name, {})[kind] = empty(tensor)
    for alias, owner in tied.items():
        model[alias] = empty(wanted[f"{owner}/fp32"])
    dcp.load({"model": model, "optimizer": {"state": states}}, checkpoint_id=path)
    found = {f"{name}/model": value for name, value in model.items()}
    found |= {f"{name}/{kind}": value for name, held in states.items() for kind, value in held.items()}
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}
    if dist.get_rank() == 0:
        save_file({k: v.contiguous().clone() for k, v in whole.items()}, out)
        Path(f"{out}.json").write_text(json.dumps(sorted(whole)))
    return {"tensors": len(whole)}


_VOCABULARY, _SAMPLES, _STEPS = 67, 12, 3
_BUFFERS = ("count", "table", "flag", "b16")


def resume(path: str, framework: str, case: dict[str, Any], out: str) -> dict[str, Any]:
    """Goes on with a run from its ranks' files, as verl or Accelerate load them, for three steps.

    Args:
        path: The directory with the files.
        framework: `verl` or `accelerate`.
        case: How the model was made: `kind`, `tied`, `buffers`.
        out: Where the first rank leaves what was loaded, gathered, by the truth's names.

    Returns:
        Losses, learning rates before the steps, and this rank's random states.
    """
    rank, world = start_world()
    verl = framework == "verl"
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",) if verl else None)
    model = _model(case)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(_groups(model, verl=verl), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up if verl else _decay)
    folder = Path(path)
    if verl:
        held = {i: folder / f"{i}_world_size_{world}_rank_{rank}.pt" for i in ("model", "optim", "extra_state")}
        model.load_state_dict(torch.load(held["model"], weights_only=True))
        optimizer.load_state_dict(torch.load(held["optim"], weights_only=True))
        extra = torch.load(held["extra_state"], weights_only=False)
        scheduler.load_state_dict(extra["lr_scheduler"])
        torch.set_rng_state(extra["rng"]["cpu"])
    else:
        set_model_state_dict(model, torch.load(folder / f"pytorch_model_fsdp_0_rank{rank}.bin", weights_only=True))
        states = torch.load(folder / f"optimizer_0_rank{rank}.bin", weights_only=True)
        set_optimizer_state_dict(model, optimizer, states)
        scheduler.last_epoch += _STEPS
    random_sum = int(torch.get_rng_state().long().sum())
    rates = [group["lr"] for group in optimizer.param_groups]
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in _held(model, optimizer).items()}
    if rank == 0:
        save_file({k: v.detach().contiguous().clone() for k, v in whole.items()}, out)
    losses = [_step(model, optimizer, scheduler, number) for number in range(_STEPS, 2 * _STEPS)]
    return {"losses": losses, "rates": rates, "random_sum": random_sum}


def resume_zero(path: str, case: dict[str, Any], stage: int, out: str, *, verl: bool = True) -> dict[str, Any]:
    """Goes on with a run under DeepSpeed, which loads a ZeRO checkpoint itself, for three steps.

    Args:
        path: The save directory.
        case: How the model was made: `kind`, `tied`, `buffers`, `light`; `zero` if the run had one group.
        stage: Of ZeRO.
        out: Where the first rank leaves what was loaded, gathered, by the truth's names; a tied pair under one.
        verl: The run was one of verl.

    Returns:
        Losses, and learning rates before the steps.
    """
    import deepspeed

    rank, world = start_world()
    inner = _model(case)
    model = _Net(inner) if case.get("light") else inner
    one = verl or bool(case.get("zero"))
    optimizer = torch.optim.AdamW(_groups(model, verl=one), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)
    config = {
        "train_micro_batch_size_per_gpu": _SAMPLES // world,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(
        model=model,
        optimizer=optimizer,
        config=config,
        lr_scheduler=lambda found: torch.optim.lr_scheduler.LambdaLR(found, _warm_up if verl else _decay),
    )
    loaded, _ = engine.load_checkpoint(path)
    assert loaded is not None, f"DeepSpeed found no checkpoint in {path}"
    states = gather_states(engine)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    found = {
        f"{n}/{'model' if k == 'fp32' else k}": v
        for key, v in states.tensors.items()
        for k, _, n in (key.partition("/"),)
    }
    found |= {f"{n}/step": torch.tensor(value) for n, value in states.scalars["step"].items()}
    found |= {f"{n}/model": b for n, b in model.named_buffers() if n.rpartition(".")[2] in _BUFFERS}
    if rank == 0:
        save_file({k: v.detach().contiguous().clone() for k, v in found.items()}, out)
    losses: list[float] = []
    for number in range(_STEPS, 2 * _STEPS):
        loss = loss_of(engine, number)
        engine.backward(loss)
        engine.step()
        losses.append(_mean(loss))
    return {"losses": losses, "rates": rates}


class _Net(nn.Module):
    """A module that holds the model under a name, as a module of Lightning does."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Any) -> Any:
        return self.net(**inputs)


def resume_shards(path: str, case: dict[str, Any], out: str) -> dict[str, Any]:
    """Goes on with a run of whole tensors from a distributed checkpoint, under FSDP2, for three steps.

    Args:
        path: The distributed checkpoint, with the keys of `get_state_dict`.
        case: How the model was made: `kind`, `tied`, `buffers`, `light`; `zero` if the run had one group.
        out: Where the first rank leaves what was loaded, gathered, by the truth's names.

    Returns:
        Losses, and learning rates before the steps.
    """
    rank, world = start_world()
    mesh = init_device_mesh("cpu", (world,))
    inner = _model(case)
    for layer in inner.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    model = _Net(inner) if case.get("light") else inner
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(_groups(model, verl=bool(case.get("zero"))), lr=2e-3, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": of_model, "optimizer": of_optimizer, "lr_scheduler": scheduler.state_dict()}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scheduler.load_state_dict(state["lr_scheduler"])
    rates = [group["lr"] for group in optimizer.param_groups]
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in _held(model, optimizer).items()}
    if rank == 0:
        save_file({k: v.detach().contiguous().clone() for k, v in whole.items()}, out)
    losses = [_step(model, optimizer, scheduler, number) for number in range(_STEPS, 2 * _STEPS)]
    return {"losses": losses, "rates": rates}


def resume_file(path: str, case: dict[str, Any], out: str) -> dict[str, Any]:
    """Goes on with a run from a file with whole tensors, under DDP, for three steps.

    Args:
        path: One file, with the keys of a script or Lightning's.
        case: How the model was made: `kind`, `tied`, `buffers`, `light`; `zero` if the run had one group.
        out: Where the first rank leaves what was loaded, by the truth's names.

    Returns:
        Losses.
    """
    rank, _ = start_world()
    inner = _model(case)
    whole = _Net(inner) if case.get("light") else inner
    model = nn.parallel.DistributedDataParallel(whole)
    groups = _groups(whole, verl=bool(case.get("zero")))
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)
    saved = torch.load(path, weights_only=True)
    whole.load_state_dict(saved.get("model") or saved["state_dict"])
    states = saved.get("optimizer") or saved["optimizer_states"][0]
    optimizer.load_state_dict(states)
    rates = next((saved[key] for key in ("scheduler", "lr_scheduler") if key in saved), None)
    rates = rates or saved["lr_schedulers"][0]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)
    scheduler.load_state_dict(rates)
    for group, rate in zip(optimizer.param_groups, states["param_groups"], strict=True):
        group["lr"] = rate["lr"]  # a new scheduler begins with the first step's
    if rank == 0:
        save_file({k: v.detach().contiguous().clone() for k, v in _held(whole, optimizer).items()}, out)
    return {"losses": [_step(model, optimizer, scheduler, number) for number in range(_STEPS, 2 * _STEPS)]}


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The rows of the real cases of the Trainer."""

    def __len__(self) -> int:
        return 2 * _STEPS * _SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = torch.randint(0, _VOCABULARY, (10,), generator=torch.Generator().manual_seed(3000 + number))
        return {"input_ids": row, "labels": row}


def _warm_up(step: int) -> float:
    return min(1.0, step / 2)


def _decay(step: int) -> float:
    return 1 / (1 + 0.1 * step)


def _model(case: dict[str, Any]) -> nn.Module:
    """The model of the real cases, with weights of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(99)
    sizes: dict[str, Any] = {
        "vocab_size": _VOCABULARY, "hidden_size": 24, "intermediate_size": 38, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
        "tie_word_embeddings": case.get("tied", False), "attn_implementation": "eager", "pad_token_id": None,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    llama = case["kind"] == "llama"
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes)) if llama else Qwen2ForCausalLM(Qwen2Config(**sizes))
    if case.get("buffers"):
        model.register_buffer("count", torch.tensor(0))
        model.register_buffer("table", torch.zeros(2, 3))
        model.register_buffer("flag", torch.tensor([False, False]))
        model.get_submodule("model").register_buffer("b16", torch.zeros(5, dtype=torch.bfloat16))
    return model


def _groups(model: nn.Module, *, verl: bool) -> Any:
    """verl's one group of all parameters; those of the case of Accelerate: vectors first, without weight decay."""
    if verl:
        return model.parameters()
    held = list(model.parameters())
    return [
        {"params": [p for p in held if p.ndim < 2], "weight_decay": 0.0},
        {"params": [p for p in held if p.ndim >= 2], "weight_decay": 0.1},
    ]


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of the model and the optimizer, by the truth's names."""
    found: dict[str, torch.Tensor] = {f"{name}/model": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{state}": value for state, value in optimizer.state[parameter].items()}
    return found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, number: int) -> float:
    """Trains on this rank's part of a step's samples; returns the mean loss of all ranks."""
    loss = loss_of(model, number)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return _mean(loss)


def _mean(loss: torch.Tensor) -> float:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()
