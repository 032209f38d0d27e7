"""The training state that all ranks hold together, of frameworks that save one file for each rank.

Boxes that several ranks hold (replicas, buffers) are one tensor; their copies must agree. Names of one memory are a
tied pair. Where a mesh shards tensors, a plain tensor beside them is a buffer: FSDP shards every parameter.

Source: as in `dtensors` and `rank_optimizer`; torch 2.13.0 `distributed/fsdp/_fully_shard/_fsdp_param.py` (FSDP shards
every parameter; a shard is a view of a padded storage), `nn/modules/module.py` (`state_dict`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np

from reshard.errors import RequestError, SourceError, listed, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard.models.resume import ResumeLayout, RunLaunch, identity_of
from reshard.options import FsdpRanksOptions, RunLayout
from reshard_engine.checkpoint import Agreement, Buffer, Checkpoint, Parameter, ParamGroup, Question, Undecided
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile, TreeTensors, walk
from reshard_engine.formats.carried import named
from reshard_engine.formats.dtensors import (
    Held,
    Mesh,
    Part,
    ProcessGroups,
    RankFile,
    Shape,
    TargetMesh,
    TensorsOfRank,
    device_of,
    mesh_shape,
    require_rows,
)
from reshard_engine.formats.format import Format
from reshard_engine.formats.model_weights import (
    SHARDED_NAMES,
    checked_name,
    checked_state,
    of_batch_norm,
    plain_name,
    refuse_equal_names,
    said_buffers,
)
from reshard_engine.formats.rank_optimizer import STEP, ModelTensor, ReadOptimizer, Slice, number_node
from reshard_engine.formats.torch_archive import under_policy
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PList,
    PObject,
    PTensor,
    PTensorRef,
    PTuple,
    check_depth,
    is_mapping,
    mapping_items,
    mapping_of,
)
from reshard_engine.pickles.rebuild import made_of_tensors
from reshard_engine.pickles.trees import TensorsAt, compare_trees, rewrite
from reshard_engine.tensors.dtypes import FLOAT32
from reshard_engine.tensors.shard_map import Boxes, Column, LogicalTensor, ShardMapBuilder, add_boxes

VERSIONS = "_metadata"
"""The attribute of a model's state dict that holds the versions of its modules."""
_OTHER_SAVE = "the files are of different saves: copy those of one save"
_LARGE_BYTES = 1 << 20
NO_GROUPS = (
    "nothing says the names of the process groups of a mesh of replicas: loaded optimizer states cannot be gathered "
    "(DTensor.full_tensor)"
)
NO_OPTIMIZER = "the source holds no optimizer: the run must begin its optimizer anew"
_OF_PARTITIONS = "one number for each rank's partition, and these files hold whole parameters' shards"
_WEIGHTS = "write the weights alone: --to safetensors"
_OF_SCHEDULER = frozenset({"last_epoch", "base_lrs"})
"""Keys of the state dict of a scheduler of torch that sets learning rates step by step."""
_LEAST_DIMS = 2
"""The dimensions of a matrix: vectors of different layers are often equal, and none is tied."""


# Tensors of all ranks in the shard map.


