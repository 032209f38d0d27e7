"""Facts of a DeepSpeed run that no other format knows, and model states built from these facts and the checkpoint.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`, `_save_checkpoint`, `_load_checkpoint`: what
it does not know goes to the client), `runtime/pipe/engine.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from reshard.errors import RequestError, counted, listed
from reshard.models.jobs import NotCarried
from reshard_engine.checkpoint import Checkpoint, Counters, FormatFacts, LossScale, ParamGroup
from reshard_engine.formats.carried import named, of_the_format
from reshard_engine.formats.deepspeed.files import (
    COUNTERS,
    DESCRIBED_KEYS,
    LAYOUT_KEYS,
    OPTIMIZER_STATE,
    OWN_KEYS,
    RNG_KEYS,
    SCHEDULER,
    VERSION,
)
from reshard_engine.formats.format import RunFacts
from reshard_engine.formats.trainer_files import is_made, made_scheduler, steps_and_updates
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PList,
    PObject,
    PTensorRef,
    PTuple,
    is_mapping,
    mapping_items,
    mapping_of,
    namespace_items,
)
from reshard_engine.pickles.trees import KeyPath, nested_dict

# Names in Megatron-DeepSpeed's checkpoints. Readers, writers and `diff` use them.
#
# Source: Megatron-DeepSpeed (main, July 2025) `megatron/checkpointing.py` (`save_checkpoint`: what is beside the tag;
# `check_checkpoint_args` compares parallel sizes), `megatron/arguments.py` (names of `args`).

ARGS = "args"
"""The entry of model states that holds the run's arguments."""
VERSION_KEY = "checkpoint_version"
ITERATION = "iteration"
TRACKER = "latest_checkpointed_iteration.txt"
"""The file beside `latest` in which Megatron's tools look for the number of the last iteration."""
TOKENS_ARG = "consumed_train_tokens"
PADDED_VOCAB_ARG = "padded_vocab_size"
NO_PIPELINE_ARG = "no_pipeline_parallel"
VOCAB_DIVISOR_ARG = "make_vocab_size_divisible_by"
LAYOUT_ARGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "world_size",
    "moe_expert_parallel_size",
    PADDED_VOCAB_ARG,
    NO_PIPELINE_ARG,
    VOCAB_DIVISOR_ARG,
)
"""Arguments that name the layout. Writers set them for the target's layout; `diff` does not compare them."""


def with_args(node: Node, values: Mapping[str, Node]) -> Node:
    """The namespace with new values for those arguments that it has; any other node is returned unchanged."""
    known = namespace_items(node)
    if not known or not isinstance(node, PObject):
        return node
    return replace(node, state=mapping_of({**known, **{k: v for k, v in values.items() if k in known}}))


def without_layout(node: Node) -> Node:
    """The namespace without the arguments that name a layout; any other node is returned unchanged."""
    known = namespace_items(node)
    if not known or not isinstance(node, PObject):
        return node
    return replace(node, state=mapping_of({k: v for k, v in known.items() if k not in LAYOUT_ARGS}))


def is_megatron(checkpoint: Checkpoint) -> bool:
    """True if the client state is that of a Megatron-DeepSpeed run."""
    return ARGS in checkpoint.client_state and VERSION_KEY in checkpoint.client_state


OLDEST_VERSION = "0.7.4"
"""Loaders insist on a version; where it is unknown, the oldest whose stage 1 is laid out as today's stands in."""


