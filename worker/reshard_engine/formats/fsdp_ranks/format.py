"""Checkpoints of FSDP with one file for each rank, as a format: verl, SkyRL, and Accelerate without DCP.

A rank's file holds what the rank held: its boxes of sharded tensors, and plain tensors whole. Boxes that several ranks
hold (replicas of HSDP, buffers) are read once and compared before anything is written.

Source: as in `files`, `rank_states`, `dtensors` and `rank_optimizer`; SkyRL 0.3.0
`backends/skyrl_train/distributed/fsdp_strategy.py` (keys of its extra state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, TypeVar

from reshard.choices import RankFramework, TargetFormat
from reshard.dcp_options import Framework
from reshard.errors import SourceError, counted, listed, printable
from reshard.models.jobs import ConvertRequest, NotCarried, PossibleTarget
from reshard.options import FsdpRanksOptions, RunLayout
from reshard_engine.checkpoint import (
    Checkpoint,
    OptimizerState,
    Question,
    Undecided,
)
from reshard_engine.containers.source_file import SourceFile, open_all
from reshard_engine.containers.torch_file import TorchFile, TreeTensors, open_torch_file
from reshard_engine.formats.carried import UNKNOWN, named
from reshard_engine.formats.dtensors import Held, RankFile
from reshard_engine.formats.format import (
    Completion,
    Discovery,
    DryRun,
    Presentation,
    Reader,
    ReadOptions,
    Writer,
    refuse_choices,
)
from reshard_engine.formats.fsdp_ranks.files import (
    CLIENT,
    CONFIG,
    RNG,
    SCHEDULER,
    NamedFiles,
    RankFacts,
    RankSet,
    SavedRanks,
    files_beside,
    holds_rank_files,
    named_files,
    rank_set,
    suggested_patterns,
)
from reshard_engine.formats.fsdp_ranks.writer import FsdpRanksWriter
from reshard_engine.formats.model_weights import SHARDED_NAMES, compiled_names
from reshard_engine.formats.numbered import (
    Sections,
    Several,
    below,
    entries_of,
    is_model,
    is_optimizer,
    own_scheduler,
    shape_of,
)
from reshard_engine.formats.rank_optimizer import (
    RankStates,
    ReadOptimizer,
    Slice,
    read_optimizer,
    states_of_rank,
)
from reshard_engine.formats.rank_states import (
    FormatOfRanks,
    ModelOfRanks,
    RankModel,
    RankState,
    RankTensors,
    RankTree,
    Value,
    is_sharded,
    model_of_rank,
)
from reshard_engine.pickles.nodes import Node, is_mapping, mapping_items, sequence_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import TreeDifference, compare_trees
from reshard_engine.storage.locations import Location, open_location
from reshard_engine.storage.protocol import Listing
from reshard_engine.tensors.layout import KnownFiles

_MADE_ANEW = frozenset({"tag", "fsdp_strategy", "world_size", "rank"})
"""Keys of SkyRL's extra state that say how it was saved."""
_BESIDE = "it lies beside the ranks' files, and nothing reads it"
_HUGGINGFACE = "huggingface/"
_MODEL_FILES = "configuration and tokenizer: --model-files with this directory copies them beside weights"
_COPY = "a copy of the model's weights, which a run of the target saves again"
_MODEL_KEYS = ("model", "state_dict", "model_state_dict")
"""The keys under which scripts usually save a model."""
_OTHER_SAVE = "the files are of different saves: copy those of one save"
_OF_EACH_RANK = "ranks saved different values under this key"
_UNREAD = "it is neither the model nor the optimizer that was read, and cannot be read"
_PER_RANK = "ranks saved different values under one key; the first rank's is taken"
_FIRST_RANK = ("_rank_0.pt", "_rank0.bin")
_Read = TypeVar("_Read")