class RankTensors:
    """Registers tensors in a shard map, and the copies that must agree with them."""

    def __init__(self, files: Sequence[str]) -> None:
        self.builder = ShardMapBuilder()
        self.agreements: list[Agreement] = []
        self.files = files
        """The names of the shard map's files."""

    def add(self, fqn: str, state: str, held: Sequence[Held], first_file: int) -> int:
        """Register a tensor, given what each rank's file holds of it; returns its number.

        Args:
            fqn: The parameter's name.
            state: The state's name.
            held: By rank.
            first_file: Number of the first rank's file.

        Raises:
            SourceError: `checkpoint.mixed` where ranks contradict one another, `checkpoint.coverage`,
                `source.unsupported` for boxes that are not packed.
        """
        first = held[0]
        for rank, other in enumerate(held):
            if (other.dtype, other.shape, other.layout) != (first.dtype, first.shape, first.layout):
                raise SourceError(
                    "checkpoint.mixed",
                    f"{printable(fqn)}/{state} is {_said(first)} in {printable(self.files[first_file])}, and "
                    f"{_said(other)} in {printable(self.files[first_file + rank])}",
                    fix=_OTHER_SAVE,
                )
        tensor = LogicalTensor(fqn, state, first.dtype, first.shape)
        boxes = self._without_copies(tensor, held, first_file)
        if len(boxes) == 1 and boxes[0][1].sizes == first.shape:
            return self._part(tensor, *boxes[0])
        if any(p.stride is not None for _, p in boxes):
            raise SourceError(
                "source.unsupported",
                f"shards of {printable(fqn)}/{state} are not in row-major order, as those of a transposed parameter",
                fix="make the parameter contiguous before it is sharded, and save again",
            )
        corners = np.array([[p.offsets, p.sizes] for _, p in boxes], dtype=np.int64)
        files, offsets = _column(file for file, _ in boxes), _column(p.at for _, p in boxes)
        return add_boxes(self.builder, tensor, Boxes(corners.reshape(len(boxes), 2, len(first.shape)), files, offsets))

    def _without_copies(self, tensor: LogicalTensor, held: Sequence[Held], first_file: int) -> list[tuple[int, Part]]:
        """The boxes that hold elements, each once, with the numbers of their files."""
        found: dict[tuple[object, ...], tuple[int, Part]] = {}
        for file, whole in enumerate(held, first_file):
            for part in whole.parts:
                if not part.numel:
                    continue
                one = found.setdefault((part.offsets, part.sizes), (file, part))
                if one[1] is not part:
                    numbers = self._part(tensor, *one), self._part(tensor, file, part)
                    where = f"its copy in {printable(self.files[file])}"
                    self.agreements.append(Agreement(tensor.fqn, tensor.state, *numbers, where))
        return list(found.values())

    def _part(self, tensor: LogicalTensor, file: int, part: Part) -> int:
        number = self.builder.tensor(tensor.fqn, tensor.state, tensor.dtype, part.sizes)
        self.builder.whole(number, file=file, offset=part.at, stride=part.stride)
        return number

    def add_slices(self, tensor: LogicalTensor, slices: Sequence[Slice], first_file: int) -> int:
        """Register a tensor whose flattened elements lie in slices; returns its number."""
        number = self.builder.tensor(tensor.fqn, tensor.state, tensor.dtype, tensor.shape)
        self.builder.pieces(
            _column(number for _ in slices),
            _column(s.begin for s in slices),
            _column(s.end for s in slices),
            file=_column(first_file + s.rank for s in slices),
            offset=_column(s.at for s in slices),
        )
        return number


def _column(numbers: Iterable[int]) -> Column:
    return np.array(list(numbers), dtype=np.int64)


def _said(held: Held) -> str:
    return f"{held.dtype.name} {held.shape} ({printable(held.layout)})"


# The model of all ranks.


@dataclass(frozen=True, slots=True)
class RankModel:
    """The model in one rank's file: tensors, and entries that are none."""

    tensors: Mapping[str, Held]
    others: tuple[str, ...]
    versions: Node
    """The attribute `_metadata` of the state dict."""


def model_of_rank(file: RankFile) -> RankModel:
    """The tensors in the file of a model's state dict.

    Raises:
        SourceError: As `RankFile.held`.
    """
    tensors: dict[str, Held] = {}
    others: list[str] = []
    for key, node in mapping_items(file.parsed.root, what=file.name).items():
        name = printable(str(key))
        held = file.held(node, name)
        if held is None:
            others.append(name)
        else:
            tensors[str(key)] = held
    return RankModel(tensors, tuple(others), None if file.rank else _versions_in(file))


