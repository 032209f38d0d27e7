"""The tensors of one model-parallel rank, joined from the files of its data-parallel ranks.

Without model parallelism, these tensors are the whole checkpoint. With it, they are one rank's parts, under the
rank's own names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import TypeGuard

from reshard.errors import SourceError, printable
from reshard.models.jobs import NotCarried
from reshard_engine.checkpoint import Agreement, Buffer, Parameter, Scalar
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TreeTensors, add_whole_tensor, place_of
from reshard_engine.formats.carried import NotCarriedKeys
from reshard_engine.formats.deepspeed.config import (
    data_before_experts,
    may_be_quantized,
    offloads_optimizer,
    uses_round_robin,
    zero_options,
)
from reshard_engine.formats.deepspeed.files import FROZEN_FRAGMENTS, FROZEN_SHAPES, OPTIMIZER_STATE
from reshard_engine.formats.deepspeed.optimizer import MOMENTUM, is_muons, muons_order
from reshard_engine.formats.deepspeed.parallel.experts import (
    ExpertGroup,
    FusedExperts,
    expert_groups,
    fused_experts,
    in_model_order,
)
from reshard_engine.formats.deepspeed.rank_files import ModelStates, RankStates, Shapes, read_scalar
from reshard_engine.formats.deepspeed.zero3 import add_sharded_params, add_sharded_tensor, swapped_partition
from reshard_engine.formats.deepspeed.zero12 import (
    Matrices,
    Partition,
    add_flat_group,
    shapes_by_group,
    shown_order,
    undealt,
)
from reshard_engine.pickles.nodes import (
    Node,
    PList,
    PObject,
    PTensor,
    PTensorRef,
    PTuple,
    is_mapping,
    kind_of,
    mapping_items,
    ordered_dict,
    sequence_items,
)
from reshard_engine.pickles.rebuild import made_of_tensors
from reshard_engine.pickles.trees import KeyPath, is_extra_state, name_of, nested_dict
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import ShardMapBuilder


@dataclass(frozen=True)
class Slice:
    """The content of one model-parallel rank. Tensor numbers index the shard map that is being built."""

    states: tuple[RankStates, ...]
    models: tuple[ModelStates, ...]
    trained: tuple[Parameter, ...]
    """The trained parameters in the optimizer's order, in the rank's own shapes."""
    ep: int
    """The number of expert-parallel ranks; 1 if no experts are spread over ranks."""
    dealt: bool
    """True if `round_robin_gradients` made a flat order that is not the optimizer's."""
    unproven: bool
    """True if neither the config nor the files say whether the flat order is the optimizer's."""
    fused: FusedExperts
    """Parameters in which AutoEP fused experts."""
    rank_numbers: frozenset[str]
    """Names of states that are one number for each data-parallel rank and differ between ranks."""
    agreements: tuple[Agreement, ...] = ()
    """Copies of matrices that several data-parallel ranks keep whole."""
    unread: tuple[str, ...] = ()
    """Names of states that have no element for each of the parameter's, such as quantized ones, each with its kind."""

    @property
    def model(self) -> ModelStates:
        """Model states of data-parallel rank 0."""
        return self.models[0]


