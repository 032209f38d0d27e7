"""DeepSpeed's AutoEP on a small model: training and resuming, fused experts joined over expert-parallel ranks.

Functions named ``*_autoep`` run inside the ranks.  AutoEP (deepspeed 0.19.8, module_inject/auto_ep_layer.py) replaces a
mixture by a router and three tensors, each with this rank's experts along its first dimension: ``experts.w1`` (gate),
``w2`` (down) and ``w3`` (up).  How they are cut is stated here from that, not read from ``ds_autoep_layers``.

The model is written by hand: on transformers 5.23 AutoEP falls over the registry of recorded outputs
(``_CanRecordRegistry.get`` takes no default).
"""

from __future__ import annotations

import re
import zlib
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe import utils as moe_utils
from deepspeed.utils import groups
from torch import Tensor, nn

from oracle.gather import flat_groups, names_of
from oracle.parallel_autoep_cases import AUTOEP_EXPERTS, AUTOEP_ROWS, AutoEpCase, autoep_config
from oracle.parallel_cuts import ROWS, WHOLE, Cut
from oracle.parallel_gather import LocalState, _wrong_weights, local_state
from oracle.parallel_train import load_and_dump, save_with_truth
from oracle.train import RESUME_SEED, SOURCE_SEED, start_world

VOCAB = 29
SEQUENCE = 8
WIDTH = 8
INNER = 5
DEPTH = 2
TOP_K = 2

_EXPERTS = re.compile(r".*\.experts\.w[123]")


class Experts(nn.Module):
    """What transformers calls fused experts: gate and up in one tensor, down in another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(AUTOEP_EXPERTS, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(AUTOEP_EXPERTS, WIDTH, INNER))
        self.act_fn = F.silu


class Mixture(nn.Module):
    """A router and its experts; AutoEP replaces it before it is ever run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, AUTOEP_EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        """Never called.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("AutoEP did not replace this mixture")


class Block(nn.Module):
    """A dense residual, then a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.moe = Mixture()

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        hidden = hidden + F.gelu(self.dense(self.norm_1(hidden)))
        out: Tensor = hidden + self.moe(self.norm_2(hidden))
        return out


class MixtureLM(nn.Module):
    """A language model of experts; no token is dropped, so that its loss does not depend on the layout."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(experts=AUTOEP_EXPERTS, top_k=TOP_K)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of the next tokens."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _draw(model: nn.Module, seed: int) -> None:
    """Weights that follow from seed and name alone: AutoEP takes each rank's experts out of the whole."""
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        drawn = torch.randn(param.shape, generator=generator)
        with torch.no_grad():
            param.copy_(drawn * 0.3 if param.ndim > 1 else drawn * 0.1 + (1.0 if "norm" in name else 0.0))


def build_engine_autoep(case: AutoEpCase, ep: int, *, seed: int, load_universal: bool = False) -> Any:
    """An engine for ``case`` with experts over ``ep`` ranks."""
    if case.largest_group is not None:
        split: Any = moe_utils.split_params_into_different_moe_groups_for_optimizer
        split.__defaults__ = (case.largest_group,)
    model = MixtureLM()
    _draw(model, seed)
    if case.frozen:
        first: Any = model.layers[0]
        first.moe.experts.down_proj.requires_grad_(False)
    config = autoep_config(case, dist.get_world_size(), ep)
    if load_universal:
        config["checkpoint"] = {"load_universal": True}
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )
    return engine


def cut_of(name: str, _: Any) -> Cut:
    """Fused experts lie along the first dimension; everything else is whole on every rank."""
    return ROWS if _EXPERTS.fullmatch(name) else WHOLE


def state_autoep(engine: Any, ep: int) -> LocalState:
    """This rank's part of the logical state; collective over the ranks that share its experts."""
    name = f"ep_size_{ep}"
    place = (groups._get_expert_parallel_rank(name), 0)
    replica = groups._get_expert_data_parallel_rank(name)
    if type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3":
        state = _sharded_state(engine, place, replica)
    else:
        state = local_state(engine, place, replica, cut_of=cut_of)
    for group in state.groups:
        # Expert groups are named for the layout; a group that is named for another one shows as a difference.
        group["name"] = "experts" if group["name"] == name else group["name"]
    return state