def _versions_in(file: RankFile) -> Node:
    """The versions of the model's modules, if they are plain values; None otherwise.

    Source: torch 2.13.0 `nn/modules/module.py` (`state_dict`: the attribute `_metadata`).
    """
    root = file.parsed.root
    state = root.state if isinstance(root, PObject) and is_mapping(root.state) else None
    versions = None if state is None else mapping_items(state, what=file.name).get(VERSIONS)
    if not is_mapping(versions):
        return None
    held = mapping_items(versions, what=file.name).values()
    plain = (mapping_items(v, what=file.name).values() if is_mapping(v) else [v] for v in held)
    return versions if all(v is None or isinstance(v, bool | int | str) for values in plain for v in values) else None


class ModelOfRanks:
    """The tensors of the model by name, each as all ranks hold it."""

    def __init__(self, ranks: Sequence[RankModel], files: Sequence[SourceFile]) -> None:
        """Prove that all ranks hold the same names.

        Raises:
            SourceError: `checkpoint.mixed`, `checkpoint.ambiguous`, `name.invalid`.
        """
        first = list(ranks[0].tensors)
        for rank, other in enumerate(ranks):
            if list(other.tensors) != first:
                names = sorted({*first} ^ {*other.tensors}) or first
                raise SourceError(
                    "checkpoint.mixed",
                    f"{printable(files[0].name)} and {printable(files[rank].name)} hold other tensors, or in another "
                    f"order: {listed(list(map(printable, names)))}",
                    fix=_OTHER_SAVE,
                )
        self.versions = ranks[0].versions
        self.held = {name: [r.tensors[name] for r in ranks] for name in first}
        self.others = tuple(dict.fromkeys(name for r in ranks for name in r.others))
        self.plain = {name: checked_name(plain_name(name)) for name in first}
        refuse_equal_names(self.plain.values())
        self.any_sharded = any(not held[0].plain for held in self.held.values())
        self.twins = self._first_of_equal(self._places)
        self.equal = self._first_of_equal(self._sums)

    def sharded(self, name: str) -> bool:
        """True if a mesh shards the tensor, or if nothing is sharded, as in a run of one rank."""
        return not self.any_sharded or not self.held[name][0].plain

    def tensors(self) -> list[ModelTensor]:
        """The tensors as the optimizer needs to know them."""
        return [
            ModelTensor(
                name,
                held[0].shape,
                not held[0].plain,
                self.twins.get(name, ""),
                self.equal.get(name, ""),
                tuple(h.coordinate for h in held),
                held[0].dtype.complex,
            )
            for name, held in self.held.items()
            if (held[0].dtype.trainable or not held[0].plain) and not of_batch_norm(name, self.held)
        ]

    def _first_of_equal(self, token: Callable[[str], object]) -> dict[str, str]:
        """For each tensor that equals an earlier one by its token the name of that one."""
        first: dict[object, str] = {}
        found: dict[str, str] = {}
        for name in self.held:
            key = token(name) if self.sharded(name) else None
            if key is not None and first.setdefault(key, name) != name:
                found[name] = first[key]
        return found

    def _places(self, name: str) -> object:
        """A key that is equal for names of one memory; None for a tensor without elements."""
        held = self.held[name]
        places = tuple((p.offsets, p.place) for h in held for p in h.parts if p.numel)
        return (held[0].shape, places) if places else None

    def _sums(self, name: str) -> object:
        """A key that is equal for matrices of equal sums; None where the files do not have the sums of all parts."""
        held = self.held[name]
        parts = [(rank, p) for rank, h in enumerate(held) for p in h.parts if p.numel]
        if len(held[0].shape) < _LEAST_DIMS or not parts or any(p.record is None for _, p in parts):
            return None
        return held[0].dtype, held[0].shape, tuple((rank, p.offsets, p.record) for rank, p in parts)


# Values that are neither the model nor the optimizer.


