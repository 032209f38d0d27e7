"""Native DeepSpeed checkpoints: any stage, on any number of ranks, from any source with optimizer states.

Loaders refuse a tag without its model states, so the model-states files are the commit files. `latest` is last.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`, `_get_optimizer_ckpt_name`,
`_save_zero_checkpoint`); what loaders read is in docs/formats/deepspeed-zero.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from reshard.choices import OpaquePolicy
from reshard.errors import RequestError, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard.options import DeepSpeedOptions
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.carried import AS_ASKED, named
from reshard_engine.formats.deepspeed.cautions import padding_changes, sectioned
from reshard_engine.formats.deepspeed.config import configured_warnings
from reshard_engine.formats.deepspeed.facts import (
    ARGS,
    ITERATION,
    PADDED_VOCAB_ARG,
    TRACKER,
    VOCAB_DIVISOR_ARG,
    derived_warnings,
    facts_of,
    is_megatron,
    model_states,
    not_kept,
    with_args,
)
from reshard_engine.formats.deepspeed.files import (
    CONFIG,
    FROZEN_FRAGMENTS,
    FROZEN_SHAPES,
    INFO,
    LATEST,
    OPTIMIZER_STATE,
    PARALLEL_DIMENSIONS,
    PARAM_SHAPES,
    RNG_KEYS,
    SCHEDULER,
    TIED,
    VERSION,
)
from reshard_engine.formats.deepspeed.native.target import LocalModel, LocalParameter, Target, resolve
from reshard_engine.formats.deepspeed.optimizer import (
    OTHER_PARTITIONS,
    Groups,
    random_states,
    refuse_torchs_muon,
    require_optimizer,
    scale_warnings,
    scaler_attributes_left,
    states_to_write,
    trained_groups,
    with_all_counters,
    without_empty_parameters,
    without_recomputed,
)
from reshard_engine.formats.deepspeed.parallel.experts import (
    entries_for,
    expert_of,
    expert_weights,
    experts_by_layer,
    fuse_experts,
    layer_numbers,
    refuse_impossible,
    require_divisible,
)
from reshard_engine.formats.deepspeed.parallel.ranks import boundaries
from reshard_engine.formats.deepspeed.parallel.rules import AFFINE, PADDED_VOCAB, SECTION_WIDTHS, SECTIONS
from reshard_engine.formats.deepspeed.parallel.tensor import Cutter
from reshard_engine.formats.deepspeed.param_groups import (
    group_changes,
    in_muons_order,
    megatron_grouped,
    regrouped,
    trainers_scheduler,
    without_empty_groups,
)
from reshard_engine.formats.deepspeed.stage0 import whole_optimizer
from reshard_engine.formats.deepspeed.zero3 import ShardedStates, share_of
from reshard_engine.formats.deepspeed.zero12 import FlatStates
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PList,
    PLiteral,
    PObject,
    PRuns,
    PRunsPart,
    PTensorRef,
    PTuple,
    is_mapping,
    mapping_items,
    mapping_of,
    ordered_dict,
    sequence_items,
)
from reshard_engine.pickles.trees import KeyPath, name_of, nested_dict
from reshard_engine.tensors.layout import Pointer, TargetFile, TargetLayout

# The parameters that each model-parallel rank of the target holds, cut from whole ones.
#
# The parameters of a stage are in the order in which `PipelineModule` registers them: first tied modules, then layer by
# layer, whatever the source's stages were. The optimizer's groups have the same order.
#
# Source: deepspeed 0.19.8 `runtime/pipe/module.py` (`_build`, `tied_modules`), `runtime/pipe/topology.py`.


def local_models(checkpoint: Checkpoint, target: Target, cutter: Cutter) -> list[LocalModel]:
    """The model-parallel ranks of the target, in the order of their numbers.

    Raises:
        RequestError: `request.unsatisfiable` if the model cannot be cut for this layout.
    """
    stages, fused = _stages(checkpoint, target), fuse_experts(checkpoint)
    buffers = {b.fqn: b.tensor for b in checkpoint.buffers}
    paths = _paths(checkpoint)
    found: list[LocalModel] = []
    for pp, members in enumerate(stages):
        for tp in range(target.layout.tp):
            local = tuple(cutter.local(p, tp) for p in members)
            inside = {p.fqn for p in members}
            found.append(
                LocalModel(
                    pp=pp,
                    tp=tp,
                    parameters=local,
                    layers={p.fqn: p.layer for p in members if p.layer is not None},
                    buffers=buffers,
                    shared={a: o for a, o in checkpoint.shared.items() if o in inside or o in buffers},
                    extra_states=checkpoint.extra_states,
                    paths=paths,
                    fused=fused,
                )
            )
    return found


def is_pipeline(checkpoint: Checkpoint) -> bool:
    """True if the names of parameters give the layers of a pipeline."""
    return any(p.layer is not None for p in checkpoint.trained)


def _stages(checkpoint: Checkpoint, target: Target) -> list[list[Parameter]]:
    """The parameters of each pipeline stage, in the order of the stage."""
    layout, everything = target.layout, [*checkpoint.trained, *checkpoint.frozen]
    if not is_pipeline(checkpoint):
        if layout.pp > 1:
            raise RequestError(
                "request.unsatisfiable",
                f"{layout.pp} pipeline stages, but the parameters' names give no layers: the run was no pipeline",
                fix="--pp 1, or --names megatron-pipeline for a model of Megatron-DeepSpeed",
            )
        return [everything]
    stray = [p.fqn for p in everything if p.layer is None]
    if stray:
        raise RequestError(
            "request.unsatisfiable",
            f"{printable(stray[0])} belongs to no layer of the pipeline",
            fix="write it without a pipeline, for a model without one: --pp 1",
        )
    ordered = sorted(everything, key=lambda p: (not p.fqn.startswith(TIED), 0 if p.fqn.startswith(TIED) else p.layer))
    if layout.pp == 1:
        return [ordered]
    cuts = _boundaries(checkpoint, target, ordered)
    return [list(_members(ordered, cuts, stage)) for stage in range(layout.pp)]


def _members(ordered: Sequence[Parameter], cuts: Sequence[int], stage: int) -> Iterator[Parameter]:
    last = stage == len(cuts) - 2
    for parameter in ordered:
        assert parameter.layer is not None
        # A tied module is on the last stage too: the embedding is used again as the model's head.
        if cuts[stage] <= parameter.layer < cuts[stage + 1] or (last and parameter.fqn.startswith(TIED)):
            yield parameter


def _boundaries(checkpoint: Checkpoint, target: Target, ordered: Sequence[Parameter]) -> list[int]:
    layout, options = target.layout, target.options
    weights: dict[int, int] = {}
    shapes: dict[int, list[object]] = {}
    for parameter in ordered:
        layer = parameter.layer or 0
        size = 1
        for length in parameter.shape:
            size *= length
        cut = parameter.cut is not None and parameter.cut.dim is not None
        if parameter.trained:
            weights[layer] = weights.get(layer, 0) + (size // layout.tp if cut else size)
        shapes.setdefault(layer, []).append((parameter.fqn.partition(".")[2], parameter.shape))
    tied = _is_tied(ordered)
    if options.partition_method is None:
        stage_layers = facts_of(checkpoint).stage_layers
        if stage_layers and len(stage_layers) == layout.pp:
            # As many stages as before: their layers are the source's.
            first = ",".join(map(str, (0, *stage_layers[1:])))
            options = options.model_copy(update={"partition_method": first})
        elif is_megatron(checkpoint):
            options = options.model_copy(update={"partition_method": "type:transformer"})
        else:
            raise RequestError(
                "request.invalid",
                f"the layers of the {layout.pp} stages depend on the model's partition_method",
                fix="--partition-method parameters (DeepSpeed's default), or what the model's code says: type:REGEX, "
                f"uniform with --pipeline-layers N (layers without parameters included, at least "
                f"{_layers_named(ordered)}), or each stage's first layer: 0,3,6",
            )
    kinds = {layer: tuple(sorted(map(repr, names))) for layer, names in shapes.items()}
    return boundaries(layout.pp, options, weights, kinds, tied=tied)


def _is_tied(ordered: Sequence[Parameter]) -> bool:
    return any(p.fqn.startswith(TIED) for p in ordered)


def _layers_named(ordered: Sequence[Parameter]) -> int:
    """The least number of layers. Tied parameters come again, in a layer behind the last one that has a number."""
    return max((p.layer or 0 for p in ordered), default=0) + (2 if _is_tied(ordered) else 1)


def _paths(checkpoint: Checkpoint) -> tuple[KeyPath, ...]:
    """The source's key paths; names that these lack go to the top of the state dict."""
    names = [*(p.fqn for p in checkpoint.parameters), *(b.fqn for b in checkpoint.buffers), *checkpoint.shared]
    known = dict.fromkeys((*names, *checkpoint.extra_states))
    held = facts_of(checkpoint).module_paths or ((name,) for name in checkpoint.module_names)
    found = {name_of(path): path for path in held if name_of(path) in known}
    return (*found.values(), *((name,) for name in known if name not in found))


