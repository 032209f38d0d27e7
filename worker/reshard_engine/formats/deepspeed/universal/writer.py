"""The DeepSpeed universal checkpoint: one directory that stages 1, 2, 3 and BF16_Optimizer all load.

The output is a superset of the files that `ds_to_universal` writes for each stage. Atoms are dicts with real shapes,
and each parameter has a `step.pt`: stages 1 and 2 address atoms by name, and stage 3 flattens them.
`optimizer_state.pt` has the keys that both loaders read, and the model states are there under both names. Frozen
parameters have atoms too, and the model states hold them and the buffers whole, although DeepSpeed's universal loader
restores neither. Only the first file of model states has the weights of trained parameters.

Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (tree), `checkpoint/universal_checkpoint.py`
(`load_hp_checkpoint_state`), `runtime/base_optimizer.py` (`load_hp_checkpoint_state_from_checkpoint_dir`),
`runtime/zero/stage3.py` (`load_hp_checkpoint_state_from_checkpoint_dir_stage3`); verified by running.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from math import prod

from reshard.choices import OpaquePolicy
from reshard.errors import RequestError, listed, printable
from reshard.models.jobs import ConvertRequest
from reshard.options import DeepSpeedOptions
from reshard_engine.checkpoint import Checkpoint, Parameter, ParamGroup, Scalar
from reshard_engine.formats import carried
from reshard_engine.formats.deepspeed.cautions import padding_of_atoms, sectioned, uncut_warnings
from reshard_engine.formats.deepspeed.config import configured_warnings
from reshard_engine.formats.deepspeed.facts import (
    OLDEST_VERSION,
    derived_warnings,
    facts_of,
    group_node,
    model_states,
    not_kept,
)
from reshard_engine.formats.deepspeed.files import (
    FROZEN_FRAGMENTS,
    FROZEN_SHAPES,
    LATEST_UNIVERSAL,
    LAYOUT_NOTES,
    OPTIMIZER_STATE,
    PARALLEL_DIMENSIONS,
    PARAM_SHAPES,
    TIED,
    VERSION,
)
from reshard_engine.formats.deepspeed.native.target import LocalParameter
from reshard_engine.formats.deepspeed.optimizer import (
    ADAM_STATES,
    groups_of,
    is_adam,
    is_muons,
    random_states,
    refuse_torchs_muon,
    require_optimizer,
    states_by_group,
    states_to_write,
    with_all_counters,
    without_empty_parameters,
    without_recomputed,
)
from reshard_engine.formats.deepspeed.parallel.experts import expert_keys, fuse_experts
from reshard_engine.formats.deepspeed.parallel.tensor import Cutter
from reshard_engine.formats.deepspeed.param_groups import (
    follows_stage,
    groups_by_stage,
    is_grouped_by_decay,
    megatron_grouped,
    sharded_groups,
    trainers_scheduler,
    without_empty_groups,
)
from reshard_engine.formats.torch_archive import scalar_node, single_tensor_template, tree_template
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PList,
    PObject,
    PRuns,
    PTensorRef,
    PTuple,
    is_mapping,
    mapping_items,
    mapping_of,
    ordered_dict,
)
from reshard_engine.pickles.trees import compare_trees
from reshard_engine.tensors.cuts import Cut
from reshard_engine.tensors.dtypes import FLOAT32, Dtype
from reshard_engine.tensors.layout import ZEROS, FileTemplate, Pointer, TargetFile, TargetLayout
from reshard_engine.tensors.shard_map import ShardMap

# Warnings about what DeepSpeed's universal loader does not restore of this run, and where it fails.
#
# docs/deepspeed-universal-limits.md has the whole list. A warning names the runs for which the loss is certain.
#
# Source: deepspeed 0.19.8 `runtime/zero/stage3.py` (`load_hp_checkpoint_state_from_checkpoint_dir_stage3`: three states
# by name, `param_groups[0]` and one step for every group), `runtime/base_optimizer.py`
# (`load_hp_checkpoint_state_from_checkpoint_dir`: `steps[0]` of the parameters that the rank holds),
# `runtime/zero/stage_1_and_2.py` and `runtime/bf16_optimizer.py` (partitions: equal, of a multiple of two elements);
# verified by running.

_RANKS = 16
"""The largest world that is checked, if twice the source's is not larger. Any group is too small for some world."""


