"""A saved optimizer: its states and param groups, and the names of the parameters that it numbers.

Source: torch 2.13.0 `distributed/checkpoint/state_dict.py` (`_flatten_optim_state_dict`: each hyper-parameter once for
each parameter; up to 2.3 all groups are one value), `optim/optimizer.py` (`state_dict`: parameters are numbered over
the groups in order; `param_names` of groups that were made of named parameters, from 2.6 on), `optim/lr_scheduler.py`
(`base_lrs`, `initial_lr`); verified by running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from reshard.choices import ParamOrder
from reshard.errors import RequestError, SourceError, counted, listed, printable
from reshard_engine.checkpoint import ParamGroup, Question, Undecided
from reshard_engine.formats.dcp.facts import nested
from reshard_engine.formats.dcp.optimizers import STEP, has_its_shape
from reshard_engine.formats.dcp_files.metadata.model import KeyPath
from reshard_engine.formats.dcp_files.saved_state import Item, SavedTensor, SavedValue
from reshard_engine.formats.model_weights import StoredNames, name_without_adapter, plain_names
from reshard_engine.formats.numbered import Form, in_models_order, only_way
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PBytearray,
    PList,
    PObject,
    PTensorRef,
    PTuple,
    is_mapping,
    mapping_items,
    sequence_items,
)

Shape = tuple[int, ...]
NodeOf = Callable[[Sequence[Item]], Node]
Order = ParamOrder | tuple[str, ...] | None
"""The user's word on the order of an optimizer's parameters."""
GROUPS, STATE, PARAMS, NAMES = "param_groups", "state", "params", "param_names"
_BY_NAME = (
    "save the optimizer with torch.distributed.checkpoint.state_dict.get_state_dict, which names parameters; weights "
    "can be had from this checkpoint: --to safetensors"
)
_SAY_ORDER = (
    "--param-order model if the optimizer was made of model.parameters(), --param-order groups if each of its groups "
    "has the model's order, or --param-order FILE with the names in the optimizer's order, one a line"
)
_SAY_GROUPS = (
    "--param-order model if the groups come in the order of their first parameters in the model, or --param-order FILE "
    "with the names in the optimizer's order, one a line"
)


@dataclass(frozen=True)
class NamesOfModel:
    """Names of a model's tensors as its state dict has them, in order, with their shapes."""

    shapes: Mapping[str, Shape]
    of_adapter: Mapping[str, str] | None = None
    """For each name the run's own, if the state dict is that of an adapter alone, without the adapter's name."""

    @cached_property
    def plain(self) -> Mapping[str, str]:
        """For each name the plain one, which is the run's without names of wrapping modules.

        Raises:
            SourceError: `checkpoint.ambiguous`.
        """
        return plain_names(list(self.shapes)) if self.of_adapter is None else self.of_adapter

    @cached_property
    def _stored(self) -> StoredNames:
        return StoredNames(self.plain)

    def of(self, key: str) -> str | None:
        """The model's name for an optimizer's key; None if the model has no such parameter."""
        return key if key in self.shapes else self._stored.of(key)

    def of_list(self, names: Sequence[str]) -> list[str | None]:
        """The model's name for each entry of a user's list; None where the model has no such parameter."""
        return self._stored.of_list(names)


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """A param group with its members as the optimizer names them: names, or numbers as text."""

    group: ParamGroup
    members: tuple[str, ...]
    numbered: bool = False
    """True if the members are numbers."""


@dataclass(frozen=True, slots=True)
class ReadOptimizer:
    """Param groups with their members, and the name of each of the optimizer's keys."""

    groups: tuple[ReadGroup, ...]
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The model's name for each key of the optimizer; none if it numbers parameters and nothing tells their order."""
    undecided: tuple[Undecided, ...] = ()
    warnings: tuple[str, ...] = ()
    assumed: tuple[Undecided, ...] = ()