def add_slice(
    builder: ShardMapBuilder,
    states: Sequence[RankStates],
    models: Sequence[ModelStates],
    number: Mapping[SourceFile, int],
) -> Slice:
    """Register the masters and optimizer states of one model-parallel rank.

    Raises:
        SourceError: `checkpoint.*` if the files do not add up.
    """
    states, unread = _readable(states)
    model, first = models[0], states[0]
    shapes = shapes_by_group(model, states)
    fused = fused_experts(model)
    parts = expert_groups(shapes, states, fused, data_first=data_before_experts(model))
    group_of = _groups_of(first, len(shapes))
    by_name: dict[str, dict[str, int]] = {}
    whole = list(_matrices(states, model, parts, group_of))
    others = [p for p in parts if all(p is not part for part, _ in whole)]
    for key in ("fp32", *_positional_keys(states)):
        of_key = others if key == MOMENTUM else parts
        _add_state(builder, key, states, of_key, number=number, by_name=by_name)
    agreements = [a for g in whole for a in _add_matrices(builder, states, g, number=number, by_name=by_name)]
    trained: list[Parameter] = []
    rank_numbers: set[str] = set()
    may_deal = first.stage in (1, 2) and not first.bf16_optimizer and len(states) > 1
    said = uses_round_robin(model) if may_deal else False
    dealt, unproven = said is True, False
    for index, same in groupby(parts, key=lambda p: p.index):
        group: list[Parameter] = []
        spread = 1
        for part in same:
            ranks, spread = [states[r] for r in part.ranks], part.ep
            order: Sequence[int] = range(len(part.shapes))
            names, model_order = [n for n, _ in part.shapes], list(model.module)
            if first.param_groups and is_muons(first.param_groups[group_of[index]]):
                model_order = muons_order(part.shapes, model_order)
            if said:
                order = undealt(names, len(ranks), model_order)
            elif said is None:
                shown = shown_order(names, len(ranks), model_order, _fragments(ranks, index))
                unproven |= shown is None
                dealt |= shown not in (None, [*order])
                order = order if shown is None else shown
            scalars = _scalars(ranks, index)
            rank_numbers |= scalars.keys() - (common := _common(ranks, index, scalars)).keys()
            members = [part.shapes[i] for i in order]
            group += [Parameter(n, shape, group_of[index], None, by_name[n], common) for n, shape in members]
        group = fused.joined(builder, group)
        if spread > 1:
            group = [group[i] for i in in_model_order([p.fqn for p in group])]
        trained += group
    ep = max((p.ep for p in parts), default=1)
    held = tuple(fused.without(m) for m in models)
    numbers = frozenset(rank_numbers)
    return Slice(tuple(states), held, tuple(trained), ep, dealt, unproven, fused, numbers, tuple(agreements), unread)


def _readable(states: Sequence[RankStates]) -> tuple[Sequence[RankStates], tuple[str, ...]]:
    """The ranks' states without those that have no element for each one of a partition, and the names of these.

    Preconditioners are matrices, or lists of them. torchao keeps `exp_avg` as a tensor of codes, scales and a table.
    bitsandbytes keeps codes beside `absmax` and `qmap`; 0.50 saves all of its tensors, whole ones too, in a dictionary.
    A block of codes is one of a rank's partition: no other partition has such a block.

    Source: torchao 0.18.0 `optim/subclass_8bit.py`; bitsandbytes 0.50.2 `optim/optimizer.py` (`init_state`: `state1`,
    `absmax1`, `qmap1`; `state_dict`: `__bnb_optimizer_quant_state__`); verified by running.
    """
    kinds: dict[str, str] = {}
    for held in (group for rank in states for group in rank.states):
        codes = any(_is_flat(v) and not BY_NAME[v.dtype].floating for v in held.values())
        for key, value in held.items():
            if (made := made_of_tensors(value)) is not None:
                kinds[key] = made.kind.dotted
            elif is_mapping(value) or isinstance(value, PList | PTuple):
                kinds[key] = kind_of(value)
            elif isinstance(value, PTensor) and (len(value.shape) > 1 or (codes and value.shape)):
                kinds[key] = f"{value.dtype} of {len(value.shape)} dimensions"
    if not kinds:
        return states, ()
    kept = [replace(r, states=tuple({k: v for k, v in g.items() if k not in kinds} for g in r.states)) for r in states]
    return kept, tuple(f"{printable(key)} ({printable(kind)})" for key, kind in kinds.items())


def _is_flat(value: Node) -> TypeGuard[PTensor]:
    return isinstance(value, PTensor) and len(value.shape) == 1