_NAMES = ("name", "param_names")
"""Entries of param groups that are not hyper-parameters."""
_AMSGRAD = "max_exp_avg_sq"


_MUONS_LOADERS = (
    "DeepSpeed's universal loader takes Muon's momentum in BF16_Optimizer, and at ZeRO-1 and 2 with offload_optimizer "
    "or on one rank. Elsewhere at ZeRO-1 and 2 the first step ends with a RuntimeError, and at ZeRO-3 the load with a "
    "FileNotFoundError: convert --to zero for those"
)


def stage_3_warnings(states: Sequence[str], groups: Sequence[ParamGroup]) -> Iterator[str]:
    """Yield what the loader of ZeRO-3 loses: states beside Adam's, and hyper-parameters of all groups but the first.

    Args:
        states: The states of the checkpoint.
        groups: The param groups of a run at ZeRO-3.
    """
    others = [s for s in states if s not in ("fp32", *ADAM_STATES)]
    if any(is_muons(g.hyper_parameters) for g in groups):
        yield _MUONS_LOADERS
    elif others and set(ADAM_STATES).issubset(states):
        fails = f" (the first step of amsgrad raises KeyError: {_AMSGRAD!r})" if _AMSGRAD in others else ""
        text = f"at ZeRO-3 DeepSpeed's universal loader does not load {listed(others)}{fails}"
        yield f"{text}: resume at ZeRO-1 or 2, or convert --to zero"
    elif not set(ADAM_STATES).issubset(states):
        held = listed(list(states[1:])) or "no states"
        yield (
            f"the optimizer keeps {held}, and at ZeRO-3 DeepSpeed looks for exp_avg and exp_avg_sq: its universal "
            "loader ends with a FileNotFoundError. Resume at ZeRO-1 or 2, or convert --to zero"
        )
    differing = [key for key in dict.fromkeys(k for g in groups for k in g.hyper_parameters) if _differs(groups, key)]
    if differing:
        text = f"at ZeRO-3 DeepSpeed's universal loader gives the {len(groups)} param groups the first one's"
        yield f"{text} {listed([str(key) for key in differing])}: set them after loading, or convert --to zero"


def _differs(groups: Sequence[ParamGroup], key: str | int) -> bool:
    held = [g.hyper_parameters[key] for g in groups if key in g.hyper_parameters]
    if key in _NAMES:
        return False
    return len(held) < len(groups) or any(next(compare_trees(held[0], h, ""), None) is not None for h in held)


