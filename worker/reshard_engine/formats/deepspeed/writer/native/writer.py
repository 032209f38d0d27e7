"""Native DeepSpeed checkpoints: any stage, on any number of ranks, from any source with optimizer states.

Loaders refuse a tag without its model states, so the model-states files are the commit files. `latest` is last.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_optimizer_ckpt_name`,
`_save_zero_checkpoint`); what loaders read is in docs/formats/deepspeed-zero.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

from reshard.choices import OpaquePolicy, RngPolicy
from reshard.errors import RequestError
from reshard.models import ConvertRequest, NotCarried
from reshard.options import NativeLayout
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.deepspeed.cautions import padding_changes, sectioned
from reshard_engine.formats.deepspeed.configured_groups import configured_warnings
from reshard_engine.formats.deepspeed.facts import derived_warnings, facts_of, model_states, not_kept
from reshard_engine.formats.deepspeed.megatron import ITERATION, TRACKER, is_megatron
from reshard_engine.formats.deepspeed.names import CONFIG, LATEST, OPTIMIZER_STATE, RNG_KEYS, TIED, VERSION
from reshard_engine.formats.deepspeed.optimizer_states import (
    OTHER_PARTITIONS,
    require_optimizer,
    states_to_write,
    with_all_counters,
    without_recomputed,
)
from reshard_engine.formats.deepspeed.random_states import random_states
from reshard_engine.formats.deepspeed.writer.native.autoep import (
    expert_weights,
    fused_experts,
    layer_numbers,
    refuse_impossible,
)
from reshard_engine.formats.deepspeed.writer.native.client_state import relaid
from reshard_engine.formats.deepspeed.writer.native.cutting import Cutter
from reshard_engine.formats.deepspeed.writer.native.experts import expert_of, experts_by_layer, require_divisible
from reshard_engine.formats.deepspeed.writer.native.flat import FlatStates
from reshard_engine.formats.deepspeed.writer.native.megatron_groups import group_changes, megatron_grouped
from reshard_engine.formats.deepspeed.writer.native.model import LocalModel
from reshard_engine.formats.deepspeed.writer.native.model_states import ModelStatesFiles
from reshard_engine.formats.deepspeed.writer.native.optimizer import Groups, trained_groups
from reshard_engine.formats.deepspeed.writer.native.rank_parameters import is_pipeline, local_models
from reshard_engine.formats.deepspeed.writer.native.regrouping import (
    regrouped,
    trainers_scheduler,
    without_empty_groups,
)
from reshard_engine.formats.deepspeed.writer.native.scaling import scale_warnings, scaler_attributes_left
from reshard_engine.formats.deepspeed.writer.native.sharded import ShardedStates
from reshard_engine.formats.deepspeed.writer.native.target import Target, resolve
from reshard_engine.formats.deepspeed.writer.native.whole import whole_optimizer
from reshard_engine.formats.not_written import AS_ASKED, named
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import Node, PTensorRef, mapping_of, ordered_dict
from reshard_engine.tensors.layout import Pointer, TargetFile, TargetLayout


class ZeroWriter:
    """Lays out native checkpoints."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Lay out the optimizer files rank by rank, then the model states.

        Raises:
            RequestError: `request.invalid` without a layout, `request.unsatisfiable` if the target cannot hold the
                source.
        """
        require_optimizer(checkpoint, "a native checkpoint")
        before = checkpoint
        checkpoint, recomputed = without_recomputed(checkpoint)
        checkpoint, empty_groups = without_empty_groups(checkpoint)
        checkpoint, never_updated = with_all_counters(checkpoint)
        target = resolve(checkpoint, request)
        checkpoint = _with_copies(checkpoint, target)
        refuse_impossible_layout(target, checkpoint)
        source = checkpoint
        checkpoint = megatron_grouped(
            regrouped(checkpoint, target.layout.ep),
            sharded=target.stage == 3,
            wanted=request.options.deepspeed.weight_decay_groups,
        )
        rows = vocab_rows(checkpoint, target.layout)
        cutter = Cutter(checkpoint, target.layout.tp, rows, dtype=target.dtype)
        models = local_models(checkpoint, target, cutter)
        # Numbers of parts follow those of the source's tensors; templates refer to both.
        parts = tuple(cutter.parts)
        whole = replace(checkpoint, shard_map=TargetLayout((), None, parts=parts).map_over(checkpoint.shard_map))
        groups = Groups(whole, states_to_write(checkpoint))
        refuse_empty_groups(models, groups.count)
        state = relaid(model_states(checkpoint), target, rows)
        files = _Files(whole, target, groups, state, opaque=request.opaque)
        for model in models:
            files.add(model)
        warnings = [
            *never_updated,
            *derived_warnings(checkpoint),
            *configured_warnings(checkpoint),
            *_rng_warnings(checkpoint, target),
            *_vocab_warnings(checkpoint, target, rows),
            *scale_warnings(target),
        ]
        warnings += [OTHER_PARTITIONS] if recomputed and target.dp != checkpoint.world.get("dp", 1) else []
        warnings += group_changes(source, checkpoint)
        warnings += padding_changes(checkpoint, rows, target.layout.tp)
        warnings += sectioned(checkpoint, request) if target.tp_changes else []
        pointer = Pointer(LATEST, name.encode(), beside=_tracker(checkpoint))
        left = (*recomputed, *empty_groups, *_not_carried(checkpoint, target))
        beside = trainers_scheduler(before, checkpoint, request.opaque)
        return TargetLayout((*files.bodies, *beside, *files.commits), pointer, tuple(warnings), parts, left)


def _with_copies(checkpoint: Checkpoint, target: Target) -> Checkpoint:
    """The checkpoint with tensors that may be copies of others, and not their other names, as frozen parameters, too.

    A run whose model has them as parameters of its own reads them as frozen ones; a run that ties them looks up only
    its own names. Source: deepspeed 0.19.8 `runtime/engine.py` (`load_module_state_dict`); verified by running.
    """
    if target.stage < 2 or target.layout.tp * target.layout.pp > 1:
        return checkpoint
    tensors = checkpoint.shard_map.tensors
    found = (Parameter(name, tensors[number].shape, None, number) for name, number in checkpoint.copies.items())
    return replace(checkpoint, parameters=(*checkpoint.parameters, *found))


def _not_carried(checkpoint: Checkpoint, target: Target) -> tuple[NotCarried, ...]:
    layout = target.layout
    drops = layout.rng is RngPolicy.DROP
    # Below stage 3 one file of model states serves all data-parallel ranks.
    ranks = layout.tp * layout.pp * (target.dp if target.stage == 3 else 1)
    rng = named(checkpoint.rng[0] if checkpoint.rng else (), AS_ASKED)
    lost = scaler_attributes_left(target)
    return (
        *(rng if drops else random_states(checkpoint, ranks)),
        *named(lost, "this target's loss scaler has no such attribute"),
        *not_kept(checkpoint),
    )


def refuse_impossible_layout(target: Target, checkpoint: Checkpoint) -> None:
    """Refuse sizes and stages that no model can have together.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    layout, experts = target.layout, experts_by_layer(p.fqn for p in checkpoint.trained)
    fused = fused_experts(checkpoint)
    require_divisible([*experts.values(), *(shape[0] for shape in fused.values())], layout.ep, target.dp)
    refuse_impossible(fused, target, [p.fqn for p in checkpoint.frozen])
    if experts and target.stage in (0, 3):
        raise RequestError(
            "request.unsatisfiable",
            f"ZeRO stage {target.stage} does not hold the groups of experts that DeepSpeed partitions on their own",
            fix="--zero-stage 1, 2 or bf16",
        )
    if target.stage == 0 and layout.tp * layout.pp > 1:
        raise RequestError(
            "request.unsatisfiable", "stage 0 under tensor or pipeline parallelism is not written", fix="--zero-stage 1"
        )
    if is_pipeline(checkpoint) and target.stage > 1:
        raise RequestError(
            "request.unsatisfiable",
            f"DeepSpeed's pipelines do not run at ZeRO stage {target.stage}",
            fix="--zero-stage 1 or bf16; for Megatron-DeepSpeed also --names megatron-no-pipeline",
        )


