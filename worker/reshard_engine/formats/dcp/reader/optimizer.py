"""The param groups of a saved optimizer, with the names of their parameters.

Source: torch 2.13.0 `distributed/checkpoint/state_dict.py` (`_flatten_optim_state_dict`: each hyper-parameter once for
each parameter; up to 2.3 all groups are one value), `optim/optimizer.py` (`state_dict`: parameters are numbered over
the groups in order); verified by running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.errors import SourceError, listed, printable
from reshard_engine.checkpoint import ParamGroup
from reshard_engine.formats.dcp.reader.roles import PARAMS, Item, Roles
from reshard_engine.formats.dcp.reader.saved_state import SavedTensor
from reshard_engine.formats.dcp.reader.values import nested
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
_BY_NAME = (
    "save the optimizer with torch.distributed.checkpoint.state_dict.get_state_dict, which names parameters; or write "
    "the weights alone: --to safetensors"
)


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """A param group with its members as the optimizer names them: names, or numbers as text."""

    group: ParamGroup
    members: tuple[str, ...]
    numbered: bool = False
    """True if the members are numbers."""


@dataclass(frozen=True, slots=True)
class ReadOptimizer:
    """Param groups by names of parameters, and the name of each of the optimizer's keys."""

    groups: tuple[ReadGroup, ...]
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The model's name for each key of the optimizer."""


def read_groups(roles: Roles, node_of: NodeOf) -> tuple[ReadGroup, ...]:
    """Read the param groups of an optimizer that is not flat; a flat one has none before its parameters are named.

    Raises:
        SourceError: `checkpoint.malformed`, `checkpoint.incomplete`.
    """
    return () if roles.optimizer is None or roles.optimizer.flat else _numbered(roles, node_of)


def read_optimizer(
    roles: Roles,
    groups: tuple[ReadGroup, ...],
    model: Mapping[str, Shape],
    *,
    plain: Mapping[str, str],
    node_of: NodeOf,
) -> ReadOptimizer:
    """Give the members of an optimizer's param groups their names.

    Args:
        roles: The entries by role.
        groups: What `read_groups` found.
        model: Names and shapes of the model's tensors of floating-point numbers, in its order, without ties.
        plain: The plain name of each of the model's tensors.
        node_of: The value of an entry.

    Raises:
        SourceError: `checkpoint.malformed`, `checkpoint.ambiguous`, `checkpoint.incomplete`.
    """
    place = roles.optimizer
    if place is not None and place.flat:
        return _flat(roles, model, plain, node_of)
    keys = [key for g in groups for key in g.members]
    if len(set(keys)) != len(keys):
        raise SourceError("checkpoint.malformed", "a parameter is a member of two param groups")
    if keys and all(g.numbered or not g.members for g in groups):
        return ReadOptimizer(groups, _names_of_numbers(groups, roles, model))
    names = {key: _name(key, model, plain) for key in keys}
    if strangers := [key for key in roles.states if key not in names]:
        raise SourceError(
            "checkpoint.malformed",
            f"the optimizer has states of {len(strangers)} parameters of no param group: {listed(strangers)}",
            fix="the model and the optimizer are of different saves: copy the checkpoint again",
        )
    return ReadOptimizer(groups, names)


def _name(key: str, model: Mapping[str, Shape], plain: Mapping[str, str]) -> str:
    name = key if key in model else plain.get(key, "")
    if name not in model and (found := next((p for p in model if key.endswith(f".{p}")), None)) is not None:
        name = found if key in (f"module.{found}", f"_orig_mod.{found}") else name
    if name not in model:
        raise SourceError(
            "checkpoint.incomplete",
            f"the optimizer names {printable(key)}, and the model has no such parameter",
            fix="the model and the optimizer are of different saves: copy the checkpoint again",
        )
    return name


