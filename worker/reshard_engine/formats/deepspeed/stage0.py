"""Stage 0: nothing is partitioned; `module` holds the weights, and `optimizer` holds the optimizer's state.

The optimizer numbers its parameters group by group and stores no names. Names follow from `module` (which is in the
model's order) only if exactly one assignment keeps that order within each group and fits every shape; otherwise the
reader asks for `--param-order`, and without an answer only weights are written. Muon sorts its matrices by shape: it
has the model's order among those of one shape.
The order itself is proven in 16 bits, where each master must round to the weight of its name, and by shapes that come
once. In fp32 a warning says that it is assumed, unless the user says it (`--param-order`).

Source: deepspeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`: `optimizer` at stage 0),
`runtime/fp16/fused_optimizer.py` and `unfused_optimizer.py` (`state_dict`), torch 2.13.0 `optim/optimizer.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from typing import Any, TypeAlias

from reshard.choices import ParamOrder
from reshard.errors import RequestError, SourceError, counted, printable
from reshard_engine.checkpoint import Agreement, Checkpoint, OptimizerState, Parameter, Question, Scalar, Undecided
from reshard_engine.containers.torch_file import TorchFile, add_whole_tensor
from reshard_engine.formats.carried import UNKNOWN, NotCarriedKeys
from reshard_engine.formats.deepspeed.config import decoupled_weight_decay
from reshard_engine.formats.deepspeed.facts import DeepSpeedFacts, own_entries, run_fields, split_groups
from reshard_engine.formats.deepspeed.files import CONFIG, OPTIMIZER_STATE, VERSION
from reshard_engine.formats.deepspeed.native.slices import ModelTrees, ModuleTensors, module_names
from reshard_engine.formats.deepspeed.native.target import LocalModel, LocalParameter, Target
from reshard_engine.formats.deepspeed.optimizer import (
    Groups,
    clip_grad_of,
    flat_runs,
    is_muons,
    plain_entries,
    state_runs,
    trained_groups,
)
from reshard_engine.formats.deepspeed.parallel.tensor import rules_of
from reshard_engine.formats.deepspeed.partitioning import Run
from reshard_engine.formats.deepspeed.rank_files import BASE_KEYS, ModelStates, named_states, read_scalar
from reshard_engine.formats.deepspeed.zero12 import Partition, add_flat_group
from reshard_engine.formats.model_weights import StoredNames, plain_name
from reshard_engine.formats.numbered import SAY_ORDER, WEIGHTS_ALONE, Unread
from reshard_engine.pickles.nodes import Node, PList, PRuns, PTensor, mapping_items, mapping_of, sequence_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.tensors.dtypes import BY_NAME, FLOAT32
from reshard_engine.tensors.shard_map import ShardMapBuilder

# Names for the optimizer's numbered parameters: by the user's list, or by the only assignment in the model's order.

_MANY = 2
_LIST = "list each parameter of the optimizer once, in its order"
_MAX_STATES = 20_000
_Path: TypeAlias = Any  # None, or (path before, choice): shared tails keep it linear
Named = tuple[str, tuple[int, ...]]


def _choices(
    placed: tuple[int, ...], shape: tuple[int, ...], groups: Sequence[Sequence[tuple[int, ...] | None]]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The groups that a candidate of this shape can join: none (-1), or each whose next member it can be."""
    yield -1, placed
    for choice, members in enumerate(groups):
        if placed[choice] < len(members) and members[placed[choice]] in (shape, None):
            yield choice, tuple(n + (i == choice) for i, n in enumerate(placed))


