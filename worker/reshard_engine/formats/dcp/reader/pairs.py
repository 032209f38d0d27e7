"""Reads one model with its optimizer: parameters, buffers, tied weights, states and param groups.

The files do not tell which of a model's tensors are buffers and which names are one parameter:

- FSDP shards every parameter along its first dimension. Buffers stay whole, as do parameters that FSDP was told to
  ignore. BatchNorm keeps three buffers together. Our own writer lists what was known to it. Where that leaves it open,
  names of buffers of known modules, a type that is seldom trained, and being whole where others are cut, make a buffer
  likely, and the checkpoint says so (`Checkpoint.assumed`). A target that needs more is refused until the user names
  the buffers.
- torch saves both names of a tied weight with all elements, and the optimizer knows only the first one. A matrix that
  the optimizer does not know is taken for the other name of one that it has updated if the CRC-32s of their records
  are equal; both are compared element by element before anything is written. It may also be a copy, of a target
  network say: `Checkpoint.copies` keeps its own tensor for targets to which that makes a difference.

Source: torch 2.13.0 `distributed/checkpoint/state_dict.py` (`_get_model_state_dict`: the state dict has both names),
`nn/modules/module.py` (`named_parameters` yields a parameter once), `nn/modules/batchnorm.py`; transformers 5.23.0
(names of buffers); verified by running.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from reshard.choices import NO_BUFFERS
from reshard.errors import RequestError, SourceError, listed, printable
from reshard_engine.checkpoint import Agreement, Buffer, OptimizerState, Parameter, Question, Scalar, Undecided
from reshard_engine.containers.source_file import CachedFile, SourceFile, open_all
from reshard_engine.containers.zip_reader import read_zip_directory
from reshard_engine.formats.dcp.facts import nested
from reshard_engine.formats.dcp.reader.optimizer import NamesOfModel, NodeOf, OptimizerEntries, Order, ReadOptimizer
from reshard_engine.formats.dcp.reader.roles import LEAST_DIMS, ModelEntries, Pair, may_be_quantized
from reshard_engine.formats.dcp_files.metadata.model import Column
from reshard_engine.formats.dcp_files.saved_state import Item, SavedTensor, SavedValue
from reshard_engine.formats.dcp_files.tensors import ChunkTensors, OpaqueTensor
from reshard_engine.formats.model_weights import (
    checked_name,
    checked_state,
    of_batch_norm,
    tensors_named,
    which_are_buffers,
)
from reshard_engine.formats.numbered import Form
from reshard_engine.pickles.nodes import Node
from reshard_engine.tensors.dtypes import FLOAT32
from reshard_engine.tensors.shard_map import ShardMapBuilder

KNOWN_BUFFERS = frozenset(
    {
        "running_mean", "running_var", "num_batches_tracked", "inv_freq", "original_inv_freq", "freqs_cis",
        "cos_cached", "sin_cached", "position_ids", "masked_bias", "e_score_correction_bias", "expert_bias",
        "tokens_per_expert", "initialized",
    }
)  # fmt: skip
"""Names that only buffers have, of torch's and transformers' modules."""
_STEP = "step"


@dataclass(slots=True)
class Tensors:
    """The registered tensors of a saved state. No tensor of the files is registered twice."""

    chunks: ChunkTensors
    builder: ShardMapBuilder
    _known: dict[int, int] = field(default_factory=dict[int, int])

    def number(self, fqn: str, state: str, saved: Sequence[SavedTensor]) -> int:
        """The number of a tensor, which is registered when it is first asked for."""
        if id(saved[0]) not in self._known:
            self._known[id(saved[0])] = self.chunks.add(fqn, state, saved)
        return self._known[id(saved[0])]


@dataclass(frozen=True, slots=True)
class NamedBuffers:
    """The user's word on which tensors are buffers, where the files do not tell."""

    patterns: tuple[str, ...]
    """Names, in which `*` stands for any text."""
    _used: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, text: str | None) -> NamedBuffers | None:
        """Read the text of `SourceChoices.buffers`."""
        if text is None:
            return None
        return cls(() if text == NO_BUFFERS else tuple(p for p in map(str.strip, text.split(",")) if p))

    def has(self, name: str, named: Mapping[str, Collection[str]]) -> bool:
        """True if the user calls this tensor a buffer.

        Args:
            name: The tensor's stored name.
            named: For each pattern the stored names of the tensors that it names.
        """
        found = {p for p in self.patterns if name in named[p]}
        self._used.update(found)
        return bool(found)

    def refuse_unused(self) -> None:
        """Refuse a name that fits no tensor which may be a buffer.

        Raises:
            RequestError: `request.invalid`.
        """
        if unused := [p for p in self.patterns if p not in self._used]:
            raise RequestError(
                "request.invalid",
                f"--buffers: {listed(unused)} fits no tensor but those that the optimizer trains",
                fix="leave it out, or give the name as the source has it",
            )


