"""Builds a checkpoint from a saved state whose entries are sorted by roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from reshard.dcp_options import Grammar
from reshard.errors import SourceError, printable
from reshard.models import NotCarried
from reshard_engine.checkpoint import (
    Agreement,
    Buffer,
    Checkpoint,
    Counters,
    OptimizerState,
    Parameter,
    Scalar,
)
from reshard_engine.formats.dcp.facts import DcpFacts
from reshard_engine.formats.dcp.reader.buffers import chunk_count, is_buffer, looks_plain
from reshard_engine.formats.dcp.reader.chunk_tensors import ChunkTensors
from reshard_engine.formats.dcp.reader.companions import Companions
from reshard_engine.formats.dcp.reader.group_order import in_order_of
from reshard_engine.formats.dcp.reader.metadata import KeyPath
from reshard_engine.formats.dcp.reader.optimizer import ReadOptimizer, read_groups, read_optimizer
from reshard_engine.formats.dcp.reader.roles import Item, Roles, below, plain_names, sort_roles
from reshard_engine.formats.dcp.reader.saved_state import SavedState, SavedTensor, SavedValue
from reshard_engine.formats.dcp.reader.ties import tied_names
from reshard_engine.formats.dcp.reader.values import CarriedValues, nested, open_values
from reshard_engine.formats.dcp.schedulers import is_scheduler
from reshard_engine.formats.names import checked_name, checked_state
from reshard_engine.pickles.differences import compare_trees
from reshard_engine.pickles.nodes import Node, PTensorRef, is_mapping, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.tensors.dtypes import FLOAT32
from reshard_engine.tensors.shard_map import ShardMapBuilder

_TRAIN_STATE, _COUNTERS = "train_state", ("step", "ntokens_seen")
"""Counters of torchtitan 0.3.0 (`trainer.py`, `state_dict`)."""
_BY_SCHEDULER = "the optimizer counts no steps: {steps} steps, which the scheduler counted, are taken"
_PER_RANK = "ranks saved different values under one key; the first rank's is taken"
_OTHER_SHAPE = "an optimizer state with another shape than its parameter"


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of a checkpoint, and the kind that its directory shows."""

    url: str
    tag: str | None
    grammar: Grammar | None
    """The grammar that the directory's files show; None if only the keys can tell."""


@dataclass(slots=True)
class _Tensors:
    """Numbers of registered tensors: no tensor of the files is registered twice."""

    chunks: ChunkTensors
    builder: ShardMapBuilder
    known: dict[int, int] = field(default_factory=dict[int, int])

    def number(self, fqn: str, state: str, saved: Sequence[SavedTensor]) -> int:
        """The number of a tensor, which is registered when it is first asked for."""
        if id(saved[0]) not in self.known:
            self.known[id(saved[0])] = self.chunks.add(fqn, state, saved)
        return self.known[id(saved[0])]