@dataclass(slots=True)
class OptimizerEntries:
    """The entries of one optimizer's state dict."""

    path: KeyPath
    flat: bool
    """True if names, states and hyper-parameters are joined to one key, as `flatten_optimizer_state_dict` does it."""
    states: dict[str, dict[str, list[Item]]] = field(default_factory=dict[str, dict[str, list[Item]]])
    """States by the optimizer's key of the parameter (its name or number) and the state's name."""
    nested: dict[str, dict[KeyPath, list[Item]]] = field(default_factory=dict[str, dict[KeyPath, list[Item]]])
    """The parts of states that are lists or dicts, by key and path."""
    _groups: dict[str | int, dict[KeyPath, list[Item]]] = field(
        default_factory=dict[str | int, dict[KeyPath, list[Item]]]
    )
    """Hyper-parameters by group and path in it; a flat optimizer has a group for each parameter's name."""
    _whole: SavedValue | None = None
    """All param groups as one value, as torch up to 2.3 saves them."""
    groups: tuple[ReadGroup, ...] = ()
    """The param groups; of a flat optimizer one for each parameter, until `resolved` joins them."""
    _hyper_parameters: Mapping[str, Mapping[str | int, Node]] = field(
        default_factory=dict[str, Mapping[str | int, Node]]
    )
    """The hyper-parameters of each parameter's group."""

    def owns(self, path: KeyPath) -> bool:
        """True for a path of this optimizer's states or groups."""
        depth = len(self.path)
        if len(path) <= depth or path[:depth] != self.path:
            return False
        head = str(path[depth])
        return head.startswith((f"{STATE}.", f"{GROUPS}.")) if self.flat else head in (STATE, GROUPS)

    def add(self, item: Item) -> bool:
        """Add an entry that it owns; False if the entry is not as torch saves optimizers."""
        inner = item.path[len(self.path) :]
        head = str(inner[0])
        if self.flat:
            kind, _, rest = head.partition(".")
            name, _, value = rest.rpartition(".")
            if kind == STATE and len(inner) > 1:
                self.nested.setdefault(name, {}).setdefault((value, *inner[1:]), []).append(item)
            elif kind == STATE:
                self.states.setdefault(name, {}).setdefault(value, []).append(item)
            else:
                self._groups.setdefault(name, {}).setdefault((value, *inner[1:]), []).append(item)
        elif head == STATE and len(inner) == 3:
            self.states.setdefault(str(inner[1]), {}).setdefault(str(inner[2]), []).append(item)
        elif head == STATE and len(inner) > 3:
            self.nested.setdefault(str(inner[1]), {}).setdefault(inner[2:], []).append(item)
        elif head == GROUPS and len(inner) >= 3 and isinstance(inner[1], int):
            self._groups.setdefault(inner[1], {}).setdefault(inner[2:], []).append(item)
        elif head == GROUPS and len(inner) == 1 and isinstance(item, SavedValue):
            self._whole = item
        else:
            return False
        return True

    def read_groups(self, node_of: NodeOf) -> None:
        """Read the param groups, when all entries are there.

        Raises:
            SourceError: `checkpoint.malformed`, `checkpoint.incomplete`.
        """
        if self.flat:
            self.groups = tuple(_flat_group(str(k), e, node_of) for k, e in self._groups.items())
        elif self._whole is not None:
            found = sequence_items(node_of([self._whole]), what="param_groups")
            self.groups = tuple(_group(mapping_items(node, what="param_groups")) for node in found)
        else:
            numbers = sorted(n for n in self._groups if isinstance(n, int))
            if numbers != list(range(len(numbers))):
                raise SourceError("checkpoint.incomplete", f"param groups are numbered {numbers[:8]}", fix=_BY_NAME)
            entries = (nested({p: node_of(i) for p, i in self._groups[n].items()}) for n in numbers)
            self.groups = tuple(map(_group, entries))
        self._hyper_parameters = {m: g.group.hyper_parameters for g in self.groups for m in g.members}
        keys = Counter(key for group in self.groups for key in group.members)
        if keys and keys.most_common(1)[0][1] > 1:
            raise SourceError("checkpoint.malformed", "a parameter is a member of two param groups")
        if self.numbered and (named := self._said_names()):
            self._rename(named)

    @property
    def numbered(self) -> bool:
        """True if it numbers its parameters."""
        return any(g.numbered for g in self.groups) and all(g.numbered or not g.members for g in self.groups)

    def _said_names(self) -> dict[str, str]:
        """The names of numbers where the groups keep them: of an optimizer that was made of named parameters."""
        found: dict[str, str] = {}
        for group in self.groups:
            names = group.group.hyper_parameters.get(NAMES)
            held = names.items if isinstance(names, PList | PTuple) else ()
            if len(held) != len(group.members) or not all(isinstance(n, str) for n in held):
                return {}
            found |= dict(zip(group.members, map(str, held), strict=True))
        return found

    def _rename(self, names: Mapping[str, str]) -> None:
        self._hyper_parameters = {names.get(key, key): found for key, found in self._hyper_parameters.items()}
        self.states = {names.get(key, key): found for key, found in self.states.items()}
        self.nested = {names.get(key, key): found for key, found in self.nested.items()}
        self.groups = tuple(ReadGroup(g.group, tuple(names[m] for m in g.members)) for g in self.groups)

    @property
    def _keys(self) -> tuple[str, ...]:
        """Its keys of parameters: in its order, then those of states without a group."""
        return tuple(dict.fromkeys((*(key for g in self.groups for key in g.members), *self.states)))

    def shape_of(self, key: str) -> Shape | None:
        """The shape of a parameter, from the states of an optimizer that is known; None if nothing tells it."""
        first = {s: i[0].entry.shape for s, i in self.states.get(key, {}).items() if isinstance(i[0], SavedTensor)}
        shapes = {state: shape for state, shape in first.items() if shape and state != STEP}
        if len({*shapes.values()}) != 1 or not has_its_shape(self._hyper_parameters.get(key, ()), shapes):
            return None
        return next(iter(shapes.values()))

    def _form_of(self, key: str) -> Form | None:
        """The form of a parameter, as far as its states tell it."""
        shape = self.shape_of(key)
        entries = [i[0].entry for i in self.states.get(key, {}).values() if isinstance(i[0], SavedTensor)]
        return Form.of_states([Form(e.shape, e.dtype.complex) for e in entries if shape and e.shape == shape])

    def has_rates(self, rates: Sequence[Node]) -> bool:
        """True if its groups have these learning rates; the groups of a flattened one have no order."""
        own = self.rates
        return bool(rates) and ({*map(str, own)} == {*map(str, rates)} if self.flat else own == [*rates])

    @property
    def rates(self) -> list[Node]:
        """The learning rate of each group; of a flattened one each rate once."""
        own = [g.group.hyper_parameters.get("lr") for g in self.groups]
        return list({str(rate): rate for rate in own}.values()) if self.flat else own

    def named_by(self, names: NamesOfModel) -> int:
        """The number of its parameters that a model has."""
        return 0 if self.numbered else sum(names.of(key) is not None for key in self._keys)

    def names_in(self, names: NamesOfModel) -> NamesOfModel:
        """A model's names; of an adapter that PEFT saved alone, with the run's names, which this optimizer has.

        The optimizer proves them: every parameter that it names is in the model without the adapter's name, for one
        adapter only, no two under one name, and with the shape of its moments. What the model has beside these is of
        modules that were saved whole, or of the base model. Anything else is left as it is.
        """
        unknown = [] if self.numbered else [key for key in self._keys if names.of(key) is None]
        adapters = dict.fromkeys(unknown[0].split(".")) if unknown else ()
        found = [runs for adapter in adapters if (runs := self._names_of_run(names, adapter)) is not None]
        return NamesOfModel(names.shapes, found[0]) if len(found) == 1 else names

    def _names_of_run(self, names: NamesOfModel, adapter: str) -> Mapping[str, str] | None:
        """For each name of a model the run's, if the model's state dict is that of this adapter; else None."""
        keys = {name_without_adapter(key, adapter): key for key in self._keys}
        if len(keys) != len(self._keys) or not all(
            name in names.shapes and self._agrees(key, names.shapes[name]) for name, key in keys.items()
        ):
            return None
        mark = f".modules_to_save.{adapter}."
        whole = dict.fromkeys(key.rpartition(mark)[0] for key in self._keys if mark in key)
        found: dict[str, str] = {}
        for name in names.shapes:
            module = next((m for m in whole if name.startswith(f"{m}.")), None)
            if name not in keys and module is None and not _is_of_base(name):
                return None
            inner = name if module is None else f"{module}{mark}{name[len(module) + 1 :]}"
            found[name] = keys.get(name, inner)
        return found if len({*found.values()}) == len(found) else None

    def fits(self, names: NamesOfModel) -> bool:
        """True if a model has all of its parameters: by their names, or by the shapes of numbered ones."""
        names = self.names_in(names)
        if not self.numbered:
            found = [(key, names.of(key)) for key in self._keys]
            return bool(found) and all(n is not None and self._agrees(key, names.shapes[n]) for key, n in found)
        available = Counter(names.shapes.values())
        wanted = Counter(shape for key in self._keys if (shape := self.shape_of(key)) is not None)
        return len(self._keys) <= len(names.shapes) and all(available[s] >= n for s, n in wanted.items())

    def _agrees(self, key: str, shape: Shape) -> bool:
        held = [i[0].entry.shape for i in self.states.get(key, {}).values() if isinstance(i[0], SavedTensor)]
        alike = [s for s in held if len(s) == len(shape)]
        return not alike or not shape or shape in alike

    def resolved(
        self, names: NamesOfModel, may_own: Mapping[str, Form], order: Order, schedulers: Sequence[Node]
    ) -> ReadOptimizer:
        """Give its parameters the model's names, and its groups their order.

        Args:
            names: The model.
            may_own: The forms of the model's tensors that it may own, by name, in the model's order.
            order: The user's word on the order of its parameters.
            schedulers: The state dict of its scheduler, which keeps the groups' learning rates in their order.

        Raises:
            SourceError: `checkpoint.incomplete`, `checkpoint.malformed`.
            RequestError: `request.invalid` for an order that does not fit.
        """
        grouped = {key for g in self.groups for key in g.members}
        if strangers := [key for key in self.states if key not in grouped]:
            raise SourceError(
                "checkpoint.malformed",
                f"the optimizer has states of {counted(len(strangers), 'parameter')} of no param group: "
                f"{listed(strangers)}",
                fix="the model and the optimizer are of different saves: copy the checkpoint again",
            )
        if self.numbered:
            return self._numbered(names, may_own, order)
        found = {key: self._name(key, names) for key in self._keys}
        if not self.flat:
            return ReadOptimizer(self.groups, found)
        return _joined(self.groups, found, names, order, schedulers)

    @staticmethod
    def _name(key: str, names: NamesOfModel) -> str:
        found = names.of(key)
        if found is None:
            raise SourceError(
                "checkpoint.incomplete",
                f"the optimizer names {printable(key)}, and the model has no such parameter",
                fix="copy the checkpoint again, if the model and the optimizer are of different saves; for the weights "
                "alone, name the model's own directory, such as pytorch_model_fsdp_0",
            )
        return found

    def as_it_is(self) -> ReadOptimizer:
        """It with its own keys as names, for one that numbers its parameters and is written again as it is."""
        return ReadOptimizer(self.groups, {key: key for key in self._keys})

    @property
    def own_names(self) -> NamesOfModel:
        """Its own keys as names, with the shapes that are known."""
        return NamesOfModel({key: self.shape_of(key) or () for key in self._keys})

    def _numbered(self, names: NamesOfModel, may_own: Mapping[str, Form], order: Order) -> ReadOptimizer:
        numbers = [key for g in self.groups for key in g.members]
        wanted = [self._form_of(key) for key in numbers]
        if isinstance(order, tuple):
            return ReadOptimizer(self.groups, self._as_said(numbers, order, names))
        if order is None:
            found = only_way(wanted, may_own)
        else:
            spans = [len(numbers)] if order is ParamOrder.MODEL else [len(g.members) for g in self.groups]
            found = in_models_order(wanted, spans, [*may_own.items()])
        if found is None:
            undecided = Undecided(Question.ORDER, _no_names(numbers, wanted, len(may_own), order), _fix_of(order))
            return ReadOptimizer(tuple(ReadGroup(g.group, ()) for g in self.groups), undecided=(undecided,))
        return ReadOptimizer(self.groups, dict(zip(numbers, found, strict=True)))

    def _as_said(self, numbers: Sequence[str], order: tuple[str, ...], names: NamesOfModel) -> dict[str, str]:
        """The names that the user listed in the optimizer's order."""
        found: dict[str, str] = {}
        if len(order) != len(numbers):
            own = counted(len(numbers), "parameter")
            text = f"--param-order has {counted(len(order), 'name')}, and the optimizer has {own}"
            raise RequestError("request.invalid", text, fix="list each parameter of the optimizer once, in its order")
        for key, said, name in zip(numbers, order, names.of_list(order), strict=True):
            shape = self.shape_of(key)
            if name is None or not self._agrees(key, names.shapes[name]):
                reason = "which the model does not have" if name is None else f"which is {names.shapes[name]}"
                raise RequestError(
                    "request.invalid",
                    f"--param-order gives number {key}, whose states are {shape}, the name {printable(said)}, {reason}",
                    fix="list each parameter of the optimizer once, in its order",
                )
            found[key] = name
        if len(set(found.values())) != len(found):
            twice = Counter(found.values()).most_common(1)[0][0]
            raise RequestError("request.invalid", f"--param-order has {printable(twice)} twice", fix="list it once")
        return found


