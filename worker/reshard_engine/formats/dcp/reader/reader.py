"""Readers of distributed checkpoints: the entries of one directory, or of a trainer's two, become a checkpoint."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.choices import NO_SCHEDULER
from reshard.dcp_options import Framework
from reshard.errors import counted, listed, printable
from reshard.models.jobs import NotCarried
from reshard_engine.checkpoint import Checkpoint, Counters, Parameter, Question, Undecided
from reshard_engine.formats.dcp.facts import (
    MODEL_DIRECTORY,
    OPTIMIZER_DIRECTORY,
    DcpFacts,
    is_distributed,
    is_shard,
    names_of,
    nested,
)
from reshard_engine.formats.dcp.optimizers import loadable_scheduler
from reshard_engine.formats.dcp.reader.optimizer import NamesOfModel
from reshard_engine.formats.dcp.reader.pairs import KNOWN_BUFFERS, NamedBuffers, Reading, ReadPair, Tensors, read_pair
from reshard_engine.formats.dcp.reader.roles import Pair, choose, key_of, no_such_place, sort_roles
from reshard_engine.formats.dcp_files.metadata.model import KeyPath
from reshard_engine.formats.dcp_files.saved_state import (
    CarriedValues,
    Item,
    SavedState,
    SavedTensor,
    SavedValue,
    open_values,
    read_state,
)
from reshard_engine.formats.dcp_files.tensors import ChunkTensors
from reshard_engine.formats.format import ReadOptions
from reshard_engine.formats.model_weights import compiled_names
from reshard_engine.formats.trainer_files import META, TRAINER_STATE, Companions, beside, is_scheduler, read_companions
from reshard_engine.pickles.nodes import Node, PList, PTensorRef, PTuple, is_mapping, mapping_items, mapping_of
from reshard_engine.pickles.trees import compare_trees
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing
from reshard_engine.tensors.shard_map import ShardMapBuilder

# Builds a checkpoint from a saved state whose entries are sorted by roles.

_TRAIN_STATE, _COUNTERS = "train_state", ("step", "ntokens_seen")
"""Counters of torchtitan 0.3.0 (`trainer.py`, `state_dict`)."""
_BY_SCHEDULER = "the optimizer counts no steps: {steps} steps, which the scheduler counted, are taken"
_PER_RANK = "ranks saved different values under one key; the first rank's is taken"


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of a checkpoint, and the kind that its directory shows."""

    url: str
    framework: Framework | None
    """The framework that the directory's files show; None if only the keys can tell."""