@dataclass(frozen=True, slots=True)
class Value:
    """A value in one rank's file."""

    node: Node
    parsed: TorchFile | None = None
    """None for a file that is no archive of torch."""

    def equals(self, other: Value) -> bool:
        """True if two ranks hold the same value. Tensors are compared by bytes, large ones by their CRC-32."""
        for difference in compare_trees(self.node, other.node, ""):
            if not isinstance(difference, TensorsAt) or self.parsed is None or other.parsed is None:
                return False
            a, b = _bytes(difference.a, self.parsed), _bytes(difference.b, other.parsed)
            if a is None or a != b:
                return False
        return True


def _bytes(tensor: Node, parsed: TorchFile) -> object:
    """Return a value that is equal for equal tensors alone; None where the file does not say it."""
    if not isinstance(tensor, PTensor):
        return None
    form = tensor.dtype, tensor.shape, tensor.stride, tensor.offset
    if not tensor.numel:
        return form
    record = parsed.storage_extent(tensor.storage)
    if record.length_bytes > _LARGE_BYTES:
        return None if record.crc32 is None else (form, record.length_bytes, record.crc32)
    return form, parsed.file.read(record.offset, record.length_bytes)


def is_sharded(node: Node) -> bool:
    """True if a value holds tensors that are made of others, or objects that only they consist of."""
    return any(
        isinstance(n, PObject)
        and (made_of_tensors(n) is not None or (isinstance(n.cls, Global) and n.cls.dotted in SHARDED_NAMES))
        for n in walk(node)
    )


# Other values with sharded tensors: a second model, its optimizer, a moving average.


@dataclass(frozen=True, slots=True)
class RankTree:
    """A value in one rank's file, with numbers in place of its tensors."""

    node: Node
    paths: tuple[tuple[str | int, ...], ...]
    """The keys that lead to each tensor."""
    held: tuple[Held, ...]

    @classmethod
    def of(cls, file: RankFile) -> RankTree:
        """Read the value of a file.

        Raises:
            SourceError: As `RankFile.held`; `checkpoint.malformed`, `pickle.too_deep`.
        """
        found: dict[tuple[str | int, ...], Held] = {}

        def placed(node: Node, path: tuple[str | int, ...]) -> Node:
            check_depth(len(path))
            name = printable(".".join(map(str, path)))
            if (held := file.held(node, name)) is not None:
                found[path] = held
                return PTensorRef(len(found) - 1)
            if is_mapping(node):
                items = mapping_items(node, what=f"{file.name}: {name}").items()
                return mapping_of({key: placed(value, (*path, key)) for key, value in items})
            if isinstance(node, PList | PTuple):
                held_items = [placed(value, (*path, number)) for number, value in enumerate(node.items)]
                return PList(held_items) if isinstance(node, PList) else PTuple(tuple(held_items))
            return node

        root = placed(file.parsed.root, ())
        return cls(root, tuple(found), tuple(found.values()))

    def of_all_ranks(
        self, key: str, ranks: Sequence[Sequence[Held]], files: Sequence[SourceFile], tensors: RankTensors
    ) -> Node:
        """The value with references to tensors of all ranks, whose files are the last ones of the shard map.

        Raises:
            SourceError: `checkpoint.mixed` where whole tensors differ, and as `RankTensors.add`.
        """
        first_file = len(tensors.files) - len(files)
        numbers: list[int] = []
        for number, path in enumerate(self.paths):
            held, name = [rank[number] for rank in ranks], ".".join(map(str, (key, *path)))
            if held[0].plain:
                tokens = {_whole_token(one, file) for one, file in zip(held, files, strict=True)}
                if None in tokens or len(tokens) > 1:
                    text = f"nothing proves that all ranks hold the same {printable(name)}"
                    raise SourceError("checkpoint.mixed", text, fix=_OTHER_SAVE)
                held = held[:1]
            numbers.append(tensors.add(name, "value", held, first_file))

        def reference(tensor: PTensorRef) -> PTensorRef:
            return PTensorRef(numbers[tensor.index])

        return rewrite(self.node, reference, lambda foreign: foreign)

    def held_in(self, file: RankFile) -> tuple[Held, ...]:
        """What another rank's file holds of the same tensors.

        Raises:
            SourceError: `checkpoint.mixed` for another value.
        """
        other = RankTree.of(file)
        for found in compare_trees(self.node, other.node, ""):
            if not isinstance(found, TensorsAt) or found.a != found.b:
                text = f"{file.name} holds another value than the first rank's file, at {printable(found.path)}"
                raise SourceError("checkpoint.mixed", text, fix=_OTHER_SAVE)
        return other.held