def _is_of_base(name: str) -> bool:
    """True for a tensor of the base model that PEFT saves with an adapter: an embedding or a head with new tokens."""
    parts = name.split(".")
    return parts[-1] in ("weight", "bias") and not any(part.startswith("lora_") for part in parts)


def _fix_of(order: Order) -> str:
    return _SAY_ORDER if order is None else f"{_SAY_ORDER}; {_BY_NAME}"


def _no_names(numbers: Sequence[str], wanted: Sequence[Form | None], tensors: int, order: Order) -> str:
    """A statement of why numbers have no names."""
    head = f"the optimizer numbers its {counted(len(numbers), 'parameter')}"
    if order is not None:
        return f"{head}, and their shapes leave no way, or several, to name them in the order of --param-order {order}"
    counts = Counter(form for form in wanted if form is not None)
    shape, most = counts.most_common(1)[0] if counts else ((), 0)
    if most > 1:
        return f"{head}, and nothing says which is which: {most} of them have the shape {shape}"
    return f"{head}, and their shapes do not tell which of {tensors} tensors of the model each one is"


def _group(entries: Mapping[str | int, Node]) -> ReadGroup:
    members = sequence_items(entries.get(PARAMS), what="params of a param group")
    numbered = bool(members) and all(type(m) is int for m in members)
    if not numbered and not all(isinstance(m, str) for m in members):
        raise SourceError("checkpoint.malformed", "a param group has members that are neither names nor numbers")
    values = ParamGroup({k: v for k, v in entries.items() if k != PARAMS})
    return ReadGroup(values, tuple(map(str, members)), numbered)