class Assembly:
    """One checkpoint being put together."""

    def __init__(self, state: SavedState, companions: Companions, options: ReadOptions) -> None:
        """Sort the entries and find the data of all chunks.

        Raises:
            SourceError: As `sort_roles`, `find_places` and `open_values`.
            RequestError: As `sort_roles`.
        """
        self._state, self._companions, self._options = state, companions, options
        self._builder = ShardMapBuilder()
        self._files = list(state.files)
        self._carried = CarriedValues(self._builder)
        self._warnings: list[str] = []
        self._not_carried: list[NotCarried] = [*companions.not_carried]
        self._nodes = self._parsed_values()
        self._tensors = Tensors(ChunkTensors(self._builder, state.files, state.tensors, options.ledger), self._builder)
        self._roles = sort_roles(state, options.choices, self.node)

    def _parsed_values(self) -> dict[int, Node]:
        copies = [other for _, other in self._state.copies]
        values = [*self._state.values, *copies]
        parsed = open_values(self._files, values, self._options.ledger)
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
            RequestError: `request.invalid` for choices that the source does not leave.
        """
        roles, beside = self._roles, self._companion_state()
        home, inside = self._home()
        rest = nested({path[len(home) if path in inside else 0 :]: self.node(i) for path, i in roles.rest.items()})
        at_root = frozenset(str(path[0]) for path in roles.rest if path not in inside)
        short = dict(_schedulers(rest, ()))
        client_state = _without(rest, list(short))
        found = {(*(() if str(path[0]) in at_root else home), *path): node for path, node in short.items()}
        schedulers = {**{key_of(path): node for path, node in found.items()}, **beside.schedulers}
        own, undecided = self._own_scheduler(schedulers)
        scheduler = [] if own is None or undecided else [list(schedulers.values())[own]]
        first, *others = self._read_pairs(scheduler)
        counters = self._counted(client_state, scheduler, first.parameters)
        pairs = [first, *others]
        framework = self._framework(origin)
        whole = Checkpoint(
            url=origin.url,
            tag=self._options.tag,
            format=f"dcp-{framework}",
            framework_version=None,
            world={},
            files=tuple(self._files),
            shard_map=self._builder.build(),
            parameters=(),
            buffers=(),
            shared={},
            optimizer=None,
            foreign_globals=tuple(sorted(self._options.ledger.foreign)),
            warnings=(*self._warnings, *(w for p in pairs for w in p.warnings)),
            agreements=(*self._tensors.chunks.agreements, *(a for p in pairs for a in p.agreements)),
            counters=counters,
            schedulers=tuple(schedulers.values()),
            scheduler_keys=tuple(schedulers),
            own_scheduler=own,
            client_state={**client_state, **beside.client_state},
            not_carried=tuple(self._not_carried),
        )
        bare = replace(
            whole, warnings=(), agreements=(), counters=Counters(), schedulers=(), scheduler_keys=(), own_scheduler=0,
            client_state={}, not_carried=(), foreign_globals=(),
        )  # fmt: skip
        further = tuple(
            _with_pair(bare, read, self._facts(pair, read, framework))
            for pair, read in zip(roles.pairs[1:], others, strict=True)
        )
        facts = replace(
            self._facts(roles.pairs[0], first, framework),
            others=further,
            home=home,
            at_root=at_root,
            scheduler_paths=tuple(found),
            passed_over=roles.passed_over,
            texts=dict(self._companions.texts),
            rank_states=beside.rng,
        )
        undecided += _unread_values(rest, home, first)
        complete = _with_pair(whole, first, facts)
        return replace(
            complete,
            undecided=(*roles.undecided, *complete.undecided, *undecided),
            assumed=(*complete.assumed, *self._of_other_rates(scheduler), *self._loose_tensors(first)),
        )

    def _of_other_rates(self, scheduler: Sequence[Node]) -> tuple[Undecided, ...]:
        """A statement about the only scheduler if its last rates are not those of the only optimizer."""
        own = self._roles.pairs[0].optimizer
        rates = _last_rates(scheduler[0]) if scheduler else []
        chosen = self._options.choices.scheduler_key is not None
        if chosen or own is None or not rates or not all(type(r) is float for r in rates) or own.has_rates(rates):
            return ()
        text = (
            f"the scheduler last set the learning rates {rates}, the optimizer has {own.rates}, and it is taken for its"
        )
        return (Undecided(Question.SCHEDULER, text, "--scheduler-key none if it is another optimizer's"),)

    def _loose_tensors(self, read: ReadPair) -> tuple[Undecided, ...]:
        """A statement about tensors at the root of the state dict, beside a model that lies there with other things.

        Nothing tells a parameter of the outermost module from a tensor that the script saved.
        """
        pair = self._roles.pairs[0]
        if pair.model is None or pair.model.path or not (self._roles.rest or pair.optimizer):
            return ()
        names = [*(p.fqn for p in read.parameters if not p.trained), *(b.fqn for b in read.buffers)]
        loose = [n for n in names if "." not in n and n not in KNOWN_BUFFERS]
        if not loose or (pair.optimizer is None and not any("." in n for n in names)):
            return ()
        text = f"{listed(loose)} lie at the root of the state dict, as the model does, and are taken for tensors of it"
        return (Undecided(Question.MODEL, text, "save them below a key of their own if they are none"),)

    def _home(self) -> tuple[KeyPath, Container[KeyPath]]:
        """The place in which the model lies, and the paths of the rest that lie there, too.

        It is the root if a key beside the model is also one at the root: no two entries become one.
        """
        model, rest = self._roles.pairs[0].model, self._roles.rest
        home = () if model is None else model.path[:-1]
        inside = {path for path in rest if path[: len(home)] == home and len(path) > len(home)}
        beside = {str(path[len(home)]) for path in inside}
        if home and any(str(path[0]) in beside for path in rest if path not in inside):
            return (), rest
        return home, inside

    def _read_pairs(self, scheduler: Sequence[Node]) -> list[ReadPair]:
        """All models and optimizers; the scheduler and the user's order of parameters are those of the first one."""
        choices = self._options.choices
        buffers = NamedBuffers.of(choices.buffers)
        reading = Reading(self._files, self._tensors, self.node, scheduler, choices.param_order, buffers)
        found: list[ReadPair] = []
        models = [p.model.names for p in self._roles.pairs if p.model is not None]
        for number, pair in enumerate(self._roles.pairs):
            if number == 0:
                found.append(read_pair(pair, _names_for(pair, models), reading))
                continue
            place = pair.model.path if pair.model is not None else pair.optimizer.path if pair.optimizer else ()
            shared = replace(reading, order=None, scheduler=())
            found.append(read_pair(pair, _names_for(pair, models), shared, label=f"{key_of(place)}:"))
        if buffers is not None:
            buffers.refuse_unused()
        return found

    def _framework(self, origin: Origin) -> Framework:
        if origin.framework is not None:
            return origin.framework
        model, optimizer = self._roles.pairs[0].model, self._roles.pairs[0].optimizer
        flat = optimizer is not None and optimizer.flat and model is not None and not model.path
        return Framework.TORCHTITAN if flat else Framework.STATE_DICT

    @staticmethod
    def _facts(pair: Pair, read: ReadPair, framework: Framework) -> DcpFacts:
        return DcpFacts(
            framework,
            None if pair.model is None else pair.model.path,
            None if pair.optimizer is None else pair.optimizer.path,
            pair.optimizer is not None and pair.optimizer.flat,
            numbered=read.numbered,
            model_names=read.model_names,
            optimizer_names=read.optimizer_names,
            odd_states=read.odd_states,
            opaque_states=read.opaque_states,
        )

    # Everything else.

    def _own_scheduler(self, schedulers: Mapping[str, Node]) -> tuple[int | None, tuple[Undecided, ...]]:
        """The index of the scheduler that changes the optimizer's learning rates; None if none does.

        It is the only one of the only optimizer, or else the one that alone has the rates which the optimizer keeps,
        if no other optimizer keeps the same ones.
        """
        keys, chosen = list(schedulers), self._options.choices.scheduler_key
        if chosen is not None:
            if chosen not in keys and chosen != NO_SCHEDULER:
                raise no_such_place("scheduler", chosen, [*keys, NO_SCHEDULER])
            return (keys.index(chosen) if chosen in keys else None), ()
        optimizers = [p.optimizer for p in self._roles.pairs if p.optimizer is not None]
        own = self._roles.pairs[0].optimizer
        if not keys or own is None or (len(keys) == 1 and len(optimizers) == 1):
            return 0 if keys else None, ()
        fitting = [i for i, node in enumerate(schedulers.values()) if own.has_rates(_last_rates(node))]
        if len(fitting) == 1:
            rates = _last_rates(list(schedulers.values())[fitting[0]])
            if sum(o.has_rates(rates) for o in optimizers) == 1:
                return fitting[0], ()
        text = (
            f"it has {counted(len(optimizers), 'optimizer')} and {counted(len(keys), 'learning-rate scheduler')}, "
            "and the rates do not tell which is this optimizer's"
        )
        return 0, (choose(Question.SCHEDULER, [*keys, NO_SCHEDULER], text),)

    def _counted(
        self,
        client_state: Mapping[str | int, Node],
        scheduler: Sequence[Node],
        parameters: Sequence[Parameter],
    ) -> Counters:
        """The counters, those of torchtitan's `train_state` among them."""
        state = client_state.get(_TRAIN_STATE)
        counted = mapping_items(state, what=_TRAIN_STATE) if is_mapping(state) else {}
        steps, tokens = (self._count_of(counted, name) for name in _COUNTERS)
        kept = self._state.counters
        if self._companions.steps is not None:
            steps = self._companions.steps
        steps = kept.steps if steps is None else steps
        if steps is None and parameters and not any("step" in p.scalars for p in parameters):
            steps = self._steps_of_groups()
        if steps is None and parameters and not any("step" in p.scalars for p in parameters):
            steps = _last_epoch(scheduler)
            self._warnings += [] if steps is None else [_BY_SCHEDULER.format(steps=steps)]
        return replace(kept, steps=steps, tokens=kept.tokens if tokens is None else tokens)

    def _steps_of_groups(self) -> int | None:
        """The steps that all param groups count alike, as those of apex do."""
        optimizer = self._roles.pairs[0].optimizer
        counts = [g.group.hyper_parameters.get("step") for g in optimizer.groups] if optimizer is not None else []
        first = counts[0] if counts else None
        return first if type(first) is int and all(c == first for c in counts) else None

    def _count_of(self, counted: Mapping[str | int, Node], name: str) -> int | None:
        """A count of torchtitan's `train_state`, which is a number or a tensor of one element."""
        if type(value := counted.get(name)) is int:
            return value
        saved = self._roles.rest.get((*self._home()[0], _TRAIN_STATE, name))
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
            {
                key: carried(replace(p, root=node), numbers[p.file.name])
                for key, (p, node) in zip(_file_keys(companions), companions.schedulers, strict=True)
            },
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
    schedulers: dict[str, Node]
    """By the names of their files."""
    rng: tuple[dict[str, Node], ...]
    client_state: dict[str, Node]


