"""The optimizer entry of stage 0: every rank has all of it, so the model states hold it once.

A 16-bit run uses one of two forms: fused optimizers keep one flat master per group, other optimizers a list of
masters. DeepSpeed's fused optimizers are recognised by their hyper-parameters.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_configure_fp16_optimizer`), `runtime/fp16/fused_optimizer.py` and
`unfused_optimizer.py` (`state_dict`, `load_state_dict`), torch 2.13.0 `optim/optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import RequestError
from reshard_engine.formats.deepspeed.names import OPTIMIZER_STATE
from reshard_engine.formats.deepspeed.partitioning import Run
from reshard_engine.formats.deepspeed.writer.native.model import LocalModel, LocalParameter
from reshard_engine.formats.deepspeed.writer.native.optimizer import (
    Groups,
    clip_grad_of,
    flat_runs,
    state_runs,
    trained_groups,
)
from reshard_engine.formats.deepspeed.writer.native.scaling import plain_entries
from reshard_engine.formats.deepspeed.writer.native.target import Target
from reshard_engine.pickles.nodes import Node, PList, PRuns, mapping_of
from reshard_engine.tensors.dtypes import FLOAT32

_OF_OTHERS = frozenset({"amsgrad", "max_grad_norm", "max_coeff"})


def whole_optimizer(groups: Groups, model: LocalModel, target: Target) -> Node:
    """The `optimizer` entry of the model states.

    Raises:
        RequestError: `request.unsatisfiable` where the loader requires what the source does not say.
    """
    members = trained_groups(model, groups.count)
    if target.master_is_weight:
        return _per_parameter(groups, members)
    entries = plain_entries(target)
    if not _is_fused(groups):
        # FP16_UnfusedOptimizer neither saves nor loads the gradient clipping.
        entries[OPTIMIZER_STATE] = _per_parameter(groups, members)
        entries["fp32_groups"] = PList([_masters(groups, m) for m in members])
        return mapping_of(entries)
    entries |= _flat(groups, members)
    clipping = clip_grad_of(target)
    entries["clip_grad"] = _default_clipping(target) if clipping is None else clipping
    return mapping_of(entries)


def _default_clipping(target: Target) -> float:
    """The gradient clipping of a run whose config gives none, which FP16_Optimizer's loader requires.

    Source: deepspeed `runtime/constants.py` (`GRADIENT_CLIPPING_DEFAULT`: 0 up to 0.19.2, 1.0 from 0.19.3 on).

    Raises:
        RequestError: `request.unsatisfiable` if the source has no config, or no version.
    """
    version = target.version.split(".")
    if not target.config_said or not all(part.isdecimal() for part in version[:3]) or len(version) < 3:
        raise RequestError(
            "request.unsatisfiable",
            "the source does not say at which norm its run clipped gradients, and DeepSpeed's loader of stage 0 in 16 "
            "bits takes that of the file in place of the run's own",
            fix="--zero-stage 1, 2 or 3: their loaders keep the clipping that the run's config gives",
        )
    return 1.0 if tuple(map(int, version[:3])) >= (0, 19, 3) else 0.0


def _is_fused(groups: Groups) -> bool:
    # FusedAdam's groups have `bias_correction`. Those of DeepSpeedCPUAdam have it too, and `amsgrad` beside it; those
    # of FusedLamb and of the 1-bit optimizers have `max_grad_norm` or `max_coeff`.
    keys = [g.hyper_parameters.keys() for g in groups.groups]
    return bool(keys) and all("bias_correction" in k and _OF_OTHERS.isdisjoint(k) for k in keys)


def _masters(groups: Groups, members: Sequence[LocalParameter]) -> Node:
    # The group has one type. It is found once: a search per parameter would take quadratic time.
    dtype = groups.dtype_of("fp32", members).name
    return PList([PRuns(dtype, p.shape, state_runs(p, "fp32")) for p in members])


def _per_parameter(groups: Groups, members: Sequence[Sequence[LocalParameter]]) -> Node:
    state: dict[str | int, Node] = {}
    numbers: list[list[int]] = []
    count = 0
    for group in members:
        numbers.append(list(range(count, count + len(group))))
        for number, parameter in zip(numbers[-1], group, strict=True):
            runs: dict[str, tuple[Run, ...]] = {s: state_runs(parameter, s) for s in groups.states}
            if len(groups.states) > 1 or parameter.scalars:
                state[number] = groups.state_entry([parameter], runs, parameter.shape)
        count += len(group)
    return mapping_of({"state": mapping_of(state), "param_groups": groups.with_params(numbers)})


def _flat(groups: Groups, members: Sequence[Sequence[LocalParameter]]) -> dict[str | int, Node]:
    state: dict[str | int, Node] = {}
    masters: list[Node] = []
    for index, group in enumerate(members):
        runs = {s: tuple(flat_runs(group, [0] * len(group), s)) for s in groups.states}
        shape = (sum(p.numel for p in group),)
        masters.append(PRuns((groups.dtype_of("fp32", group) if group else FLOAT32).name, shape, runs["fp32"]))
        if group and (len(groups.states) > 1 or any(p.scalars for p in group)):
            state[index] = groups.state_entry(group, runs, shape)
    numbers = [[index] for index in range(len(members))]
    inner = mapping_of({"state": mapping_of(state), "param_groups": groups.with_params(numbers)})
    return {OPTIMIZER_STATE: inner, "fp32_groups_flat": PList(masters)}