@dataclass(frozen=True, slots=True)
class DeepSpeedFacts(FormatFacts):
    """The facts that a reader of DeepSpeed's files notes, for DeepSpeed's writers and for people."""

    engine_names: ClassVar[bool] = True
    lists_shapes: ClassVar[bool] = True

    zero_stage: int | None = None
    """The ZeRO stage; None for a universal checkpoint, which has one form for all stages."""
    bf16_optimizer: bool = False
    """True for a run of BF16_Optimizer, whose files say stage 1."""
    stage_layers: tuple[int, ...] = ()
    """For each stage of a pipeline, the number of its first layer that has parameters."""
    vocab_divisor: int | None = None
    """Models pad vocabularies to a multiple of this number times the tensor-parallel ranks; None where nothing says."""
    vocab_rows: int | None = None
    """Rows of the vocabulary in the source, with padding."""
    groups_kept: bool = False
    """True if the file says that Megatron-DeepSpeed's param groups are the same at every ZeRO stage of this run."""
    entries: Mapping[str | int, Node] = field(default_factory=dict[str | int, Node])
    """Entries of model states that are DeepSpeed's own, such as `module` (with `PTensorRef`s) and `ds_config`.

    A scheduler's state that `model_states` once made is here, too: it is not a state of the run.
    """
    order: tuple[str | int, ...] = ()
    """All keys of the model states in the order of the source's file; empty for a source that is not DeepSpeed's."""
    module_paths: tuple[KeyPath, ...] = ()
    """Key paths of the entries of `module`, which Megatron nests."""
    optimizer_entries: Mapping[str, Node] = field(default_factory=dict[str, Node])
    """Entries of optimizer files beside states and groups: loss scaler, overflow flag, clip_grad, ds_version."""
    params: tuple[Node, ...] = ()
    """The `params` entry of each param group, as in the source; empty where the groups were made anew."""
    dealt: bool = False
    """True if `round_robin_gradients` was on, by the config or, where that is a path, by the order of the files."""

    def run_state(self, checkpoint: Checkpoint) -> Mapping[str | int, Node]:
        """The model states without the entries that name, shape or hold tensors."""
        state = {k: v for k, v in _joined(checkpoint, self).items() if k not in DESCRIBED_KEYS}
        return {**state, SCHEDULER: None} if SCHEDULER in self.entries else state

    def own_state(self) -> Mapping[str | int, Node]:
        """Entries of model states such as `ds_config`, and entries of optimizer files such as the loss scaler."""
        described = {*DESCRIBED_KEYS, SCHEDULER}
        entries = {k: v for k, v in self.entries.items() if k not in described and v is not None}
        return {**entries, **{f"{OPTIMIZER_STATE}.{k}": v for k, v in self.optimizer_entries.items()}}

    def loss_scale(self) -> LossScale | None:
        """The dynamic scale of an fp16 run; it grows at the second step at which the count is a multiple of the window.

        Source: deepspeed 0.19.8 `runtime/fp16/loss_scaler.py` (`DynamicLossScaler.update_scale`).
        """
        beside, items = self.optimizer_entries, _scaler(self.optimizer_entries)
        if beside.get("dynamic_loss_scale", items.get("dynamic")) is not True:
            return None
        counts = [items.get(k) for k in ("cur_iter", "last_overflow_iter", "scale_window")]
        now, last, window = (n if type(n) is int else None for n in counts)
        # Optimizers of stage 0 have no hysteresis: each overflow halves the scale.
        whole, left = items.get("delayed_shift", 1), items.get("cur_hysteresis", 1)
        scale, least = items.get(_SCALE), items.get("min_scale")
        if now is None or last is None or window is None or window < 1 or now <= last:
            return None
        if type(whole) is not int or type(left) is not int or items.get("consecutive_hysteresis", False) is not False:
            return None
        if not isinstance(scale, int | float) or items.get("scale_factor") != 2:
            return None
        stable = now - last - 1
        held = tuple(f"{OPTIMIZER_STATE}.{k}" for k in ("loss_scaler", "dynamic_loss_scale", *_SCALER) if k in beside)
        good = (stable - 1) % window if stable else -1
        lowest = float(least) if isinstance(least, int | float) else None
        return LossScale(float(scale), good, 1 if whole == 1 else left, window, whole, lowest, held)

    def trees(self, checkpoint: Checkpoint) -> Iterator[tuple[Node, str]]:
        """The trees that every format has, and the entries of optimizer files such as the loss scaler."""
        yield from FormatFacts.trees(self, checkpoint)
        yield mapping_of({**self.optimizer_entries}), OPTIMIZER_STATE