@dataclass(frozen=True, slots=True)
class Reading:
    """The parts of a saved state that all pairs share."""

    files: Sequence[SourceFile]
    tensors: Tensors
    node_of: NodeOf
    scheduler: Sequence[Node]
    """The scheduler of the optimizer to read, if it has one."""
    order: Order
    """The user's word on the order of an optimizer's parameters."""
    buffers: NamedBuffers | None
    """The user's word on which tensors are buffers."""


@dataclass(slots=True)
class ReadPair:
    """A model and an optimizer as the fields of a checkpoint."""

    parameters: list[Parameter] = field(default_factory=list[Parameter])
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    shared: dict[str, str] = field(default_factory=dict[str, str])
    optimizer: OptimizerState | None = None
    extra_states: dict[str, Node] = field(default_factory=dict[str, Node])
    module_names: tuple[str, ...] = ()
    agreements: list[Agreement] = field(default_factory=list[Agreement])
    undecided: tuple[Undecided, ...] = ()
    warnings: tuple[str, ...] = ()
    assumed: tuple[Undecided, ...] = ()
    unproven: frozenset[str] = frozenset()
    copies: dict[str, int] = field(default_factory=dict[str, int])
    numbered: bool = False
    """True for an optimizer that numbers its parameters, and whose numbers are the names here."""
    model_names: dict[str, str] = field(default_factory=dict[str, str])
    """For each plain name the one in the model's state dict, where it is another."""
    optimizer_names: dict[str, str] = field(default_factory=dict[str, str])
    """For each plain name the one in the optimizer's state dict, where it is another."""
    adapter_alone: bool = False
    """True if the model's state dict is that of an adapter: its frozen base model was left out."""
    odd_states: dict[str, dict[str, Node]] = field(default_factory=dict[str, dict[str, Node]])
    """Optimizer states by parameter that are neither a number nor one for each element, with references to tensors.

    Integers of the parameter's shape are codes, such as those of 8-bit optimizers, and mean nothing by themselves."""
    opaque_states: dict[str, dict[str, OpaqueTensor]] = field(default_factory=dict[str, dict[str, OpaqueTensor]])
    """Optimizer states by parameter that are tensors of classes of their own."""


def read_pair(pair: Pair, names: NamesOfModel, reading: Reading, *, label: str = "") -> ReadPair:
    """Read a model and its optimizer.

    Args:
        pair: Their entries.
        names: The model's names and shapes; of an optimizer without a model, those of a model that it fits.
        reading: The shared parts.
        label: Text before the names of tensors in the shard map, for all pairs but the first.

    Raises:
        SourceError: `checkpoint.*`, `name.invalid`, `zip.*`.
        RequestError: `request.invalid` for an order of parameters that does not fit.
    """
    return _PairReader(pair, names, reading, label).read()