def assign_names(
    candidates: Sequence[Named], groups: Sequence[Sequence[tuple[int, ...] | None]]
) -> list[list[str]] | None:
    """Per group the names of its parameters, in the optimizer's order.

    None unless exactly one assignment keeps the model's order in each group.

    Args:
        candidates: Names and shapes in the model's order; some may be frozen and belong to no group.
        groups: Per group the shapes in the optimizer's order, None where the optimizer shows none.
    """
    owned = sum(len(g) for g in groups)
    # Per reachable state (how many of each group are placed): ways to reach it, and one predecessor.
    layer: dict[tuple[int, ...], tuple[int, _Path]] = {tuple(0 for _ in groups): (1, None)}
    goal = tuple(len(g) for g in groups)
    for position, (_, shape) in enumerate(candidates):
        left = len(candidates) - position - 1
        following: dict[tuple[int, ...], tuple[int, _Path]] = {}
        for placed, (ways, path) in layer.items():
            for choice, after in _choices(placed, shape, groups):
                if owned - sum(after) <= left:
                    known = following.get(after)
                    following[after] = (min(_MANY, ways + (known[0] if known else 0)), (path, choice))
        if len(following) > _MAX_STATES:
            return None
        layer = following
    ways, path = layer.get(goal, (0, None))
    if ways != 1:
        return None
    choices: list[int] = []
    while path is not None:
        path, choice = path
        choices.append(choice)
    names: list[list[str]] = [[] for _ in groups]
    for (name, _), choice in zip(candidates, reversed(choices), strict=True):
        if choice >= 0:
            names[choice].append(name)
    return names


def shapes_prove(candidates: Sequence[Named], groups: Sequence[Sequence[tuple[int, ...] | None]]) -> bool:
    """True if every number has a shape that no other number and one candidate only has: then no order is assumed."""
    available = Counter(shape for _, shape in candidates)
    wanted = Counter(shape for group in groups for shape in group)
    return None not in wanted and all(count == 1 == available[shape] for shape, count in wanted.items() if shape)


def names_as_said(
    candidates: Sequence[Named], groups: Sequence[Sequence[tuple[int, ...] | None]], names: Sequence[str]
) -> list[list[str]]:
    """The names that the user listed in the optimizer's order, by group.

    Raises:
        RequestError: `request.invalid` if they are not those of parameters with these shapes.
    """
    shapes, wanted = dict(candidates), [shape for group in groups for shape in group]
    names = _stored_names(shapes, names)
    if len(names) != len(wanted) or len(set(names)) != len(names):
        own = counted(len(wanted), "parameter")
        text = f"--param-order has {counted(len(set(names)), 'name')}, and the optimizer has {own}"
        raise RequestError("request.invalid", text, fix=_LIST)
    for number, (name, shape) in enumerate(zip(names, wanted, strict=True)):
        held = shapes.get(name)
        if held is None or shape not in (held, None):
            reason = "which the model does not have" if held is None else f"which is {held}"
            text = (
                f"--param-order gives number {number}, whose states are {shape}, the name {printable(name)}, {reason}"
            )
            raise RequestError("request.invalid", text, fix=_LIST)
    found, left = list[list[str]](), list(names)
    for group in groups:
        found.append(left[: len(group)])
        left = left[len(group) :]
    return found


def _stored_names(shapes: Iterable[str], names: Sequence[str]) -> list[str]:
    """The user's names as the file has them, which keeps those of wrappers; a name of no parameter stays as it is."""
    found = StoredNames({name: plain_name(name) for name in shapes}).of_list(names)
    return [stored or name for stored, name in zip(found, names, strict=True)]


def assign_names_flat(candidates: Sequence[Named], totals: Sequence[int]) -> list[list[str]] | None:
    """The names of the parameters in each group's flat tensor, of which only the numbers of elements are known.

    The order is proven only for one group that holds every candidate; None otherwise. Several groups could share the
    candidates in many ways.
    """
    numel = sum(prod(shape) for _, shape in candidates)
    if len(totals) == 1 and totals[0] == numel:
        return [[name for name, _ in candidates]]
    return None