def step_warnings(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield that the parameters of a group have different step counters, of which the loader takes one."""
    for group in dict.fromkeys(p.group for p in checkpoint.trained):
        counts = {p.scalars["step"].value if "step" in p.scalars else 0 for p in checkpoint.trained if p.group == group}
        if len(counts) > 1:
            yield (
                f"the parameters of group {group} have {min(counts):g} to {max(counts):g} steps, and DeepSpeed's "
                "universal loader fails at ZeRO-1, 2 and BF16 (Steps are not equal) and takes one of them at ZeRO-3: "
                "convert --to zero --zero-stage 0 --dtype fp32, which keeps each parameter's own"
            )
            return


def empty_rank_warnings(checkpoint: Checkpoint) -> list[str]:
    """One warning for all groups that a world of usual size would leave empty on a rank."""
    sizes: dict[int, int] = {}
    for parameter in checkpoint.trained:
        group = parameter.group or 0
        sizes[group] = sizes.get(group, 0) + prod(parameter.shape)
    limit = max(_RANKS, 2 * checkpoint.world.get("dp", 1))
    found = {group: ranks for group, size in sizes.items() if (ranks := _smallest_world(size, limit)) is not None}
    if not found:
        return []
    listed = ", ".join(f"group {g} ({sizes[g]} elements) on {ranks}" for g, ranks in sorted(found.items())[:4])
    text = "DeepSpeed's universal loader fails at ZeRO-1, 2 and BF16 where a rank holds nothing of a param group"
    return [f"{text}, and the smallest such numbers of ranks are {listed}: use fewer ranks, ZeRO-3, or --to zero"]


def _smallest_world(size: int, limit: int) -> int | None:
    """The smallest number of ranks, up to a limit, of which the last holds nothing of a flat group."""
    for ranks in range(2, limit + 1):
        partition = 2 * -(-size // (2 * ranks))
        if (ranks - 1) * partition >= size:
            return ranks
    return None


# Entries of a universal atom that describe the cut of its parameter for tensor parallelism.
#
# Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`: the keys of an atom),
# `checkpoint/universal_checkpoint.py` (`load_hp_checkpoint_state`, `SubparamShape`).


def cut_keys(cut: Cut | None, name: str) -> dict[str | int, Node]:
    """The entries beside `param`; empty for a parameter that is whole on every rank, or has no known cut."""
    if cut is None or cut.dim is None:
        return {}
    found: dict[str | int, Node] = {}
    if cut.grid is not None:
        found["sub_param_shape"] = _sub_param_shape(cut, name)
    else:
        found["cat_dim"] = cut.dim
        if len(cut.sections) == 2 and cut.dim == 0 and cut.sections[0] == cut.sections[1]:
            found["param_n_sub_params"] = 2
    if cut.vocabulary is not None:
        found["vocab_tensor"] = True
    return found


def _sub_param_shape(cut: Cut, name: str) -> Node:
    grid = cut.grid or ()
    sizes: list[Node] = [PTuple(cut.sections) if d == cut.dim else n for d, n in enumerate(grid)]
    state = {"patterns": PList([f"^{name}$"]), "shape": PTuple(tuple(sizes)), "partition_dim": cut.dim}
    cls = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")
    return PObject("newobj", cls, PTuple(), state=mapping_of({**state}), has_state=True)


# Lays out all files of a universal checkpoint.

PARAM_KEY = "param"
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")


class UniversalWriter:
    """Lays out universal checkpoints."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Lay out the atoms state by state, then the commit files, without which loaders refuse the checkpoint.

        Raises:
            RequestError: `request.unsatisfiable` if moments are missing for some parameters only.
        """
        if request.dtype is not None:
            raise RequestError(
                "request.invalid",
                "a universal checkpoint holds fp32 masters: --dtype is for weights",
                fix="leave --dtype out",
            )
        require_optimizer(checkpoint, "a universal checkpoint")
        before = checkpoint
        checkpoint, recomputed = without_recomputed(without_empty_parameters(checkpoint))
        checkpoint, empty_groups = without_empty_groups(checkpoint)
        checkpoint, never_updated = with_all_counters(checkpoint)
        groups = request.options.of(DeepSpeedOptions).weight_decay_groups
        by_stage = follows_stage(checkpoint, groups)
        source, checkpoint = checkpoint, megatron_grouped(checkpoint, sharded=False, wanted=groups)
        states, warnings = _states_to_write(checkpoint)
        warnings += groups_by_stage(source, checkpoint) if by_stage else []
        warnings += uncut_warnings(checkpoint)
        warnings += sectioned(checkpoint, request)
        asked = request.vocab_divisor
        rows = _vocab_rows(checkpoint, asked)
        warnings += padding_of_atoms(checkpoint, rows, asked or facts_of(checkpoint).vocab_divisor)
        cutter = Cutter(checkpoint, 1, rows, dtype=FLOAT32)
        files = _atoms(checkpoint, states, cutter if rows is not None else None)
        files += _step_files(checkpoint)
        if not request.exclude_frozen:
            files += _frozen_atoms(checkpoint)
        files += trainers_scheduler(before, checkpoint, request.opaque)
        files += _commit_files(checkpoint, request, by_stage=by_stage)
        warnings = [*never_updated, *derived_warnings(checkpoint), *warnings]
        warnings += [*configured_warnings(checkpoint), *empty_rank_warnings(checkpoint), *step_warnings(checkpoint)]
        warnings += stage_3_warnings(states, sharded_groups(checkpoint) or groups_of(checkpoint))
        frozen = carried.frozen_parameters(checkpoint) if request.exclude_frozen else ()
        return TargetLayout(
            tuple(files),
            Pointer(LATEST_UNIVERSAL, name.encode()),
            tuple(warnings),
            tuple(cutter.parts),
            not_carried=(*recomputed, *empty_groups, *random_states(checkpoint, 1), *not_kept(checkpoint), *frozen),
        )


def _states_to_write(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    for parameter in checkpoint.trained:
        if other := sorted(set(parameter.scalars) - {"step"}):
            raise RequestError(
                "request.unsatisfiable",
                f"optimizer state {printable(other[0])!r} is one number per group: the universal form cannot hold it",
                fix="--to zero --dp N keeps it; or write the weights alone: --to safetensors",
            )
    states = states_to_write(checkpoint)
    refuse_torchs_muon(checkpoint)
    if len(states) == 1 and is_adam(checkpoint):
        # Adam itself starts from zeros; DeepSpeed's stage-3 loader refuses atoms without moments.
        counted = any(p.scalars for p in checkpoint.trained)
        said = "the source has no moments of each element" if counted else "no optimizer step had been taken"
        return [*states, *ADAM_STATES], [f"{said}: moments are zero{'' if counted else ', step is 0'}"]
    if not any(p.scalars for p in checkpoint.trained) and is_adam(checkpoint):
        return states, ["the source has moments and no step counter: step is 0, so bias correction begins anew"]
    return states, []


def _vocab_rows(checkpoint: Checkpoint, asked: int | None) -> int | None:
    """Rows of a vocabulary's atoms: those of the model on one tensor-parallel rank. None leaves all padding out.

    DeepSpeed's loader of stage 3 takes the rows of an atom as they are, and refuses tensor parallelism. Its loader of
    stages 1 and 2 adds zeros up to the model's rows, of which more ranks never have fewer. But it takes an atom in the
    shape of a rank's part for the whole parameter, and a vocabulary that fits into one divisor has that shape.

    Source: deepspeed 0.19.8 `checkpoint/universal_checkpoint.py` and `runtime/zero/stage3.py` (both
    `load_hp_checkpoint_state`); Megatron-DeepSpeed (July 2025) `megatron/tokenizer/tokenizer.py`
    (`_vocab_size_with_padding`); verified by resuming at stages 1, 2 and 3.

    Args:
        checkpoint: The source.
        asked: The divisor that the request gives; it counts in any case.
    """
    data = [p.shape[0] for p in checkpoint.parameters if p.cut is not None and p.cut.vocabulary is not None]
    divisor = asked or facts_of(checkpoint).vocab_divisor
    if not data or divisor is None or (asked is None and max(data) <= divisor):
        return None
    return -(-max(data) // divisor) * divisor


def _atoms(checkpoint: Checkpoint, states: list[str], padding: Cutter | None) -> list[TargetFile]:
    # State by state: the parameters of one flat partition follow one another in both files' order,
    # so that a unit reads one long run from each rank.
    cache: dict[object, FileTemplate] = {}
    tensors, fused = checkpoint.shard_map.tensors, fuse_experts(checkpoint)
    files: list[TargetFile] = []
    # One optimizer may keep other states for other groups. States that no group has are added, for all groups.
    own = states_by_group(checkpoint, states)
    held = {state for kept in own.values() for state in kept}
    for state in states:
        for parameter in checkpoint.trained:
            if state in held and state not in own[parameter.group or 0]:
                continue
            if padding is not None and parameter.cut is not None and parameter.cut.vocabulary is not None:
                files.append(_padded_atom(state, padding.local(parameter, 0), parameter.cut, checkpoint.shard_map))
                continue
            index = parameter.states.get(state, ZEROS)
            dtype = FLOAT32 if index == ZEROS else tensors[index].dtype
            template = _atom(state, dtype, parameter, cache, experts=expert_keys(fused, parameter.fqn))
            files.append(TargetFile(f"zero/{parameter.fqn}/{state}.pt", template, (index,)))
    return files


def _padded_atom(state: str, vocabulary: LocalParameter, cut: Cut, shard_map: ShardMap) -> TargetFile:
    dtype, shape = vocabulary.dtypes.get(state, FLOAT32), vocabulary.shape
    runs = vocabulary.states.get(state, ((ZEROS, 0, prod(shape)),))
    node = mapping_of({**cut_keys(cut, vocabulary.fqn), PARAM_KEY: PRuns(dtype.name, shape, runs)})
    template, slots = tree_template(state, node, shard_map, opaque=OpaquePolicy.REFUSE)
    return TargetFile(f"zero/{vocabulary.fqn}/{state}.pt", template, slots)


def _atom(
    state: str,
    dtype: Dtype,
    parameter: Parameter,
    cache: dict[object, FileTemplate],
    *,
    experts: dict[str | int, Node],
) -> FileTemplate:
    keys = cut_keys(parameter.cut, parameter.fqn) | experts
    # Atoms of one shape share a template, except atoms whose `sub_param_shape` contains the parameter's name.
    kind = parameter.fqn if "sub_param_shape" in keys else tuple(sorted(map(str, keys.items())))

    def wrapped(tensor: Node) -> Node:
        return mapping_of({**keys, PARAM_KEY: tensor})

    return single_tensor_template(state, dtype, parameter.shape, wrapped, cache=cache, kind=kind)


def _frozen_atoms(checkpoint: Checkpoint) -> list[TargetFile]:
    # fp32, so that a run that unfreezes the parameter can start its master from it (16 bits widen exactly).
    cache: dict[object, FileTemplate] = {}
    fused = fuse_experts(checkpoint)
    files: list[TargetFile] = []
    for parameter in checkpoint.frozen:
        if parameter.weight is None or not checkpoint.shard_map.tensors[parameter.weight].dtype.floating:
            continue
        template = _atom("fp32", FLOAT32, parameter, cache, experts=expert_keys(fused, parameter.fqn))
        files.append(TargetFile(f"zero/{parameter.fqn}/fp32.pt", template, (parameter.weight,)))
    return files


def _step(parameter: Parameter) -> Scalar:
    return parameter.scalars.get("step") or Scalar(0.0, FLOAT32, bytes(4), ())


def _step_files(checkpoint: Checkpoint) -> list[TargetFile]:
    cache: dict[tuple[object, ...], FileTemplate] = {}
    files: list[TargetFile] = []
    counts = any(p.scalars for p in checkpoint.trained) or is_adam(checkpoint)
    matrices = {index for index, group in enumerate(groups_of(checkpoint)) if is_muons(group.hyper_parameters)}
    for parameter in checkpoint.trained if counts else ():
        if parameter.group in matrices:
            continue  # Muon counts nothing
        step = _step(parameter)
        # 0.0 and -0.0 would be one key by value, and a nan would never be found: so the key has the bytes.
        key = (step.raw, step.dtype, step.shape, type(step.value), None if step.dtype else repr(step.value))
        if key not in cache:
            cache[key], _ = tree_template("step", scalar_node(step), checkpoint.shard_map, opaque=OpaquePolicy.REFUSE)
        files.append(TargetFile(f"zero/{parameter.fqn}/step.pt", cache[key], ()))
    return files


def _commit_files(checkpoint: Checkpoint, request: ConvertRequest, *, by_stage: bool) -> list[TargetFile]:
    files: list[TargetFile] = []
    entries = model_states(checkpoint)
    if request.exclude_frozen:
        entries = _without_frozen(entries, checkpoint)
    entries |= _described(entries, checkpoint)
    entries["mp_world_size"] = 1
    if PARALLEL_DIMENSIONS in entries:
        # The source's degrees would say that files of other ranks are missing.
        entries[PARALLEL_DIMENSIONS] = mapping_of({"pp_degree": 1, "tp_degree": 1})
    if (layout := _layout_notes(checkpoint, request, by_stage=by_stage)) is not None:
        entries[LAYOUT_NOTES] = layout
    for path, held in zip(MODEL_FILES, (entries, _without_trained(entries, checkpoint)), strict=True):
        root = path.removesuffix(".pt")
        template, slots = tree_template(root, mapping_of(held), checkpoint.shard_map, opaque=request.opaque)
        files.append(TargetFile(path, template, slots, commit=True))
    template, slots = tree_template(
        "optimizer_state", _optimizer_state(checkpoint, by_stage=by_stage), checkpoint.shard_map, opaque=request.opaque
    )
    files.append(TargetFile("zero/optimizer_state.pt", template, slots, commit=True))
    return files


def _described(entries: Mapping[str | int, Node], checkpoint: Checkpoint) -> dict[str | int, Node]:
    """Entries that the source's version or stage lacks, added so that the output can be read without the source."""
    found: dict[str | int, Node] = {}
    if not isinstance(entries.get(PARAM_SHAPES), PList | PTuple):
        groups = sorted({p.group for p in checkpoint.trained if p.group is not None})
        shapes = [{p.fqn: _size(p.shape) for p in checkpoint.trained if p.group == g} for g in groups]
        found[PARAM_SHAPES] = PList([ordered_dict(s) for s in shapes])
    if checkpoint.shared and "shared_params" not in entries:
        found["shared_params"] = mapping_of({**checkpoint.shared})
    return found


def _layout_notes(checkpoint: Checkpoint, request: ConvertRequest, *, by_stage: bool) -> Node:
    """Notes that a later target with model parallelism needs, and that names do not show; None without any."""
    tied = {p.fqn: p.layer for p in checkpoint.parameters if p.layer is not None and p.fqn.startswith(TIED)}
    notes: dict[str | int, Node] = {}
    if any(p.layer is not None for p in checkpoint.parameters):
        notes["tied_layers"] = mapping_of({**tied})
    facts = facts_of(checkpoint)
    if (divisor := request.vocab_divisor or facts.vocab_divisor) is not None:
        notes["vocab_divisor"] = divisor
    if facts.vocab_rows is not None:
        notes["vocab_rows"] = facts.vocab_rows
    if is_grouped_by_decay(checkpoint) and not by_stage:
        notes["groups_kept"] = True
    if any(len(path) > 1 for path in facts.module_paths):
        # ZeRO-3 stores no weights in `module`: nothing else says how the state dict is nested.
        notes["module_paths"] = PList([PList(list(path)) for path in facts.module_paths])
    return mapping_of(notes) if notes else None


def _size(shape: tuple[int, ...]) -> Node:
    return PObject("reduce", Global("torch", "Size"), PTuple((PTuple(shape),)))


def _without_trained(entries: dict[str | int, Node], checkpoint: Checkpoint) -> dict[str | int, Node]:
    """The entries without the weights of trained parameters, as stage 3 keeps them: the atoms hold their values.

    The loader does not look at `module`, and the other file has all of it: whole weights here would be an eighth of the
    directory, written twice.
    """
    # At stage 0 of an fp32 run the weight in `module` is the master itself.
    weights = {n for p in checkpoint.trained for n in (p.weight, p.states.get("fp32"))}

    def kept(node: Node) -> Node:
        items = mapping_items(node, what="module").items()
        held = {str(n): kept(v) if is_mapping(v) else v for n, v in items if not _is_one_of(v, weights)}
        return ordered_dict(held)

    module = entries.get("module")
    return {**entries, "module": kept(module)} if is_mapping(module) else entries


def _is_one_of(node: Node, tensors: Container[int | None]) -> bool:
    return isinstance(node, PTensorRef) and node.index in tensors


def _without_frozen(entries: dict[str | int, Node], checkpoint: Checkpoint) -> dict[str | int, Node]:
    # As `save_checkpoint(exclude_frozen_parameters=True)` leaves it; other names of frozen parameters go with them.
    frozen = {p.fqn for p in checkpoint.frozen}
    gone = frozen | {alias for alias, owner in checkpoint.shared.items() if owner in frozen}
    kept = dict(entries)
    for key in ("module", "shared_params"):
        if is_mapping(entries.get(key)):
            items = mapping_items(entries[key], what=key)
            kept[key] = mapping_of({n: v for n, v in items.items() if n not in gone})
    for key in (FROZEN_SHAPES, FROZEN_FRAGMENTS):
        if key in kept:
            kept[key] = None
    return kept


def _optimizer_state(checkpoint: Checkpoint, *, by_stage: bool) -> Node:
    facts, own = facts_of(checkpoint), groups_of(checkpoint)
    params = facts.params if len(facts.params) == len(own) else [PList([i]) for i in range(len(own))]
    groups: Node = PList([group_node(g, p) for g, p in zip(own, params, strict=True)])
    counted = [p for p in checkpoint.trained if p.scalars]
    first = next(iter(counted or checkpoint.trained), None)
    step: Node = scalar_node(_step(first)) if first is not None else 0
    # Stage 3 reads these, the other stages those at the top: Megatron-DeepSpeed has other groups there.
    others = sharded_groups(checkpoint) if by_stage else []
    sharded: Node = PList([group_node(g, PList([i])) for i, g in enumerate(others)]) if others else groups
    inner = mapping_of({"state": mapping_of({0: mapping_of({"step": step})}), "param_groups": sharded})
    entries: dict[str | int, Node] = {**facts.optimizer_entries}
    # Both loaders insist on it; the oldest version that wrote universal checkpoints stands in where it is unknown.
    entries.setdefault(VERSION, (facts.order and checkpoint.framework_version) or OLDEST_VERSION)
    entries["param_groups"] = groups
    entries[OPTIMIZER_STATE] = inner
    return mapping_of(entries)
