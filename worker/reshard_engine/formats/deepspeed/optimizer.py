"""The optimizer states, counters and loss scalers that DeepSpeed's writers take from any source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from reshard.errors import RequestError, counted, listed, printable
from reshard.models.jobs import NotCarried
from reshard_engine.checkpoint import Checkpoint, OptimizerState, ParamGroup, Scalar
from reshard_engine.formats.carried import named
from reshard_engine.formats.deepspeed.config import RunConfig, configured_groups
from reshard_engine.formats.deepspeed.facts import facts_of, group_node, refuse_complex, scaler_object
from reshard_engine.formats.deepspeed.native.target import LocalModel, LocalParameter, Target
from reshard_engine.formats.deepspeed.parallel.experts import renamed_group
from reshard_engine.formats.deepspeed.partitioning import Run
from reshard_engine.formats.torch_archive import scalar_node
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PList,
    PObject,
    PRuns,
    PTuple,
    is_mapping,
    mapping_items,
    mapping_of,
)
from reshard_engine.tensors.dtypes import FLOAT32, Dtype
from reshard_engine.tensors.layout import ZEROS

ADAM_STATES = ("exp_avg", "exp_avg_sq")
_RMS = "RMS"
OTHER_PARTITIONS = (
    "Adafactor scales and clips its updates by means over each rank's partition, so they depend on the number of "
    "ranks, as in a run that began on that many"
)


def require_optimizer(checkpoint: Checkpoint, what: str) -> OptimizerState:
    """The optimizer's state.

    Raises:
        RequestError: `request.unsatisfiable` for a source with weights only, quantized states or complex parameters.
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
            f"{what} holds an element of each state for each of a parameter's, and the source's states are others: "
            f"{listed(checkpoint.optimizer.unread)}",
            fix="write the weights alone: --to safetensors; or go on with the source's own files on as many ranks"
            if facts_of(checkpoint).order
            else "write the weights alone: --to safetensors; --to dcp keeps the optimizer as it is",
        )
    refuse_complex(checkpoint)
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
    if len(kinds) > 1 and not _groups_say_states(checkpoint):
        said = [f"{count} have {listed([n for n in held if n != 'fp32']) or 'none'}" for held, count in kinds.items()]
        raise RequestError(
            "request.unsatisfiable",
            f"parameters have different optimizer states: {'; '.join(said)}, and DeepSpeed's engine has one optimizer",
            fix="write all of it as a distributed checkpoint: --to dcp; or the weights alone: --to safetensors",
        )
    return list(states)


MOMENTUM = "momentum_buffer"


def is_muons(group: Mapping[str | int, Node]) -> bool:
    """True for a param group of matrices that DeepSpeed's Muon updates.

    Source: deepspeed 0.19.8 `runtime/engine.py` (`_muon_param_groups`).
    """
    return group.get("use_muon") is True


def refuse_torchs_muon(checkpoint: Checkpoint) -> None:
    """Refuse states of `torch.optim.Muon` for ZeRO: it takes matrices alone, and ZeRO gives it flat partitions.

    Raises:
        RequestError: `request.unsatisfiable`.

    Source: torch 2.13.0 `optim/_muon.py` (`Muon.__init__`: "only supports 2D parameters", `_init_group`).
    """
    if any("ns_coefficients" in group.hyper_parameters for group in groups_of(checkpoint)):
        raise RequestError(
            "request.unsatisfiable",
            "torch.optim.Muon takes matrices alone, and ZeRO gives optimizers flat partitions: no run of DeepSpeed at "
            "ZeRO-1, 2 or 3 has it, and DeepSpeed's own Muon has other groups",
            fix="--to dcp, or --to fsdp_ranks; or write the weights alone: --to safetensors",
        )


def muons_order(shapes: Iterable[tuple[str, tuple[int, ...]]], model_order: Sequence[str]) -> list[str]:
    """The names of a group in the order into which Muon sorts it: by shape, the largest first, then as in the model.

    Source: deepspeed 0.19.8 `runtime/zero/muon/original_muon.py` (`MuonWithAuxAdam.__init__`); verified by running.
    """
    place = {name: index for index, name in enumerate(model_order)}
    in_model = sorted(shapes, key=lambda item: place.get(item[0], len(place)))
    return [name for name, _ in sorted(in_model, key=lambda item: item[1], reverse=True)]


_DECIDE_STATES = ("use_muon", "momentum", "amsgrad", "centered")
"""Hyper-parameters that decide which states an optimizer keeps for a group, by being 0 or false."""