def _whole_token(held: Held, file: SourceFile) -> object:
    """Return a value that is equal for equal whole tensors alone; None for a large one without a sum."""
    (part,) = held.parts
    length = part.numel * held.dtype.itemsize_bytes
    form = held.dtype, held.shape, part.stride
    if part.sum is not None or not length:
        return form, part.sum
    return None if part.stride is not None or length > _LARGE_BYTES else (form, file.read(part.at, length))


# Parameters, buffers and ties.


@dataclass(slots=True)
class Kinds:
    """Parameters and buffers, and what is open about them."""

    parameters: list[Parameter]
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    unproven: list[str] = field(default_factory=list[str])
    assumed: tuple[Undecided, ...] = ()
    undecided: tuple[Undecided, ...] = ()


@dataclass(frozen=True, slots=True)
class Ties:
    """Second names of tied pairs, each with the name that owns the tensor."""

    twins: Mapping[str, str]
    """Names of one memory of the run."""
    by_value: Mapping[str, str]
    """Names of equal elements, which are compared before anything is written."""

    @property
    def all(self) -> dict[str, str]:
        """Both kinds."""
        return {**self.twins, **self.by_value}


class RankState:
    """The parameters and buffers of the model, with the optimizer's states."""

    def __init__(
        self,
        tensors: RankTensors,
        model: ModelOfRanks,
        optimizer: ReadOptimizer | None,
        *,
        first_state: int,
        buffers: str | None,
    ) -> None:
        """Register the model's tensors, whose files are the first ones.

        Args:
            tensors: The tensors of the shard map.
            model: What the files of the model hold.
            optimizer: The optimizer, under the model's names.
            first_state: Number of the optimizer's first file.
            buffers: The user's word on which tensors are buffers.

        Raises:
            SourceError: `checkpoint.mixed`, `checkpoint.coverage`, `source.unsupported`.
        """
        self._tensors, self._model, self._optimizer = tensors, model, optimizer
        self._first_state, self._buffers = first_state, buffers
        self.ties = self._tied()
        self.weights = {name: self._add_weight(name) for name in model.held if name not in self.ties.twins}

    def saved(self) -> SavedRun:
        """How the run saved the files, for a target of the same kind."""
        held, weights = {name: ranks[0] for name, ranks in self._model.held.items()}, self.weights
        numbers = {} if self._optimizer is None else self._optimizer.numbers
        cut = {n: [d for d in h.dims if d is not None] for n, h in held.items() if h.mesh is not None}
        return SavedRun(
            mesh=next((h.mesh for h in held.values() if h.mesh is not None), None),
            plain=frozenset(w for name, w in weights.items() if held[name].plain and self._model.any_sharded),
            other_cuts=tuple(n for n, dims in cut.items() if dims != [0] or held[n].dims[-1] is None),
            numbers={weights[n]: i for n, i in numbers.items() if n in weights},
            lists=() if self._optimizer is None else self._optimizer.lists,
            versions=self._model.versions,
        )

    def groups(self, optimizer: ReadOptimizer, parsed: TorchFile | None) -> tuple[ParamGroup, ...]:
        """The param groups with references in place of tensors, which all ranks have alike, as one file has them."""
        if parsed is None:
            return optimizer.groups
        trees = TreeTensors(self._tensors.builder, {parsed.file: self._first_state})
        carried = (trees.carried(mapping_of({**g.hyper_parameters}), parsed) for g in optimizer.groups)
        return tuple(ParamGroup(mapping_items(node, what="a param group")) for node in carried)

    def _tied(self) -> Ties:
        """Second names of tied pairs: of one memory, or of equal elements that the optimizer counts once."""
        optimizer, model = self._optimizer, self._model
        members = {} if optimizer is None else optimizer.members
        twins = dict(model.twins)
        for alias, owner in model.twins.items():
            if alias in members and owner not in members:
                del twins[alias]
                twins[owner] = alias
        by_value = {} if optimizer is None else {a: o for a, o in optimizer.ties.items() if a not in twins}
        if optimizer is not None and members and not optimizer.counts_all:
            updated = {n for n in members if optimizer.states.get(n)}
            pairs = {a: o for a, o in model.equal.items() if a not in twins and o not in twins}
            by_value = {a: o for a, o in pairs.items() if a not in members and o in updated}
        return Ties(twins, by_value)

    def _add_weight(self, name: str) -> int:
        return self._tensors.add(self._model.plain[name], "weight", self._model.held[name], 0)

    def kinds(self) -> Kinds:
        """Parameters in the optimizer's order, then frozen ones, and buffers.

        Raises:
            SourceError: As `RankTensors.add`; `name.invalid`.
            RequestError: `request.invalid` for names of buffers that are not there.
        """
        plain, optimizer = self._model.plain, self._optimizer
        members = {} if optimizer is None else optimizer.members
        found = Kinds([self._trained(name, group) for name, group in members.items()])
        if all(p.never_updated for p in found.parameters):  # before the first step no parameter has states
            found.parameters = [replace(p, never_updated=False) for p in found.parameters]
        for alias, owner in self.ties.by_value.items():
            numbers, where = (self.weights[owner], self.weights[alias]), f"its other name {printable(plain[alias])}"
            self._tensors.agreements.append(Agreement(plain[owner], "weight", *numbers, where))
        said = said_buffers(self._buffers, self._model.plain)
        frozen = () if optimizer is None else optimizer.frozen
        counted = optimizer is not None and optimizer.counts_all
        likely: list[str] = []
        for name, number in self.weights.items():
            if name in members or name in self.ties.by_value:
                continue
            first = self._model.held[name][0]
            sharded = not first.plain
            is_buffer = not sharded and name not in frozen and (counted or not first.dtype.trainable)
            is_buffer = is_buffer or of_batch_norm(name, self._model.held)
            if not sharded and not is_buffer and name not in frozen:
                # Parameters that FSDP was told to ignore are plain, too.
                is_buffer = name in said if said is not None else self._model.any_sharded
                found.unproven += [] if said is not None else [plain[name]]
                likely += [plain[name]] if is_buffer and said is None else []
            if is_buffer:
                found.buffers.append(Buffer(plain[name], number))
            else:
                found.parameters.append(Parameter(plain[name], first.shape, None, number))
        if likely and optimizer is not None:
            found.assumed = (_likely_buffers(likely),)
        return found

    def _trained(self, name: str, group: int) -> Parameter:
        optimizer, fqn = self._optimizer, self._model.plain[name]
        first, weight = self._model.held[name][0], self.weights[name]
        states: dict[str, int] = {"fp32": weight} if first.dtype is FLOAT32 else {}
        held = {} if optimizer is None else optimizer.states.get(name, {})
        scalars = {} if optimizer is None else optimizer.scalars.get(name, {})
        for state, (dtype, elements) in held.items():
            boxes = [e for e in elements if isinstance(e, Held)]
            if boxes:
                states[checked_state(state)] = self._tensors.add(fqn, state, boxes, self._first_state)
            else:
                tensor = LogicalTensor(fqn, checked_state(state), dtype, first.shape)
                slices = [e for e in elements if isinstance(e, Slice)]
                states[state] = self._tensors.add_slices(tensor, slices, self._first_state)
        return Parameter(fqn, first.shape, group, weight, states, scalars, never_updated=not held and not scalars)