def names_by_sizes(candidates: Sequence[Named], totals: Sequence[int], names: Sequence[str]) -> list[list[str]]:
    """The names that the user listed in the optimizer's order, by flat group: each group is full before the next.

    Raises:
        RequestError: `request.invalid` if they are not those of parameters, or do not fill the groups.
    """
    shapes = dict(candidates)
    names = _stored_names(shapes, names)
    if missing := [n for n in names if n not in shapes]:
        text = f"--param-order has {printable(missing[0])}, which the model does not have"
        raise RequestError("request.invalid", text, fix=_LIST)
    found: list[list[str]] = []
    left = list(dict.fromkeys(names))
    for total in totals:
        held: list[str] = []
        room = total
        while left and prod(shapes[left[0]]) <= room:
            room -= prod(shapes[left[0]])
            held.append(left.pop(0))
        found.append(held if room == 0 else [])
    if left or len(set(names)) != len(names) or not all(found):
        text = f"the parameters of --param-order do not fill the optimizer's {len(totals)} groups of {list(totals)}"
        raise RequestError("request.invalid", f"{text} elements", fix=_LIST)
    return found


# Builds the checkpoint of a run at stage 0.

EXTRA_KEYS = (
    "dynamic_loss_scale",
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "scale_factor",
    "scale_window",
    "clip_grad",
)

_WRAPPER_KEYS = frozenset({"fp32_groups", "fp32_groups_flat", OPTIMIZER_STATE})


def assemble_stage0(
    model: ModelStates,
    others: Sequence[str] = (),
    *,
    url: str,
    tag: str | None,
    ledger: OpaqueLedger,
    rules: Mapping[str, Any] | None = None,
    order: ParamOrder | tuple[str, ...] | None = None,
) -> Checkpoint:
    """The checkpoint of a run without ZeRO.

    Optimizer states that cannot be given names are left out with a warning.

    Args:
        model: The only file.
        others: Names of files of its directory that DeepSpeed does not write.
        url: The directory.
        tag: Its tag.
        ledger: What happens to objects of classes that are not listed.
        rules: Rules for cuts, in place of those in the model states.
        order: The user's word on the order of the optimizer's parameters.

    Raises:
        SourceError: `checkpoint.*`.
        RequestError: `request.invalid` for an order that does not fit.
    """
    builder = ShardMapBuilder()
    number = {model.torch_file.file: 0}
    module = ModuleTensors(builder, [model], number, owned={}, sharded=False)
    # Without `param_shapes` everything that is neither a buffer nor an alias is a candidate, in the model's order.
    candidates = {p.fqn: p for p in module.frozen_parameters}
    trees = ModelTrees(builder, number)
    extra_states = {n: trees.carried(v, model.torch_file) for n, v in model.extra_states.items()}
    node = model.entries.get("optimizer")
    optimizer: OptimizerState | None = None
    params: tuple[Node, ...] = ()
    beside: dict[str, Node] = {}
    parameters = list(candidates.values())
    warnings: list[str] = []
    states = None if node is None else _Stage0Optimizer(node, model.torch_file, builder)
    owned, open_ = (None, None) if states is None else _named(states, candidates, order)
    unnamed = "" if open_ is None else open_.text
    if open_ is not None:
        reason = "its optimizer's states have no names" if open_.question is Question.ORDER else unnamed
        warnings.append(f"weights only, as precise as the model's dtype: {reason}")
    noted = NotCarriedKeys()
    noted.add_all(others, "no file of DeepSpeed's")
    if states is not None:
        left = states.unread if owned is not None else ["optimizer"]
        noted.add_all(left, UNKNOWN if owned is not None else "its states have no names", file=states.file_name)
    if states is None:
        warnings.append("the checkpoint has no optimizer: weights only")
    elif owned is not None:
        parameters = [owned.get(n, p) for n, p in candidates.items()]
        place = {n: i for i, n in enumerate(owned)}
        parameters.sort(key=lambda p: (p.fqn not in place, place.get(p.fqn, 0)))
        groups, params = split_groups(trees.carried(n, model.torch_file) for n in states.group_nodes)
        optimizer = OptimizerState(groups, decoupled_weight_decay(model.entries.get(CONFIG)))
        beside = {k: trees.carried(v, model.torch_file) for k, v in states.extras.items()}
        beside |= {VERSION: model.version} if model.version else {}
        if "cur_scale" in states.extras:
            warnings.append("stage 0 keeps its loss scale in another form than stages 1 to 3: it starts anew there")
        if not any(p.states.keys() - {"fp32"} for p in owned.values()) and not model.stepped:
            warnings.append("the checkpoint has no optimizer states: it was saved before the first step")
    roundings = [
        Agreement(n, "fp32", p.states["fp32"], p.weight, "the weight of that name", rounded=True, fix=_ANOTHER_ORDER)
        for n, p in (owned or {}).items()
        if states is not None and states.has_masters and p.weight is not None
    ]
    cut_rules, _ = rules_of(model, rules)
    if cut_rules is not None:
        parameters = [replace(p, cut=cut_rules.cut_of(p.fqn, [p.shape])) for p in parameters]
    entries = trees.model_state(model, module.numbers, module, extra_states=extra_states)
    return Checkpoint(
        url=url,
        tag=tag,
        format="deepspeed-stage0",
        framework_version=model.version,
        facts=DeepSpeedFacts(
            zero_stage=0,
            entries=own_entries(entries),
            order=tuple(entries),
            module_paths=model.paths,
            optimizer_entries=beside,
            params=params,
        ),
        **run_fields(entries),
        world={"dp": model.integer("dp_world_size") or 1, "tp": 1, "pp": 1},
        files=(model.torch_file.file,),
        parameters=tuple(parameters),
        buffers=module.buffer_entries(),
        shared=module.shared,
        optimizer=optimizer,
        no_optimizer=unnamed,
        module_names=module_names(model.paths, module.numbers, extra_states),
        extra_states=extra_states,
        not_carried=noted.found(),
        shard_map=builder.build(),
        foreign_globals=tuple(sorted(ledger.foreign)),
        warnings=tuple(warnings),
        agreements=tuple(roundings),
        undecided=() if open_ is None or open_.question is not Question.ORDER else (open_,),
        assumed=(_IN_MODELS_ORDER,) if owned and order is None and states is not None and states.unproven else (),
    )


