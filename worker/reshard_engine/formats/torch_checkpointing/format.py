"""Checkpoints of torch_checkpointing, as a format: items of ranks, under names that the payload has.

The model is the item `model`, or the only one with sharded tensors that is a state dict; the optimizer is the item
with `state` and `param_groups`. `optimizer_transform_pre` gives it names; else it has numbers. DTensors say how they
lie, and `metadata.pkl` must say the same. Files of safetensors hold local tensors, which the metadata alone place.

All other items are carried as they are, if all ranks hold the same; else by rank.

Source: torch_checkpointing 0.1.1 `state_transformations.py`, `checkpoint_layout.py` (`SafetensorsSerialization`),
`default_resharder.py` (a plain tensor is described as replicated over all ranks); verified by running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from reshard.choices import TargetFormat
from reshard.errors import RequestError, SourceError, counted, listed, printable
from reshard.models.jobs import NotCarried, PossibleTarget
from reshard.options import RunLayout
from reshard_engine.checkpoint import Checkpoint, OptimizerState, Question, Undecided
from reshard_engine.containers.safetensors import SafetensorsFile, open_safetensors_file
from reshard_engine.containers.source_file import SourceFile, open_all, parse_json
from reshard_engine.containers.torch_file import TorchFile, TreeTensors, open_torch_file, walk
from reshard_engine.formats.carried import UNKNOWN, named
from reshard_engine.formats.dtensors import WHOLE, Held, Part, RankFile, placed
from reshard_engine.formats.format import (
    Discovery,
    DryRun,
    Presentation,
    Reader,
    ReadOptions,
    Writer,
    refuse_choices,
)
from reshard_engine.formats.model_weights import SHARDED_NAMES, compiled_names
from reshard_engine.formats.numbered import WEIGHTS_ALONE, Several, own_scheduler, shape_of
from reshard_engine.formats.rank_optimizer import PARAMS, RankStates, ReadOptimizer, read_optimizer, states_of_rank
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
from reshard_engine.formats.torch_checkpointing.files import (
    GROUPS,
    JSON,
    METADATA,
    MODEL,
    NAMED,
    NAMES,
    OPTIMIZER,
    SAFETENSORS,
    STATE,
    TORCH,
    VERSION,
    Item,
    ItemFacts,
    ItemFiles,
    ItemMetadata,
    Path,
    SavedItems,
    Spec,
    holds_items,
    item_files,
)
from reshard_engine.formats.torch_checkpointing.writer import TorchCheckpointingWriter
from reshard_engine.pickles.nodes import (
    Node,
    PDict,
    PList,
    PTensor,
    PTensorRef,
    PTuple,
    is_mapping,
    kind_of,
    mapping_items,
    mapping_of,
    node_of,
    sequence_items,
)
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.rebuild import made_of_tensors
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing
from reshard_engine.tensors.layout import KnownFiles

_JSON_LIMIT_BYTES = 256 << 20
_OTHER_SAVE = "the files are of different saves: copy those of one save"
_PER_RANK = "ranks saved different values of it, and the format of the target has no place for them"
_UNREAD = "it holds sharded tensors, is neither the model nor the optimizer that was read, and cannot be read"
_Read = TypeVar("_Read")


class TorchCheckpointingReader:
    """Reads a directory of torch_checkpointing."""

    family = "torch_checkpointing"

    def recognises(self, listing: Listing) -> bool:
        """True if there are files of items of ranks."""
        return holds_items(listing)

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the model, its optimizer and all other items.

        Raises:
            SourceError: `checkpoint.*`, `pickle.*`, `zip.*`, `safetensors.*`, `tensor.*`, `source.unsupported`,
                `name.invalid`.
            RequestError: `request.invalid` for choices that the source does not leave.
        """
        followed = ("model_key", "optimizer_key", "scheduler_key", "param_order", "buffers")
        text = f"{printable(location.url)} holds items of ranks"
        refuse_choices(options.choices.model_copy(update=dict.fromkeys(followed)), text)
        return _Assembly(item_files(location, listing), options, location).checkpoint()


class _Discovery(Discovery):
    """The directories and files that are checkpoints of this format."""

    readers: ClassVar[tuple[Reader, ...]] = (TorchCheckpointingReader(),)
    of_training = True
    takes_choices = True
    files = KnownFiles(
        entries=(METADATA,),
        suffixes=(f"{MODEL}_0.pt",),
        needed=(METADATA, f"{MODEL}_[0-9]*.pt", f"{MODEL}_[0-9]*.safetensors"),
    )

    def holds_shards(self, listing: Listing) -> bool:
        """True for files of items of ranks: those of a model look like weights."""
        return holds_items(listing)