def _likely_buffers(names: Sequence[str]) -> Undecided:
    return Undecided(
        Question.BUFFERS,
        f"{listed(names)} are taken for buffers because they are whole where FSDP shards each parameter",
        "--buffers none if they are parameters that FSDP was told to ignore",
    )


# The run that saved files of ranks, and the ranks that load those of a target.


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """How a run saved its ranks' files. Parameters are named by the numbers of their weights in the shard map."""

    mesh: Mesh | None
    """The first rank's mesh; None for a run whose tensors are on none."""
    plain: frozenset[int]
    """Tensors that no mesh shards."""
    other_cuts: tuple[str, ...]
    """Names of tensors that are cut in another way than FSDP cuts rows: over one axis of the mesh, the last one."""
    numbers: Mapping[int, int]
    """The optimizer's number of each parameter; empty where names are its keys, and for flat parameters."""
    lists: tuple[tuple[int, ...], ...]
    """The numbers in each param group."""
    versions: Node
    """The versions of the model's modules, which `state_dict` keeps beside the tensors."""


@dataclass(frozen=True)
class TargetRanks:
    """The ranks that load the files of a target."""

    checkpoint: Checkpoint
    request: ConvertRequest
    run: SavedRun | None
    """How the source's run saved it, if it saved files of the same kind."""
    device: str
    shape: Shape
    """The shape of the mesh: all ranks, or replicas and the ranks of one copy."""
    names: tuple[str, ...] | None
    """The names of the mesh's axes."""

    @cached_property
    def mesh(self) -> TargetMesh:
        """The mesh of the ranks."""
        return TargetMesh(self.shape, self.names, self.device, self.groups.names)

    @cached_property
    def groups(self) -> ProcessGroups:
        """The names of their process groups."""
        return ProcessGroups(self.shape, None if self.run is None else self.run.mesh)

    @property
    def plain(self) -> frozenset[int]:
        """Weights that the run keeps whole, by number."""
        return frozenset[int]() if self.run is None else self.run.plain

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The optimizer's number of each parameter in a run of the same kind; empty unless it numbers all of them."""
        if self.run is None or not self.run.numbers:
            return {}
        places = ((p.fqn, p.weight) for p in self.checkpoint.parameters)
        found = {name: self.run.numbers[w] for name, w in places if w is not None and w in self.run.numbers}
        return found if found.keys() >= {p.fqn for p in self.checkpoint.trained} else {}

    def carried(self, node: Node) -> Node:
        """A tree of the source under the request's policy for objects of unknown classes."""
        return under_policy(node, self.request.opaque)

    def refuse_unwritable(self) -> None:
        """Refuse an optimizer that these files have no place for.

        Raises:
            RequestError: `request.unsatisfiable`.
        """
        optimizer = self.checkpoint.optimizer
        if optimizer is not None and optimizer.unread:
            raise RequestError(
                "request.unsatisfiable",
                f"the optimizer keeps {listed([*optimizer.unread])}, which only the source's own format holds",
                fix=_WEIGHTS,
            )
        if optimizer is not None and self.checkpoint.trained and not optimizer.groups:
            text = "the source keeps no hyper-parameters of its param groups"
            raise RequestError("request.unsatisfiable", text, fix=_WEIGHTS)

    def numbers_left_out(self) -> Iterator[NotCarried]:
        """The numbers that the optimizer has for each rank's partition."""
        numbers = () if self.checkpoint.optimizer is None else self.checkpoint.optimizer.rank_numbers
        yield from named((f"optimizer.{name}" for name in numbers), _OF_PARTITIONS)