def _flat_group(key: str, entries: Mapping[KeyPath, list[Item]], node_of: NodeOf) -> ReadGroup:
    values = nested({path: node_of(items) for path, items in entries.items()})
    values.pop(PARAMS, None)
    return ReadGroup(ParamGroup(values), (key,))


def _joined(
    single: Sequence[ReadGroup],
    names: Mapping[str, str],
    model: NamesOfModel,
    order: Order,
    schedulers: Sequence[Node],
) -> ReadOptimizer:
    """Groups made of the parameters whose hyper-parameters are equal, in the order that something says.

    A flattened optimizer keeps neither the order of its groups nor that of its parameters. A scheduler keeps an initial
    learning rate for each group. Parameters are in the model's order.
    """
    said = model.of_list(order) if isinstance(order, tuple) else list(model.shapes)
    rank = {name: i for i, name in enumerate(said)}
    if missing := [n for n in names.values() if n not in rank]:
        raise RequestError(
            "request.invalid",
            f"--param-order leaves out {counted(len(missing), 'parameter')} of the optimizer: {listed(missing)}",
            fix="list each parameter of the optimizer once, in its order",
        )
    groups: dict[object, tuple[ParamGroup, list[str]]] = {}
    for one in sorted(single, key=lambda g: rank[names[g.members[0]]]):
        values = one.group.hyper_parameters
        same = tuple((k, _token(v)) for k, v in sorted(values.items(), key=lambda i: str(i[0])))
        groups.setdefault(same, (one.group, []))[1].append(one.members[0])
    found = [ReadGroup(group, tuple(members)) for group, members in groups.values()]
    read = _in_order(found, names, schedulers, said=order is not None and order is not ParamOrder.GROUPS)
    return read if order is not None else replace(read, assumed=(_OF_FLATTENED,))