def facts_of(checkpoint: Checkpoint) -> DeepSpeedFacts:
    """The DeepSpeed facts of a checkpoint; if no reader of DeepSpeed's files made it, nothing but its loss scale."""
    if isinstance(checkpoint.facts, DeepSpeedFacts):
        return checkpoint.facts
    scale = checkpoint.facts.loss_scale()
    return DeepSpeedFacts(optimizer_entries={} if scale is None else _entries_of(scale, checkpoint.counters.steps))


def refuse_complex(checkpoint: Checkpoint) -> None:
    """Refuse trained parameters of complex numbers, with which no run of DeepSpeed can take a step.

    Raises:
        RequestError: `request.unsatisfiable`.

    Source: deepspeed 0.19.8 `runtime/engine.py` (`split_half_float_double_sparse`: "attempting to reduce an unsupported
    grad type" at stage 0), `runtime/zero` (stages 1 to 3 copy parameters into flat vectors of one type); verified by
    running.
    """
    tensors = checkpoint.shard_map.tensors
    names = [p.fqn for p in checkpoint.trained if p.weight is not None and tensors[p.weight].dtype.complex]
    if names:
        raise RequestError(
            "request.unsatisfiable",
            f"{counted(len(names), 'trained parameter is', 'trained parameters are')} complex ({listed(names)}), and "
            "DeepSpeed trains real numbers alone",
            fix="--to dcp, for a run under FSDP2 or DDP; or write the weights alone: --to safetensors",
        )


def _entries_of(scale: LossScale, steps: int | None) -> dict[str, Node]:
    """The entries of optimizer files that hold a loss scale."""
    now, good = scale.good_steps + 1 if steps is None else steps, scale.good_steps
    scaler = scaler_object(
        "DynamicLossScaler",
        {
            "cur_scale": scale.scale, "dynamic": True, "cur_iter": now, "last_overflow_iter": now - 2 - good,
            "scale_factor": 2.0, "scale_window": scale.window, "min_scale": scale.least,
            "delayed_shift": scale.hysteresis, "cur_hysteresis": scale.overflows, "consecutive_hysteresis": False,
            "raise_error_at_min_scale": True, "dtype": Global("torch", "float16"),
        },
    )  # fmt: skip
    return {"loss_scaler": scaler, "dynamic_loss_scale": True, "overflow": False}


def scaler_object(name: str, state: dict[str | int, Node]) -> PObject:
    """A loss scaler of a class of DeepSpeed with these attributes."""
    cls = Global("deepspeed.runtime.fp16.loss_scaler", name)
    return PObject("newobj", cls, PTuple(), state=mapping_of(state), has_state=True)


def run_fields(entries: Mapping[str | int, Node], rng: tuple[Mapping[str, Node], ...] = ()) -> dict[str, Any]:
    """The fields of `Checkpoint` that every format has, taken from the entries of model states.

    Args:
        entries: The model states, with references in place of tensors.
        rng: Random states by rank, where they are known; those of `entries` otherwise.
    """
    rng = rng or ((found,) if (found := {k: entries[k] for k in RNG_KEYS if entries.get(k) is not None}) else ())
    taken = {*own_entries(entries), *(rng[0] if rng else ()), *COUNTERS, SCHEDULER}
    counted: dict[str, int] = {COUNTERS[str(k)]: v for k, v in entries.items() if k in COUNTERS and type(v) is int}
    tokens = namespace_items(entries.get(ARGS)).get(TOKENS_ARG)
    scheduler = entries.get(SCHEDULER)
    return {
        "counters": Counters(**counted, tokens=tokens if type(tokens) is int else None),
        "schedulers": () if scheduler is None or is_made(scheduler) else (scheduler,),
        "rng": rng,
        "client_state": {k: v for k, v in entries.items() if k not in taken},
    }