def _last_epoch(schedulers: Sequence[Node]) -> int | None:
    """The count of the first scheduler."""
    counts = (mapping_items(s, what="a scheduler").get("last_epoch") for s in schedulers if is_mapping(s))
    return next((c for c in counts if type(c) is int), None)


def _file_keys(companions: Companions) -> list[str]:
    """A key for each scheduler of the files: the file's name, with its index if one file has several."""
    names = [parsed.file.name for parsed, _ in companions.schedulers]
    return [n if names.count(n) == 1 else f"{n}.{names[:i].count(n)}" for i, n in enumerate(names)]


def _names_for(pair: Pair, models: Sequence[NamesOfModel]) -> NamesOfModel:
    """The names of a pair's model; for an optimizer alone those of a model that it fits, or its own."""
    model, optimizer = pair.model, pair.optimizer
    if optimizer is None:
        return NamesOfModel({}) if model is None else model.names
    if model is not None:
        return optimizer.names_in(model.names)
    own = optimizer.own_names
    return own if optimizer.numbered else next((optimizer.names_in(m) for m in models if optimizer.fits(m)), own)


def _with_pair(checkpoint: Checkpoint, read: ReadPair, facts: DcpFacts) -> Checkpoint:
    return replace(
        checkpoint,
        parameters=tuple(read.parameters),
        buffers=tuple(read.buffers),
        shared=read.shared,
        optimizer=read.optimizer,
        extra_states=read.extra_states,
        module_names=read.module_names,
        undecided=read.undecided,
        assumed=read.assumed,
        unproven=read.unproven,
        copies=read.copies,
        run_names=compiled_names(read.model_names),
        frozen_left_out=read.adapter_alone,
        facts=facts,
    )