def _fragments(ranks: Sequence[RankStates], index: int) -> list[str]:
    """The names in the `param_slice_mappings` of a group over all ranks, each where it comes first."""
    found: dict[str, None] = {}
    for rank in ranks:
        outer = mapping_items(rank.torch_file.root, what=printable(rank.torch_file.file.name))
        node = mapping_items(outer[OPTIMIZER_STATE], what=OPTIMIZER_STATE).get("param_slice_mappings")
        groups = sequence_items(node, what="param_slice_mappings") if node is not None else ()
        names = groups[index] if index < len(groups) else None
        found |= dict.fromkeys(map(str, mapping_items(names, what="param_slice_mappings")) if is_mapping(names) else ())
    return list(found)


def _groups_of(first: RankStates, count: int) -> list[int]:
    """The optimizer param group of each entry of `param_shapes`, whose entries are sub-groups at ZeRO-3."""
    if first.elastic:
        return list(range(count)) if first.stage != 3 else [0] * count
    return group_of_subgroup(first.param_groups, count)


def group_of_subgroup(param_groups: Sequence[Mapping[str | int, Node]], count: int) -> list[int]:
    """For each flat (sub-)group, the param group whose `params` lists the (sub-)group's number.

    Raises:
        SourceError: `checkpoint.malformed` if no param group lists a (sub-)group.
    """
    found: dict[int, int] = {}
    for index, group in enumerate(param_groups):
        params = group.get("params")
        for item in params.items if params is not None and hasattr(params, "items") else ():
            if type(item) is int:
                found[item] = index
    missing = [i for i in range(count) if i not in found]
    if missing:
        raise SourceError("checkpoint.malformed", f"flat groups {missing[:8]} belong to no optimizer param group")
    return [found[i] for i in range(count)]