def device_and_shape(request: ConvertRequest, run: SavedRun | None) -> tuple[str, Shape]:
    """The type of the devices and the shape of the mesh of a target's ranks: as the user says, else the source.

    Raises:
        RequestError: `request.invalid`, `request.unsatisfiable`.
    """
    options, mesh = request.options.of(FsdpRanksOptions), None if run is None else run.mesh
    require_rows(mesh, () if run is None else run.other_cuts)
    device = device_of(options.device_type, mesh)
    return device, mesh_shape(request.layout.dp or 1, options.fsdp_size, mesh)


class FormatOfRanks(Format):
    """A format with files for each rank, whose runs load files of as many ranks as they have."""

    def layout_for(self, checkpoint: Checkpoint, launch: RunLaunch) -> ResumeLayout:
        """Files of the launch's ranks, as the source's framework loads them.

        Raises:
            RequestError: `request.invalid` for a launch with ranks of another kind, or without a number of ranks.
        """
        given = [f"--{axis}" for axis in ("tp", "pp", "ep") if (getattr(launch, axis) or 1) > 1]
        given += [] if launch.zero_stage is None else ["--zero-stage"]
        if given:
            raise RequestError(
                "request.invalid",
                f"{', '.join(given)}: the source has one file for each rank of FSDP, and its run loads nothing else",
                fix="for a run of DeepSpeed: --to zero; else leave it out",
            )
        to, dp = self.targets[0], launch.data_ranks()
        return ResumeLayout(
            to=to,
            layout=RunLayout(dp=dp),
            dtype=launch.dtype,
            identity=identity_of({"to": to, "dp": dp}),
            label=f"{to}-dp{dp}",
        )

    def fits(self, checkpoint: Checkpoint, wanted: ResumeLayout) -> bool:
        """True for files of as many ranks."""
        return wanted.dtype is None and prod(checkpoint.world.values()) == wanted.layout.dp