def refuse_empty_groups(models: Sequence[LocalModel], count: int) -> None:
    """Refuse stages without a parameter of some param group.

    DeepSpeed drops such a group on that stage, and the ranks then wait for each other for ever.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    for model in models:
        empty = [index for index in range(count) if not model.group(index)]
        if empty and len(models) > 1:
            raise RequestError(
                "request.unsatisfiable",
                f"pipeline stage {model.pp} would hold no parameter of param group {empty[0]}",
                fix="other boundaries: --partition-method 0,3,6",
            )


def vocab_rows(checkpoint: Checkpoint, layout: NativeLayout) -> int | None:
    """Rows of the vocabulary with padding for the target's ranks; None where no parameter is a vocabulary.

    Where nothing gives the divisor of the padding, the source's number of rows stays if the ranks divide it. A model
    that has another number of rows refuses the checkpoint when it loads.
    """
    sizes = [p.shape[0] for p in checkpoint.parameters if p.cut is not None and p.cut.vocabulary is not None]
    if not sizes:
        return None
    facts = facts_of(checkpoint)
    divisor = layout.vocab_divisor or facts.vocab_divisor
    if divisor is None and facts.vocab_rows is not None and facts.vocab_rows % layout.tp == 0:
        return facts.vocab_rows
    unit = (divisor or 1) * layout.tp
    return -(-max(sizes) // unit) * unit


def _vocab_warnings(checkpoint: Checkpoint, target: Target, rows: int | None) -> list[str]:
    known = target.layout.vocab_divisor or facts_of(checkpoint).vocab_divisor
    if rows is None or known is not None or not target.tp_changes:
        return []
    text = f"nothing says to which multiple the model pads its vocabulary: {rows} rows for {target.layout.tp} ranks"
    return [f"{text}; a model with another number of rows refuses them; --vocab-divisor gives the right number"]


def _tracker(checkpoint: Checkpoint) -> tuple[tuple[str, bytes], ...]:
    """The file of Megatron's tools beside `latest`: the number of the iteration, as text."""
    iteration = checkpoint.client_state.get(ITERATION)
    return ((TRACKER, str(iteration).encode()),) if is_megatron(checkpoint) and type(iteration) is int else ()