class _Presentation(Presentation):
    """The answers for people about checkpoints of this format."""

    def possible_targets(self, tried: DryRun) -> Iterable[PossibleTarget]:
        """Items of any number of ranks, for a checkpoint of the same kind."""
        if not isinstance(tried.checkpoint.facts, ItemFacts):
            return []
        to = TargetFormat.TORCH_CHECKPOINTING
        refusal = tried.refusal(to, layout=RunLayout(dp=2))
        if refusal is not None:
            return [tried.impossible(f"{to} --dp", refusal)]
        return [tried.possible(f"{to} --dp", "any number of ranks of FSDP2", f"--to {to} --dp 2")]

    def rank_label(self, file: str, world: Mapping[str, int]) -> str:
        """The rank in a file's name."""
        number = file.rpartition(".")[0].rpartition("_")[2]
        return f"rank {int(number)}" if number.isdecimal() else ""


class TorchCheckpointing(FormatOfRanks):
    """Directories of torch_checkpointing."""

    name = "torch_checkpointing"
    discovery = _Discovery()
    presentation = _Presentation()
    targets = (TargetFormat.TORCH_CHECKPOINTING,)

    def writer(self, target: str) -> Writer:
        """The writer of items of FSDP2's ranks."""
        return TorchCheckpointingWriter()


# What one rank's file holds of an item.


def _is_state_dict(node: Node, what: str) -> bool:
    """True if a value maps texts to tensors, some of which are sharded."""
    held = mapping_items(node, what=what) if is_mapping(node) else {}
    tensors = [isinstance(v, PTensor) or made_of_tensors(v) is not None for v in held.values()]
    return bool(held) and all(tensors) and all(isinstance(k, str) for k in held) and is_sharded(node)


def _is_optimizer(node: Node, what: str) -> bool:
    return is_mapping(node) and {STATE, GROUPS} <= mapping_items(node, what=what).keys()


def _is_scheduler(node: Node, what: str) -> bool:
    """True for the state dict of a scheduler of torch: `last_epoch`, with rates or schedulers within."""
    held = mapping_items(node, what=what).keys() if is_mapping(node) else set[str | int]()
    return "last_epoch" in held and bool({"_last_lr", "base_lrs", "_schedulers"} & held)


@dataclass(slots=True)
class _State:
    """The items that are neither the model nor the optimizer."""

    schedulers: dict[str, Node] = field(default_factory=dict[str, Node])
    client_state: dict[str | int, Node] = field(default_factory=dict[str | int, Node])
    rank_items: dict[str, tuple[Node, ...]] = field(default_factory=dict[str, tuple[Node, ...]])
    other_models: dict[str, Node] = field(default_factory=dict[str, Node])
    not_carried: list[NotCarried] = field(default_factory=list[NotCarried])


