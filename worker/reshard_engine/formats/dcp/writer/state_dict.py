"""The entries of a checkpoint's state dict as torch flattens it, under a framework's keys."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from reshard.choices import MissingMoments
from reshard.errors import RequestError, SourceError, counted, listed, printable
from reshard_engine.checkpoint import Checkpoint, Parameter, ParamGroup, Scalar
from reshard_engine.formats.dcp.facts import DcpFacts, facts_of, nested
from reshard_engine.formats.dcp.optimizers import STEP, begins_as_zeros, is_adam, keeps_like
from reshard_engine.formats.dcp_files.metadata.model import KeyPath
from reshard_engine.formats.dcp_files.shards import (
    Kind,
    LiteralEntry,
    OpaqueEntry,
    StateEntry,
    TensorEntry,
    ValueEntry,
    key_of,
)
from reshard_engine.formats.dcp_files.tensors import OpaqueTensor
from reshard_engine.pickles.nodes import (
    Node,
    PDict,
    PList,
    PLiteral,
    PRuns,
    PTensorRef,
    check_depth,
    is_mapping,
    mapping_of,
    text_items,
)
from reshard_engine.tensors.dtypes import FLOAT32, Dtype
from reshard_engine.tensors.layout import ZEROS


def flattened(path: KeyPath, node: Node) -> Iterator[tuple[KeyPath, Node]]:
    """The leaves of a value as torch flattens it: tensors, and values without tensors in them.

    Raises:
        SourceError: `pickle.too_deep`; as `text_items` for keys of which torch makes no text, or one text of two.
    """
    check_depth(len(path))
    if isinstance(node, PDict) or is_mapping(node):
        for key, value in text_items(node, what=printable(key_of(path))).items():
            yield from flattened((*path, key), value)
    elif _is_entered(node, len(path)):
        for number, item in enumerate(node.items):
            yield from flattened((*path, number), item)
    else:
        yield path, node


def _is_entered(node: Node, depth: int) -> bool:
    """True for a list with tensors, dicts, or lists that have some."""
    check_depth(depth)
    return isinstance(node, PList) and any(
        isinstance(i, PTensorRef | PLiteral) or is_mapping(i) or _is_entered(i, depth + 1) for i in node.items
    )


def number_entry(path: KeyPath, scalar: Scalar) -> StateEntry:
    """A number per parameter as torch's optimizers keep it: a tensor of one element; a Python number becomes fp32.

    Source: torch 2.13.0 `optim/adam.py` (`_init_group`: `step` is a tensor of `_get_scalar_dtype()`).
    """
    if scalar.dtype is not None:
        return LiteralEntry(path, PLiteral(scalar.dtype.name, scalar.shape, scalar.raw))
    try:
        raw = struct.pack("<f", scalar.value)
    except OverflowError as error:
        raise SourceError("checkpoint.malformed", f"{printable(key_of(path))} is {scalar.value}") from error
    return LiteralEntry(path, PLiteral(FLOAT32.name, (), raw))


def _nodes(entries: Iterable[StateEntry]) -> dict[KeyPath, Node]:
    """The values of entries by their paths.

    Raises:
        RequestError: `request.unsatisfiable` for a tensor of a class of its own, whose chunks only that class joins.
    """
    found: dict[KeyPath, Node] = {}
    zeros = 0
    for entry in entries:
        match entry:
            case TensorEntry(tensor=number) if number == ZEROS:
                # Each has a range of zeros of its own: tensors of one range would share their memory when loaded.
                end = zeros + prod(entry.shape)
                found[entry.path] = PRuns(entry.dtype.name, entry.shape, ((ZEROS, zeros, end),))
                zeros = end
            case TensorEntry():
                found[entry.path] = PTensorRef(entry.tensor)
            case LiteralEntry():
                found[entry.path] = entry.literal
            case ValueEntry():
                found[entry.path] = entry.value
            case OpaqueEntry():
                kind = printable(entry.tensor.kind)
                raise RequestError(
                    "request.unsatisfiable",
                    f"{printable(key_of(entry.path))} is a {kind}, and only its own class joins its chunks",
                    fix="--to dcp keeps it as it is",
                )
    return found


@dataclass(frozen=True, slots=True)
class Places:
    """The keys of a model and an optimizer."""

    model: KeyPath
    optimizer: KeyPath
    flat: bool
    """True to join names, states and hyper-parameters to one key, as `flatten_optimizer_state_dict` does it."""
    model_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each name the one in the model's state dict, where it is another."""
    optimizer_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each name the one in the optimizer's state dict, where it is another."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """The states with which the optimizer of a group begins."""

    scalars: Mapping[str, Scalar]
    tensors: Mapping[str, Dtype | None]
    """The element type of each state; None for that of the parameter."""