_ANOTHER_ORDER = "say the order of the optimizer's parameters, which its file numbers: --param-order FILE"
_IN_MODELS_ORDER = Undecided(
    Question.ORDER,
    "stage 0 numbers the optimizer's parameters: in each group they are taken in the model's order, which nothing "
    "proves in fp32",
    "--param-order FILE gives another one",
)


def _unread(numbered: str, order: ParamOrder | None, *, listable: bool, by_model: bool = False) -> Unread:
    """The reason why the optimizer's states have no names.

    Args:
        numbered: The optimizer's parameters and groups, in words.
        order: The user's word on their order, which leaves no way, or several.
        listable: True if the model has parameters for all of them, so that the user can list their names.
        by_model: True if one way keeps the model's order over all groups.
    """
    text = f"stage 0 stores no names for optimizer states: the optimizer numbers its {numbered}, and "
    if not listable:
        return Unread(f"{text}the model has no parameters of their shapes", WEIGHTS_ALONE, Question.OPTIMIZER)
    if order is not None:
        reason = f"in the order of --param-order {order} their shapes leave no way, or several, to name them"
    else:
        reason = "nothing says which parameter has which number"
    model = "--param-order model if the groups take the model's parameters one after another, or " if by_model else ""
    return Unread(f"{text}{reason}", f"{model}{SAY_ORDER}; {WEIGHTS_ALONE}; ZeRO stage 1 stores names")


def _named(
    states: _Stage0Optimizer, candidates: Mapping[str, Parameter], order: ParamOrder | tuple[str, ...] | None
) -> tuple[dict[str, Parameter] | None, Undecided | None]:
    """The parameters that the optimizer owns; None, and the reason, if its states cannot be given names."""
    shapes, weights = {n: p.shape for n, p in candidates.items()}, {n: p.weight for n, p in candidates.items()}
    try:
        return states.assign(shapes, weights, order), None
    except Unread as reason:
        # The weights have names in any case. Writers of optimizer states refuse this source and say why.
        return None, Undecided(reason.question, reason.text, reason.fix)