def _groups_say_states(checkpoint: Checkpoint) -> bool:
    """True if one optimizer of DeepSpeed's keeps other states for other param groups, as its hyper-parameters say.

    DeepSpeed's Muon is one optimizer with two kinds of groups: matrices have `momentum_buffer`, all others the states
    of Adam. Groups with the same hyper-parameters have the same states, and so have the parameters of a group.

    Source: deepspeed 0.19.8 `runtime/zero/muon/muon_optimizer.py`, `runtime/engine.py` (`_muon_param_groups`).
    """
    optimizer = checkpoint.optimizer
    if optimizer is None or not optimizer.groups or not facts_of(checkpoint).order:
        return False
    kinds: dict[object, frozenset[str]] = {}
    for parameter in checkpoint.trained:
        values = optimizer.groups[parameter.group or 0].hyper_parameters
        alike = frozenset(values), tuple(bool(values.get(name)) for name in _DECIDE_STATES)
        if kinds.setdefault(alike, frozenset(parameter.states)) != frozenset(parameter.states):
            return False
    return True


def states_by_group(checkpoint: Checkpoint, states: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """For each param group those of `states` that its parameters have; all of them if no gradient reached the group."""
    held: dict[int, set[str]] = {}
    for parameter in checkpoint.trained:
        own = held.setdefault(parameter.group or 0, set())
        own |= set() if parameter.never_updated else {*parameter.states}
    return {group: tuple(s for s in states if s in own or not own) for group, own in held.items()}


def without_empty_parameters(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with trained parameters that have no elements among the frozen ones, where DeepSpeed has them.

    Its optimizers take only parameters with elements, and its loader looks all others up among the frozen fragments.
    Older versions own such parameters, of which their flat tensors hold nothing, and take frozen fragments of more
    parameters than their own.

    Source: deepspeed 0.19.8 `runtime/utils.py` (`is_optimized_parameter`), `runtime/engine.py`
    (`load_module_state_dict`, `_get_zero_frozen_param_attributes`); verified by running.
    """
    parameters = tuple(
        replace(p, group=None, weight=p.value() if p.weight is None else p.weight, states={}, scalars={},
                never_updated=False)
        if p.trained and 0 in p.shape
        else p
        for p in checkpoint.parameters
    )  # fmt: skip
    return replace(checkpoint, parameters=parameters)


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
    moments, so that the value is not an assumption. Torch's Adam keeps a key that it does not know and never reads it.

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


# The groups, states and counters of the optimizer in a native checkpoint, for any stage.
#
# Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`state_dict`), `runtime/zero/stage3.py`
# (`_rigid_state_dict`), `runtime/bf16_optimizer.py` (`state_dict`), `runtime/fp16/fused_optimizer.py` and
# `unfused_optimizer.py`.


class Groups:
    """The optimizer's param groups and the states that their parameters have."""

    def __init__(self, checkpoint: Checkpoint, states: Sequence[str]) -> None:
        """Take the per-element states to write, `fp32` first."""
        self.groups = groups_of(checkpoint)
        self._states = states_by_group(checkpoint, states)

    @property
    def count(self) -> int:
        """The number of param groups."""
        return len(self.groups)

    def states_of(self, group: int | None) -> tuple[str, ...]:
        """The states of a group's parameters, `fp32` first."""
        return self._states.get(group or 0, ("fp32",))

    def with_params(self, params: Sequence[Iterable[int]], *, ep: int = 1) -> PList:
        """The entry `param_groups` with these numbers as `params`, for `ep` expert-parallel ranks."""
        found: list[Node] = []
        for group, numbers in zip(self.groups, params, strict=True):
            found.append(group_node(renamed_group(group, ep), PList(list(numbers))))
        return PList(found)

    @staticmethod
    def dtype_of(state: str, parameters: Sequence[LocalParameter]) -> Dtype:
        """The one element type of a state in a group.

        Raises:
            RequestError: `request.unsatisfiable` if its parameters have several types: a flat tensor has one type.
        """
        dtypes = {p.dtypes[state] for p in parameters if state in p.dtypes}
        if len(dtypes) > 1:
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(state)} of one group has the types {', '.join(sorted(d.name for d in dtypes))}",
                fix="--zero-stage 0 keeps each parameter's states apart",
            )
        return dtypes.pop() if dtypes else FLOAT32

    def scalars_of(self, parameters: Sequence[LocalParameter]) -> dict[str | int, Node]:
        """The one-number states that a (sub-)group has in common.

        Raises:
            RequestError: `request.unsatisfiable` if its parameters have different counters.
        """
        distinct = {tuple((k, _same(v)) for k, v in sorted(p.scalars.items())): p for p in parameters}
        if len(distinct) > 1:
            first, second = list(distinct.values())[:2]
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(first.fqn)} and {printable(second.fqn)} have different counters "
                f"({_counters(first.scalars)} and {_counters(second.scalars)}), and ZeRO keeps one for a whole group",
                fix="--zero-stage 0 in fp32 keeps each parameter's own",
            )
        return {k: scalar_node(v) for k, v in parameters[0].scalars.items()} if parameters else {}

    def state_entry(
        self, parameters: Sequence[LocalParameter], runs_of: Mapping[str, tuple[Run, ...]], shape: tuple[int, ...]
    ) -> Node:
        """The optimizer's state of one flat tensor: counters, then per-element states made of these runs."""
        entries = self.scalars_of(parameters)
        for state in self.states_of(parameters[0].group)[1:]:
            entries[state] = PRuns(self.dtype_of(state, parameters).name, shape, runs_of[state])
        return mapping_of(entries)

    def has_state(self, parameters: Sequence[LocalParameter]) -> bool:
        """True if the optimizer keeps anything for these parameters of one group."""
        return bool(parameters) and (len(self.states_of(parameters[0].group)) > 1 or any(p.scalars for p in parameters))