class RankFilesReader:
    """Reads a directory with one file for each rank."""

    family = "fsdp_ranks"

    def recognises(self, listing: Listing) -> bool:
        """True if there is a file with a rank's name."""
        return holds_rank_files(listing)

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the model, its optimizer and what lies beside them.

        Raises:
            SourceError: `checkpoint.*`, `pickle.*`, `zip.*`, `tensor.*`, `source.unsupported`, `name.invalid`.
            RequestError: `request.invalid` for choices that the source does not leave.
        """
        choices = options.choices
        found = rank_set(location, listing, choices)
        keys = ["model_key", "optimizer_key"] if found.framework is RankFramework.ACCELERATE else []
        followed = ["param_order", "buffers", *keys]
        text = f"{printable(location.url)} holds one model, its optimizer and its scheduler"
        refuse_choices(choices.model_copy(update=dict.fromkeys(followed)), text)
        return _Assembly(found, options).checkpoint(location.url)


class NamedFilesReader:
    """Reads files of ranks under names that a script chose, which the user says by a pattern."""

    family = "fsdp_ranks"

    def recognises(self, listing: Listing) -> bool:
        """False: nobody but the user knows the names."""
        return False

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the model, its optimizer and everything else in the files that the pattern names.

        Raises:
            SourceError: As `named_files` and `RankFilesReader.read`; `checkpoint.ambiguous` for whole tensors alone.
            RequestError: `request.invalid` for choices that the source does not leave.
        """
        found = named_files(location, listing, options.choices.rank_files or "")
        return _NamedAssembly(found, options, location).checkpoint(location.url)


class _Discovery(Discovery):
    """The directories and files that are checkpoints of this format."""

    readers: ClassVar[tuple[Reader, ...]] = (RankFilesReader(),)
    named_reader: ClassVar[Reader | None] = NamedFilesReader()
    of_training = True
    takes_choices = True
    files = KnownFiles(
        entries=(CONFIG,),
        suffixes=_FIRST_RANK,
        needed=("model_world_size_*_rank_*.pt", "pytorch_model_fsdp_*_rank*.bin"),
    )

    def holds_shards(self, listing: Listing) -> bool:
        """True if there is a file with a rank's name."""
        return holds_rank_files(listing)

    def names_to_say(self, listing: Listing) -> str:
        """Flags for names that differ in a number alone."""
        return suggested_patterns(listing.by_name)


class _Completion(Completion):
    """The checkpoint that a request means, in the terms of this format."""

    def indifferent(self, checkpoint: Checkpoint, request: ConvertRequest) -> tuple[Question, ...]:
        """The names of numbers, and what plain tensors are, in files whose numbers and tensors stay as they are."""
        saved = checkpoint.facts.saved if isinstance(checkpoint.facts, RankFacts) else None
        options = request.options.of(FsdpRanksOptions)
        if saved is None or options.rank_framework is RankFramework.ACCELERATE:
            return ()
        # The names of wrapped modules in the model's file say the units of FSDP1, too.
        units = bool(saved.units) and saved.run.versions is not None and options.fsdp_version != 2
        kept = bool(saved.run.numbers) or units
        return (Question.ORDER, Question.BUFFERS) if kept else ()

    def completed(self, checkpoint: Checkpoint, request: ConvertRequest, base: Checkpoint | None) -> Checkpoint:
        """The checkpoint with the small files beside it, for a target that keeps them at the same places."""
        facts = checkpoint.facts
        saved = facts.saved if isinstance(facts, RankFacts) else None
        chosen = request.options.of(FsdpRanksOptions).rank_framework
        if request.to not in FsdpRanks.targets or not isinstance(facts, RankFacts) or saved is None:
            return checkpoint
        if RankFramework.ACCELERATE in (saved.framework, chosen):
            return checkpoint
        beside, weights = files_beside(open_location(checkpoint.url, request.source.profile))
        carried = {*beside, *([_HUGGINGFACE] if any(p.startswith(_HUGGINGFACE) for p in (*beside, *weights)) else [])}
        left = tuple(n for n in checkpoint.not_carried if n.path not in carried) + named(weights, _COPY)
        return replace(checkpoint, facts=replace(facts, saved=replace(saved, beside=beside)), not_carried=left)


class _Presentation(Presentation):
    """The answers for people about checkpoints of this format."""

    def possible_targets(self, tried: DryRun) -> Iterable[PossibleTarget]:
        """Files of any number of ranks, for a checkpoint of the same kind."""
        if not isinstance(tried.checkpoint.facts, RankFacts):
            return []
        to = TargetFormat.FSDP_RANKS
        refusal = tried.refusal(to, layout=RunLayout(dp=2))
        if refusal is not None:
            return [tried.impossible(f"{to} --dp", refusal)]
        saved = tried.checkpoint.facts.saved
        version = 2 if saved is None or saved.fsdp is None else saved.fsdp
        return [tried.possible(f"{to} --dp", f"any number of ranks of FSDP{version}", f"--to {to} --dp 2")]

    def rank_label(self, file: str, world: Mapping[str, int]) -> str:
        """The rank in a file's name."""
        number = file.rpartition(".")[0].rpartition("rank")[2].lstrip("_")
        return f"rank {int(number)}" if number.isdecimal() else ""