class _Assembly:
    """One checkpoint being put together."""

    def __init__(self, found: ItemFiles, options: ReadOptions, location: Location) -> None:
        self._found, self._options, self._url = found, options, location.url
        # Sharded tensors become numbers, so that nothing names their classes.
        self._ledger = OpaqueLedger(options.ledger.policy, options.ledger.foreign, SHARDED_NAMES)
        self._first = {key: self._value(item.files[0], item.kind) for key, item in found.items.items()}
        self._model_item, self._optimizer_item, self._open = self._chosen()
        self._files: list[SourceFile] = []
        names = [f.name for item in self._read_items() for f in item.files]
        self._tensors = RankTensors(names)
        self._model = ModelOfRanks(self._of_model(self._model_item), self._model_item.files)
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

    def _value(self, file: SourceFile, kind: str) -> Value:
        if kind == TORCH:
            parsed = open_torch_file(file, self._ledger)
            return Value(parsed.root, parsed)
        if kind == JSON:
            name = printable(file.name)
            if file.size_bytes > _JSON_LIMIT_BYTES:
                raise SourceError("checkpoint.too_large", f"{name} has {file.size_bytes} bytes")
            text = file.read(0, file.size_bytes)
            return Value(node_of(parse_json(text, code="checkpoint.malformed", what=name)))
        return Value(None)

    def _read_items(self) -> Iterable[Item]:
        """The model and its optimizer, in the order in which the shard map numbers their files."""
        return [self._model_item, *([] if self._optimizer_item is None else [self._optimizer_item])]

    # Which item is what.

    def _chosen(self) -> tuple[Item, Item | None, tuple[Undecided, ...]]:
        """The model's item, the optimizer's, and what is open until the user says which ones are read."""
        items, choices = self._found.items, self._options.choices
        likely = [
            key
            for key, value in self._first.items()
            if key == MODEL or items[key].kind == SAFETENSORS or _is_state_dict(value.node, printable(key))
        ]
        optimizers = {k: v.node for k, v in self._first.items() if _is_optimizer(v.node, printable(k))}
        self._require(choices.model_key, likely, "--model-key")
        self._require(choices.optimizer_key, [*optimizers], "--optimizer-key")
        said = [] if choices.model_key is None else [choices.model_key]
        models = sorted({*likely, *said}, key=lambda key: (key != MODEL, key))
        if not models:
            text = f"{printable(self._url)}: no item is the state dict of a model"
            fix = f"name the item: --model-key KEY; there is {listed([*items])}"
            raise SourceError("checkpoint.incomplete", text, fix=fix)
        usual = MODEL in models or len(models) == 1
        several = Several(printable(self._url), {k: self._shapes_of(k) for k in models}, optimizers, usual)
        if (odd := choices.optimizer_key) is not None and odd not in optimizers:  # reading it says what it lacks
            pair = several.chosen(choices.model_copy(update={"optimizer_key": None}))
            return items[pair.model], items[odd], pair.undecided
        pair = several.chosen(choices)
        if not optimizers and OPTIMIZER in items:
            text = f"the item {OPTIMIZER} is {kind_of(self._first[OPTIMIZER].node)} without `{STATE}` and `{GROUPS}`"
            fix = f"save optimizer.state_dict(), or {WEIGHTS_ALONE}"
            return items[pair.model], None, (*pair.undecided, Undecided(Question.OPTIMIZER, text, fix))
        return items[pair.model], None if pair.optimizer is None else items[pair.optimizer], pair.undecided

    def _require(self, said: str | None, held: Sequence[str], flag: str) -> None:
        if said is not None and said not in self._found.items:
            raise RequestError(
                "request.invalid",
                f"the source has no item {printable(said)!r}; there is {listed([*self._found.items])}",
                fix=", or ".join(f"{flag} {key}" for key in held) or f"leave {flag} out",
            )

    def _shapes_of(self, key: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the whole tensors of an item, by name."""
        item = self._found.items[key]
        if item.kind != TORCH and item.metadata is not None:
            return {str(path[-1]): specs.each[0].shape for path, specs in item.metadata.specs.items()}
        node = self._first[key].node
        held = mapping_items(node, what=printable(key)).items() if is_mapping(node) else ()
        return {str(name): shape for name, value in held if (shape := shape_of(value)) is not None}

    # The model.

    def _opened(self, item: Item, read: Callable[[RankFile], _Read]) -> list[_Read]:
        """Read the files of all ranks. Only what `read` returns is kept: a thousand trees would fill the memory."""
        ranks = {f.name: rank for rank, f in enumerate(item.files)}

        def parse(file: SourceFile) -> tuple[SourceFile, _Read]:
            parsed = open_torch_file(file, self._ledger)
            return parsed.file, read(RankFile(parsed, ranks[file.name], self._found.world))

        found = open_all(item.files, parse)
        self._files += [file for file, _ in found]
        return [one for _, one in found]

    def _of_model(self, item: Item) -> list[RankModel]:
        """Read the model in each rank's file, which the metadata must not contradict."""
        if item.kind == JSON:
            raise SourceError("source.unsupported", f"the files of {printable(item.key)} are JSON, and hold no tensors")
        if item.kind == SAFETENSORS:
            return self._of_safetensors(item)
        found = self._opened(item, _model_of)
        if item.metadata is not None:
            paths: list[dict[Path, Held]] = [{(name,): h for name, h in rank.tensors.items()} for rank in found]
            _prove(item, item.metadata, paths)
        elif self._found.world > 1 and all(h.plain for rank in found for h in rank.tensors.values()):
            raise SourceError(
                "checkpoint.ambiguous",
                f"{printable(item.files[0].name)} and the {counted(self._found.world - 1, 'file')} after it hold whole "
                f"tensors, and no {METADATA} is there: nothing says that they are of ranks, and not of steps or epochs",
                fix="move the file of one model, and that of its optimizer, into a directory of their own",
            )
        return found

    def _of_safetensors(self, item: Item) -> list[RankModel]:
        metadata = item.metadata
        if metadata is None:
            raise SourceError(
                "checkpoint.incomplete",
                f"{printable(item.files[0].name)} holds the local tensors of one rank, and no {METADATA} says which "
                "part of the model they are",
                fix=f"copy {METADATA} of this save into {printable(self._url)}",
            )
        ranks = {f.name: rank for rank, f in enumerate(item.files)}

        def parse(file: SourceFile) -> tuple[SourceFile, dict[str, Held]]:
            parsed = open_safetensors_file(file)
            return parsed.file, _local_tensors(parsed, ranks[file.name], metadata)

        found = open_all(item.files, parse)
        self._files += [file for file, _ in found]
        for rank, (_, tensors) in enumerate(found):
            _require_all(item, metadata, rank, [(name,) for name in tensors])
        return [RankModel(tensors, (), None) for _, tensors in found]

    # The optimizer.

    def _read_optimizer(self) -> ReadOptimizer | None:
        item = self._optimizer_item
        if item is None:
            return None
        if item.kind != TORCH:
            text = f"the files of the optimizer {printable(item.key)} are no archives of torch"
            raise SourceError("source.unsupported", text, fix="save it in the layout that it has by default")
        paths: list[dict[Path, Held]] = [{} for _ in item.files]
        described = item.metadata is not None

        def read(file: RankFile) -> RankStates:
            states = states_of_rank(_with_members(file))
            if described:
                paths[file.rank] = _paths_of(states)
            return states

        ranks = self._opened(item, read)
        if item.metadata is not None:
            _prove(item, item.metadata, paths)
        self._first_optimizer = ranks[0].parsed
        names = [f.name for f in item.files]
        # The run makes its optimizer as it likes: numbers are not those of `model.parameters()` unless shapes prove it.
        return read_optimizer(ranks, self._model.tensors(), names, self._options.choices.param_order, of_model=False)

    # All items together.

    def checkpoint(self) -> Checkpoint:
        """The checkpoint of everything that was read.

        Raises:
            SourceError: `checkpoint.*`, `tensor.*`.
            RequestError: `request.invalid` for names of buffers or schedulers that are not there.
        """
        state = self._other_items()
        kinds = self._state.kinds()
        model, optimizer, plain = self._model, self._optimizer, self._model.plain
        read = None
        if optimizer is not None and not optimizer.unread:
            read = OptimizerState(self._state.groups(optimizer, self._first_optimizer))
        optimizers = sum(_is_optimizer(v.node, printable(k)) for k, v in self._first.items())
        own, undecided = own_scheduler([*state.schedulers], optimizers, self._options.choices.scheduler_key)
        longer = {short: name for name, short in plain.items() if name != short}
        ordered = self._model_item.kind == TORCH  # safetensors sorts names
        beside = [NotCarried(path=printable(n), file=printable(n), reason=r) for n, r in self._found.others.items()]
        lacks = [u.text for u in self._open if u.question is Question.OPTIMIZER and self._optimizer_item is None]
        return Checkpoint(
            url=self._url,
            tag=self._options.tag,
            format="torch-checkpointing",
            framework_version=None,
            world={"dp": self._found.world},
            files=tuple(self._files),
            shard_map=self._tensors.builder.build(),
            parameters=tuple(kinds.parameters),
            buffers=tuple(kinds.buffers),
            shared={plain[a]: plain[o] for a, o in self._state.ties.all.items()},
            optimizer=read,
            foreign_globals=tuple(sorted(self._options.ledger.foreign)),
            warnings=() if optimizer is None else optimizer.warnings,
            agreements=tuple(self._tensors.agreements),
            schedulers=tuple(state.schedulers.values()),
            scheduler_keys=tuple(state.schedulers),
            own_scheduler=own,
            client_state=state.client_state,
            run_names=compiled_names(longer),
            module_names=tuple(plain.values()) if ordered else (),
            not_carried=(*state.not_carried, *named(model.others, UNKNOWN), *beside),
            facts=ItemFacts(
                saved=self._saved([*state.schedulers]), rank_items=state.rank_items, other_models=state.other_models
            ),
            undecided=(
                *self._open,
                *(() if optimizer is None else optimizer.undecided),
                *kinds.undecided,
                *undecided,
            ),
            assumed=(*(() if optimizer is None else optimizer.assumed), *kinds.assumed),
            unproven=frozenset(kinds.unproven),
            copies={plain[a]: self._state.weights[a] for a in self._state.ties.by_value},
            no_optimizer=(lacks or [""])[-1] if optimizer is None else optimizer.unread,
            frozen_left_out=optimizer is not None and optimizer.adapter_alone,
        )

    def _saved(self, schedulers: Sequence[str]) -> SavedItems:
        return SavedItems(
            run=self._state.saved(),
            model=self._model_item.key,
            optimizer=OPTIMIZER if self._optimizer_item is None else self._optimizer_item.key,
            schedulers=tuple(schedulers),
            described=self._found.has_metadata,
            layouts={
                key: (item.kind, item.pattern)
                for key, item in self._found.items.items()
                if (item.kind, item.pattern) != (TORCH, f"{key}_{{rank}}.pt")
            },
        )

    def _other_items(self) -> _State:
        """Schedulers, and all items that are neither the model nor the optimizer."""
        found = _State()
        read = {item.key for item in self._read_items()}
        left = {key: item for key, item in self._found.items.items() if key not in read}
        for key, item in left.items():
            if item.kind == SAFETENSORS or is_sharded(self._first[key].node):
                try:
                    found.other_models[key] = self._of_another(item)
                except SourceError as error:
                    found.not_carried += named([key], f"{_UNREAD}: {error.message}")
                continue
            values = open_all(item.files, lambda file, kind=item.kind: self._value(file, kind))
            same = all(values[0].equals(other) for other in values[1:])
            kept = values[:1] if same else values
            nodes = self._carried(kept)
            if same and _is_scheduler(values[0].node, printable(key)):
                found.schedulers[key] = nodes[0]
            elif same:
                found.client_state[key] = nodes[0]
            else:
                found.rank_items[key] = nodes
        return found

    def _of_another(self, item: Item) -> Node:
        """An item with sharded tensors that is neither the model nor the optimizer that is read."""
        parsed = self._first[item.key].parsed
        if item.kind == SAFETENSORS or parsed is None:
            models = self._of_safetensors(item)
            names = [*models[0].tensors]
            refs: dict[str | int, Node] = {name: PTensorRef(number) for number, name in enumerate(names)}
            tree = RankTree(mapping_of(refs), tuple((n,) for n in names), tuple(models[0].tensors.values()))
            ranks = [tuple(model.tensors[name] for name in names) for model in models]
        else:
            tree = RankTree.of(RankFile(parsed, 0, self._found.world))
            ranks = self._opened(item, tree.held_in)
            if item.metadata is not None:
                _prove(item, item.metadata, [dict(zip(tree.paths, held, strict=True)) for held in ranks])
        self._tensors.files = [f.name for f in self._files]
        return tree.of_all_ranks(item.key, ranks, item.files, self._tensors)

    def _carried(self, values: Sequence[Value]) -> tuple[Node, ...]:
        """The values with references in place of tensors."""
        parsed = [v.parsed for v in values if v.parsed is not None]
        trees = TreeTensors(self._tensors.builder, {p.file: len(self._files) + i for i, p in enumerate(parsed)})
        self._files += [p.file for p in parsed]
        return tuple(v.node if v.parsed is None else trees.carried(v.node, v.parsed) for v in values)


# The model and the optimizer in one rank's file.


def _model_of(file: RankFile) -> RankModel:
    for key, node in mapping_items(file.parsed.root, what=file.name).items():
        tensor = isinstance(node, PTensor) or made_of_tensors(node) is not None
        if not tensor and any(isinstance(n, PTensor) for n in walk(node)):
            raise SourceError(
                "source.unsupported",
                f"{file.name}: {printable(str(key))} holds tensors within {kind_of(node)}, and a model's state dict "
                "maps names to tensors",
                fix="save model.state_dict() as an item of its own",
            )
    return model_of_rank(file)


def _with_members(file: RankFile) -> RankFile:
    """The file of an optimizer with `params` in its groups, which `optimizer_transform_pre` leaves out beside names.

    Raises:
        SourceError: `source.unsupported` for a later version of that form, `checkpoint.malformed`.
    """
    root = mapping_items(file.parsed.root, what=file.name)
    version = root.get(VERSION, 0)
    if version not in (0, NAMED) or type(version) is not int:
        raise SourceError(
            "source.unsupported",
            f"{file.name}: {VERSION} is {printable(str(version), max_chars=40)}, and 0 and {NAMED} are known",
            fix="report the version of torch_checkpointing that wrote it",
        )
    if version == 0:
        return file
    groups: list[Node] = []
    for node in sequence_items(root.get(GROUPS), what=f"{file.name}: {GROUPS}"):
        group = mapping_items(node, what=f"{file.name}: a param group")
        names = group.pop(NAMES, None)
        if not isinstance(names, PList | PTuple) or not all(isinstance(n, str) for n in names.items):
            raise SourceError("checkpoint.malformed", f"{file.name}: a param group has no list of {NAMES}")
        groups.append(mapping_of({**group, PARAMS: names}))
    node: PDict = mapping_of({STATE: root.get(STATE), GROUPS: PList(groups)})
    return RankFile(replace(file.parsed, root=node), file.rank, file.world)


def _paths_of(states: RankStates) -> dict[Path, Held]:
    found: dict[Path, Held] = {}
    for key, held in states.states.items():
        for state, value in held.items():
            tensor = value if isinstance(value, Held) else value.held
            if tensor is not None:
                found[STATE, key, state] = tensor
    return found


# The metadata and the files must say the same.


def _local_tensors(file: SafetensorsFile, rank: int, metadata: ItemMetadata) -> dict[str, Held]:
    """The tensors of one rank's file of safetensors, placed by the metadata."""
    found: dict[str, Held] = {}
    name = printable(file.file.name)
    for tensor in file.tensors:
        what = f"{name}: {printable(tensor.name)}"
        spec = metadata.spec((tensor.name,), rank)
        if spec is None:
            raise _mixed(f"{what} is not among the tensors that {METADATA} lists of rank {rank}")
        if spec.dtype is not tensor.dtype:
            raise _mixed(f"{what} is {tensor.dtype.name}, and {METADATA} says {spec.dtype.name}")
        held, offsets, sizes = placed(spec.dtype, spec.shape, spec.mesh_of(rank), spec.placements, what)
        if _of_plain(spec):
            held = Held(spec.dtype, spec.shape, WHOLE, ())
        if sizes != tensor.shape:
            cuts = listed(list(map(str, spec.placements)))
            text = f"{what} is {tensor.shape}, and {METADATA} gives rank {rank} {sizes} of {spec.shape} by {cuts}"
            raise _mixed(text)
        part = Part(offsets, sizes, tensor.offset, None, (tensor.name,), None)
        found[tensor.name] = replace(held, parts=(part,))
    return found


def _of_plain(spec: Spec) -> bool:
    """True for what the framework says of a plain tensor: it is on a mesh of all ranks whose axis has no name.

    Source: `default_resharder.py` (`_replicated_tensor_metadata`).
    """
    return spec.whole and spec.names is None and len(spec.mesh_shape) == 1


def _prove(item: Item, metadata: ItemMetadata, ranks: Sequence[Mapping[Path, Held]]) -> None:
    """Prove that each tensor of each rank's file lies as the metadata say, and that all of those are there."""
    for rank, tensors in enumerate(ranks):
        name = printable(item.files[rank].name)
        for path, held in tensors.items():
            what = f"{name}: {printable('.'.join(map(str, path)))}"
            spec = metadata.spec(path, rank)
            if spec is None:
                raise _mixed(f"{what} is not among the tensors that {METADATA} lists of rank {rank}")
            said, _, _ = placed(spec.dtype, spec.shape, spec.mesh_of(rank), spec.placements, what)
            place = None if held.mesh is None else (held.layout, held.mesh.coordinate)
            wanted = None if said.mesh is None else (said.layout, said.mesh.coordinate)
            fits = spec.whole if held.plain else held.mesh is None or place == wanted
            if (held.dtype, held.shape) != (spec.dtype, spec.shape) or not fits:
                here = f"{held.dtype.name} {held.shape} ({printable(held.layout)})"
                there = f"{spec.dtype.name} {spec.shape} ({printable(said.layout)})"
                raise _mixed(f"{what} is {here}, and {METADATA} says {there}")
        _require_all(item, metadata, rank, tensors)


def _require_all(item: Item, metadata: ItemMetadata, rank: int, held: Iterable[Path]) -> None:
    there = {*held}
    said = (p for p, specs in metadata.specs.items() if rank in specs.by_rank)
    lacking = [p for p in said if p not in there and not (len(p) > 1 and p[0] == GROUPS)]  # a rate may be a tensor
    if lacking:
        names = [printable(".".join(map(str, p))) for p in lacking]
        raise _mixed(f"{printable(item.files[rank].name)} does not hold {listed(names)}, which {METADATA} lists")


def _mixed(text: str) -> SourceError:
    return SourceError("checkpoint.mixed", text, fix=_OTHER_SAVE)