def _same(scalar: Scalar) -> tuple[object, ...]:
    # 0.0 and -0.0 are equal as values, and a nan never equals itself: so bytes are compared.
    return (scalar.raw, scalar.dtype, scalar.shape, type(scalar.value), None if scalar.dtype else repr(scalar.value))


def _counters(scalars: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{printable(k)}={v.value}" for k, v in scalars.items()) or "none"


def state_runs(parameter: LocalParameter, state: str) -> tuple[Run, ...]:
    """The runs of elements that make up one state of a parameter; zeros where the parameter has no such state."""
    return parameter.states.get(state) or ((ZEROS, 0, parameter.numel),)


def flat_runs(parameters: Sequence[LocalParameter], paddings: Sequence[int], state: str) -> list[Run]:
    """The runs of one state of several parameters in order, with alignment padding between the parameters."""
    found: list[Run] = []
    for parameter, padding in zip(parameters, paddings, strict=True):
        found += state_runs(parameter, state)
        if padding:
            found.append((ZEROS, 0, padding))
    return found


def zero_stage_node(stage: int) -> Node:
    """The enumeration's member, as DeepSpeed pickles it."""
    return PObject("reduce", Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), PTuple((stage,)))


def fragment_node(numel: int, start: int) -> Node:
    """A `fragment_address`: the place of a parameter's piece in its rank's partition."""
    cls = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return PObject("newobj", cls, PTuple(), state=mapping_of({"numel": numel, "start": start}), has_state=True)


def clip_grad_of(target: Target) -> Node:
    """The source's gradient clipping, from its files or its config (stage 3 stores none); None where neither has it.

    Without this entry, a loader keeps the value of its own config. The default was 0, and became 1.0 during 0.19.
    """
    return target.extras.get("clip_grad", target.source.clip_grad)


def trained_groups(model: LocalModel, count: int) -> list[list[LocalParameter]]:
    """The rank's trained parameters by param group."""
    return [model.group(index) for index in range(count)]


# Loss scaling: the object that stages 1 to 3 keep, and the plain entries that stage 0 keeps.
#
# Source: deepspeed 0.19.8 `runtime/fp16/loss_scaler.py` (attributes), `runtime/fp16/fused_optimizer.py` (`state_dict`),
# `runtime/config.py` (`fp16`: scale 2**16, window 1000, hysteresis 2, smallest scale 1),
# `runtime/zero/stage_1_and_2.py` and `stage3.py` (`load_state_dict`, `_rigid_load_state_dict`: required entries).

_PLAIN_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


def _facts(extras: Mapping[str, Node], config: RunConfig) -> dict[str | int, Node]:
    """The dynamic scaler's attributes: the fp16 source's own, in any of DeepSpeed's forms, or those of its config."""
    fp16 = config.fp16
    found: dict[str | int, Node] = {
        "cur_scale": 2.0 ** int(fp16.get("initial_scale_power", 16)),
        "dynamic": True,
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": fp16.get("loss_scale_window", 1000),
        "min_scale": fp16.get("min_loss_scale", 1),
        "delayed_shift": fp16.get("hysteresis", 2),
        "cur_hysteresis": fp16.get("hysteresis", 2),
        "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
        "dtype": Global("torch", "float16"),
    }
    scaler = extras.get("loss_scaler")
    if isinstance(scaler, PObject) and is_mapping(scaler.state):
        found |= mapping_items(scaler.state, what="loss_scaler")
    return found | {k: extras[k] for k in _PLAIN_KEYS if k in extras}