def _unread_values(entries: Mapping[str | int, Node], home: KeyPath, read: ReadPair) -> tuple[Undecided, ...]:
    """Refusals of targets that need a model or an optimizer which was saved as one value: without flattening.

    Such a value holds what one rank had of it: nothing says if that is all.
    """
    held = {k: mapping_items(v, what=str(k)) for k, v in entries.items() if is_mapping(v)}
    models = [k for k, v in held.items() if any(isinstance(item, PTensorRef) for item in v.values())]
    optimizers = [k for k, v in held.items() if {"state", "param_groups"} <= v.keys()]
    asked: list[Undecided] = []
    for question, decided, found in (
        (Question.MODEL, read.parameters or read.buffers, models),
        (Question.OPTIMIZER, read.optimizer, optimizers),
    ):
        if found and not decided:
            place = printable(key_of((*home, found[0])))
            text = f"the {question.value} at {place} was saved as one value of one rank"
            asked.append(Undecided(question, text, "save with the default planner (flatten_state_dict=True)"))
    return tuple(asked)


def _schedulers(entries: Mapping[str | int, Node], place: KeyPath) -> Iterator[tuple[KeyPath, Node]]:
    """The state dicts of schedulers among these entries and in dicts within them, by their whole paths."""
    for key, node in entries.items():
        if is_scheduler(node):
            yield (*place, key), loadable_scheduler(node)
        elif is_mapping(node):
            yield from _schedulers(mapping_items(node, what=key_of(place)), (*place, key))