def _in_order(
    found: Sequence[ReadGroup], names: Mapping[str, str], schedulers: Sequence[Node], *, said: bool
) -> ReadOptimizer:
    """The groups in the order of a scheduler's initial rates, or in the order that they have if the user said so."""
    rates = next((r for s in schedulers if (r := _rates(s)) is not None), None)
    own = [_initial(g) for g in found]
    warnings: tuple[str, ...] = ()
    if rates is not None and sorted(map(str, rates)) != sorted(map(str, own)):
        warnings = (_NO_ORDER.format(rates=rates, own=own),)
    elif rates is not None and len({*map(str, rates)}) == len(rates):
        if said and rates != own:
            raise RequestError(
                "request.invalid",
                f"--param-order gives the param groups the initial rates {own}, and the scheduler keeps {rates}",
                fix="leave --param-order out: the scheduler tells the order of the groups",
            )
        return ReadOptimizer(tuple(found[own.index(rate)] for rate in rates), names)
    if said or len(found) < 2:
        return ReadOptimizer(tuple(found), names, warnings=warnings)
    text = f"the optimizer is flattened, and nothing says in which order its {len(found)} param groups come"
    return ReadOptimizer(tuple(found), names, (Undecided(Question.GROUPS, text, _SAY_GROUPS),), warnings)