def scaler_entries(target: Target) -> dict[str | int, Node]:
    """`loss_scaler`, `dynamic_loss_scale` and `overflow`, as stages 1 to 3 keep them, for this target.

    Nothing for an fp16 target whose source says no scale: stages 1 and 2 then keep the scaler of the run's config.

    Raises:
        RequestError: `request.unsatisfiable` at stage 3, whose loader takes the scaler of the file in any case.
    """
    extras, config = target.extras, target.source
    overflow = extras.get("overflow", False)
    if target.dtype.name != "float16":
        # Only fp16 scales its loss. An engine with another dtype would take over and use any scale that it finds.
        plain = scaler_object("LossScaler", {"cur_scale": 1.0, "dynamic": False})
        return {"loss_scaler": plain, "dynamic_loss_scale": False, "overflow": overflow}
    if not target.scale_said:
        _refuse_unsaid(target)
        return {}
    dynamic = bool(extras.get("dynamic_loss_scale", not config.fp16.get("loss_scale")))
    scaler = extras.get("loss_scaler")
    if isinstance(scaler, PObject) and isinstance(scaler.cls, Global) and dynamic == (scaler.cls.name != "LossScaler"):
        return {"loss_scaler": scaler, "dynamic_loss_scale": dynamic, "overflow": overflow}
    if not dynamic:
        scale = extras.get("cur_scale", config.fp16.get("loss_scale", 1.0))
        static = scaler_object(
            "LossScaler", {"cur_scale": scale, "dynamic": False, "dtype": Global("torch", "float16")}
        )
        return {"loss_scaler": static, "dynamic_loss_scale": False, "overflow": overflow}
    dynamic_scaler = scaler_object("DynamicLossScaler", _facts(extras, config))
    return {"loss_scaler": dynamic_scaler, "dynamic_loss_scale": True, "overflow": overflow}


def plain_entries(target: Target) -> dict[str | int, Node]:
    """The entries of the loss scale that 16-bit optimizers of stage 0 keep; unfused ones keep them in bf16 too.

    Raises:
        RequestError: `request.unsatisfiable` for an fp16 target whose source says no scale: its loader requires one.
    """
    extras, config = target.extras, target.source
    if target.dtype.name != "float16":
        return {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": 0}
    if not target.scale_said:
        _refuse_unsaid(target)
    dynamic = bool(extras.get("dynamic_loss_scale", not config.fp16.get("loss_scale")))
    facts = _facts(extras, config)
    kept = _PLAIN_KEYS if dynamic else _PLAIN_KEYS[:2]
    return {"dynamic_loss_scale": dynamic, **{k: facts[k] for k in kept}}


def _refuse_unsaid(target: Target) -> None:
    if target.stage in (1, 2):
        return
    raise RequestError(
        "request.unsatisfiable",
        f"the source's run was not in fp16, so that it says no loss scale, and DeepSpeed's loader of stage "
        f"{target.stage} takes the scale of the file in place of the run's own",
        fix="--zero-stage 1, or 2: their loaders keep the scale that the run's config gives; or --dtype bf16",
    )


def scaler_attributes_left(target: Target) -> list[str]:
    """Attributes of the source's loss scaler that are lost, because the target's scaler has no such attributes."""
    scaler = target.extras.get("loss_scaler")
    if not isinstance(scaler, PObject) or not is_mapping(scaler.state):
        return []
    if target.stage > 0 and not target.bf16_optimizer and scaler_entries(target).get("loss_scaler") is scaler:
        return []
    known = _facts({}, target.source)
    return [f"loss_scaler.{k}" for k in mapping_items(scaler.state, what="loss_scaler") if k not in known]


def scale_warnings(target: Target) -> list[str]:
    """The warning that the loss scale starts anew, for a source whose run was not in fp16."""
    if target.dtype.name != "float16" or target.scale_said:
        return []
    return ["the source says no loss scale: the run's config gives it, and the first steps may be skipped"]


# Random states of ranks that a target does not take.


def random_states(checkpoint: Checkpoint, ranks: int) -> tuple[NotCarried, ...]:
    """Random states of source ranks beyond the first `ranks`, which no rank of the target takes."""
    held = checkpoint.rng
    if len(held) <= ranks:
        return ()
    reason = f"the target holds the states of {counted(ranks, 'rank')}, the source those of {len(held)}"
    return named(dict.fromkeys(k for r in held[ranks:] for k, v in r.items() if v is not None), reason)