class StateDict:
    """Makes the entries of one model and its optimizer."""

    def __init__(self, checkpoint: Checkpoint, places: Places) -> None:
        """Prepare for these keys."""
        self._checkpoint, self._places = checkpoint, places
        self._tensors = checkpoint.shard_map.tensors
        self._facts = facts_of(checkpoint) or DcpFacts(None)
        self.warnings: list[str] = []

    def model(self, *, exclude_frozen: bool) -> Iterator[StateEntry]:
        """Every entry of the model, in its order: masters of trained parameters, the others as they are stored."""
        found = self._checkpoint
        numbers = {p.fqn: p.value() for p in found.parameters if p.trained or not exclude_frozen}
        buffers = {b.fqn: b.tensor for b in found.buffers}
        numbers |= buffers
        numbers |= {alias: numbers[owner] for alias, owner in found.shared.items() if owner in numbers}
        proven, open_ = found.optimizer is not None, found.unproven | found.copies.keys()
        for name in dict.fromkeys((*found.module_names, *numbers, *found.extra_states)):
            path = (*self._places.model, self._places.model_names.get(name, name))
            if name in numbers:
                plain = name in buffers
                kind: Kind = ("buffer" if plain else "parameter") if proven and name not in open_ else None
                yield replace(self._tensor(path, numbers[name]), kind=kind, whole=plain)
            elif name in found.extra_states:
                yield from self.values(path, found.extra_states[name])

    def optimizer(self, groups: Sequence[ParamGroup], missing: MissingMoments) -> Iterator[StateEntry]:
        """States by parameter, and the hyper-parameters of each group, or of each parameter if they are flattened."""
        adam = [is_adam(g.hyper_parameters, self._states_of(i)) for i, g in enumerate(groups)]
        begins = self._begins(groups) if missing is MissingMoments.ZERO else {}
        for parameter in self._checkpoint.trained:
            group = parameter.group or 0
            begin = begins.get(group) if parameter.never_updated else None
            yield from self._states(parameter, begin, as_torch=adam[group])
        for number, group in enumerate(groups):
            members = [self._key(p) for p in self._checkpoint.members(number)]
            if self._places.flat:
                for name in members:
                    for key, value in group.hyper_parameters.items():
                        yield from self.values((*self._places.optimizer, f"param_groups.{name}.{key}"), value)
                continue
            head = (*self._places.optimizer, "param_groups", number)
            for key, value in {**group.hyper_parameters, "params": PList([*members])}.items():
                yield from self.values((*head, str(key)), value)

    def model_tree(self) -> Node:
        """The model's state dict as `get_state_dict` returns it, with whole tensors."""
        return mapping_of(nested(_nodes(self.model(exclude_frozen=False))))

    def optimizer_tree(self, groups: Sequence[ParamGroup], missing: MissingMoments) -> Node:
        """The optimizer's state dict as `get_state_dict` returns it, with whole tensors: names are its keys.

        Source: torch 2.13.0 `distributed/checkpoint/state_dict.py` (`_get_optim_state_dict`).
        """
        entries = (e for e in self.optimizer(groups, missing) if e.path[0] == "state")
        states = nested(_nodes(entries)).get("state") or mapping_of({})
        members = ([self._key(p) for p in self._checkpoint.members(i)] for i in range(len(groups)))
        written = [
            mapping_of({**group.hyper_parameters, "params": PList([*names])})
            for group, names in zip(groups, members, strict=True)
        ]
        return mapping_of({"state": states, "param_groups": PList([*written])})

    def values(self, path: KeyPath, node: Node) -> Iterator[StateEntry]:
        """A value as the entries that torch makes of it."""
        for place, leaf in flattened(path, node):
            match leaf:
                case PTensorRef():
                    yield self._tensor(place, leaf.index)
                case PLiteral():
                    yield LiteralEntry(place, leaf)
                case _:
                    yield ValueEntry(place, leaf)

    def _tensor(self, path: KeyPath, number: int) -> TensorEntry:
        stored = self._tensors[number]
        return TensorEntry(path, number, stored.dtype, stored.shape)

    def _states_of(self, group: int) -> set[str]:
        return {state for p in self._checkpoint.members(group) for state in p.states} - {"fp32"}

    def _begins(self, groups: Sequence[ParamGroup]) -> dict[int, _Begin]:
        """The states that the optimizer begins with, by group: zeros in place of those of its other parameters.

        A group of which no parameter was updated takes those of a group with the same hyper-parameters' names: two
        optimizers may have one state dict, and keep other states. Without such a group, states are left out.
        """
        found: dict[int, _Begin] = {}
        alike: dict[object, list[int]] = {}
        for number, group in enumerate(groups):
            updated = [p for p in self._checkpoint.members(number) if not p.never_updated]
            if not updated:
                continue
            scalars = {n: s for p in updated for n, s in p.scalars.items()}
            names = {*scalars, *(n for p in updated for n in p.states), *(n for p in updated for n in self._odd(p))}
            names |= {n for p in updated for n in self._opaque(p)}
            if not begins_as_zeros(group.hyper_parameters, names - {"fp32"}):
                continue
            tensors = {n: self._dtype_of(n, updated) for n in sorted(names - scalars.keys() - {"fp32"})}
            zeros = {n: Scalar(0.0, s.dtype, bytes(len(s.raw)), s.shape) for n, s in scalars.items()}
            found[number] = _Begin(zeros, tensors)
            alike.setdefault(keeps_like(group.hyper_parameters), []).append(number)
        unknown: list[str] = []
        for number, group in enumerate(groups):
            like = alike.get(keeps_like(group.hyper_parameters), [])
            kinds = {(*found[i].scalars, *found[i].tensors) for i in like}
            if number not in found and len(kinds) == 1:
                found[number] = found[like[0]]
            elif number not in found:
                unknown += [p.fqn for p in self._checkpoint.members(number) if p.never_updated]
        if unknown:
            self.warnings.append(
                f"{counted(len(unknown), 'parameter has', 'parameters have')} no optimizer states, and nothing says "
                "which ones their optimizer "
                f"begins with: {listed(unknown)}; loaders need allow_partial_load"
            )
        return found

    def _dtype_of(self, state: str, updated: Sequence[Parameter]) -> Dtype | None:
        """The element type of a state if all parameters have one; None if it is that of each parameter."""
        found = {self._tensors[p.states[state]].dtype for p in updated if state in p.states}
        return found.pop() if len(found) == 1 else None

    def _states(self, parameter: Parameter, begin: _Begin | None, *, as_torch: bool) -> Iterator[StateEntry]:
        scalars = {**(begin.scalars if begin is not None else {}), **parameter.scalars}
        # torch's own order: the step first, then moments.
        for name in sorted(scalars, key=lambda n: n != STEP):
            path = self._state(parameter, name)
            if scalars[name].dtype is None and not as_torch:
                yield ValueEntry(path, scalars[name].value)
            else:
                yield number_entry(path, scalars[name])
        for name, number in parameter.states.items():
            if name != "fp32":
                yield self._tensor(self._state(parameter, name), number)
        for name, node in self._odd(parameter).items():
            yield from self.values(self._state(parameter, name), node)
        for name, tensor in self._opaque(parameter).items():
            yield OpaqueEntry(self._state(parameter, name), tensor)
        for name, dtype in () if begin is None else begin.tensors.items():
            if name not in parameter.states:
                own = self._tensors[parameter.value()].dtype
                # The states of a complex parameter are complex, whatever those of the group's other parameters are.
                own = dtype if dtype is not None and dtype.complex == own.complex else own
                yield TensorEntry(self._state(parameter, name), ZEROS, own, parameter.shape)

    def _odd(self, parameter: Parameter) -> Mapping[str, Node]:
        return self._facts.odd_states.get(parameter.fqn, {})

    def _opaque(self, parameter: Parameter) -> Mapping[str, OpaqueTensor]:
        return self._facts.opaque_states.get(parameter.fqn, {})

    def _state(self, parameter: Parameter, state: str) -> KeyPath:
        name, place = str(self._key(parameter)), self._places.optimizer  # torch makes texts of numbers that are keys
        return (*place, f"state.{name}.{state}") if self._places.flat else (*place, "state", name, state)

    def _key(self, parameter: Parameter) -> str | int:
        """The optimizer's key of a parameter: its name, or its number in one that is written as it was."""
        name = parameter.fqn
        return int(name) if self._facts.numbered else self._places.optimizer_names.get(name, name)