def steps_rates(scheduler: Node) -> bool:
    """True for the state dict of a scheduler of torch that sets learning rates step by step."""
    keys = mapping_items(scheduler, what="a scheduler").keys() if is_mapping(scheduler) else ()
    return {*map(str, keys)} >= _OF_SCHEDULER


# What the files of a rank hold of them.


def model_entries(checkpoint: Checkpoint, rank: TensorsOfRank, carried: Callable[[Node], Node]) -> dict[str, Node]:
    """The entries of the model's state dict on a rank, in the module's order as far as the source knows it.

    Args:
        checkpoint: The run.
        rank: Makes the rank's tensors.
        carried: What becomes of the values of `get_extra_state`.
    """
    parameters = {p.fqn: p for p in checkpoint.parameters}
    buffers = {b.fqn: b.tensor for b in checkpoint.buffers}
    found: dict[str, Node] = {}
    known = (*checkpoint.module_names, *buffers, *parameters, *checkpoint.shared, *checkpoint.extra_states)
    for name in dict.fromkeys(known):
        owner = checkpoint.shared.get(name, name)
        if owner in parameters:
            found[name] = rank.parameter(parameters[owner].value(), parameters[owner].weight)
        elif owner in buffers:
            found[name] = rank.whole(buffers[owner])
        elif name in checkpoint.extra_states:
            found[name] = carried(checkpoint.extra_states[name])
    return found


def number_entries(parameter: Parameter) -> dict[str | int, Node]:
    """The states of a parameter that are numbers, the step first, as torch has them."""
    return {n: number_node(n, parameter.scalars[n]) for n in sorted(parameter.scalars, key=lambda n: n != STEP)}


def state_entries(parameter: Parameter, rank: TensorsOfRank) -> dict[str | int, Node]:
    """The states of a parameter on a rank: its numbers first, as torch has them."""
    found = number_entries(parameter)
    for name, number in parameter.states.items():
        if name != "fp32":
            found[name] = rank.parameter(number, parameter.weight)
    return found