def _without(entries: Mapping[str | int, Node], paths: Sequence[KeyPath]) -> dict[str | int, Node]:
    """The entries without those at these paths."""
    left: dict[str | int, Node] = {}
    for key, node in entries.items():
        inner = [path[1:] for path in paths if path[0] == key]
        if not inner:
            left[key] = node
        elif () not in inner and (kept := _without(mapping_items(node, what=str(key)), inner)):
            left[key] = mapping_of(kept)
    return left


def _last_rates(scheduler: Node) -> list[Node]:
    """The learning rates that a scheduler set last, one for each group; none if it keeps none."""
    held = mapping_items(scheduler, what="a scheduler").get("_last_lr") if is_mapping(scheduler) else None
    return list(held.items) if isinstance(held, PList | PTuple) else []


def saved_state_in(location: Location, listing: Listing) -> SavedState | None:
    """The state dict of a directory, or those of a trainer's models and optimizers; None for others.

    Those of one model and its optimizer are one state dict. Those of several lie below the names of their directories.

    Raises:
        SourceError: All errors of the metadata.
    """
    if not any(MODEL_DIRECTORY.fullmatch(d) for d in listing.directories):
        return read_state(location, listing) if is_distributed(listing) else None
    folders = _folders(listing)
    several = sum(MODEL_DIRECTORY.fullmatch(d) is not None for d in folders) > 1
    state = SavedState()
    for folder in folders:
        child = location.child(folder)
        read = read_state(child, child.store.list_directory(child.path), folder=folder)
        state = state.joined(read, below=(folder,) if several else ())
    return state


def _folders(listing: Listing) -> list[str]:
    """A trainer's directories of models and of their optimizers, by number."""
    models = [d for d in listing.directories if MODEL_DIRECTORY.fullmatch(d)]
    numbers = {d.rpartition("_")[2] for d in models}
    optimizers = [
        d for d in listing.directories if OPTIMIZER_DIRECTORY.fullmatch(d) and d.rpartition("_")[2] in numbers
    ]
    return sorted((*models, *optimizers), key=lambda d: int(d.rpartition("_")[2]))


class DcpReader:
    """Reads a directory that `torch.distributed.checkpoint.save` wrote."""

    family = "dcp"

    def recognises(self, listing: Listing) -> bool:
        """True if the directory holds `.metadata`, that of a rank, or files of shards."""
        return is_distributed(listing)

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the state dict of a directory, with Lightning's `meta.pt` beside it.

        Raises:
            SourceError: `checkpoint.*`, `pickle.*`, `zip.*`, `tensor.*`, `source.unsupported`, `name.invalid`.
        """
        lightning = META in names_of(listing)
        companions = read_companions(location, listing, options.ledger) if lightning else Companions()
        companions.not_carried += beside(listing, is_shard, companions=lightning)
        framework = Framework.LIGHTNING if lightning else None
        state = read_state(location, listing)
        if options.refuse_keys is not None:
            options.refuse_keys(location, (item.entry.key for item in (*state.tensors, *state.values)))
        return Assembly(state, companions, options).checkpoint(Origin(location.url, framework))


class TrainerReader:
    """Reads a directory of Accelerate or of the Trainer: shards of the model, of the optimizer, and other files."""

    family = "dcp"

    def recognises(self, listing: Listing) -> bool:
        """True if there is a directory of FSDP's shards of a model."""
        return any(MODEL_DIRECTORY.fullmatch(d) for d in listing.directories)

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the model's and the optimizer's state dicts, and the files beside them.

        Raises:
            SourceError: As `DcpReader.read`.
        """
        state = saved_state_in(location, listing) or SavedState()
        companions = read_companions(location, listing, options.ledger)
        companions.not_carried += beside(listing, is_shard, companions=True, folders=_folders(listing))
        framework = Framework.TRAINER if TRAINER_STATE in names_of(listing) else Framework.ACCELERATE
        return Assembly(state, companions, options).checkpoint(Origin(location.url, framework))