def _joined(local: Tensor, process_group: Any) -> list[Tensor]:
    raw = local.detach().contiguous().view(torch.uint8)
    parts = [torch.empty_like(raw) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, raw, group=process_group)
    return [part.view(local.dtype) for part in parts]


def _sharded_state(engine: Any, place: tuple[int, int], replica: int) -> LocalState:
    """Stage 3: parameters of experts are cut over the ranks that share them, all others over all ranks."""
    optimizer = engine.optimizer
    params = dict(engine.module.named_parameters())
    group_of = {name: param.ds_process_group for name, param in params.items()}
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, float]] = {}
    found = flat_groups(engine)
    for group in found:
        over = {group_of[slot.name] for slot in group.slots}
        if len(over) != 1:
            raise AssertionError("a sub-group is cut over several sets of ranks")
        flats = {"fp32": group.master} | group.state
        for key, value in sorted(flats.items()):
            if torch.is_tensor(value) and value.shape == group.master.shape:
                parts = _joined(value, over.copy().pop())
                for s in group.slots:
                    flat = torch.cat([p.narrow(0, s.offset, s.piece) for p in parts])[: s.numel]
                    tensors[f"{key}/{s.name}"] = flat.view(s.shape).clone()
            elif value is not None:
                scalars.setdefault(key, {}).update({s.name: float(value) for s in group.slots})
    for name, param in params.items():
        flat = torch.cat(_joined(param.ds_tensor, group_of[name]))[: param.ds_numel]
        tensors[f"{'module' if param.requires_grad else 'frozen'}/{name}"] = flat.view(param.ds_shape).clone()
    hyper = [
        {key: value for key, value in group.items() if key != "params"} | {"names": names_of(found, g)}
        for g, group in enumerate(optimizer.param_groups)
    ]
    cuts = {name: cut_of(name, param) for name, param in params.items()}
    order = [[s.name for s in group.slots] for group in found]
    return LocalState(place, replica, tensors, cuts, scalars, hyper, order, _wrong_weights(tensors))


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(70_001 + step)
    rows = torch.randint(VOCAB, (AUTOEP_ROWS, SEQUENCE + 1), generator=generator)
    rows[:, 1::2] = rows[:, 0:-1:2]
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def train_steps_autoep(engine: Any, steps: int) -> list[float]:
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


def train_and_save_autoep(
    case: dict[str, Any], ep: int, save_dir: str, truth_dir: str, steps_after: int
) -> dict[str, Any]:
    """Trains ``case.steps`` steps with experts over ``ep`` ranks, saves, dumps the truth, trains on.

    Returns:
        See ``save_with_truth``.
    """
    start_world()
    parsed = AutoEpCase(**case)
    engine = build_engine_autoep(parsed, ep, seed=SOURCE_SEED)
    return save_with_truth(
        engine,
        lambda: state_autoep(engine, ep),
        lambda steps: train_steps_autoep(engine, steps),
        save_dir=save_dir,
        truth_dir=truth_dir,
        steps=parsed.steps,
        steps_after=steps_after,
        client_state={},
        notes={"case": case, "ep": ep},
    )


def resume_autoep(
    case: dict[str, Any], ep: int, load_dir: str, tag: str | None, out: str, steps: int, load_universal: bool = False
) -> dict[str, Any]:
    """A new engine with other weights loads plainly, dumps ``out/resumed.*``, trains ``steps`` steps."""
    start_world()
    engine = build_engine_autoep(AutoEpCase(**case), ep, seed=RESUME_SEED, load_universal=load_universal)
    load_and_dump(engine, lambda: state_autoep(engine, ep), load_dir, tag, out)
    return {"losses": train_steps_autoep(engine, steps)}