def own_entries(entries: Mapping[str | int, Node]) -> dict[str | int, Node]:
    """The entries that only DeepSpeed knows, and entries with a counter's name whose value is not an integer."""
    made = {SCHEDULER} if is_made(entries.get(SCHEDULER)) else set[str]()
    return {k: v for k, v in entries.items() if k in OWN_KEYS | made or (k in COUNTERS and type(v) is not int)}


def model_states(checkpoint: Checkpoint) -> dict[str | int, Node]:
    """The model states that DeepSpeed would save here; in the source's order if DeepSpeed wrote the source.

    Raises:
        RequestError: `request.unsatisfiable` if DeepSpeed keeps less than the source holds.
    """
    facts, why = facts_of(checkpoint), None
    if taken := [str(k) for k in checkpoint.client_state if k in OWN_KEYS or k in COUNTERS or k == SCHEDULER]:
        why = f"the client state has {listed(taken)}, and DeepSpeed keeps something else under that name"
    if why is not None:
        raise RequestError("request.unsatisfiable", why, fix="write the weights alone: --to safetensors")
    return ({} if facts.order else _derived(checkpoint)) | _joined(checkpoint, facts)


def _joined(checkpoint: Checkpoint, facts: DeepSpeedFacts) -> dict[str | int, Node]:
    held: dict[str | int, Node] = {SCHEDULER: None} if SCHEDULER in facts.order else {}
    held |= facts.entries
    held |= {k: v for k, name in COUNTERS.items() if (v := getattr(checkpoint.counters, name)) is not None}
    # Not None where the source has schedulers and none is this optimizer's: loaders of a run with one take no None.
    held |= {} if (scheduler := checkpoint.scheduler) is None else {SCHEDULER: scheduler}
    for states in checkpoint.rng[:1]:
        held |= {**states}
    held |= checkpoint.client_state
    return {key: held[key] for key in dict.fromkeys((*facts.order, *held)) if key in held}


def _derived(checkpoint: Checkpoint) -> dict[str | int, Node]:
    """The entries that loaders require, made for a source whose files were not DeepSpeed's."""
    steps, updates = steps_and_updates(checkpoint)
    numbers = {p.fqn: p.weight for p in checkpoint.parameters if p.weight is not None}
    numbers |= {b.fqn: b.tensor for b in checkpoint.buffers}
    nodes: dict[str, Node] = {**{n: PTensorRef(t) for n, t in numbers.items()}, **checkpoint.extra_states}
    nodes |= {alias: nodes[owner] for alias, owner in checkpoint.shared.items() if owner in nodes}
    names = (n for n in dict.fromkeys((*checkpoint.module_names, *nodes)) if n in nodes)
    return {
        "module": nested_dict(((name,), nodes[name]) for name in names),
        "buffer_names": PList([b.fqn for b in checkpoint.buffers if b.registered]),
        "optimizer": None,
        "shared_params": mapping_of({**checkpoint.shared}),
        SCHEDULER: made_scheduler(updates or 0),
        "skipped_steps": 0,
        "global_steps": steps or 0,
        "dp_world_size": checkpoint.world.get("dp", 1),
        "mp_world_size": 1,
        VERSION: OLDEST_VERSION,
    }


def derived_warnings(checkpoint: Checkpoint) -> list[str]:
    """Warnings about counters, schedulers and frozen weights of which a source of another format holds none."""
    if facts_of(checkpoint).order:
        return []
    steps, updates = steps_and_updates(checkpoint)
    found = ["nothing in the source counts steps: global_steps is 0"] if steps is None else []
    if checkpoint.frozen_left_out:
        found.append(
            "the frozen base model is not in the source, so it has to be there when the run loads: the Trainer does "
            "that; in a script, build the model with its base weights and load_checkpoint(load_module_strict=False)"
        )
    if checkpoint.scheduler is None:
        after = "begins anew" if updates is None else f"goes on as after {updates} steps, one for each update"
        found.append(
            f"the source holds no state of this optimizer's learning-rate scheduler: the run's scheduler {after}; "
            "CosineAnnealingWarmRestarts, ReduceLROnPlateau and GreedyLR remember more than a count and begin anew; "
            "SequentialLR and ChainedScheduler do not load it (load_lr_scheduler_states=False)"
        )
    return found