class Assembly:
    """One checkpoint being put together."""

    def __init__(self, state: SavedState, companions: Companions, ledger: OpaqueLedger) -> None:
        """Sort the entries and find the data of all chunks.

        Raises:
            SourceError: As `sort_roles`, `find_places` and `open_values`.
        """
        self._state, self._companions, self._ledger = state, companions, ledger
        self._roles = sort_roles(state)
        self._builder = ShardMapBuilder()
        self._tensors = _Tensors(ChunkTensors(self._builder, state.files, self._wanted(), ledger), self._builder)
        self._files = list(state.files)
        self._carried = CarriedValues(self._builder)
        self._warnings: list[str] = []
        self._not_carried: list[NotCarried] = [*companions.not_carried]
        self._nodes = self._parsed_values()
        self._names = plain_names(list(self._roles.weights))
        self._shared: dict[str, str] = {}
        self._agreements: list[Agreement] = []

    def _wanted(self) -> list[SavedTensor]:
        """The tensors to read: all but those of further optimizers."""
        others = self._roles.other_optimizers
        return [t for t in self._state.tensors if not any(t.path[: len(o)] == o for o in others)]

    def _parsed_values(self) -> dict[int, Node]:
        copies = [other for _, other in self._state.copies]
        values = [*self._state.values, *copies]
        parsed = open_values(self._files, values, self._ledger)
        nodes = {
            id(v): self._carried.carried(p, v.part.first_file + v.entry.file)
            for v, p in zip(values, parsed, strict=True)
        }
        differing = {
            first.entry.key
            for first, other in self._state.copies
            if any(True for _ in compare_trees(nodes[id(first)], nodes[id(other)], ""))
        }
        self._not_carried += [NotCarried(path=printable(key), reason=_PER_RANK) for key in sorted(differing)]
        return nodes

    def node(self, items: Sequence[Item]) -> Node:
        """The value of an entry; a tensor is a reference into the shard map."""
        first = items[0]
        if isinstance(first, SavedValue):
            return self._nodes[id(first)]
        tensors = [i for i in items if isinstance(i, SavedTensor)]
        return PTensorRef(self._tensors.number(first.entry.key, "value", tensors))

    def checkpoint(self, origin: Origin) -> Checkpoint:
        """The checkpoint of everything that was read.

        Raises:
            SourceError: `checkpoint.*`, `name.invalid`, `source.unsupported`.
        """
        roles = self._roles
        rest = nested({path: self.node(items) for path, items in roles.rest.items()})
        schedulers, scheduler_paths, client_state = _without_schedulers(rest)
        beside = self._companion_state()
        optimizer = self._optimizer((*schedulers, *beside.schedulers))
        members = {} if optimizer is None else self._members(optimizer)
        parameters, buffers = self._model(members)
        extra_states = self._extra_states()
        counters, client_state = self._counted(client_state, (*schedulers, *beside.schedulers), parameters)
        shard_map = self._builder.build()
        agreements = (*self._tensors.chunks.agreements, *self._agreements)
        module_names = tuple(dict.fromkeys((*(self._names[n] for n in roles.weights), *extra_states)))
        if roles.other_optimizers:
            self._several_optimizers(roles)
        return Checkpoint(
            url=origin.url,
            tag=origin.tag,
            format=f"dcp-{self._grammar(origin)}",
            framework_version=None,
            world={},
            files=tuple(self._files),
            shard_map=shard_map,
            parameters=tuple(parameters),
            buffers=tuple(buffers),
            shared=dict(self._shared),
            optimizer=None if optimizer is None else OptimizerState(tuple(g.group for g in optimizer.groups)),
            foreign_globals=tuple(sorted(self._ledger.foreign)),
            warnings=tuple(self._warnings),
            agreements=agreements,
            counters=counters,
            schedulers=(*schedulers, *beside.schedulers),
            client_state={**client_state, **beside.client_state},
            module_names=module_names,
            extra_states=extra_states,
            not_carried=tuple(self._not_carried),
            facts=DcpFacts(
                self._grammar(origin),
                roles.model_path,
                None if roles.optimizer is None else roles.optimizer.path,
                roles.optimizer is not None and roles.optimizer.flat,
                scheduler_paths,
                frozenset(roles.at_root),
                {plain: name for name, plain in self._names.items() if name != plain},
                dict(self._companions.texts),
                beside.rng,
            ),
        )

    def _grammar(self, origin: Origin) -> Grammar:
        if origin.grammar is not None:
            return origin.grammar
        place = self._roles.optimizer
        flat = place is not None and place.flat and not self._roles.model_path
        return Grammar.TORCHTITAN if flat else Grammar.STATE_DICT

    def _several_optimizers(self, roles: Roles) -> None:
        names = [".".join(map(str, p)) for p in roles.other_optimizers]
        self._not_carried += [NotCarried(path=printable(n), reason="only one optimizer is read") for n in names]
        self._warnings.append(f"it has {len(names) + 1} optimizers: states of the first one are read")

    # The model.

    def _optimizer(self, schedulers: Sequence[Node]) -> ReadOptimizer | None:
        roles = self._roles
        if roles.optimizer is None:
            return None
        if not roles.weights:
            raise SourceError(
                "checkpoint.incomplete",
                "it holds an optimizer's states and no model",
                fix="name the directory that holds both, such as that of Accelerate's save_state",
            )
        groups = read_groups(roles, self.node)
        by_number = any(g.numbered for g in groups)
        flat = (*roles.states, *map(str, roles.groups)) if roles.optimizer.flat else ()
        known = {*flat, *(member for g in groups for member in g.members)}

        def trained(name: str) -> bool | None:
            return None if by_number else name in known or self._names[name] in known

        self._shared = {
            self._names[a]: self._names[o] for a, o in tied_names(self._files, roles.weights, trained).items()
        }
        model = {
            self._names[n]: saved[0].entry.shape
            for n, saved in roles.weights.items()
            if self._names[n] not in self._shared and not (by_number and is_buffer(n, saved[0].entry.dtype))
        }
        found = read_optimizer(roles, groups, model, plain=self._names, node_of=self.node)
        if not roles.optimizer.flat:
            return found
        ordered, warnings = in_order_of(found.groups, schedulers)
        self._warnings += warnings
        return replace(found, groups=tuple(ordered))

    @staticmethod
    def _members(optimizer: ReadOptimizer) -> dict[str, tuple[int, str]]:
        """For each parameter of the optimizer its group and the optimizer's key, in the optimizer's order."""
        return {optimizer.names[key]: (number, key) for number, g in enumerate(optimizer.groups) for key in g.members}

    def _model(self, members: Mapping[str, tuple[int, str]]) -> tuple[list[Parameter], list[Buffer]]:
        by_name = {self._names[n]: saved for n, saved in self._roles.weights.items()}
        self._shared = {a: o for a, o in self._shared.items() if a not in members}
        numbers = {name: self._tensors.number(checked_name(name), "weight", saved) for name, saved in by_name.items()}
        for alias, owner in self._shared.items():
            where = f"its other name {printable(alias)}"
            self._agreements.append(Agreement(owner, "weight", numbers[owner], numbers[alias], where))
        trained = [self._trained(name, numbers[name], *place) for name, place in members.items()]
        idle = [p for p in trained if p.never_updated]
        some = len(idle) < len(trained)
        if not some:  # before the first step no parameter has states
            trained = [replace(p, never_updated=False) for p in trained]
        parameters, buffers = trained, list[Buffer]()
        marked = any(saved[0].entry.requires_grad for saved in by_name.values())
        most_chunks = max(map(chunk_count, by_name.values()), default=1)
        for name, saved in by_name.items():
            if name in members or name in self._shared:
                continue
            entry = saved[0].entry
            if is_buffer(name, entry.dtype) or looks_plain(saved, most_chunks, marked=marked):
                buffers.append(Buffer(name, numbers[name]))
            else:
                parameters.append(Parameter(name, entry.shape, None, numbers[name]))
        # Only parameters are tied: equal buffers are two.
        twice = {a for a, o in self._shared.items() if any(o == b.fqn for b in buffers)}
        buffers += [Buffer(alias, numbers[alias]) for alias in self._shared if alias in twice]
        self._shared = {a: o for a, o in self._shared.items() if a not in twice}
        return parameters, buffers

    def _trained(self, name: str, weight: int, group: int, key: str) -> Parameter:
        stored = self._builder.tensors[weight]
        states: dict[str, int] = {"fp32": weight} if stored.dtype is FLOAT32 else {}
        scalars: dict[str, Scalar] = {}
        found = self._roles.states.get(key, {})
        for state, items in found.items():
            checked_state(state)
            if (scalar := self._scalar(items, stored.shape, state)) is not None:
                scalars[state] = scalar
                continue
            tensors = [i for i in items if isinstance(i, SavedTensor)]
            if not tensors or tensors[0].entry.shape != stored.shape:
                self._not_carried.append(NotCarried(path=printable(items[0].entry.key), reason=_OTHER_SHAPE))
                continue
            states[state] = self._tensors.number(name, state, tensors)
        return Parameter(name, stored.shape, group, weight, states, scalars, never_updated=not found)

    def _scalar(self, items: Sequence[Item], shape: tuple[int, ...], state: str) -> Scalar | None:
        """A state that is one number; None for a state with a number for each element."""
        first = items[0]
        if isinstance(first, SavedValue):
            node = self._nodes[id(first)]
            if type(node) is not int and type(node) is not float:
                raise SourceError(
                    "checkpoint.malformed", f"{printable(first.entry.key)} is neither a number nor a tensor"
                )
            return Scalar(node)
        if first.entry.shape == () and (shape != () or state == "step"):
            return self._tensors.chunks.scalar(first)
        return None

    # Everything else.

    def _extra_states(self) -> dict[str, Node]:
        found = nested({path: self.node([item]) for path, item in below(self._roles.extra_states)})
        return {checked_name(str(name)): node for name, node in found.items()}

    def _counted(
        self, client_state: Mapping[str | int, Node], schedulers: Sequence[Node], parameters: Sequence[Parameter]
    ) -> tuple[Counters, dict[str | int, Node]]:
        """The counters, and the client state without those of torchtitan that are nothing but counters."""
        left = dict(client_state)
        state = client_state.get(_TRAIN_STATE)
        counted = mapping_items(state, what=_TRAIN_STATE) if is_mapping(state) else {}
        if counted and all(k in _COUNTERS and type(v) is int for k, v in counted.items()):
            del left[_TRAIN_STATE]
        steps, tokens = (self._count_of(counted, name) for name in _COUNTERS)
        if self._companions.steps is not None:
            steps = self._companions.steps
        if steps is None and parameters and not any("step" in p.scalars for p in parameters):
            steps = _last_epoch(schedulers)
            self._warnings += [] if steps is None else [_BY_SCHEDULER.format(steps=steps)]
        return Counters(steps=steps, tokens=tokens), left

    def _count_of(self, counted: Mapping[str | int, Node], name: str) -> int | None:
        """A count of torchtitan's `train_state`, which is a number or a tensor of one element."""
        if type(value := counted.get(name)) is int:
            return value
        saved = self._roles.rest.get((_TRAIN_STATE, name))
        if saved and isinstance(saved[0], SavedTensor) and (scalar := self._tensors.chunks.scalar(saved[0])):
            return int(scalar.value)
        return None

    def _companion_state(self) -> _Beside:
        """The contents of the files beside the shards, with references in place of tensors."""
        numbers: dict[str, int] = {}
        companions = self._companions
        for parsed in (
            *(p for p, _ in companions.schedulers),
            *(p for p, _ in companions.rng),
            *(p for p, _, _ in companions.client_state),
        ):
            if parsed.file.name not in numbers:
                numbers[parsed.file.name] = len(self._files)
                self._files.append(parsed.file)
        carried = self._carried.carried
        return _Beside(
            tuple(carried(replace(p, root=node), numbers[p.file.name]) for p, node in companions.schedulers),
            tuple(
                {
                    str(k): v
                    for k, v in mapping_items(carried(p, numbers[p.file.name]), what=printable(p.file.name)).items()
                }
                for p, _ in companions.rng
            ),
            {name: carried(replace(p, root=node), numbers[p.file.name]) for p, name, node in companions.client_state},
        )


@dataclass(frozen=True, slots=True)
class _Beside:
    schedulers: tuple[Node, ...]
    rng: tuple[dict[str, Node], ...]
    client_state: dict[str, Node]


def _last_epoch(schedulers: Sequence[Node]) -> int | None:
    """The count of the first scheduler."""
    counts = (mapping_items(s, what="a scheduler").get("last_epoch") for s in schedulers if is_mapping(s))
    return next((c for c in counts if type(c) is int), None)


def _without_schedulers(
    rest: Mapping[str | int, Node],
) -> tuple[tuple[Node, ...], tuple[KeyPath, ...], dict[str | int, Node]]:
    """Schedulers, their places, and everything else that lies beside the model."""
    found = {key: node for key, node in rest.items() if is_scheduler(node)}
    paths = tuple((key,) for key in found)
    return tuple(found.values()), paths, {k: v for k, v in rest.items() if k not in found}
