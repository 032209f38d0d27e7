"""A small neural operator, whose spectral weights are complex numbers; alone, and inside the ranks of FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from oracle.dcp_models import start_world

WIDTH, MODES, POINTS = 4, 5, 16


class Spectral(nn.Module):
    """A convolution of the lowest frequencies, as of the Fourier neural operator.

    All its parameters are complex: FSDP2 wants one element type for what it gathers together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, dtype=torch.cfloat) / WIDTH)
        self.high = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, dtype=torch.cfloat) / WIDTH)

    def forward(self, value: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        found: Any = torch.fft.rfft(value)
        kernel = (self.low + self.high) * mix
        kept = torch.einsum("bix,iox->box", found[..., :MODES], kernel)
        return torch.fft.irfft(nn.functional.pad(kept, (0, found.shape[-1] - MODES)), n=value.shape[-1])


class Operator(nn.Module):
    """Two complex parameters, a real one of their shape among others, and a complex buffer of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, WIDTH, 1)
        self.spectral = Spectral()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES) / WIDTH)
        self.project = nn.Conv1d(WIDTH, 2, 1)
        self.register_buffer("rotations", torch.polar(torch.ones(6), torch.arange(6.0)))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.project(torch.relu(self.spectral(self.lift(value), self.mix)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """Train one step on a sample that its number decides; returns the loss."""
    sample = torch.randn(2, 1, POINTS, generator=torch.Generator().manual_seed(100 + number))
    loss = model(sample).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The run's optimizer."""
    return torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)


def trained(seed: int = 0) -> tuple[Operator, torch.optim.Optimizer]:
    """An operator and its optimizer after three steps."""
    torch.manual_seed(seed)
    model = Operator()
    optimizer = adam(model)
    for number in range(3):
        step(model, optimizer, number)
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of the model and of the optimizer, whole, by name."""
    found: dict[str, Any] = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for k, v in found.items()}


def _sharded() -> tuple[Operator, torch.optim.Optimizer]:
    model = Operator()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.spectral, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adam(model)


def save(folder: str) -> None:
    """Train three steps under FSDP2 and save files of ranks under verl's names, and the truth beside them."""
    rank, world = start_world()
    torch.manual_seed(0)
    model, optimizer = _sharded()
    for number in range(3):
        step(model, optimizer, number)
    files = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    files["extra_state"] = {"lr_scheduler": None, "rng": {"cpu": torch.get_rng_state()}}
    saved = Path(folder, "save")
    saved.mkdir(exist_ok=True)
    for item, value in files.items():
        torch.save(value, saved / f"{item}_world_size_{world}_rank_{rank}.pt")
    state = state_of(model, optimizer)
    if rank == 0:
        torch.save(state, Path(folder, "truth.pt"))
    dist.barrier()
    after = {"loss": step(model, optimizer, 3), **state_of(model, optimizer)}
    if rank == 0:
        torch.save(after, Path(folder, "after.pt"))


def resume(path: str, out: str) -> list[float]:
    """Load a distributed checkpoint, or files of FSDP's ranks as Accelerate does, and train one step.

    Args:
        path: The checkpoint.
        out: Where the first rank leaves what was loaded, whole.

    Returns:
        The losses of the next step and of the one after it.
    """
    rank, _ = start_world()
    torch.manual_seed(1)
    model, optimizer = _sharded()
    folder = Path(path)
    if (folder / ".metadata").exists():
        state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        set_model_state_dict(model, torch.load(folder / f"pytorch_model_fsdp_0_rank{rank}.bin", weights_only=True))
        states = torch.load(folder / f"optimizer_0_rank{rank}.bin", weights_only=True)
        set_optimizer_state_dict(model, optimizer, states)
    found = state_of(model, optimizer)
    if rank == 0:
        torch.save(found, out)
    return [step(model, optimizer, number) for number in (3, 4)]


def with_deepspeed(stage: int) -> str:
    """Train one step under DeepSpeed; returns the error with which it stops, or an empty text."""
    import deepspeed

    start_world()
    model = Operator()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    initialize: Any = deepspeed.initialize
    try:
        engine, *_ = initialize(model=model, optimizer=adam(model), config=config)
        engine.backward(engine(torch.ones(2, 1, POINTS)).square().mean())
        engine.step()
    except (AssertionError, RuntimeError, TypeError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