class _PairReader:
    def __init__(self, pair: Pair, names: NamesOfModel, reading: Reading, label: str) -> None:
        self._model = pair.model or ModelEntries(())
        self._optimizer, self._names, self._reading, self._label = pair.optimizer, names, reading, label
        self._found = ReadPair()

    def read(self) -> ReadPair:
        found, weights = self._found, self._model.weights
        plain = self._names.plain
        if plain and all(_plain_of_wrapper(*names) for names in plain.items()):
            found.assumed = (_OF_DISTRIBUTED,)
        optimizer = None if self._optimizer is None else self._resolved(self._optimizer)
        members: dict[str, tuple[int, str]] = {}
        if optimizer is not None:
            found.optimizer = OptimizerState(tuple(g.group for g in optimizer.groups))
            found.undecided, found.warnings = optimizer.undecided, optimizer.warnings
            found.assumed = (*found.assumed, *optimizer.assumed)
            members = {
                optimizer.names[key]: (number, key) for number, g in enumerate(optimizer.groups) for key in g.members
            }
        trained = [self._trained(name, *place) for name, place in members.items()]
        if all(p.never_updated for p in trained):  # before the first step no parameter has states
            trained = [replace(p, never_updated=False) for p in trained]
        updated = {p.fqn for p in trained if p.states.keys() - {"fp32"} or p.scalars}
        found.parameters = trained
        if found.optimizer is not None:
            kinds = (f"{s} ({one.kind})" for held in found.opaque_states.values() for s, one in held.items())
            found.optimizer = replace(found.optimizer, unread=tuple(dict.fromkeys(kinds)))
        ties = {} if not weights else self._tied(members, updated)
        numbers = {name: self._number(plain[name], saved) for name, saved in weights.items()}
        for alias, owner in ties.items():
            where = f"its other name {printable(plain[alias])}"
            found.agreements.append(Agreement(plain[owner], "weight", numbers[owner], numbers[alias], where))
        found.shared = {plain[a]: plain[o] for a, o in ties.items()}
        found.copies = {plain[a]: numbers[a] for a in ties}
        self._rest_of_model(numbers, {*members, *ties})
        found.extra_states = self._extra_states()
        found.module_names = tuple(dict.fromkeys((*(plain[n] for n in weights), *found.extra_states)))
        found.model_names = {short: name for name, short in plain.items() if name != short}
        if optimizer is not None and self._optimizer is not None and not self._optimizer.numbered:
            keys = {plain[name]: key for key, name in optimizer.names.items()}
            found.optimizer_names = {short: key for short, key in keys.items() if key != short}
        found.adapter_alone = self._names.of_adapter is not None
        return found

    def _number(self, fqn: str, saved: Sequence[SavedTensor]) -> int:
        return self._reading.tensors.number(self._label + checked_name(fqn), "weight", saved)

    # The optimizer.

    def _resolved(self, optimizer: OptimizerEntries) -> ReadOptimizer:
        if self._label and optimizer.numbered:
            self._found.numbered = True
            return optimizer.as_it_is()
        entries = {n: saved[0].entry for n, saved in self._model.weights.items()}
        may_own = {
            n: Form(entry.shape, entry.dtype.complex)
            for n, entry in entries.items()
            if entry.dtype.trainable and not self._is_said_buffer(n) and not of_batch_norm(n, entries)
        }
        return optimizer.resolved(self._names, may_own, self._reading.order, self._reading.scheduler)

    def _is_said_buffer(self, name: str) -> bool:
        wanted = self._reading.buffers
        return wanted is not None and wanted.has(name, self._named_buffers)

    @cached_property
    def _named_buffers(self) -> Mapping[str, Collection[str]]:
        """For each pattern of `--buffers` the stored names of the tensors that it names."""
        buffers = self._reading.buffers
        return {} if buffers is None else {p: tensors_named(p, self._names.plain) for p in buffers.patterns}

    def _trained(self, name: str, group: int, key: str) -> Parameter:
        saved = self._model.weights.get(name)
        fqn, shape = self._names.plain[name], self._names.shapes[name]
        weight = None if saved is None else self._number(fqn, saved)
        masters = saved is not None and saved[0].entry.dtype is FLOAT32 and weight is not None
        states: dict[str, int] = {"fp32": weight} if masters and weight is not None else {}
        scalars: dict[str, Scalar] = {}
        held = {} if self._optimizer is None else self._optimizer.states.get(key, {})
        for state, items in held.items():
            checked_state(state)
            tensors = [i for i in items if isinstance(i, SavedTensor)]
            if (kind := self._reading.tensors.chunks.class_of(tensors)) is not None:
                self._found.opaque_states.setdefault(fqn, {})[state] = self._reading.tensors.chunks.opaque(
                    tensors, kind
                )
            elif (scalar := self._scalar(items, shape, state)) is not None:
                scalars[state] = scalar
            elif tensors and tensors[0].entry.shape == shape and tensors[0].entry.dtype.trainable:
                states[state] = self._reading.tensors.number(self._label + fqn, state, tensors)
            else:
                self._found.odd_states.setdefault(fqn, {})[state] = self._reading.node_of(items)
        parts = {} if self._optimizer is None else self._optimizer.nested.get(key, {})
        if parts:
            whole = nested({path: self._reading.node_of(items) for path, items in parts.items()})
            self._found.odd_states.setdefault(fqn, {}).update({str(state): node for state, node in whole.items()})
        return Parameter(fqn, shape, group, weight, states, scalars, never_updated=not held and not parts)

    def _scalar(self, items: Sequence[Item], shape: tuple[int, ...], state: str) -> Scalar | None:
        """A state that is one number; None for all others."""
        first = items[0]
        if isinstance(first, SavedValue):
            node = self._reading.node_of(items)
            if type(node) is int or type(node) is float:
                return Scalar(node)
            if state == _STEP:
                raise SourceError("checkpoint.malformed", f"{printable(first.entry.key)} is not a number")
            return None
        if first.entry.shape == () and (shape != () or state == _STEP):
            return self._reading.tensors.chunks.scalar(first)
        return None

    # The model.

    def _tied(self, members: Mapping[str, object], updated: set[str]) -> dict[str, str]:
        """The owner of each name whose weight is another name's."""
        alone = {n: saved for n, saved in self._model.weights.items() if n not in members}
        owners = [n for n in members if self._names.plain[n] in updated and n in self._model.weights]
        return _equal_ones(self._reading.files, {**{n: self._model.weights[n] for n in owners}, **alone}, owners)

    def _rest_of_model(self, numbers: Mapping[str, int], done: set[str]) -> None:
        """Frozen parameters and buffers."""
        weights = self._model.weights
        most_chunks = max(map(_chunk_count, weights.values()), default=1)
        assumed: list[str] = []
        unknown: list[str] = []
        for name, saved in weights.items():
            if name in done:
                continue
            fqn, entry = self._names.plain[name], saved[0].entry
            is_buffer = True if of_batch_norm(name, weights) else _is_buffer(saved, most_chunks)
            said = self._is_said_buffer(name)
            if is_buffer is None and self._reading.buffers is not None:
                is_buffer = said
            if is_buffer is None:
                is_buffer = _last(name) in KNOWN_BUFFERS or _is_likely_buffer(saved, most_chunks)
                (assumed if is_buffer else unknown).append(fqn)
            if is_buffer:
                self._found.buffers.append(Buffer(fqn, numbers[name]))
            else:
                self._found.parameters.append(Parameter(fqn, entry.shape, None, numbers[name]))
        self._found.unproven = frozenset((*assumed, *unknown))
        # Where nothing is trained the kinds make no difference; where names are open, the order is asked for first.
        if self._optimizer is None or any(u.question is Question.ORDER for u in self._found.undecided):
            return
        if assumed:
            self._found.assumed = (*self._found.assumed, _likely_buffers(assumed))
        if unknown:
            self._found.undecided = (*self._found.undecided, which_are_buffers((*unknown, *assumed), assumed))

    def _extra_states(self) -> dict[str, Node]:
        states = self._model.extra_states
        found = nested({path: self._reading.node_of(items) for path, items in states.items()})
        return {checked_name(str(name)): node for name, node in found.items()}


