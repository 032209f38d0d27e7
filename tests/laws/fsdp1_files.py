"""verl's files of FSDP1, whose optimizers torch's own FSDP1 cuts: in one process, rank after rank on fake groups."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import distribute_tensor

from laws.rank_files import ROWS, World, numbers


class Layer(nn.Module):
    """A matrix and a vector; FSDP1 wraps each layer."""

    def __init__(self, first: int, rows: int) -> None:
        super().__init__()
        self.proj = nn.Parameter(numbers(first, rows, 3))
        self.norm = nn.Parameter(numbers(first + 100, rows))
        self.scale = nn.Parameter(numbers(first + 200, 1))


class Model(nn.Module):
    """Layers of uneven sizes, one of them of five elements, a buffer, and a head that is perhaps tied."""

    def __init__(self, rows: tuple[int, ...] = (5, 1, 7), *, tied: bool = False) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(7))
        self.embed = nn.Embedding(6, 3, _weight=numbers(1, 6, 3))
        self.layers = nn.ModuleList(Layer(1000 * (i + 1), n) for i, n in enumerate(rows))
        self.norm = nn.Parameter(numbers(9000, 2))
        self.head = nn.Linear(3, 6, bias=False)
        self.head.weight = self.embed.weight if tied else nn.Parameter(numbers(9100, 6, 3))


def save_fsdp1(
    folder: Path,
    world: int,
    make: Callable[[], nn.Module] = Model,
    *,
    orig: bool,
    compute: torch.dtype = torch.float32,
    without: tuple[str, ...] = (),
) -> Path:
    """The files of verl under FSDP1 on a number of ranks.

    Args:
        folder: Where they go.
        world: The number of ranks.
        make: Makes the model, whose children `layers` are wrapped.
        orig: `use_orig_params`.
        compute: The type that the run computes in, by which parameters are aligned.
        without: Parameters that no gradient reached.
    """
    folder.mkdir(parents=True)
    for rank in range(world):
        with World((world,)).mesh_of(rank) as mesh, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # on one rank
            model = make()
            whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
            buffers = {name for name, _ in model.named_buffers()}
            held: Any = FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Layer}),
                device_id=torch.device("cpu"),
                device_mesh=mesh,
                mixed_precision=MixedPrecision(param_dtype=compute),
                use_orig_params=orig,
            )
            optimizer: Any = torch.optim.AdamW(held.parameters(), lr=0.0, weight_decay=0.0)
            for name, parameter in held.named_parameters():
                if parameter.numel() and name.replace("_fsdp_wrapped_module.", "") not in without:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for parameter, states in optimizer.state.items():  # padding of flat parameters is zero and stays it
                states["exp_avg"].copy_(parameter.detach() * 2)
                states["exp_avg_sq"].copy_(parameter.detach() * 3)
            found: OrderedDict[str, Any] = OrderedDict(
                (n, v if n in buffers else distribute_tensor(v, mesh, ROWS, src_data_rank=None))
                for n, v in whole.items()
            )
            found._metadata = OrderedDict(  # type: ignore[attr-defined]
                (name, {"version": 1}) for name, _ in held.named_modules()
            )
            items = {"model": found, "optim": optimizer.state_dict(), "extra_state": {"lr_scheduler": None}}
            for item, value in items.items():
                torch.save(value, folder / f"{item}_world_size_{world}_rank_{rank}.pt")
    (folder / "fsdp_config.json").write_text(f'{{\n    "FSDP_version": 1,\n    "world_size": {world}\n}}')
    return folder
