"""The entries of a checkpoint's state dict: model, optimizer and what lies beside them, under a framework's keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.dcp_options import MissingMoments
from reshard_engine.checkpoint import Checkpoint, Parameter, ParamGroup, Scalar
from reshard_engine.formats.dcp.writer.entries import (
    KeyPath,
    LiteralEntry,
    StateEntry,
    TensorEntry,
    ValueEntry,
    flattened,
    number_entry,
)
from reshard_engine.pickles.nodes import Node, PList, PLiteral, PTensorRef
from reshard_engine.tensors.dtypes import FLOAT32
from reshard_engine.tensors.layout import ZEROS

_STEP = "step"


@dataclass(frozen=True, slots=True)
class Places:
    """The keys of a state dict."""

    model: KeyPath
    optimizer: KeyPath
    flat: bool
    """True to join names, states and hyper-parameters to one key, as `flatten_optimizer_state_dict` does it."""
    names: Mapping[str, str]
    """For each parameter the name in the state dict, where it is another one."""


class StateDict:
    """Makes the entries of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, places: Places) -> None:
        """Prepare for these keys."""
        self._checkpoint, self._places = checkpoint, places
        self._tensors = checkpoint.shard_map.tensors

    def model(self, *, exclude_frozen: bool) -> Iterator[StateEntry]:
        """Every entry of the model, in its order: masters of trained parameters, the others as they are stored."""
        found = self._checkpoint
        numbers = {p.fqn: p.value() for p in found.parameters if p.trained or not exclude_frozen}
        buffers = {b.fqn: b.tensor for b in found.buffers}
        numbers |= buffers
        numbers |= {alias: numbers[owner] for alias, owner in found.shared.items() if owner in numbers}
        for name in dict.fromkeys((*found.module_names, *numbers, *found.extra_states)):
            path = (*self._places.model, self._name(name))
            if name in numbers:
                plain = name in buffers
                yield replace(self._tensor(path, numbers[name]), parameter=not plain, whole=plain)
            elif name in found.extra_states:
                yield from self.values(path, found.extra_states[name])

    def optimizer(self, groups: Sequence[ParamGroup], missing: MissingMoments) -> Iterator[StateEntry]:
        """States by parameter, and the hyper-parameters of each group, or of each parameter if they are flattened."""
        wanted = self._wanted() if missing is MissingMoments.ZERO else {}
        for parameter in self._checkpoint.trained:
            yield from self._states(parameter, wanted)
        for number, group in enumerate(groups):
            members = [self._name(p.fqn) for p in self._checkpoint.members(number)]
            if self._places.flat:
                for name in members:
                    for key, value in group.hyper_parameters.items():
                        yield from self.values((*self._places.optimizer, f"param_groups.{name}.{key}"), value)
                continue
            head = (*self._places.optimizer, "param_groups", number)
            for key, value in {**group.hyper_parameters, "params": PList([*members])}.items():
                yield from self.values((*head, str(key)), value)

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

    def _name(self, fqn: str) -> str:
        return self._places.names.get(fqn, fqn)

    def _tensor(self, path: KeyPath, number: int) -> TensorEntry:
        stored = self._tensors[number]
        return TensorEntry(path, number, stored.dtype, stored.shape)

    def _wanted(self) -> dict[str, Scalar | None]:
        """Names of states that some parameter has: None for those with elements, the start of the others."""
        found: dict[str, Scalar | None] = {}
        for parameter in self._checkpoint.trained:
            found |= {n: Scalar(0.0, s.dtype, bytes(len(s.raw)), s.shape) for n, s in parameter.scalars.items()}
            found |= dict.fromkeys(parameter.states)
        return {n: s for n, s in found.items() if n != "fp32"}

    def _states(self, parameter: Parameter, wanted: Mapping[str, Scalar | None]) -> Iterator[StateEntry]:
        scalars = {**parameter.scalars}
        missing: list[str] = []
        for name, start in wanted.items():
            if name not in scalars and name not in parameter.states:
                if start is None:
                    missing.append(name)
                else:
                    scalars[name] = start
        # torch's own order: the step first, then moments.
        for name in sorted(scalars, key=lambda n: n != _STEP):
            yield number_entry(self._state(parameter, name), scalars[name])
        for name, number in parameter.states.items():
            if name != "fp32":
                yield self._tensor(self._state(parameter, name), number)
        for name in missing:
            yield TensorEntry(self._state(parameter, name), ZEROS, FLOAT32, parameter.shape)

    def _state(self, parameter: Parameter, state: str) -> KeyPath:
        name, place = self._name(parameter.fqn), self._places.optimizer
        return (*place, f"state.{name}.{state}") if self._places.flat else (*place, "state", name, state)
