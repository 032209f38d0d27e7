"""The optimizer states and param groups that DeepSpeed's writers take from any source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from reshard.errors import RequestError, counted, listed, printable
from reshard.models import NotCarried
from reshard_engine.checkpoint import Checkpoint, OptimizerState, ParamGroup, Scalar
from reshard_engine.formats.deepspeed.configured_groups import configured_groups
from reshard_engine.formats.deepspeed.facts import facts_of

ADAM_STATES = ("exp_avg", "exp_avg_sq")
_RMS = "RMS"
OTHER_PARTITIONS = (
    "Adafactor scales and clips its updates by means over each rank's partition, so they depend on the number of "
    "ranks, as in a run that began on that many"
)


def require_optimizer(checkpoint: Checkpoint, what: str) -> OptimizerState:
    """The optimizer's state.

    Raises:
        RequestError: `request.unsatisfiable` for a source that has weights only, or quantized states.
    """
    if checkpoint.optimizer is None:
        raise RequestError(
            "request.unsatisfiable",
            f"{what} is made of optimizer states, and none were read: "
            f"{checkpoint.no_optimizer or 'the files hold weights alone'}",
            fix="write the weights alone: --to safetensors"
            if checkpoint.no_optimizer
            else "name the training checkpoint as the source, or write the weights alone: --to safetensors",
        )
    if checkpoint.optimizer.unread:
        raise RequestError(
            "request.unsatisfiable",
            f"{what} holds plain optimizer states, and the source's are of classes of their own: "
            f"{listed(checkpoint.optimizer.unread)}",
            fix="write the weights alone: --to safetensors; --to dcp keeps the optimizer as it is",
        )
    return checkpoint.optimizer


def states_to_write(checkpoint: Checkpoint) -> list[str]:
    """The per-element states of the trained parameters, `fp32` first.

    Raises:
        RequestError: `request.unsatisfiable` if some parameters lack states that others have, or if ranks have numbers
            of their own.
    """
    if checkpoint.optimizer is not None and (own := checkpoint.optimizer.rank_numbers):
        raise RequestError(
            "request.unsatisfiable",
            f"optimizer state {printable(own[0])!r} is one number for each rank's partition and differs between "
            "ranks: other partitions have no such number",
            fix="write the weights alone: --to safetensors",
        )
    states: dict[str, None] = {"fp32": None}
    for parameter in checkpoint.trained:
        states |= dict.fromkeys(parameter.states)
    if narrow := [p.fqn for p in checkpoint.trained if "fp32" not in p.states]:
        raise RequestError(
            "request.unsatisfiable",
            f"of {counted(len(checkpoint.trained), 'parameter')}, {counted(len(narrow), 'has', 'have')} no fp32 "
            f"masters ({listed(narrow)}): the run "
            "trained in a narrower type, and DeepSpeed keeps masters in fp32",
            fix="write the weights alone: --to safetensors",
        )
    kinds = Counter(tuple(n for n in states if n in p.states) for p in checkpoint.trained if not p.never_updated)
    if len(kinds) > 1:
        said = [f"{count} have {listed([n for n in held if n != 'fp32']) or 'none'}" for held, count in kinds.items()]
        raise RequestError(
            "request.unsatisfiable",
            f"parameters have different optimizer states: {'; '.join(said)}, and DeepSpeed's engine has one optimizer",
            fix="write all of it as a distributed checkpoint: --to dcp; or the weights alone: --to safetensors",
        )
    return list(states)


def without_recomputed(checkpoint: Checkpoint) -> tuple[Checkpoint, tuple[NotCarried, ...]]:
    """The checkpoint without numbers that the optimizer computes anew before it reads them, and their names.

    Adafactor of transformers keeps the root mean square of each partition as `RMS`. `step` sets it, and then
    `_get_lr`, which nothing else calls, reads it; a state without it loads and goes on (transformers 5.23.0
    `optimization.py`, verified by running).
    """
    if checkpoint.optimizer is None or not checkpoint.optimizer.is_adafactor:
        return checkpoint, ()
    numbers = checkpoint.optimizer.rank_numbers
    if _RMS not in numbers and not any(_RMS in p.scalars for p in checkpoint.trained):
        return checkpoint, ()
    parameters = tuple(
        replace(p, scalars={k: v for k, v in p.scalars.items() if k != _RMS}) for p in checkpoint.parameters
    )
    rest = tuple(name for name in numbers if name != _RMS)
    kept = replace(checkpoint, parameters=parameters, optimizer=replace(checkpoint.optimizer, rank_numbers=rest))
    reason = "one number for each rank's partition, which Adafactor computes anew before it reads it"
    return kept, (NotCarried(path=f"optimizer.{_RMS}", reason=reason),)


def with_all_counters(checkpoint: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """The checkpoint with counters for parameters that were never updated, those of their groups; and warnings.

    Such parameters have no states in a run of FSDP. ZeRO keeps zeros for them, and one counter for a whole group.
    """
    idle = [p for p in checkpoint.trained if p.never_updated]
    if not idle:
        return checkpoint, []
    updated = [p for p in checkpoint.trained if not p.never_updated]
    scalars = {p.group: p.scalars for p in reversed(updated)}
    rest: Mapping[str, Scalar] = updated[0].scalars if updated else {}
    parameters = tuple(
        replace(p, scalars=scalars.get(p.group, rest)) if p.never_updated else p for p in checkpoint.parameters
    )
    text = (
        f"{counted(len(idle), 'parameter was', 'parameters were')} never updated ({listed([p.fqn for p in idle])}): "
        "moments are zeros, and "
        "ZeRO decays such parameters, which other optimizers leave alone"
    )
    return replace(checkpoint, parameters=parameters), [text]


def is_adam(checkpoint: Checkpoint) -> bool:
    """True if the hyper-parameters of every group are Adam's, and so are the states, if there are any.

    Raises:
        RequestError: `request.unsatisfiable`, as `groups_of` does.
    """
    states = {name for p in checkpoint.trained for name in p.states} - {"fp32"}
    if states and not states.issuperset(ADAM_STATES):
        return False
    groups = [g.hyper_parameters for g in groups_of(checkpoint)]
    return bool(groups) and all("betas" in g and "eps" in g for g in groups)


def groups_of(checkpoint: Checkpoint) -> list[ParamGroup]:
    """The source's param groups, or groups made from its config where its states carry none.

    Groups of torch's Adam get the one key that DeepSpeed's own Adam reads and torch's does not have: without it, the
    first step of FusedAdam or DeepSpeedCPUAdam ends with a KeyError. Torch's Adam always corrects the bias of its
    moments, so that the value is no assumption. Torch's Adam keeps a key that it does not know and never reads it.

    Source: deepspeed 0.19.8 `ops/adam/fused_adam.py`, `ops/adam/cpu_adam.py` (`step`), torch 2.13.0 `optim/adam.py`.
    """
    optimizer = checkpoint.optimizer
    if optimizer is None or not optimizer.groups:
        return configured_groups(checkpoint)
    if facts_of(checkpoint).order:
        return list(optimizer.groups)
    return [_with_bias_correction(group) for group in optimizer.groups]


_OF_TORCH_ADAM = frozenset({"lr", "betas", "eps", "weight_decay", "amsgrad", "foreach"})
"""Keys that of torch's optimizers Adam and AdamW alone have together; torch 1.12 to 2.14."""
_BIAS_CORRECTION = "bias_correction"


def _with_bias_correction(group: ParamGroup) -> ParamGroup:
    """The group as DeepSpeed's Adam reads it, if the two compute the same: neither has `amsgrad` or `maximize`."""
    values = group.hyper_parameters
    if not values.keys() >= _OF_TORCH_ADAM or values["amsgrad"] or values.get("maximize") or _BIAS_CORRECTION in values:
        return group
    return ParamGroup({**values, _BIAS_CORRECTION: True})