# The model-states files: weights in the model's dtype, names and shapes, counters, and the run's own state.
#
# Source: deepspeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`, `_load_checkpoint`,
# `_get_zero_frozen_param_attributes`: fragments are whole at stage 2 and shares at stage 3).


class ModelStatesFiles:
    """The model states of one model-parallel rank."""

    def __init__(
        self, checkpoint: Checkpoint, model: LocalModel, target: Target, shapes: Sequence[Sequence[LocalParameter]]
    ) -> None:
        """Take the rank's parameters, and `shapes`: its trained parameters by group or sub-group, in flat order."""
        self._checkpoint, self._model, self._target, self._shapes = checkpoint, model, target, shapes
        self._parameters = {p.fqn: p for p in model.parameters if expert_of(p.fqn) is None and p.fqn not in model.fused}
        self._nodes: dict[str, Node] = {}
        self._flat = self._flat_weights()

    def entries_of(self, rank: int, run_state: Mapping[str | int, Node], optimizer: Node) -> Node:
        """The content of one data-parallel rank's file (below stage 3 only rank 0 has one).

        Args:
            rank: Data-parallel rank.
            run_state: The source's model states. Entries that this writer lays out itself replace the source's.
            optimizer: The `optimizer` entry; None at stages 1 to 3.
        """
        model, target = self._model, self._target
        layout = target.layout
        entries: dict[str | int, Node] = {"module": self._module(), "buffer_names": PList(self._buffer_names())}
        entries["optimizer"] = optimizer
        entries[PARAM_SHAPES] = (
            PList([ordered_dict({p.fqn: size_node(p.shape) for p in group}) for group in self._shapes])
            if target.stage
            else None
        )
        entries |= self._frozen_entries(rank, run_state)
        entries["shared_params"] = mapping_of({**model.shared})
        kept = {k: v for k, v in run_state.items() if k not in (*entries, FROZEN_SHAPES, FROZEN_FRAGMENTS)}
        entries |= kept
        entries |= entries_for(kept, target, model.fused, rank)
        for counter in ("skipped_steps", "global_steps"):
            entries.setdefault(counter, 0)
        entries.setdefault(SCHEDULER, None)
        entries["dp_world_size"] = target.dp
        entries["mp_world_size"] = layout.pp * layout.tp
        if layout.pp * layout.tp > 1 or PARALLEL_DIMENSIONS in kept:
            entries[PARALLEL_DIMENSIONS] = mapping_of({"pp_degree": layout.pp, "tp_degree": layout.tp})
        entries[CONFIG] = target.config
        entries[VERSION] = target.version
        return mapping_of(entries)

    def _buffer_names(self) -> list[Node]:
        return [b.fqn for b in self._checkpoint.buffers if b.registered]

    def _module(self) -> Node:
        """The state dict, nested as the source's."""
        model = self._model
        if model.layers:
            return None  # pipelines keep their weights in layer files
        found: list[tuple[KeyPath, Node]] = []
        for path in model.paths:
            name = name_of(path)
            if name in model.extra_states:
                found.append((path, model.extra_states[name]))
            elif (node := self._named(name)) is not None:
                found.append((path, node))
        return nested_dict(found)

    def _named(self, name: str) -> Node:
        """The node of one name of the state dict; tied names share a node. None for experts, which have own files."""
        model = self._model
        owner = model.shared.get(name, name)
        if owner not in self._nodes:
            node: Node = None
            if (parameter := self._parameters.get(owner)) is not None:
                sharded = self._target.stage == 3
                node = self._placeholder() if sharded else self._flat.get(owner) or self.weight_node(parameter)
            elif owner in model.buffers:
                node = PTensorRef(model.buffers[owner])
            self._nodes[owner] = node
        return self._nodes[owner]

    def _placeholder(self) -> Node:
        return PLiteral(self._target.dtype.name, (0,), b"")

    def _flat_weights(self) -> dict[str, PRunsPart]:
        """The weights of stages 1 and 2; each is a part of its group's flat tensor, as in DeepSpeed's own files."""
        found: dict[str, PRunsPart] = {}
        if self._target.stage not in (1, 2) or self._model.layers:
            return found
        for group in self._shapes:
            members = [p for p in group if p.fqn in self._parameters]
            runs = tuple(run for p in members for run in p.weight)
            whole = PRuns(self._target.dtype.name, (sum(p.numel for p in members),), runs)
            offset = 0
            for parameter in members:
                found[parameter.fqn] = PRunsPart(whole, offset, parameter.shape)
                offset += parameter.numel
        return found

    def weight_node(self, parameter: LocalParameter) -> Node:
        """A parameter's weight in the model's dtype."""
        return PRuns(self._weight_dtype(parameter), parameter.shape, parameter.weight)

    def _weight_dtype(self, parameter: LocalParameter) -> str:
        # Frozen integers and 8-bit weights keep their type: a cast of the model does not change them.
        stored = parameter.weight_dtype
        if parameter.group is None and not (stored.floating and stored.itemsize_bytes > 1):
            return stored.name
        return self._target.dtype.name

    def _frozen_entries(self, rank: int, run_state: Mapping[str | int, Node]) -> dict[str | int, Node]:
        """The entries `frozen_param_shapes` and `frozen_param_fragments`.

        A loader that finds a mapping requires all frozen parameters in it. If the source left some out, or may have
        left them out, the values are None, which loads: frozen weights then come from `module` below stage 3, or from
        the base model. If no parameter is frozen, both entries may be absent.
        """
        if self._target.stage < 2 or self._checkpoint.frozen_left_out:
            return {FROZEN_SHAPES: None, FROZEN_FRAGMENTS: None}
        frozen = self._model.frozen
        if not is_mapping(run_state.get(FROZEN_FRAGMENTS)) and not frozen:
            return {}
        shapes = ordered_dict({p.fqn: size_node(p.shape) for p in frozen})
        return {FROZEN_SHAPES: shapes, FROZEN_FRAGMENTS: self._fragments(rank)}

    def _fragments(self, rank: int) -> Node:
        found: dict[str, Node] = {}
        for parameter in self._model.frozen:
            if self._target.stage == 2:
                # The same node as in `module`, so that it is written once. A parameter that was frozen late is a part
                # of its group's tensor.
                found[parameter.fqn] = self._flat.get(parameter.fqn) or self.weight_node(parameter)
                continue
            ranks = self._target.dp
            runs = tuple(share_of(parameter.weight, parameter.numel, rank, ranks))
            shape = (-(-parameter.numel // ranks),)
            found[parameter.fqn] = PRuns(self._weight_dtype(parameter), shape, runs)
        return ordered_dict(found)


def size_node(shape: tuple[int, ...]) -> Node:
    """A `torch.Size`."""
    return PObject("reduce", Global("torch", "Size"), PTuple((PTuple(shape),)))


# Entries of a run's state that name its layout, rewritten for the target: Megatron's arguments, and rules.
#
# Source: `reshard_engine.formats.deepspeed.facts` for the arguments; deepspeed 0.19.8 `checkpoint/constants.py`.


def relaid(state: Mapping[str | int, Node], target: Target, vocab_rows: int | None) -> dict[str | int, Node]:
    """The entries of `state`, with the target's sizes in place of the source's."""
    found = dict(state)
    layout = target.layout
    sizes: dict[str, Node] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "data_parallel_size": target.dp,
        "world_size": layout.world_size,
        "moe_expert_parallel_size": layout.ep,
    }
    if vocab_rows is not None:
        sizes[PADDED_VOCAB_ARG] = vocab_rows
    if target.vocab_divisor is not None:
        sizes[VOCAB_DIVISOR_ARG] = target.vocab_divisor
    if ARGS in found:
        found[ARGS] = with_args(found[ARGS], sizes)
    if is_mapping(state.get(INFO)):
        facts = dict(mapping_items(state[INFO], what=INFO))
        if vocab_rows is not None and PADDED_VOCAB in facts:
            facts[PADDED_VOCAB] = vocab_rows
        if target.tp_changes:
            facts.pop(AFFINE, None)  # holds for the source's ranks only; the patterns hold for any number
        # Rules of a request give widths for one rank, whatever the number of ranks is.
        if SECTION_WIDTHS in facts and (target.tp_changes or not _are_of(facts[SECTION_WIDTHS], layout.tp)):
            facts[SECTION_WIDTHS] = _section_widths(facts.get(SECTIONS), layout.tp)
        found[INFO] = mapping_of(facts)
    return found


def _are_of(widths: Node, tp: int) -> bool:
    """True if the widths are for `tp` ranks."""
    tables = mapping_items(widths, what=SECTION_WIDTHS).values() if is_mapping(widths) else ()
    return all(
        len(sequence_items(row, what=SECTION_WIDTHS)) == tp
        for table in tables
        for row in sequence_items(table, what=SECTION_WIDTHS)
    )


def _section_widths(sections: Node, tp: int) -> Node:
    """The widths of evenly cut sections by pattern, section and rank; the first ranks take one more of a rest."""
    found: dict[str | int, Node] = {}
    for entry in sequence_items(sections, what=SECTIONS) if sections is not None else ():
        facts = mapping_items(entry, what=SECTIONS)
        shape, dim = sequence_items(facts.get("shape"), what=SECTIONS), facts.get("partition_dim")
        sizes = shape[dim] if type(dim) is int and 0 <= dim < len(shape) else None
        if not isinstance(sizes, PList | PTuple):
            continue
        widths = [PList([n // tp + (rank < n % tp) for rank in range(tp)]) for n in sizes.items if type(n) is int]
        for pattern in sequence_items(facts.get("patterns"), what=SECTIONS):
            if isinstance(pattern, str):
                found[pattern] = PList([*widths])
    return mapping_of(found)


# Lays out all files of a native checkpoint.


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
        target = resolve(checkpoint, request)
        # At stage 0 in fp32 nothing wraps the run's own optimizer, which has all trained parameters.
        checkpoint = checkpoint if target.master_is_weight else without_empty_parameters(checkpoint)
        checkpoint, empty_groups = without_empty_groups(checkpoint)
        checkpoint, never_updated = with_all_counters(checkpoint)
        checkpoint = _with_copies(checkpoint, target)
        refuse_impossible_layout(target, checkpoint)
        source = checkpoint
        checkpoint = megatron_grouped(
            in_muons_order(regrouped(checkpoint, target.layout.ep), target),
            sharded=target.stage == 3,
            wanted=request.options.of(DeepSpeedOptions).weight_decay_groups,
        )
        rows = vocab_rows(checkpoint, target.layout.tp, target.vocab_divisor)
        cutter = Cutter(checkpoint, target.layout.tp, rows, dtype=target.dtype)
        models = local_models(checkpoint, target, cutter)
        # Numbers of parts follow those of the source's tensors; templates refer to both.
        parts = tuple(cutter.parts)
        whole = replace(checkpoint, shard_map=TargetLayout((), None, parts=parts).map_over(checkpoint.shard_map))
        groups = Groups(whole, states_to_write(checkpoint))
        if target.stage:
            refuse_torchs_muon(checkpoint)
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
    # Below stage 3 one file of model states serves all data-parallel ranks.
    ranks = layout.tp * layout.pp * (target.dp if target.stage == 3 else 1)
    rng = named(checkpoint.rng[0] if checkpoint.rng else (), AS_ASKED)
    lost = scaler_attributes_left(target)
    return (
        *(rng if target.drops_rng else random_states(checkpoint, ranks)),
        *named(lost, "this target's loss scaler has no such attribute"),
        *not_kept(checkpoint),
    )


def refuse_impossible_layout(target: Target, checkpoint: Checkpoint) -> None:
    """Refuse sizes and stages that no model can have together.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    layout, experts = target.layout, experts_by_layer(p.fqn for p in checkpoint.trained)
    fused = fuse_experts(checkpoint)
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


def vocab_rows(checkpoint: Checkpoint, tp: int, divisor: int | None) -> int | None:
    """Rows of the vocabulary with padding for `tp` ranks; None where no parameter is a vocabulary.

    `divisor` is the one that the request gives. Where nothing gives it, the source's number of rows stays if the ranks
    divide it. A model that has another number of rows refuses the checkpoint when it loads.
    """
    sizes = [p.shape[0] for p in checkpoint.parameters if p.cut is not None and p.cut.vocabulary is not None]
    if not sizes:
        return None
    facts = facts_of(checkpoint)
    divisor = divisor or facts.vocab_divisor
    if divisor is None and facts.vocab_rows is not None and facts.vocab_rows % tp == 0:
        return facts.vocab_rows
    unit = (divisor or 1) * tp
    return -(-max(sizes) // unit) * unit


def _vocab_warnings(checkpoint: Checkpoint, target: Target, rows: int | None) -> list[str]:
    known = target.vocab_divisor or facts_of(checkpoint).vocab_divisor
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
        if self._target.drops_rng:
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
    if target.drops_rng:
        return [f"random states ({', '.join(rng_states)}) were left out, as asked"]
    return [
        f"random states ({', '.join(rng_states)}) do not fit other worlds: rank r gets those of source rank r mod N"
    ]