def _numbered(roles: Roles, node_of: NodeOf) -> tuple[ReadGroup, ...]:
    """The groups in their order: entries of each, or one value that holds all of them."""
    if roles.whole_groups is not None:
        found = sequence_items(node_of([roles.whole_groups]), what="param_groups")
        entries = [mapping_items(node, what="param_groups") for node in found]
    else:
        numbers = sorted(n for n in roles.groups if isinstance(n, int))
        if numbers != list(range(len(numbers))):
            raise SourceError("checkpoint.incomplete", f"param groups are numbered {numbers[:8]}", fix=_BY_NAME)
        entries = [nested({p: node_of(i) for p, i in roles.groups[n].items()}) for n in numbers]
    return tuple(_group(e) for e in entries)


def _group(entries: Mapping[str | int, Node]) -> ReadGroup:
    members = sequence_items(entries.get(PARAMS), what="params of a param group")
    numbered = bool(members) and all(type(m) is int for m in members)
    if not numbered and not all(isinstance(m, str) for m in members):
        raise SourceError("checkpoint.malformed", "a param group has members that are neither names nor numbers")
    values = ParamGroup({k: v for k, v in entries.items() if k != PARAMS})
    return ReadGroup(values, tuple(map(str, members)), numbered)


def _flat(roles: Roles, model: Mapping[str, Shape], plain: Mapping[str, str], node_of: NodeOf) -> ReadOptimizer:
    """Groups made of the parameters whose hyper-parameters are equal; those that have none are in no group."""
    names = {str(key): _name(str(key), model, plain) for key in roles.groups}
    order = {name: i for i, name in enumerate(model)}
    groups: dict[object, tuple[dict[str | int, Node], list[str]]] = {}
    for key in sorted(names, key=lambda k: order[names[k]]):
        entries = nested({path: node_of(items) for path, items in roles.groups[key].items()})
        entries.pop(PARAMS, None)
        same = tuple((k, _token(v)) for k, v in sorted(entries.items(), key=lambda i: str(i[0])))
        groups.setdefault(same, (entries, []))[1].append(key)
    return ReadOptimizer(tuple(ReadGroup(ParamGroup(e), tuple(m)) for e, m in groups.values()), names)


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


def _names_of_numbers(groups: Sequence[ReadGroup], roles: Roles, model: Mapping[str, Shape]) -> dict[str, str]:
    """The names of numbered parameters: each group takes them in the model's order, and shapes must leave one way.

    Raises:
        SourceError: `checkpoint.ambiguous` if shapes leave several ways, or none.
    """
    found: dict[str, str] = {}
    names, shapes = list(model), list(model.values())
    for number, group in enumerate(groups):
        wanted = [_shape_of(roles, key) for key in group.members]
        first = _matched(wanted, shapes)
        last = _matched(wanted[::-1], shapes[::-1])
        last = None if last is None else [len(shapes) - 1 - i for i in reversed(last)]
        if first is None or first != last:
            ways = "is no way" if first is None else "are several ways"
            raise SourceError(
                "checkpoint.ambiguous",
                f"the optimizer numbers its parameters, and there {ways} to give the {len(wanted)} numbers of "
                f"group {number} the names of {len(names)} tensors of the model in their order",
                fix=_BY_NAME,
            )
        found |= {key: names[i] for key, i in zip(group.members, first, strict=True)}
    if len(set(found.values())) != len(found):
        raise SourceError(
            "checkpoint.ambiguous",
            "the optimizer numbers its parameters, and by their shapes two groups have a parameter in common",
            fix=_BY_NAME,
        )
    return found


def _shape_of(roles: Roles, key: str) -> Shape | None:
    """The shape of a numbered parameter, from its largest state; None if it has no states."""
    first = (items[0] for state, items in roles.states.get(key, {}).items() if state != "step")
    return max((i.entry.shape for i in first if isinstance(i, SavedTensor)), key=len, default=None)


def _matched(wanted: Sequence[Shape | None], shapes: Sequence[Shape]) -> list[int] | None:
    """The first places of these shapes in order; None if there are none. A shape that is None fits everywhere."""
    found: list[int] = []
    at = 0
    for shape in wanted:
        while at < len(shapes) and shape is not None and shapes[at] != shape:
            at += 1
        if at == len(shapes):
            return None
        found.append(at)
        at += 1
    return found