def _flats(
    states: Sequence[RankStates], tensors: Sequence[PTensor], shapes: Shapes, number: Mapping[SourceFile, int]
) -> Iterator[Partition]:
    """The place of each rank's flat tensor of one (sub-)group."""
    elsewhere = states[0].stage == 3 and not all(t.numel for t in tensors)
    # The elements of a rank's flat tensor, padding included. Needed only where the rank file lacks some.
    numel = sum(-(-prod(shape) // len(states)) for _, shape in shapes) if elsewhere else 0
    for rank, tensor in zip(states, tensors, strict=True):
        if numel and not tensor.numel:
            yield swapped_partition(rank, tensor, numel, number)
        else:
            yield Partition(number[rank.torch_file.file], rank.torch_file.tensor_offset(tensor), tensor.numel)


def _positional_keys(states: Sequence[RankStates]) -> list[str]:
    keys: dict[str, None] = {}
    for group in (g for rank in states for g in rank.states):
        for key, value in group.items():
            if isinstance(value, PTensor) and len(value.shape) == 1:
                keys[key] = None
    return list(keys)


@dataclass(frozen=True, slots=True)
class _Wide:
    """The sub-groups of stage 3 that one set of ranks shares, joined end to end."""

    tensors: list[int]
    shapes: list[tuple[str, tuple[int, ...]]]
    partitions: list[list[Partition]]
    """By rank."""
    itemsize_bytes: int


def _add_state(
    builder: ShardMapBuilder,
    key: str,
    states: Sequence[RankStates],
    parts: Sequence[ExpertGroup],
    *,
    number: Mapping[SourceFile, int],
    by_name: dict[str, dict[str, int]],
) -> None:
    """Register one state of every (sub-)group that has it."""
    wide: dict[tuple[int, ...], _Wide] = {}
    for part in parts:
        index, group, ranks = part.index, part.shapes, [states[r] for r in part.ranks]
        flats = [s.fp32[index] if key == "fp32" else s.states[index].get(key) for s in ranks]
        if all(f is None for f in flats):
            continue
        found = [f for f in flats if isinstance(f, PTensor) and len(f.shape) == 1]
        if len(found) != len(ranks):
            raise SourceError(
                "checkpoint.incomplete", f"group {index}: {printable(key)} is on {len(found)} of {len(ranks)} ranks"
            )
        if len({f.dtype for f in found}) != 1:
            raise SourceError("checkpoint.mixed", f"group {index}: {printable(key)} has several element types")
        dtype = BY_NAME[found[0].dtype]
        tensors = [builder.tensor(name, key, dtype, shape) for name, shape in group]
        for (name, _), tensor in zip(group, tensors, strict=True):
            by_name.setdefault(name, {})[key] = tensor
        partitions = list(_flats(ranks, found, group, number))
        what = f"group {index}, {printable(key)}"
        if states[0].stage != 3:
            pads = states[0].alignment_paddings[index] if index < len(states[0].alignment_paddings) else ()
            add_flat_group(
                builder,
                tensors,
                group,
                partitions=partitions,
                paddings=pads,
                itemsize_bytes=dtype.itemsize_bytes,
                what=what,
            )
            continue
        found_wide = wide.setdefault(part.ranks, _Wide([], [], [[] for _ in ranks], dtype.itemsize_bytes))
        found_wide.tensors.extend(tensors)
        found_wide.shapes.extend(group)
        for held, partition in zip(found_wide.partitions, partitions, strict=True):
            held.append(partition)
    for group in wide.values():
        add_sharded_params(
            builder,
            group.tensors,
            tuple(group.shapes),
            partitions=group.partitions,
            itemsize_bytes=group.itemsize_bytes,
            what=printable(key),
        )


def _matrices(
    states: Sequence[RankStates], model: ModelStates, parts: Sequence[ExpertGroup], group_of: Sequence[int]
) -> Iterator[tuple[ExpertGroup, Matrices]]:
    """The flat groups of whose momentum Muon keeps whole matrices, and the matrices of each rank.

    Raises:
        SourceError: `checkpoint.coverage` if the ranks' tensors have the lengths of no layout, `checkpoint.ambiguous`
            if nothing says which of two it is, `source.unsupported` for experts.
    """
    first = states[0]
    if first.stage == 3 or first.bf16_optimizer or not first.param_groups:
        return
    offloads = offloads_optimizer(zero_options(model))
    for part in parts:
        index, ranks = part.index, [states[r] for r in part.ranks]
        lengths = [t.numel if isinstance(t := s.states[index].get(MOMENTUM), PTensor) else 0 for s in ranks]
        if not is_muons(first.param_groups[group_of[index]]) or not any(lengths):
            continue
        pads = first.alignment_paddings[index] if index < len(first.alignment_paddings) else ()
        found = Matrices.of(part.shapes, pads, [s.fp32[index].numel for s in ranks])
        if not found.are_kept(lengths, offloads=offloads, what=f"group {index}, {MOMENTUM}"):
            continue
        if part.ep > 1:
            raise SourceError(
                "source.unsupported",
                f"group {index} holds experts that Muon updates on {part.ep} expert-parallel ranks, of which each "
                "keeps whole matrices: this version does not read them",
                fix="write from a save with offload_optimizer, whose momentum is cut as the masters are",
            )
        yield part, found


def _add_matrices(
    builder: ShardMapBuilder,
    states: Sequence[RankStates],
    group: tuple[ExpertGroup, Matrices],
    *,
    number: Mapping[SourceFile, int],
    by_name: dict[str, dict[str, int]],
) -> list[Agreement]:
    """Register the momentum of one of Muon's groups; returns the copies that must agree."""
    part, matrices = group
    held = [(s.torch_file, s.states[part.index].get(MOMENTUM)) for s in (states[r] for r in part.ranks)]
    dtypes = {t.dtype for _, t in held if isinstance(t, PTensor)}
    if len(dtypes) != 1:
        raise SourceError("checkpoint.mixed", f"group {part.index}: {MOMENTUM} has several element types")
    places = [
        Partition(number[file.file], file.tensor_offset(tensor), tensor.numel) if isinstance(tensor, PTensor) else None
        for file, tensor in held
    ]
    dtype = BY_NAME[dtypes.pop()]
    tensors, agreements = matrices.add(builder, MOMENTUM, part.shapes, dtype=dtype, partitions=places)
    for (name, _), tensor in zip(part.shapes, tensors, strict=True):
        by_name.setdefault(name, {})[MOMENTUM] = tensor
    return agreements


def _scalars(states: Sequence[RankStates], index: int) -> Mapping[str, Scalar]:
    """The one-number states of a (sub-)group on its first rank. Counters must be equal on all ranks.

    Raises:
        SourceError: `checkpoint.mixed` if a rank counts differently, or has other states.
    """
    mine: dict[str, Scalar] = {}
    for rank, state in enumerate(states):
        theirs = _group_scalars(state, index)
        if rank == 0:
            mine = theirs
        elif counters(theirs) != counters(mine) or theirs.keys() != mine.keys():
            text = ", ".join(f"{printable(k)}={v.value}" for k, v in theirs.items())
            raise SourceError(
                "checkpoint.mixed",
                f"rank {rank} has {text or 'no counters'}, rank 0 has "
                + (", ".join(f"{printable(k)}={v.value}" for k, v in mine.items()) or "none"),
                fix="the files are of different steps: copy one whole save",
            )
    return mine


def counters(scalars: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The one-number states that count steps: `step`, and every integer.

    The other one-number states are computed from a tensor, such as Adafactor's RMS: each partition has its own value.
    """
    return {k: s for k, s in scalars.items() if k == "step" or not isinstance(s.value, float)}


def _common(states: Sequence[RankStates], index: int, first: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The one-number states that are the same on all ranks."""
    if len(counters(first)) == len(first):
        return dict(first)
    others = [_group_scalars(s, index) for s in states[1:]]
    return {k: s for k, s in first.items() if all(o[k] == s for o in others)}


def _group_scalars(state: RankStates, index: int) -> dict[str, Scalar]:
    entries = state.states[index]
    name = state.torch_file.file.name
    scalars = {
        key: read_scalar(value, state.torch_file, what=f"{printable(name)}: {printable(key)}")
        for key, value in entries.items()
        if value is not None and not (isinstance(value, PTensor) and len(value.shape) == 1)
    }
    if "step" not in scalars and entries and state.param_groups:
        # Fused optimizers, and all optimizers before 0.6, keep the step in the param group.
        for group in state.param_groups:
            params = group.get("params")
            if group.get("step") is not None and params is not None and index in getattr(params, "items", ()):
                scalars["step"] = read_scalar(group["step"], state.torch_file, what="param_groups: step")
    return scalars


# The tensors of `module`: weights in the model's dtype, buffers, frozen parameters, tied aliases.


class ModuleTensors:
    """Sorts the entries of `module` into weights, buffers, frozen parameters and aliases.

    Source: deepspeed 0.19.8 `runtime/engine.py` (`_get_zero_frozen_param_attributes`: fragments at stage 2
    are whole, at stage 3 each rank's share; below stage 2 frozen parameters are only in `module`).
    """

    def __init__(
        self,
        builder: ShardMapBuilder,
        models: Sequence[ModelStates],
        number: Mapping[SourceFile, int],
        *,
        owned: Mapping[str, tuple[int, ...]],
        sharded: bool,
        whole: bool = True,
    ) -> None:
        """Register everything that `module` and the frozen fragments hold.

        Args:
            builder: Collects tensors and pieces.
            models: Model states of all ranks that are needed, rank 0 first.
            number: File numbers of the shard map.
            owned: Names and shapes of the parameters that the optimizer owns.
            sharded: True if parameters are sharded (ZeRO-3), so that `module` holds empty placeholders.
            whole: True if its tensors are whole. If they are one rank's parts, only buffers are read.

        Raises:
            SourceError: `checkpoint.*` if names or shapes do not fit.
        """
        self._builder = builder
        self._model = models[0]
        self._file = number[models[0].torch_file.file]
        self.buffers: dict[str, int] = {}
        self.unregistered: set[str] = set()
        """Names of the tensors that the module does not call buffers: extra states, and what hooks of the model add."""
        self.weights: dict[str, int] = {}
        self.shared: dict[str, str] = {
            # Below stage 3 DeepSpeed takes equal addresses for a tie, and all tensors without elements have address 0.
            name: owner
            for name, owner in self._model.shared.items()
            if sharded or name not in self._model.module or self._model.module[name].numel
        }
        self.frozen_late = frozenset(n for n, _ in self._model.frozen_shapes if n in owned)
        """Parameters that the run froze after the optimizer was made."""
        self.frozen_parameters: list[Parameter] = []
        self.undescribed: list[str] = []
        """Empty placeholders of ZeRO-3 that stand for no known parameter."""
        self._frozen = dict(self._model.frozen_shapes)
        shapes = self._model.entries.get(FROZEN_SHAPES)
        # The names in the file itself: `frozen_shapes` lacks fused experts, which `FusedExperts` puts together.
        self._listed = frozenset(mapping_items(shapes, what=FROZEN_SHAPES)) if is_mapping(shapes) else None
        self._frozen_numbers: dict[str, int] = {}
        self._add_buffers()
        if not whole:
            self._refuse_frozen_parts(owned)
            return
        if sharded:
            self._add_frozen_shares(models, number, owned)
        self._add_rest(owned, sharded=sharded)
        if not sharded:
            self._add_left_aliases()

    def _whole(self, name: str, state: str, tensor: PTensor) -> int:
        return add_whole_tensor(self._builder, name, state, tensor, torch_file=self._model.torch_file, file=self._file)

    def _add_buffers(self) -> None:
        for name in self._model.buffer_names:
            tensor = self._model.module.get(name)
            if tensor is not None:
                self.buffers[name] = self._whole(name, "value", tensor)

    def _refuse_frozen_parts(self, owned: Mapping[str, tuple[int, ...]]) -> None:
        frozen = [n for n in self._model.module if n not in owned and n not in self.buffers and n not in self.shared]
        if frozen:
            raise SourceError(
                "source.unsupported",
                f"{len(frozen)} frozen parameters ({printable(frozen[0])}, ...) are stored only as one rank's parts",
                fix="convert the original checkpoint",
            )

    def _add_frozen_shares(
        self,
        models: Sequence[ModelStates],
        number: Mapping[SourceFile, int],
        owned: Mapping[str, tuple[int, ...]],
    ) -> None:
        for name, shape in self._model.frozen_shapes:
            if owned.get(name, shape) != shape:
                raise SourceError(
                    "checkpoint.mixed",
                    f"{printable(name)} is {shape} in `frozen_param_shapes`, {owned[name]} in `param_shapes`",
                )
            shares: list[Partition] = []
            dtypes: set[str] = set()
            for rank, model in enumerate(models):
                share = model.frozen_fragments.get(name)
                if share is not None and not share.shape and shape:
                    raise SourceError(
                        "source.unsupported",
                        f"frozen {printable(name)} was on NVMe (offload_param): DeepSpeed did not save it",
                        fix="save with offload_param.device cpu, or with exclude_frozen_parameters=True and take the "
                        "frozen weights from the base model",
                    )
                if share is None or len(share.shape) != 1:
                    raise SourceError(
                        "checkpoint.incomplete", f"rank {rank} holds no share of frozen {printable(name)}"
                    )
                dtypes.add(share.dtype)
                shares.append(
                    Partition(number[model.torch_file.file], model.torch_file.tensor_offset(share), share.numel)
                )
            if dtypes == {"int8"} and may_be_quantized(self._model):
                raise SourceError(
                    "source.unsupported",
                    f"frozen {printable(name)} was saved in 8 bits without its scales "
                    "(zero_quantized_nontrainable_weights)",
                    fix="save with exclude_frozen_parameters=True and take the frozen weights from the base model",
                )
            if len(dtypes) != 1:
                raise SourceError("checkpoint.mixed", f"frozen {printable(name)} has several element types")
            dtype = BY_NAME[dtypes.pop()]
            index = self._builder.tensor(name, "weight", dtype, shape)
            add_sharded_tensor(
                self._builder,
                index,
                partitions=shares,
                itemsize_bytes=dtype.itemsize_bytes,
                what=f"frozen {printable(name)}",
            )
            if name in owned:
                # The run froze it after the optimizer was made. The optimizer still steps its master.
                # This weight is the rounding of the master.
                self.weights[name] = index
            else:
                self._add_frozen(name, shape, index)

    def _add_frozen(self, name: str, shape: tuple[int, ...], index: int) -> None:
        self.frozen_parameters.append(Parameter(name, shape, None, index))
        self._frozen_numbers[name] = index

    def _add_rest(self, owned: Mapping[str, tuple[int, ...]], *, sharded: bool) -> None:
        places: dict[tuple[object, ...], str] = {}
        owners: dict[str, str] = {}
        module = {**self._model.frozen_fragments, **self._model.module} if not sharded else self._model.module
        for name, tensor in module.items():
            place = place_of(tensor)
            if name in self.buffers or name in self._frozen_numbers:
                continue
            if name in owned:
                if not sharded:
                    places[place] = name
                    self.weights[name] = self._whole(name, "weight", tensor)
                owners[tensor.storage.key] = name
                continue
            if name in self.shared:
                continue
            if not sharded and tensor.numel and place in places:
                # Before 0.9.0 aliases were not listed; they share their owner's storage.
                self.shared[name] = places[place]
                continue
            if is_extra_state(name) or self._is_hooks_own(name, tensor, sharded=sharded):
                self.buffers[name] = self._whole(name, "value", tensor)
                self.unregistered.add(name)
                continue
            if sharded and self._is_placeholder(tensor) and name not in self._frozen:
                if not self._lists_shared and tensor.storage.key in owners:
                    # Each parameter has a placeholder of its own; an alias has the placeholder of its owner.
                    self.shared[name] = owners[tensor.storage.key]
                else:
                    self.undescribed.append(name)
                continue
            places[place] = name
            self._add_frozen(name, tensor.shape, self._whole(name, "weight", tensor))

    def _add_left_aliases(self) -> None:
        """Take frozen weights from names that they are tied to, where the save left out their own names."""
        for name in self._model.aliases_left:
            owner = self.shared[name]
            if owner not in self._frozen_numbers:
                tensor = self._model.module[name]
                self._add_frozen(owner, tensor.shape, self._whole(owner, "weight", tensor))

    def _is_hooks_own(self, name: str, tensor: PTensor, *, sharded: bool) -> bool:
        """True for a tensor that is not a parameter, in a run that lists its frozen parameters (stages 2 and 3)."""
        if self._listed is None or name in self._listed:
            return False
        return not (sharded and self._is_placeholder(tensor))

    @property
    def _lists_shared(self) -> bool:
        return "shared_params" in self._model.entries

    def _is_placeholder(self, tensor: PTensor) -> bool:
        # ZeRO-3 leaves `torch.empty(0)` in `module`; up to 0.5 it left `torch.ones(1)`.
        return tensor.numel == 0 or (FROZEN_SHAPES not in self._model.entries and tensor.shape == (1,))

    def weight_of(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The tensor number of an owned parameter's weight in the model's dtype, where it is stored.

        Raises:
            SourceError: as `weight_of`.
        """
        return weight_of(self._builder, self.weights, name, shape)

    @property
    def numbers(self) -> dict[str, int]:
        """The tensor numbers of all entries of `module` but aliases."""
        return {**self.weights, **self.buffers, **self._frozen_numbers}

    def buffer_entries(self) -> tuple[Buffer, ...]:
        """The buffers."""
        return tuple(Buffer(n, t, registered=n not in self.unregistered) for n, t in self.buffers.items())

    @property
    def warnings(self) -> list[str]:
        """Warnings about weights that the files do not hold."""
        return [f"{printable(n)} is an empty placeholder that nothing describes; left out" for n in self.undescribed]

    def not_carried(self) -> tuple[NotCarried, ...]:
        """The placeholders that stand for no known parameter."""
        noted = NotCarriedKeys()
        noted.add_all((f"module.{n}" for n in self.undescribed), "an empty placeholder that nothing describes")
        return noted.found()

    @property
    def frozen_numbers(self) -> Mapping[str, int]:
        """Tensor numbers of frozen parameters by name."""
        return self._frozen_numbers


def weight_of(builder: ShardMapBuilder, weights: Mapping[str, int], name: str, shape: tuple[int, ...]) -> int | None:
    """The tensor number of a parameter's weight in `module`; None where no weight is stored.

    Raises:
        SourceError: `checkpoint.mixed` if the weight has another shape than the optimizer knows.
    """
    index = weights.get(name)
    if index is not None and builder.tensors[index].shape != shape:
        raise SourceError(
            "checkpoint.mixed",
            f"{printable(name)} is {builder.tensors[index].shape} in `module`, {shape} in `param_shapes`",
        )
    return index


# Model states as a tree that a writer can write again: `module` refers to whole tensors, the rest is as it was.


def module_names(paths: Iterable[KeyPath], numbers: Iterable[str], extra_states: Iterable[str]) -> tuple[str, ...]:
    """The names of the state dict in its order, then names that the state dict lacks (frozen shares, layers)."""
    return tuple(dict.fromkeys((*map(name_of, paths), *numbers, *extra_states)))


class ModelTrees(TreeTensors):
    """Trees of model-states files."""

    def model_state(
        self,
        model: ModelStates,
        numbers: Mapping[str, int],
        module: ModuleTensors,
        *,
        extra_states: Mapping[str, Node],
        without: Collection[str | int] = (),
    ) -> dict[str | int, Node]:
        """The entries of the model states.

        Frozen parameters are put together: their fragments become whole tensors, as stage 2 writes them.

        Args:
            model: The model states of rank 0.
            numbers: Tensors of `module` by name.
            module: Tied names and frozen parameters.
            extra_states: Entries of `module` that are not tensors, by name.
            without: Entries to leave out.
        """
        entries: dict[str | int, Node] = {}
        for key, value in model.entries.items():
            if key in without:
                continue
            if key == "module":
                entries[key] = _module(model.paths, numbers, module.shared, extra_states)
            elif key == FROZEN_FRAGMENTS:
                # An empty mapping says that no parameter is frozen, None that the save left frozen parameters out.
                whole = {**module.frozen_numbers, **module.weights}
                refs: dict[str, Node] = {n: PTensorRef(whole[n]) for n, _ in model.frozen_shapes if n in whole}
                entries[key] = ordered_dict(refs) if is_mapping(value) else None
            elif key == "optimizer":
                entries[key] = None
            else:
                entries[key] = self.carried(value, model.torch_file)
        return entries


def _module(
    paths: Collection[KeyPath], numbers: Mapping[str, int], shared: Mapping[str, str], extra_states: Mapping[str, Node]
) -> PObject:
    """The state dict with references, nested as it was, then entries that it lacks (frozen shares, layers)."""
    nodes: dict[str, Node] = {name: PTensorRef(number) for name, number in numbers.items()} | {**extra_states}
    found: list[tuple[KeyPath, Node]] = []
    left = dict(nodes)
    for path in paths:
        name = name_of(path)
        owner = shared.get(name, name)
        if owner in nodes:
            found.append((path, nodes[owner]))
            left.pop(name, None)
    return nested_dict([*found, *(((name,), node) for name, node in left.items())])