class _Stage0Optimizer:
    """The `optimizer` entry: torch's own state dict, or the 16-bit wrapper with fp32 masters around it."""

    def __init__(self, node: Node, torch_file: TorchFile, builder: ShardMapBuilder) -> None:
        outer = mapping_items(node, what="optimizer")
        self._torch_file = torch_file
        self._builder = builder
        self.unproven = False
        """True if the order of the model was assumed for its numbers."""
        self._flat = _tensors(outer.get("fp32_groups_flat"))
        self._masters = (
            [_tensors(g) for g in sequence_items(outer["fp32_groups"], what="fp32_groups")]
            if "fp32_groups" in outer
            else []
        )
        inner = mapping_items(outer[OPTIMIZER_STATE], what="optimizer") if OPTIMIZER_STATE in outer else outer
        self.file_name = torch_file.file.name
        known = BASE_KEYS if inner is outer else _WRAPPER_KEYS | frozenset(EXTRA_KEYS)
        self.unread = [f"optimizer.{k}" for k in outer if k not in known]
        if inner is not outer:
            self.unread += [f"optimizer.{OPTIMIZER_STATE}.{k}" for k in inner if k not in BASE_KEYS]
        self.extras: dict[str, Node] = {k: outer[k] for k in EXTRA_KEYS if k in outer}
        state = inner.get("state")
        self._state = {} if state is None else mapping_items(state, what="optimizer state")
        self._elementwise = _elementwise_keys([_states_of(entry) for entry in self._state.values()])
        self.group_nodes = tuple(sequence_items(inner.get("param_groups"), what="param_groups"))
        self._groups = [
            [
                i
                for i in sequence_items(mapping_items(g, what="param_groups").get("params"), what="params")
                if type(i) is int
            ]
            for g in self.group_nodes
        ]
        ids = [i for group in self._groups for i in group]
        owned = range(len(self._flat)) if self._flat else ids
        self.unread += [f"optimizer.state.{k}" for k in self._state if k not in owned]
        lengths = [len(g) for g in self._masters]
        if len(set(ids)) != len(ids) or (self._masters and lengths != [len(g) for g in self._groups]):
            raise SourceError("checkpoint.malformed", "the optimizer's groups and its masters do not fit together")

    @property
    def has_masters(self) -> bool:
        """True if masters lie beside the weights, which are their roundings."""
        return bool(self._flat or self._masters)

    def assign(
        self,
        candidates: Mapping[str, tuple[int, ...]],
        weights: Mapping[str, int | None],
        order: ParamOrder | tuple[str, ...] | None,
    ) -> dict[str, Parameter]:
        """The parameters that the optimizer owns, in its order, with their states registered.

        Raises:
            RequestError: `request.invalid` for a list of names that does not fit.
            Unread: Nothing tells the names of its numbers.
        """
        if self._flat:
            return self._assign_flat(candidates, weights, order)
        shapes = [[self._shape(g, p, i) for p, i in enumerate(ids)] for g, ids in enumerate(self._groups)]
        named = list(candidates.items())
        if isinstance(order, tuple):
            names = names_as_said(named, shapes, order)
        elif (ordered := self._ordered(named, shapes, order)) is not None:
            names = ordered
        else:
            raise self._unnamed(named, shapes, order)
        self.unproven = not self.has_masters and not shapes_prove(named, shapes)
        owned: dict[str, Parameter] = {}
        for group, (ids, group_names) in enumerate(zip(self._groups, names, strict=True)):
            for place, (index, name) in enumerate(zip(ids, group_names, strict=True)):
                states, scalars = self._whole_states(name, index, group)
                master = self._masters[group][place] if self._masters else None
                if master is not None:
                    states["fp32"] = add_whole_tensor(
                        self._builder, name, "fp32", master, torch_file=self._torch_file, file=0
                    )
                elif (weight := weights[name]) is not None:
                    states["fp32"] = weight
                owned[name] = Parameter(name, candidates[name], group, weights[name], states, scalars)
        return owned

    def _ordered(
        self,
        named: Sequence[Named],
        shapes: Sequence[Sequence[tuple[int, ...] | None]],
        order: ParamOrder | None,
    ) -> list[list[str]] | None:
        """The names by group in the model's order, within each group or over all groups; None unless one way fits."""
        if order is not ParamOrder.MODEL:
            return self._in_models_order(named, shapes)
        # Over all groups: each of them holds what follows the one before it in the model.
        flat = assign_names(named, [[s for group in shapes for s in group]])
        return None if flat is None else names_as_said(named, shapes, flat[0])

    def _unnamed(
        self,
        named: Sequence[Named],
        shapes: Sequence[Sequence[tuple[int, ...] | None]],
        order: ParamOrder | None,
    ) -> Unread:
        """The reason why the numbers have no names, with the orders that give them names."""
        wanted = Counter(shape for group in shapes for shape in group)
        unshown = wanted.pop(None, 0)
        listable = wanted <= Counter(shape for _, shape in named) and wanted.total() + unshown <= len(named)
        by_model = order is None and len(shapes) > 1 and self._ordered(named, shapes, ParamOrder.MODEL) is not None
        counts = f"{counted(wanted.total() + unshown, 'parameter')} over {counted(len(shapes), 'param group')}"
        return _unread(counts, order, listable=listable, by_model=by_model)

    def _in_models_order(
        self, named: Sequence[Named], shapes: Sequence[Sequence[tuple[int, ...] | None]]
    ) -> list[list[str]] | None:
        """The names by group, each in the model's order; Muon sorts by shape, and has it among equal shapes."""
        runs: list[list[list[tuple[int, ...] | None]]] = []
        for node, group in zip(self.group_nodes, shapes, strict=True):
            sorts = is_muons(mapping_items(node, what="param_groups")) and None not in group
            runs.append([list(same) for _, same in groupby(group)] if sorts else [list(group)])
        assigned = assign_names(named, [run for group in runs for run in group])
        if assigned is None:
            return None
        found = iter(assigned)
        return [[name for _ in group for name in next(found)] for group in runs]

    def _shape(self, group: int, place: int, index: int) -> tuple[int, ...] | None:
        """The shape that the optimizer's own tensors show, or None before the first step."""
        if self._masters:
            return self._masters[group][place].shape
        entry = self._state.get(index)
        if entry is not None:
            for key, value in _states_of(entry).items():
                if isinstance(value, PTensor) and key in self._elementwise:
                    return value.shape
        return None

    def _whole_states(self, name: str, index: int, group: int) -> tuple[dict[str, int], dict[str, Scalar]]:
        states: dict[str, int] = {}
        scalars: dict[str, Scalar] = {}
        entry = _states_of(self._state.get(index))
        for key, value in entry.items():
            if isinstance(value, PTensor) and key in self._elementwise:
                states[key] = add_whole_tensor(self._builder, name, key, value, torch_file=self._torch_file, file=0)
            elif value is not None:
                scalars[key] = read_scalar(value, self._torch_file, what=f"optimizer state {printable(key)}")
        return states, self._counted(scalars, entry, group)

    def _counted(self, scalars: dict[str, Scalar], entry: Mapping[str, Node], group: int) -> dict[str, Scalar]:
        """The scalars, with the group's counter where the states have none: fused optimizers count there."""
        step = mapping_items(self.group_nodes[group], what="param_groups").get("step")
        if entry and step is not None and "step" not in scalars:
            scalars["step"] = read_scalar(step, self._torch_file, what="param_groups: step")
        return scalars

    def _assign_flat(
        self,
        candidates: Mapping[str, tuple[int, ...]],
        weights: Mapping[str, int | None],
        order: ParamOrder | tuple[str, ...] | None,
    ) -> dict[str, Parameter]:
        named, totals = list(candidates.items()), [f.numel for f in self._flat]
        names = names_by_sizes(named, totals, order) if isinstance(order, tuple) else assign_names_flat(named, totals)
        if names is None:
            listable = sum(totals) <= sum(prod(shape) for _, shape in named)
            raise _unread(f"parameters in {counted(len(totals), 'flat group')}", None, listable=listable)
        owned: dict[str, Parameter] = {}
        for group, group_names in enumerate(names):
            shapes = tuple((n, candidates[n]) for n in group_names)
            flats: dict[str, PTensor] = {"fp32": self._flat[group]}
            scalars: dict[str, Scalar] = {}
            entry = _states_of(self._state.get(group))
            for key, value in entry.items():
                if isinstance(value, PTensor) and value.shape:
                    flats[key] = value
                elif value is not None:
                    scalars[key] = read_scalar(value, self._torch_file, what=f"optimizer state {printable(key)}")
            scalars = self._counted(scalars, entry, group)
            by_name: dict[str, dict[str, int]] = {n: {} for n in group_names}
            for key, flat in flats.items():
                dtype = BY_NAME[flat.dtype]
                tensors = [self._builder.tensor(n, key, dtype, s) for n, s in shapes]
                for name, tensor in zip(group_names, tensors, strict=True):
                    by_name[name][key] = tensor
                add_flat_group(
                    self._builder,
                    tensors,
                    shapes,
                    partitions=[Partition(0, self._torch_file.tensor_offset(flat), flat.numel)],
                    paddings=(),
                    itemsize_bytes=dtype.itemsize_bytes,
                    what=f"group {group}, {printable(key)}",
                )
            for name, shape in shapes:
                owned[name] = Parameter(name, shape, group, weights[name], by_name[name], scalars)
        return owned