class _Files:
    """Collects the files of all ranks."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Target,
        groups: Groups,
        state: Mapping[str | int, Node],
        *,
        opaque: OpaquePolicy,
    ) -> None:
        self._checkpoint, self._target, self._opaque = checkpoint, target, opaque
        self._groups, self._state = groups, state
        self._experts = experts_by_layer(p.fqn for p in checkpoint.trained)
        self._done: set[str] = set()
        self.bodies: list[TargetFile] = []
        self.commits: list[TargetFile] = []

    def _file(self, name: str, node: Node, *, commit: bool) -> TargetFile:
        root = name.removesuffix(".pt")
        template, slots = tree_template(root, node, self._checkpoint.shard_map, opaque=self._opaque)
        return TargetFile(name, template, slots, commit=commit)

    def add(self, model: LocalModel) -> None:
        """The files of one model-parallel rank."""
        target = self._target
        number = model.pp * target.layout.tp + model.tp
        states = self._states_of(model)
        shapes = states.shapes() if states is not None else trained_groups(model, self._groups.count)
        model_files = ModelStatesFiles(self._checkpoint, model, target, shapes)
        if states is not None:
            self._add_optimizer(states, number)
        self._add_layers(model, model_files)
        self._add_experts(model, model_files, number)
        optimizer = whole_optimizer(self._groups, model, target) if states is None else None
        ranks = target.dp if target.stage == 3 else 1
        for rank in range(ranks):
            name = f"mp_rank_{number:02d}_model_states.pt"
            name = f"zero_pp_rank_{rank}_{name}" if target.stage == 3 else name
            entries = model_files.entries_of(rank, self._run_state(number * ranks + rank), optimizer)
            self.commits.append(self._file(name, entries, commit=True))

    def _states_of(self, model: LocalModel) -> FlatStates | ShardedStates | None:
        if self._target.stage == 0:
            return None
        kind = ShardedStates if self._target.stage == 3 else FlatStates
        return kind(self._groups, model, self._target)

    def _add_optimizer(self, states: FlatStates | ShardedStates, number: int) -> None:
        for rank in range(self._target.dp):
            outer: dict[str | int, Node] = {
                OPTIMIZER_STATE: states.optimizer_of(rank),
                CONFIG: self._target.config,
                VERSION: self._target.version,
            }
            name = f"{self._target.prefix}zero_pp_rank_{rank}_mp_rank_{number:02d}_optim_states.pt"
            self.bodies.append(self._file(name, mapping_of(outer), commit=False))

    def _run_state(self, rank: int) -> Mapping[str | int, Node]:
        """The run's own state, with the random states of source rank `rank` modulo their number."""
        found = self._checkpoint.rng
        if self._target.layout.rng is RngPolicy.DROP:
            gone = {*RNG_KEYS, *(found[0] if found else ())}
            return {k: v for k, v in self._state.items() if k not in gone}
        return {**self._state, **found[rank % len(found)]} if found else self._state

    def _add_layers(self, model: LocalModel, files: ModelStatesFiles) -> None:
        layers: dict[int, dict[str, Node]] = {}
        # In the model's order: only `module_names` still show it after the parameters were grouped anew.
        place = {name: i for i, name in enumerate(self._checkpoint.module_names)}
        for parameter in sorted(model.parameters, key=lambda p: place.get(p.fqn, 0)):
            if (layer := model.layers.get(parameter.fqn)) is not None:
                inner = parameter.fqn.removeprefix(f"{layer}.")
                if parameter.fqn.startswith(TIED):
                    inner = parameter.fqn.removeprefix(TIED).partition(".")[2]
                layers.setdefault(layer, {})[inner] = files.weight_node(parameter)
        for name, number in model.buffers.items():
            layer = name.partition(".")[0]
            if layer.isdecimal() and int(layer) in layers:
                layers[int(layer)][name.removeprefix(f"{layer}.")] = PTensorRef(number)
        for name, extra in model.extra_states.items():
            layer = name.partition(".")[0]
            if layer.isdecimal() and int(layer) in layers:
                layers[int(layer)][name.removeprefix(f"{layer}.")] = extra
        for layer, weights in sorted(layers.items()):
            name = f"layer_{layer:02d}-model_{model.tp:02d}-model_states.pt"
            if name not in self._done:  # a tied module is on several stages
                self._done.add(name)
                self.bodies.append(self._file(name, ordered_dict(weights), commit=False))

    def _add_experts(self, model: LocalModel, files: ModelStatesFiles, number: int) -> None:
        if self._target.stage != 3:
            for layer, expert_number, parts in expert_weights(model, self._checkpoint):
                fused: dict[str, Node] = {p.fqn: files.weight_node(p) for p in parts}
                name = f"layer_{layer}_expert_{expert_number}_mp_rank_{number:02d}_model_states.pt"
                self.bodies.append(self._file(name, ordered_dict(fused), commit=False))
        # MoE layers of both kinds share one sequence of numbers.
        taken = layer_numbers(self._checkpoint)
        free = (n for n in count() if n not in taken)
        heads = dict(zip(self._experts, free, strict=False))
        experts: dict[tuple[int, int], dict[str, Node]] = {}
        for parameter in model.parameters:
            if (expert := expert_of(parameter.fqn)) is not None:
                experts.setdefault((heads[expert.head], expert.number), {})[parameter.fqn] = files.weight_node(
                    parameter
                )
        for (layer, expert_number), weights in sorted(experts.items()):
            name = f"layer_{layer}_expert_{expert_number}_mp_rank_{number:02d}_model_states.pt"
            self.bodies.append(self._file(name, ordered_dict(weights), commit=False))


def _rng_warnings(checkpoint: Checkpoint, target: Target) -> list[str]:
    rng_states = list(checkpoint.rng[0]) if checkpoint.rng else []
    layout = target.layout
    world = (target.dp, layout.tp, layout.pp)
    if not rng_states or world == tuple(checkpoint.world.get(axis, 1) for axis in ("dp", "tp", "pp")):
        return []
    if layout.rng is RngPolicy.DROP:
        return [f"random states ({', '.join(rng_states)}) were left out, as asked"]
    return [
        f"random states ({', '.join(rng_states)}) do not fit other worlds: rank r gets those of source rank r mod N"
    ]