class FsdpRanks(FormatOfRanks):
    """Files of FSDP's ranks."""

    name = "fsdp_ranks"
    discovery = _Discovery()
    completion = _Completion()
    presentation = _Presentation()
    targets = (TargetFormat.FSDP_RANKS,)

    def writer(self, target: str) -> Writer:
        """The writer of files of FSDP's ranks."""
        return FsdpRanksWriter()


# The checkpoint.


@dataclass(slots=True)
class _State:
    """The contents of the extra state."""

    schedulers: tuple[Node, ...] = ()
    scheduler_keys: tuple[str, ...] = ()
    own_scheduler: int | None = 0
    undecided: tuple[Undecided, ...] = ()
    rng: tuple[Mapping[str, Node], ...] = ()
    client_state: dict[str | int, Node] = field(default_factory=dict[str | int, Node])
    other_models: dict[str, Node] = field(default_factory=dict[str, Node])
    not_carried: list[NotCarried] = field(default_factory=list[NotCarried])


class _Assembly:
    """One checkpoint being put together."""

    _open: tuple[Undecided, ...] = ()
    """Which model and which optimizer are read, as far as the user has to say it."""
    _saved_by: Framework | None = None
    """The framework that saved the files, if it saves distributed checkpoints, too."""

    def __init__(self, files: RankSet, options: ReadOptions) -> None:
        self._set, self._options = files, options
        if files.framework is RankFramework.ACCELERATE:
            self._saved_by = Framework.ACCELERATE
        self._label, self._world = files.label, files.world
        self._files: list[SourceFile] = []
        # Sharded tensors become numbers, so that nothing names their classes. What is carried is parsed without them.
        self._ledger = OpaqueLedger(options.ledger.policy, options.ledger.foreign, SHARDED_NAMES)
        self._tensors = RankTensors([f.name for f in files.files])
        self._model = ModelOfRanks(self._opened(files.model, model_of_rank), files.model)
        self._first_state = len(self._files)
        self._first_optimizer: TorchFile | None = None
        self._optimizer = self._read_optimizer()
        self._state = RankState(
            self._tensors,
            self._model,
            self._optimizer,
            first_state=self._first_state,
            buffers=options.choices.buffers,
        )

    def _opened(self, files: Sequence[SourceFile], read: Callable[[RankFile], _Read]) -> list[_Read]:
        """Read the files of all ranks. Only what `read` returns is kept: a thousand trees would fill the memory."""
        ranks = {f.name: rank for rank, f in enumerate(files)}

        def parse(file: SourceFile) -> tuple[SourceFile, _Read]:
            parsed = open_torch_file(file, self._ledger)
            return parsed.file, read(RankFile(parsed, ranks[file.name], self._world))

        found = open_all(files, parse)
        self._files += [file for file, _ in found]
        return [one for _, one in found]

    def checkpoint(self, url: str) -> Checkpoint:
        """The checkpoint of everything that was read.

        Raises:
            SourceError: `checkpoint.*`, `tensor.*`.
            RequestError: `request.invalid` for names of buffers that are not there.
        """
        state = self._extra_state()
        kinds = self._state.kinds()
        model, optimizer, plain = self._model, self._optimizer, self._model.plain
        read = None
        if optimizer is not None and not optimizer.unread:
            read = OptimizerState(self._state.groups(optimizer, self._first_optimizer))
        longer = {short: name for name, short in plain.items() if name != short}
        return Checkpoint(
            url=url,
            tag=self._options.tag,
            format=self._label,
            framework_version=None,
            world={"dp": self._world},
            files=tuple(self._files),
            shard_map=self._tensors.builder.build(),
            parameters=tuple(kinds.parameters),
            buffers=tuple(kinds.buffers),
            shared={plain[a]: plain[o] for a, o in self._state.ties.all.items()},
            optimizer=read,
            foreign_globals=tuple(sorted(self._options.ledger.foreign)),
            warnings=() if optimizer is None else optimizer.warnings,
            agreements=tuple(self._tensors.agreements),
            schedulers=state.schedulers,
            scheduler_keys=state.scheduler_keys,
            own_scheduler=state.own_scheduler,
            client_state=state.client_state,
            run_names=compiled_names(longer),
            module_names=tuple(plain.values()),
            not_carried=(*state.not_carried, *named(model.others, UNKNOWN), *self._beside()),
            facts=RankFacts(
                rank_states=state.rng,
                saved=self._saved(),
                other_models=state.other_models,
                saved_by=self._saved_by,
            ),
            undecided=(
                *self._open,
                *(() if optimizer is None else optimizer.undecided),
                *kinds.undecided,
                *state.undecided,
            ),
            assumed=(*(() if optimizer is None else optimizer.assumed), *kinds.assumed),
            unproven=frozenset(kinds.unproven),
            copies={plain[a]: self._state.weights[a] for a in self._state.ties.by_value},
            no_optimizer="" if optimizer is None else optimizer.unread,
            frozen_left_out=optimizer is not None and optimizer.adapter_alone,
        )

    def _saved(self) -> SavedRanks | None:
        """How the run saved the files, for a target of the same kind."""
        held, weights = {name: ranks[0] for name, ranks in self._model.held.items()}, self._state.weights
        return SavedRanks(
            run=self._state.saved(),
            framework=self._set.framework,
            number=self._set.number,
            fsdp=self._version(held.values()),
            units=() if self._optimizer is None else tuple(tuple(weights[n] for n in u) for u in self._optimizer.units),
            cuts={weights[n]: cuts for n, cuts in self._cuts().items() if n in weights},
            has_extra=bool(self._set.extra),
            strategy=self._set.strategy,
        )

    def _cuts(self) -> dict[str, list[dict[int, int]]]:
        """The elements of each parameter's states by rank, where FSDP1 cut it from a flat parameter."""
        found: dict[str, list[dict[int, int]]] = {}
        for name, states in ({} if self._optimizer is None else self._optimizer.states).items():
            for _, elements in states.values():
                slices = [e for e in elements if isinstance(e, Slice)]
                lengths = {s.rank: s.end - s.begin for s in slices if s.end > s.begin}
                if slices and lengths not in found.setdefault(name, []):
                    found[name].append(lengths)
        return found

    def _version(self, held: Iterable[Held]) -> int | None:
        """The version of FSDP that saved the files.

        FSDP1 keeps slices of flattened parameters in its optimizer, or `ShardedTensor`s; FSDP2 keeps DTensors there.
        """
        optimizer = self._optimizer
        if (optimizer is not None and optimizer.flat) or any(h.mesh is None and not h.plain for h in held):
            return 1
        states = [] if optimizer is None else [e for s in optimizer.states.values() for _, e in s.values()]
        on_mesh = any(isinstance(e[0], Held) and e[0].mesh is not None for e in states if e)
        return 2 if on_mesh else self._set.fsdp

    def _read_optimizer(self) -> ReadOptimizer | None:
        files = self._set.optimizer
        if not files:
            return None
        ranks = self._opened(files, states_of_rank)
        self._first_optimizer = ranks[0].parsed
        names = [f.name for f in files]
        return read_optimizer(ranks, self._model.tensors(), names, self._options.choices.param_order)

    # What lies beside.

    def _extra_state(self) -> _State:
        """The scheduler, the ranks' random states, and the client state of SkyRL."""
        found = _State()
        parsed = open_all(self._set.extra, lambda file: open_torch_file(file, self._options.ledger))
        if not parsed:
            return found
        first_file = len(self._files)
        self._files += [p.file for p in parsed]
        trees = TreeTensors(self._tensors.builder, {p.file: first_file + i for i, p in enumerate(parsed)})
        entries = [mapping_items(p.root, what=printable(p.file.name)) for p in parsed]
        found.rng = _random_states(trees, parsed, entries)
        for key, node in entries[0].items():
            empty = is_mapping(node) and not mapping_items(node, what=printable(str(key)))
            if key == RNG or node is None or (key == SCHEDULER and empty):  # SkyRL's word for none
                continue
            if key in _MADE_ANEW or key not in (SCHEDULER, CLIENT):
                reason = "it says how the run was saved" if key in _MADE_ANEW else UNKNOWN
                found.not_carried += named([str(key)], reason)
                continue
            if any(_differ(node, other.get(key)) for other in entries[1:]):
                found.not_carried += named([str(key)], _PER_RANK)
            carried = trees.carried(node, parsed[0])
            if key == SCHEDULER:
                found.schedulers = (carried,)
            elif is_mapping(carried):
                found.client_state |= mapping_items(carried, what=CLIENT)
            else:
                found.client_state[CLIENT] = carried
        return found

    def _beside(self) -> list[NotCarried]:
        """The files and directories beside the ranks' files."""
        reasons = {_HUGGINGFACE: _MODEL_FILES}
        return [
            NotCarried(path=printable(n), file=printable(n), reason=reasons.get(n, _BESIDE)) for n in self._set.others
        ]