def _plain_of_wrapper(name: str, plain: str) -> bool:
    """True if the plain name is without the name of DistributedDataParallel's wrapper."""
    return f".{name}".count(".module.") > f".{plain}".count(".module.")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_whole(saved: Sequence[SavedTensor]) -> bool:
    """True if each rank that says something of a tensor has all of it."""
    shape = saved[0].entry.shape
    return all(s.entry.count == 1 and bool((s.entry.boxes[0, 1] == shape).all()) for s in saved)


def _chunk_count(saved: Sequence[SavedTensor]) -> int:
    """The number of different chunks of a tensor: without collectives, several ranks may have one and the same."""
    if len(saved) == 1:
        return saved[0].entry.count
    return len({box.tobytes() for s in saved for box in s.entry.boxes})


def _is_buffer(saved: Sequence[SavedTensor], most_chunks: int) -> bool | None:
    """True or False where the files prove it; None for a tensor that may be a buffer or a frozen parameter.

    Args:
        saved: The tensor's entries; without collectives each rank has one.
        most_chunks: The largest number of chunks of a tensor of the model.
    """
    entry, ours = saved[0].entry, saved[0].part.metadata.buffers
    if entry.requires_grad:
        return False
    if ours is not None:
        return True if entry.key in ours else None
    return False if most_chunks > 1 and _chunk_count(saved) > 1 else None