def not_kept(checkpoint: Checkpoint) -> tuple[NotCarried, ...]:
    """Parts of the run that DeepSpeed's files cannot hold: tokens, unless Megatron's arguments count them, and more.

    It keeps one scheduler.
    """
    lost = ["tokens"] if checkpoint.counters.tokens is not None and ARGS not in checkpoint.client_state else []
    count = len(checkpoint.schedulers)
    keys = checkpoint.scheduler_keys or tuple(f"{SCHEDULER}[{i}]" for i in range(count))
    further = named((keys[i] for i in range(count) if i != checkpoint.own_scheduler), "DeepSpeed keeps one scheduler")
    own = isinstance(checkpoint.facts, DeepSpeedFacts)
    others = () if own else of_the_format(checkpoint, "DeepSpeed's checkpoints have no place for it")
    return (*named(lost, "DeepSpeed counts no tokens"), *further, *others)


def split_groups(nodes: Iterable[Node]) -> tuple[tuple[ParamGroup, ...], tuple[Node, ...]]:
    """Param groups as DeepSpeed's files hold them: hyper-parameters, and the numbers of their members."""
    found = [mapping_items(node, what="param_groups") for node in nodes]
    groups = tuple(ParamGroup({k: v for k, v in entries.items() if k != "params"}) for entries in found)
    return groups, tuple(entries.get("params", PList([i])) for i, entries in enumerate(found))


def group_node(group: ParamGroup, params: Node) -> Node:
    """A param group as DeepSpeed's files hold it, with the numbers of its members."""
    return mapping_of({**group.hyper_parameters, "params": params})


# The part of a DeepSpeed run's state that `diff` compares beside its tensors: the same under every layout.

_SCALE = "cur_scale"
_SCALER = (_SCALE, "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_CLIPPING = "clip_grad"


def run_facts(checkpoint: Checkpoint) -> RunFacts:
    """The run's state for `diff`: model states without layout entries, the loss scale, and the gradient clipping.

    Raises:
        SourceError: `checkpoint.malformed` for trees of the wrong shape.
    """
    entries = checkpoint.facts.run_state(checkpoint)
    state = {str(k): v for k, v in entries.items() if k not in LAYOUT_KEYS} if entries else None
    if state is not None and ARGS in state:
        state[ARGS] = without_layout(state[ARGS])
    if checkpoint.optimizer is None:
        return RunFacts(state)
    beside = facts_of(checkpoint).optimizer_entries
    scaler = _scaler(beside)
    # Stage 0 in fp32 and BF16_Optimizer keep no scale: they scale by 1. Only some stages keep the other attributes.
    optimizer: dict[str, Node] = {f"loss_scaler.{_SCALE}": scaler.get(_SCALE, 1.0)}
    optimizer |= {f"loss_scaler.{key}": scaler[key] for key in _SCALER[1:] if key in scaler}
    optimizer |= {_CLIPPING: beside[_CLIPPING]} if _CLIPPING in beside else {}
    return RunFacts(state, optimizer, frozenset(k for k in optimizer if k != f"loss_scaler.{_SCALE}"))


def _scaler(beside: Mapping[str, Node]) -> Mapping[str | int, Node]:
    """The loss scaler's attributes, from the object that stages 1 to 3 keep, or from stage 0's entries.

    Source: deepspeed 0.19.8 `runtime/fp16/loss_scaler.py` (`LossScalerBase`), `runtime/fp16/fused_optimizer.py`.
    """
    node = beside.get("loss_scaler")
    if isinstance(node, PObject) and node.has_state and is_mapping(node.state):
        return mapping_items(node.state, what="loss_scaler")
    return {k: v for k, v in beside.items() if k in _SCALER}