def _states_of(entry: Node) -> dict[str, Node]:
    return {} if entry is None else named_states(mapping_items(entry, what="optimizer state"))


def _elementwise_keys(entries: Sequence[Mapping[str, Node]]) -> set[str]:
    """The states that have an element for each of the parameter's, not one number.

    A parameter without dimensions does not show the difference; the other parameters do. If there are no others, only
    `step` is taken for a number: so every optimizer of torch and DeepSpeed calls its only number.
    """
    tensors = [(key, value) for entry in entries for key, value in entry.items() if isinstance(value, PTensor)]
    return {key for key, value in tensors if value.shape} or {key for key, _ in tensors if key != "step"}


def _tensors(node: Node) -> list[PTensor]:
    items: Sequence[Node] = [] if node is None else sequence_items(node, what="fp32 groups")
    if not all(isinstance(i, PTensor) for i in items):
        raise SourceError("checkpoint.malformed", "an fp32 group holds something that is not a tensor")
    if any(prod(i.shape) != i.numel for i in items):
        raise SourceError("checkpoint.malformed", "an fp32 group has an impossible shape")
    return list(items)


# The optimizer entry of stage 0: every rank has all of it, so the model states hold it once.
#
# A 16-bit run uses one of two forms: fused optimizers keep one flat master per group, other optimizers a list of
# masters. DeepSpeed's fused optimizers are recognised by their hyper-parameters.
#
# Source: deepspeed 0.19.8 `runtime/engine.py` (`_configure_fp16_optimizer`), `runtime/fp16/fused_optimizer.py` and
# `unfused_optimizer.py` (`state_dict`, `load_state_dict`), torch 2.13.0 `optim/optimizer.py`.

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
            runs: dict[str, tuple[Run, ...]] = {s: state_runs(parameter, s) for s in groups.states_of(parameter.group)}
            if groups.has_state([parameter]):
                state[number] = groups.state_entry([parameter], runs, parameter.shape)
        count += len(group)
    return mapping_of({"state": mapping_of(state), "param_groups": groups.with_params(numbers)})


def _flat(groups: Groups, members: Sequence[Sequence[LocalParameter]]) -> dict[str | int, Node]:
    state: dict[str | int, Node] = {}
    masters: list[Node] = []
    for index, group in enumerate(members):
        runs = {s: tuple(flat_runs(group, [0] * len(group), s)) for s in groups.states_of(index)}
        shape = (sum(p.numel for p in group),)
        masters.append(PRuns((groups.dtype_of("fp32", group) if group else FLOAT32).name, shape, runs["fp32"]))
        if groups.has_state(group):
            state[index] = groups.state_entry(group, runs, shape)
    numbers = [[index] for index in range(len(members))]
    inner = mapping_of({"state": mapping_of(state), "param_groups": groups.with_params(numbers)})
    return {OPTIMIZER_STATE: inner, "fp32_groups_flat": PList(masters)}