def _is_likely_buffer(saved: Sequence[SavedTensor], most_chunks: int) -> bool:
    """True for numbers, for types that nobody trains but for quantized weights, and for what is whole beside cut ones.

    What our own writer cut says nothing.
    """
    entry, ours = saved[0].entry, saved[0].part.metadata.buffers is not None
    if not entry.dtype.trainable:
        return not may_be_quantized(entry)
    return entry.shape == () or (not ours and most_chunks > 1 and entry.shape[0] > 1 and _is_whole(saved))


_OF_DISTRIBUTED = Undecided(
    Question.MODEL,
    "all names of the model begin with `module.`, which is taken for the name that DistributedDataParallel puts before "
    "them, and left out",
    "if the model itself has one child called `module`, put it back into the names",
)


def _likely_buffers(names: Sequence[str]) -> Undecided:
    return Undecided(
        Question.BUFFERS,
        f"{listed(names)} are taken for buffers because of their names or types, or because they are whole where "
        "parameters are cut",
        "--buffers none if they are frozen parameters",
    )


def _equal_ones(
    files: Sequence[SourceFile], weights: Mapping[str, Sequence[SavedTensor]], owners: Iterable[str]
) -> dict[str, str]:
    """For each matrix that equals an earlier one the name of that one.

    Args:
        files: The files of the state.
        weights: The tensors by name, in their order.
        owners: The names that others may equal.

    Raises:
        SourceError: `zip.*`.
    """
    same: dict[object, list[str]] = {}
    for name, saved in weights.items():
        entry = saved[0].entry
        # Vectors of different layers are often equal: all ones or all zeros. Only matrices are tied.
        if len(entry.shape) >= LEAST_DIMS and any(s.entry.count for s in saved):
            same.setdefault((entry.dtype.name, entry.shape, _in_order(saved)[0].tobytes()), []).append(name)
    may_own = set(owners)
    found: dict[str, str] = {}
    for names in same.values():
        if may_own.isdisjoint(names) or may_own.issuperset(names):
            continue
        first: dict[tuple[int, ...], str] = {}
        for name in names:
            sums = _sums(files, weights[name])
            if sums is None:
                continue
            if (owner := first.get(sums)) is None:
                if name in may_own:
                    first[sums] = name
            elif name not in may_own:
                found[name] = owner
    return found


def _sums(files: Sequence[SourceFile], saved: Sequence[SavedTensor]) -> tuple[int, ...] | None:
    """The CRC-32s of a tensor's chunks; None if the writer did not compute one."""
    parts: list[SourceFile] = []
    for one, row in _in_order(saved)[1]:
        metadata = one.part.metadata
        file = files[one.part.first_file + int(metadata.file[row])]
        parts.append(file.part(int(metadata.offset[row]), int(metadata.length[row])))
    sums = tuple(open_all(parts, _sum))
    return None if 0 in sums else sums


def _in_order(saved: Sequence[SavedTensor]) -> tuple[Column, list[tuple[SavedTensor, int]]]:
    """The boxes of a tensor's chunks by offset, each once, and the row of each in its metadata.

    Of copies, any rank may be the one that writes: the order in which chunks come is another one for each tensor.
    """
    boxes = np.concatenate([s.entry.boxes for s in saved])
    rows = [(s, row) for s in saved for row in range(s.entry.first, s.entry.first + s.entry.count)]
    distinct, first = np.unique(boxes.reshape(len(boxes), -1), axis=0, return_index=True)
    return distinct, [rows[i] for i in first.tolist()]


def _sum(part: SourceFile) -> int:
    entries = read_zip_directory(CachedFile(part)).entries
    data = [e.crc32 for n, e in entries.items() if n.startswith("data/")]
    return data[0] if len(data) == 1 else 0
