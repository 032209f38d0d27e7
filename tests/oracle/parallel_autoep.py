"""DeepSpeed's AutoEP on a small model: training and resuming, fused experts joined over expert-parallel ranks.

AutoEP (deepspeed 0.19.8, module_inject/auto_ep_layer.py) replaces a
mixture by a router and three tensors, each with this rank's experts along its first dimension: ``experts.w1`` (gate),
``w2`` (down) and ``w3`` (up).  How they are cut is stated here from that, not read from ``ds_autoep_layers``.

The model is written by hand: on transformers 5.23 AutoEP falls over the registry of recorded outputs
(``_CanRecordRegistry.get`` takes no default).
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe import utils as moe_utils
from deepspeed.utils import groups
from torch import Tensor, nn

from oracle.gather import flat_groups, names_of
from oracle.parallel_cases import EXPERTS, AutoEpCase, Layout, autoep_config
from oracle.parallel_cuts import ROWS, WHOLE, Cut
from oracle.parallel_gather import LocalState, _wrong_weights, local_state
from oracle.parallel_moe import WIDTH, MixtureLM, run_of_experts
from oracle.parallel_train import Run, draw, initialized
from reshard_engine.formats.deepspeed import param_groups

INNER = 5

_EXPERTS = re.compile(r".*\.experts\.w[123]")


class Experts(nn.Module):
    """What transformers calls fused experts: gate and up in one tensor, down in another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.act_fn = F.silu


class Mixture(nn.Module):
    """A router and its experts; AutoEP replaces it before it is ever run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, hidden: Tensor) -> Tensor:
        """Never called.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("AutoEP did not replace this mixture")


def cut_of(name: str, _: Any) -> Cut:
    """Fused experts lie along the first dimension; everything else is whole on every rank."""
    return ROWS if _EXPERTS.fullmatch(name) else WHOLE


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


def start(case: AutoEpCase, layout: Layout, *, seed: int, load_universal: bool) -> Run:
    """An engine for ``case`` with experts over ``layout.ep`` ranks.

    No token is dropped, so that its loss does not depend on the layout. AutoEP takes each rank's experts out of the
    whole, which was drawn by name. The state is collective over the ranks that share its experts.
    """
    if case.largest_group is not None:
        split: Any = moe_utils.split_params_into_different_moe_groups_for_optimizer
        split.__defaults__ = (case.largest_group,)
        param_groups.MAX_GROUP_ELEMS = case.largest_group  # of a direct load, whose plan is made in the rank
    model = MixtureLM(Mixture)
    draw(model, seed)
    if case.frozen:
        first: Any = model.layers[0]
        first.moe.experts.down_proj.requires_grad_(False)
    config = autoep_config(case, dist.get_world_size(), layout.ep)
    engine = initialized(model, [p for p in model.parameters() if p.requires_grad], config, load_universal)
    name = f"ep_size_{layout.ep}"
    place = (groups._get_expert_parallel_rank(name), 0)
    replica = groups._get_expert_data_parallel_rank(name)

    def state() -> LocalState:
        if type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3":
            return _sharded_state(engine, place, replica)
        return local_state(engine, place, replica, cut_of=cut_of)

    return run_of_experts(engine, layout.ep, state, batches=70_001)
