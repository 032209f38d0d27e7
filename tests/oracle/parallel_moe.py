"""DeepSpeed's own mixture of experts: a small model, training and resuming, states under global expert numbers.

Functions named ``*_moe`` run inside the ranks.  Experts of a layer are numbered per rank in parameter names; globally
expert ``e * local + i`` is number ``i`` on expert-parallel rank ``e`` (deepspeed 0.19.8, engine.py
``_save_moe_checkpoint``).
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from safetensors.torch import save_file
from torch import Tensor, nn

from oracle.parallel_cases import MOE_EXPERTS, MOE_ROWS, MoeCase, moe_config
from oracle.parallel_cuts import WHOLE
from oracle.parallel_gather import LocalState, local_state
from oracle.parallel_train import load_and_dump, save_with_truth
from oracle.train import RESUME_SEED, SOURCE_SEED, start_world

VOCAB = 29
SEQUENCE = 8
WIDTH = 8
INNER = 11
DEPTH = 2

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


class MoeBlock(nn.Module):
    """A dense residual, then a mixture of experts.

    No token is dropped and none is sampled, so that what an expert computes depends on neither rank nor batch size.
    """

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.moe = MoE(WIDTH, Expert(), MOE_EXPERTS, ep_size=ep, k=1, drop_tokens=False, use_rts=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        hidden = hidden + F.gelu(self.dense(self.norm_1(hidden)))
        mixed, _, _ = self.moe(self.norm_2(hidden))
        out: Tensor = hidden + mixed
        return out


class MoeLM(nn.Module):
    """A language model of experts; no auxiliary loss, because that one depends on how rows lie on ranks."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(MoeBlock(ep) for _ in range(DEPTH))
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


def _draw(model: nn.Module, seed: int, ep_rank: int, local_experts: int) -> None:
    """Weights that follow from seed and global name alone: the same model on every layout."""
    for name, param in model.named_parameters():
        known = global_name(name, ep_rank, local_experts)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{known}".encode()))
        drawn = torch.randn(param.shape, generator=generator)
        with torch.no_grad():
            param.copy_(drawn * 0.3 if param.ndim > 1 else drawn * 0.1 + (1.0 if "norm" in name else 0.0))


def build_engine_moe(case: MoeCase, ep: int, *, seed: int) -> Any:
    """An engine for ``case`` with experts over ``ep`` ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = MoeLM(ep)
    ep_rank = rank // (world // ep) if case.data_before_expert else rank % ep
    _draw(model, seed, ep_rank, MOE_EXPERTS // ep)
    params = list(model.parameters())
    by_kind: list[dict[str, Any]] = [
        {"name": "matrices", "params": [p for p in params if p.ndim > 1], "lr": 1e-2, "weight_decay": 0.1},
        {"name": "vectors", "params": [p for p in params if p.ndim <= 1], "lr": 5e-3, "weight_decay": 0.0},
    ]
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(
        model=model,
        model_parameters=split_params_into_different_moe_groups_for_optimizer(by_kind),
        config=moe_config(case, world),
    )
    if groups._get_expert_parallel_rank(f"ep_size_{ep}") != ep_rank:
        raise AssertionError("experts were drawn for another expert-parallel rank than DeepSpeed gave")
    return engine


def state_moe(engine: Any, ep: int) -> LocalState:
    """This rank's part of the logical state; expert-parallel ranks know different experts and the same dense part."""
    name = f"ep_size_{ep}"
    ep_rank = groups._get_expert_parallel_rank(name)
    state = local_state(
        engine,
        (0, ep_rank),
        groups._get_expert_data_parallel_rank(name),
        rename=lambda local: global_name(local, ep_rank, MOE_EXPERTS // ep),
        cut_of=lambda _name, _param: WHOLE,
    )
    for group in state.groups:
        # Expert groups are named for the layout; a group that is named for another one shows as a difference.
        group["name"] = "experts" if group["name"] == name else group["name"]
    return state


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50_001 + step)
    rows = torch.randint(VOCAB, (MOE_ROWS, SEQUENCE + 1), generator=generator)
    rows[:, 1::2] = rows[:, 0:-1:2]
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def train_steps_moe(engine: Any, steps: int) -> list[float]:
    """Global mean losses of the next ``steps`` steps; the data follow ``engine.global_steps``."""
    losses = []
    engine.train()
    for _ in range(steps):
        loss = engine(*_batch(engine.global_steps))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().to(torch.float64)
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def train_and_save_moe(
    case: dict[str, Any], ep: int, save_dir: str, truth_dir: str, steps_after: int
) -> dict[str, Any]:
    """Trains ``case.steps`` steps with experts over ``ep`` ranks, saves, dumps the truth, trains on.

    Returns:
        See ``save_with_truth``.
    """
    start_world()
    parsed = MoeCase(**case)
    engine = build_engine_moe(parsed, ep, seed=SOURCE_SEED)
    return save_with_truth(
        engine,
        lambda: state_moe(engine, ep),
        lambda steps: train_steps_moe(engine, steps),
        save_dir=save_dir,
        truth_dir=truth_dir,
        steps=parsed.steps,
        steps_after=steps_after,
        client_state={},
        notes={"case": case, "ep": ep},
    )


def resume_moe(case: dict[str, Any], ep: int, load_dir: str, tag: str | None, out: str, steps: int) -> dict[str, Any]:
    """A new engine with other weights loads plainly, dumps ``out/resumed.*``, trains ``steps`` steps."""
    start_world()
    engine = build_engine_moe(MoeCase(**case), ep, seed=RESUME_SEED)
    load_and_dump(engine, lambda: state_moe(engine, ep), load_dir, tag, out)
    return {"losses": train_steps_moe(engine, steps)}


def expert_files(tag_dir: str, out: str) -> None:
    """Collects a checkpoint's expert files, whose names and keys carry global numbers, as ``module/<name>``."""
    found: dict[str, Tensor] = {}
    for path in sorted(Path(tag_dir).glob("layer_*_expert_*_model_states.pt")):
        weights = torch.load(path, map_location="cpu", weights_only=True)
        found |= {f"module/{name}": value.contiguous() for name, value in weights.items()}
    save_file(found, out)