_OF_FLATTENED = Undecided(
    Question.GROUPS,
    "a flattened optimizer keeps no order: parameters with equal hyper-parameters are taken for one group, in the "
    "model's order",
    "--param-order FILE gives another one",
)
_NO_ORDER = (
    "the scheduler keeps the initial rates {rates}, and the param groups, which were flattened, have {own}: no order "
    "of the groups fits, so set the scheduler anew after loading"
)


def _initial(group: ReadGroup) -> Node:
    values = group.group.hyper_parameters
    return values.get("initial_lr", values.get("lr"))


def _rates(scheduler: Node) -> list[Node] | None:
    held = mapping_items(scheduler, what="a scheduler").get("base_lrs") if is_mapping(scheduler) else None
    rates = list(held.items) if isinstance(held, PList | PTuple) else []
    return rates if rates and all(type(r) is float for r in rates) else None


def _token(node: Node) -> object:
    """A key that is equal for equal hyper-parameters. Values that hold other objects equal only themselves."""
    match node:
        case PList() | PTuple():
            return (type(node).__name__, *map(_token, node.items))
        case float():
            return ("float", node.hex())
        case None | bool() | int() | str() | bytes() | Global() | PTensorRef():
            return (type(node).__name__, node)
        case PBytearray():
            return ("bytearray", node.data)
        case PObject() if is_mapping(node):
            return ("dict", *((k, _token(v)) for k, v in mapping_items(node, what="a hyper-parameter").items()))
        case _:
            return id(node)