# Files whose names the user says.


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a state dict: the item of its file, and the keys that lead to it there."""

    item: str
    path: tuple[str | int, ...] = ()

    @property
    def key(self) -> str:
        """Its name for the user, who knows a file without items by its own keys."""
        return ".".join(map(str, (*([self.item] if self.item else []), *self.path))) or "."

    def within(self, file: RankFile) -> RankFile:
        """The file with the state dict as its value.

        Raises:
            SourceError: `checkpoint.mixed` if it is not there.
        """
        node = file.parsed.root
        for key in self.path:
            held = sequence_items(node, what=file.name) if isinstance(key, int) else mapping_items(node, what=file.name)
            try:
                node = held[key]  # type: ignore[index]
            except LookupError:
                text = f"{file.name} has nothing at {printable(self.key)}, where the first rank's file has it"
                raise SourceError("checkpoint.mixed", text, fix=_OTHER_SAVE) from None
        return RankFile(replace(file.parsed, root=node), file.rank, file.world)


@dataclass(slots=True)
class _Contents:
    """The contents of the first rank's files, by the user's names."""

    places: dict[str, _Place] = field(default_factory=dict[str, _Place])
    models: dict[str, Node] = field(default_factory=dict[str, Node])
    optimizers: dict[str, Node] = field(default_factory=dict[str, Node])
    schedulers: dict[str, Node] = field(default_factory=dict[str, Node])
    rest: dict[str, Node] = field(default_factory=dict[str, Node])

    def add(self, item: str, root: Node, what: str) -> None:
        """Add what one file holds: one state dict, or several under keys."""
        if is_optimizer(root) or is_model(root):
            self._put(self.optimizers if is_optimizer(root) else self.models, _Place(item), root)
            return
        if not is_mapping(root):
            self._put(self.rest, _Place(item), root)
            return
        for key, node in mapping_items(root, what=what).items():
            found = Sections.of({key: node})
            inner = [*entries_of(node)] if is_mapping(node) else [*range(len(dict(below(key, node))))]
            paths = {f"{key}.{one}": (key, one) for one in inner} | {str(key): (key,)}
            kinds = ((self.models, found.models), (self.optimizers, found.optimizers))
            for into, held in (*kinds, (self.schedulers, found.schedulers)):
                for name, value in held.items():
                    self._put(into, _Place(item, paths[name]), value)
            for value in found.rest.values():
                self._put(self.rest, _Place(item, (key,)), value)

    def _put(self, into: dict[str, Node], place: _Place, node: Node) -> None:
        if place.key in self.places:
            text = f"two entries of the first rank's files are called {printable(place.key)}"
            raise SourceError("checkpoint.ambiguous", text, fix="name the files of one of them by --rank-files")
        self.places[place.key] = place
        into[place.key] = node

    def several(self, where: str) -> Several:
        """The models and optimizers, of which one pair is read."""
        usual = [k for k in self.models if k.rpartition(".")[2] in _MODEL_KEYS]
        shapes = {
            key: {str(n): shape for n, t in entries_of(self.models[key]).items() if (shape := shape_of(t)) is not None}
            for key in (*usual, *(k for k in self.models if k not in usual))
        }
        return Several(where, shapes, self.optimizers, bool(usual) or len(shapes) == 1)


class _NamedAssembly(_Assembly):
    """One checkpoint being put together from files whose names the user says."""

    def __init__(self, files: NamedFiles, options: ReadOptions, location: Location) -> None:
        self._named, self._options = files, options
        self._label, self._world = "fsdp-ranks", files.world
        self._files: list[SourceFile] = []
        self._ledger = OpaqueLedger(options.ledger.policy, options.ledger.foreign, SHARDED_NAMES)
        where = printable(location.url)
        self._contents = self._first_files(where)
        pair = self._contents.several(where).chosen(options.choices)
        self._open = pair.undecided
        self._read_keys = (pair.model, pair.optimizer)
        places = [self._contents.places[key] for key in (pair.model, pair.optimizer) if key is not None]
        self._items = list(dict.fromkeys(place.item for place in places))
        self._tensors = RankTensors([f.name for item in self._items for f in files.items[item]])
        read = [self._of_item(item, places) for item in self._items]
        model, states = read[0][0], read[-1][1]
        self._model = ModelOfRanks(model, files.items[self._items[0]])
        self._require_shards(where)
        self._first_state = (len(self._items) - 1) * files.world
        self._first_optimizer = states[0].parsed if states else None
        self._optimizer = self._named_optimizer(states)
        self._state = RankState(
            self._tensors, self._model, self._optimizer, first_state=self._first_state, buffers=options.choices.buffers
        )

    def _first_files(self, where: str) -> _Contents:
        """Read the first rank's files, and prove that the files of all ranks are there."""
        found = _Contents()
        for item, files in self._named.items.items():
            parsed = open_torch_file(files[0], self._ledger)
            said = RankFile(parsed, 0, self._world).ranks_said()
            if said is not None and said > self._world:
                raise self._named.missing(said)
            if said is not None and said < self._world:
                raise SourceError(
                    "checkpoint.mixed",
                    f"{printable(files[0].name)} is of a run of {counted(said, 'rank')}, and the directory holds files "
                    f"of {self._world} under these names",
                    fix="move the files of the other save into a directory of their own",
                )
            found.add(item, parsed.root, printable(files[0].name))
        if not found.models:
            keys = [*found.optimizers, *found.schedulers, *found.rest]
            text = f"the files under these names in {where} hold {listed(keys)}, and no state dict of a model"
            fix = "name the model's files, too: {item} in the pattern stands for the name of what a file holds"
            raise SourceError("checkpoint.incomplete", text, fix=fix)
        return found

    def _of_item(self, item: str, places: Sequence[_Place]) -> tuple[list[RankModel], list[RankStates]]:
        """Read the model and the optimizer in the files of one item, by rank."""
        key = self._read_keys[0]
        model = self._contents.places[key] if self._contents.places[key].item == item else None
        rest = [place for place in places if place.item == item and place is not model]
        optimizer = rest[0] if rest else None

        def read(file: RankFile) -> tuple[RankModel | None, RankStates | None]:
            return (
                None if model is None else model_of_rank(model.within(file)),
                None if optimizer is None else states_of_rank(optimizer.within(file)),
            )

        ranks = self._opened(self._named.items[item], read)
        return [m for m, _ in ranks if m is not None], [s for _, s in ranks if s is not None]

    def _require_shards(self, where: str) -> None:
        if not self._model.any_sharded:
            names = [f.name for f in self._named.items[self._items[0]]]
            raise SourceError(
                "checkpoint.ambiguous",
                f"{listed(list(map(printable, names)))} in {where} hold whole tensors: nothing says that they are of "
                "ranks, and not of steps or epochs",
                fix="name the file of one model: any rank's is whole",
            )

    def _named_optimizer(self, states: Sequence[RankStates]) -> ReadOptimizer | None:
        if not states:
            return None
        names = [f.name for f in self._named.items[self._items[-1]]]
        order = self._options.choices.param_order
        # A script makes its optimizer as it likes: numbers are those of `model.parameters()` only if shapes prove it.
        return read_optimizer(states, self._model.tensors(), names, order, of_model=False)

    def _saved(self) -> SavedRanks | None:
        """None: no framework is known to load files under these names."""
        return None

    def _extra_state(self) -> _State:
        """Schedulers and client state that all ranks hold alike; everything else is named."""
        found, contents = _State(), self._contents
        whole = [k for k, node in (contents.schedulers | contents.rest).items() if not is_sharded(node)]
        others = [k for k in contents.places if k not in (*self._read_keys, *whole)]
        found.other_models, unread = self._of_others(others)
        found.not_carried += unread
        schedulers: dict[str, Node] = {}
        for key, values in self._values(whole).items():
            if not all(values[0].equals(other) for other in values[1:]):
                found.not_carried += named([key], _OF_EACH_RANK)
            elif key in contents.schedulers:
                schedulers[key] = self._carried(values[0])
            else:
                place = contents.places[key]
                found.client_state[key if place.item else place.path[0]] = self._carried(values[0])
        found.schedulers, found.scheduler_keys = tuple(schedulers.values()), tuple(schedulers)
        chosen = self._options.choices.scheduler_key
        found.own_scheduler, found.undecided = own_scheduler([*schedulers], len(contents.optimizers), chosen)
        return found

    def _of_others(self, keys: Sequence[str]) -> tuple[dict[str, Node], list[NotCarried]]:
        """The state dicts that are not read, and the names of those that cannot be. Each file is opened once."""
        found: dict[str, Node] = {}
        unread: list[NotCarried] = []
        by_item: dict[str, dict[str, RankTree]] = {}
        for key in keys:
            place = self._contents.places[key]
            first = open_torch_file(self._named.items[place.item][0], self._ledger)
            try:
                tree = RankTree.of(place.within(RankFile(first, 0, self._world)))
            except SourceError as error:
                unread += named([key], f"{_UNREAD}: {error.message}")
                continue
            by_item.setdefault(place.item, {})[key] = tree
        for item, trees in by_item.items():
            files = self._named.items[item]
            try:
                ranks = self._opened(files, partial(self._held_in, trees))
            except SourceError as error:  # one of the files is damaged
                unread += named(trees, f"{_UNREAD}: {error.message}")
                continue
            self._tensors.files = [f.name for f in self._files]
            for key, tree in trees.items():
                try:
                    held = [_or_raised(one[key]) for one in ranks]
                    found[key] = tree.of_all_ranks(key, held, files, self._tensors)
                except SourceError as error:
                    unread += named([key], f"{_UNREAD}: {error.message}")
        return found, unread

    def _held_in(self, trees: Mapping[str, RankTree], file: RankFile) -> dict[str, Sequence[Held] | SourceError]:
        """What a rank's file holds of the state dicts that are not read."""
        found: dict[str, Sequence[Held] | SourceError] = {}
        for key, tree in trees.items():
            try:
                found[key] = tree.held_in(self._contents.places[key].within(file))
            except SourceError as error:
                found[key] = error
        return found

    def _values(self, keys: Sequence[str]) -> dict[str, list[Value]]:
        """The values of entries by rank. Each file is read once."""
        by_item: dict[str, list[str]] = {}
        for key in keys:
            by_item.setdefault(self._contents.places[key].item, []).append(key)
        found: dict[str, list[Value]] = {}
        for item, held in by_item.items():
            places = [self._contents.places[key] for key in held]
            ranks = {f.name: rank for rank, f in enumerate(self._named.items[item])}
            of_ranks = open_all(self._named.items[item], partial(self._values_of_file, ranks, places))
            found |= {key: [values[number] for values in of_ranks] for number, key in enumerate(held)}
        return found

    def _values_of_file(self, ranks: Mapping[str, int], places: Sequence[_Place], file: SourceFile) -> list[Value]:
        parsed = open_torch_file(file, self._ledger)
        whole = RankFile(parsed, ranks[file.name], self._world)
        return [Value(place.within(whole).parsed.root, replace(parsed, root=None)) for place in places]

    def _carried(self, value: Value) -> Node:
        """The value with references in place of tensors. Its file is one of the checkpoint's."""
        if value.parsed is None:
            return value.node
        file = value.parsed.file
        known = {f.name: number for number, f in enumerate(self._files)}
        if file.name not in known:
            self._files.append(file)
        number = known.get(file.name, len(self._files) - 1)
        return TreeTensors(self._tensors.builder, {file: number}).carried(value.node, value.parsed)

    def _beside(self) -> list[NotCarried]:
        return [NotCarried(path=printable(n), file=printable(n), reason=_BESIDE) for n in self._named.others]


def _or_raised(held: Sequence[Held] | SourceError) -> Sequence[Held]:
    if isinstance(held, SourceError):
        raise held
    return held


def _random_states(
    trees: TreeTensors, parsed: Sequence[TorchFile], entries: Sequence[Mapping[str | int, Node]]
) -> tuple[Mapping[str, Node], ...]:
    """The random states of each rank; none if a rank has none."""
    found: list[Mapping[str, Node]] = []
    for one, held in zip(parsed, entries, strict=True):
        states = held.get(RNG)
        if not is_mapping(states):
            return ()
        what = f"{printable(one.file.name)}: {RNG}"
        found.append({str(k): v for k, v in mapping_items(trees.carried(states, one), what=what).items()})
    return tuple(found)


def _differ(node: Node, other: Node) -> bool:
    """True if two trees hold other values. Tensors are not compared."""
    return any(isinstance(d, TreeDifference) for d in compare_trees(node, other, ""))
