"""DeepSpeed's own mixture of experts: a small model, training and resuming, states under global expert numbers.

Experts of a layer are numbered per rank in parameter names; globally
expert ``e * local + i`` is number ``i`` on expert-parallel rank ``e`` (deepspeed 0.19.8, engine.py
``_save_moe_checkpoint``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from safetensors.torch import save_file
from torch import Tensor, nn

from oracle.parallel_cases import EXPERT_ROWS, EXPERTS, Layout, MoeCase, moe_config
from oracle.parallel_cuts import WHOLE
from oracle.parallel_gather import LocalState, local_state
from oracle.parallel_train import Run, draw, initialized
from oracle.train import mean_losses

VOCAB = 29
SEQUENCE = 8
WIDTH = 8
INNER = 11
DEPTH = 2
TOP_K = 2  # of AutoEP, which reads it from the configuration

_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")


class Expert(nn.Module):
    """A small feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Outputs, same shape."""
        out: Tensor = self.down(F.gelu(self.up(hidden)))
        return out


class Block(nn.Module):
    """A dense residual, then a mixture of experts."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.moe = mixture

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        hidden = hidden + F.gelu(self.dense(self.norm_1(hidden)))
        mixed = self.moe(self.norm_2(hidden))
        out: Tensor = hidden + (mixed[0] if isinstance(mixed, tuple) else mixed)
        return out


class MixtureLM(nn.Module):
    """A language model of experts; no auxiliary loss, because that one depends on how rows lie on ranks."""

    def __init__(self, mixture: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.config = SimpleNamespace(experts=EXPERTS, top_k=TOP_K)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block(mixture()) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the next tokens."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def global_name(name: str, ep_rank: int, local_experts: int) -> str:
    """The name under which an expert of this rank is known everywhere."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return name
    return f"{found[1]}{ep_rank * local_experts + int(found[2])}{found[3]}"


def _batch(step: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + step)
    rows = torch.randint(VOCAB, (EXPERT_ROWS, SEQUENCE + 1), generator=generator)
    rows[:, 1::2] = rows[:, 0:-1:2]
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def run_of_experts(engine: Any, ep: int, state: Callable[[], LocalState], *, batches: int) -> Run:
    """A run with experts over ``ep`` ranks, whose data follow from the seed ``batches``."""

    def renamed() -> LocalState:
        found = state()
        for group in found.groups:
            # Expert groups are named for the layout; a group that is named for another one shows as a difference.
            group["name"] = "experts" if group["name"] == f"ep_size_{ep}" else group["name"]
        return found

    return Run(engine, renamed, lambda steps: mean_losses(engine, steps, lambda step: engine(*_batch(step, batches))))


def start(case: MoeCase, layout: Layout, *, seed: int, load_universal: bool) -> Run:
    """An engine for ``case`` with experts over ``layout.ep`` ranks, which know different experts and one dense part.

    No token is dropped and none is sampled, so that what an expert computes depends on neither rank nor batch size.
    """
    rank, world, ep = dist.get_rank(), dist.get_world_size(), layout.ep
    model = MixtureLM(lambda: MoE(WIDTH, Expert(), EXPERTS, ep_size=ep, k=1, drop_tokens=False, use_rts=False))
    ep_rank = rank // (world // ep) if case.data_before_expert else rank % ep

    def known(name: str) -> str:
        return global_name(name, ep_rank, EXPERTS // ep)

    draw(model, seed, known=known)
    params = list(model.parameters())
    by_kind: list[dict[str, Any]] = [
        {"name": "matrices", "params": [p for p in params if p.ndim > 1], "lr": 1e-2, "weight_decay": 0.1},
        {"name": "vectors", "params": [p for p in params if p.ndim <= 1], "lr": 5e-3, "weight_decay": 0.0},
    ]
    split = split_params_into_different_moe_groups_for_optimizer(by_kind)
    engine = initialized(model, split, moe_config(case, world), load_universal)
    if groups._get_expert_parallel_rank(f"ep_size_{ep}") != ep_rank:
        raise AssertionError("experts were drawn for another expert-parallel rank than DeepSpeed gave")
    replica = groups._get_expert_data_parallel_rank(f"ep_size_{ep}")

    def state() -> LocalState:
        return local_state(engine, (0, ep_rank), replica, rename=known, cut_of=lambda _name, _param: WHOLE)

    return run_of_experts(engine, ep, state, batches=50_001)


def expert_files(tag_dir: str, out: str) -> None:
    """Collects a checkpoint's expert files, whose names and keys carry global numbers, as ``module/<name>``."""
    found: dict[str, Tensor] = {}
    for path in sorted(Path(tag_dir).glob("layer_*_expert_*_model_states.pt")):
        weights = torch.load(path, map_location="cpu", weights_only=True)
        found |= {f"module/{name}": value.contiguous() for name, value in weights.items()}
    save_file(found, out)
