"""Optimizer states that `torch_dist` holds without names: as buckets (`dp_reshardable`, the default of Megatron-core).

Each model-parallel rank has vectors of its own: `optimizer.distributed.dp_group_idx_I.gbuf_idx_G.dtype_D.bucket_idx_B`,
then `param` for the masters, or the name of a state. They hold no names. The parameters of a rank follow from the
arguments of the run, their lengths from the chunks of the model's own tensors, and their places from the layout of
buffers. The lengths of buckets and the begins of all chunks must be those that follow; masters must round to the
weights, which is compared before anything is written.

Saves of the kind `dp_zero_gather_scatter` have an object of each model-parallel rank in place of them
(`optimizer.distributed.dp_group_idx_I.param_state`): the vectors of `distrib_optim.pt`, all buckets of a buffer one
after another. Their lengths must be those that follow, and masters must round to the weights.

With expert parallelism there are two optimizers, whose keys begin with `chained_0.` and `chained_1.`: the second one
holds the experts, and its ranks are those of tensor, expert and pipeline parallelism.

Source: megatron-core 0.16.1 and 0.19.2 `optimizer/distrib_optimizer.py` (`sharded_param_state_dp_reshardable`;
`sharded_param_state_dp_zero`, which 0.12.3 to 0.19.2 write alike),
`optimizer/__init__.py` (`get_megatron_optimizer`: which group of ranks numbers which buffers), `optimizer/optimizer.py`
(`ChainedOptimizer.sharded_state_dict`: the prefix); verified by running both without expert parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Agreement
from reshard_engine.formats.dcp_files.saved_state import SavedState, SavedTensor, SavedValue, open_values
from reshard_engine.formats.dcp_files.tensors import ChunkTensors
from reshard_engine.formats.megatron.buffers import (
    Bucket,
    LayoutError,
    Member,
    Slot,
    check_cuts,
    slots_in_vector,
    slots_of,
)
from reshard_engine.formats.megatron.common import CommonState, only_one, steps_in
from reshard_engine.formats.megatron.legacy import BufferVectors, VectorFile, add_from_vector, buffers_of
from reshard_engine.formats.megatron.model import ModelBuilder
from reshard_engine.formats.megatron.names import BUFFERS
from reshard_engine.formats.megatron.placement import GATED, OUTPUT_LAYER, WORD_EMBEDDINGS, Run, orders_of, tied
from reshard_engine.formats.model_weights import checked_state
from reshard_engine.pickles.nodes import Global, Node, PDict, PTuple, sequence_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.tensors.cuts import Cut, CutError, local_grid
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.shard_map import Boxes, ShardMapBuilder

_GROUP = r"(?:chained_(\d{1,3})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,6})\."
_KEY = re.compile(_GROUP + r"gbuf_idx_(\d{1,6})\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d{1,6})\.(\w+)")
_OBJECT = re.compile(_GROUP + r"(optimizer|per_bucket_numel|per_bucket_numel_unpadded|param_state)/shard_0_1")
_ANY = re.compile(_GROUP + r".+")
_FILE_OF_RANK = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")
_MASTERS = "param"
_VECTORS = "param_state"
_COPY = "the copy of the embedding that the last stage holds"
_FIX = "the metadata is damaged, or of another save: copy the checkpoint again"


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """A weight as the chunks of the file hold it, padding included."""

    dtype: Dtype
    shape: tuple[int, ...]
    boxes: Boxes


Owner = tuple[int, int]
"""The number of a chained optimizer, 0 for the only one, and that of the model-parallel rank."""


@dataclass(frozen=True, slots=True)
class _Group:
    """The parameters of one buffer, in the order of their registration."""

    stage: int
    chunk: int
    dtype: str
    members: Sequence[Member]


@dataclass(slots=True)
class _Buffer:
    """One buffer of one model-parallel rank."""

    dtype: str
    """Element type of its parameters."""
    buckets: dict[int, dict[str, SavedTensor]] = field(default_factory=dict[int, dict[str, SavedTensor]])
    """The vectors of each bucket by state."""


_Places = dict[tuple[Owner, int], list[Slot]]


def is_of_buckets(key: str) -> bool:
    """True for the keys of optimizers in buckets."""
    return _ANY.fullmatch(key) is not None


class SavedBuckets:
    """The vectors of all model-parallel ranks, and their objects."""

    def __init__(self, builder: ShardMapBuilder, state: SavedState, ledger: OpaqueLedger) -> None:
        """Find the keys.

        Raises:
            SourceError: `checkpoint.malformed` for keys that contradict one another.
        """
        self._builder, self._state, self._ledger = builder, state, ledger
        self.agreements: list[Agreement] = []
        self._buffers: dict[Owner, dict[int, _Buffer]] = {}
        self._objects: dict[Owner, dict[str, SavedValue]] = {}
        for tensor in state.tensors:
            if (match := _KEY.fullmatch(tensor.entry.key)) is not None:
                self._note(tensor, match)
        for value in state.values:
            if (match := _OBJECT.fullmatch(value.entry.key)) is not None:
                owner = int(match[1] or 0), int(match[2])
                self._objects.setdefault(owner, {})[match[3]] = value
        keys = [t.entry.key for t in state.tensors if is_of_buckets(t.entry.key)]
        self.found = bool(keys or self._objects)
        """True if the checkpoint has an optimizer without names."""
        gathered = any(_VECTORS in held for held in self._objects.values())
        self.kind = "" if not self.found else "dp_zero_gather_scatter" if gathered else "dp_reshardable"
        """How it was saved, as Megatron-core calls it; empty for no such optimizer."""
        self.what = "vectors of model-parallel ranks" if gathered else "buckets of data-parallel ranks"
        self._unread = next((k for k in keys if _KEY.fullmatch(k) is None), None)

    def _note(self, tensor: SavedTensor, match: re.Match[str]) -> None:
        owner = int(match[1] or 0), int(match[2])
        number, dtype, bucket, state = int(match[3]), match[4], int(match[5]), match[6]
        buffer = self._buffers.setdefault(owner, {}).setdefault(number, _Buffer(dtype))
        if buffer.dtype != dtype:
            raise SourceError(
                "checkpoint.malformed",
                f"buffer {number} of rank {owner[1]} holds both {buffer.dtype} and {printable(dtype)}",
                fix=_FIX,
            )
        buffer.buckets.setdefault(bucket, {})[state] = tensor

    def saving_ranks(self) -> int:
        """The ranks that saved parts of buckets, if they are numbered from 0 on; else 0."""
        ranks: set[int] = set()
        for vector in self._vectors():
            entry, metadata = vector.entry, vector.part.metadata
            for number in np.unique(metadata.file[entry.first : entry.first + entry.count]).tolist():
                match = _FILE_OF_RANK.fullmatch(metadata.files[int(number)])
                ranks.add(int(match[1]) if match is not None else -1)
        return len(ranks) if ranks == {*range(len(ranks))} else 0

    def has_read(self, key: str) -> bool:
        """True for an object that is read here."""
        return _OBJECT.fullmatch(key) is not None

    def read(
        self,
        opened: Callable[[Sequence[SavedValue]], list[Node]],
        weights: Mapping[str, SavedWeight],
        common: CommonState,
        model: ModelBuilder,
    ) -> list[Node]:
        """Add the masters and the states to the model; returns the dicts that hold the param groups.

        Args:
            opened: Reads objects of the checkpoint.
            weights: The model's own tensors by the names of parameters, in the order of the file.
            common: The state that is not a tensor.
            model: The parameters.

        Raises:
            LayoutError: The parameters are not proven to lie anywhere.
            SourceError: `checkpoint.malformed`, `checkpoint.incomplete`, `checkpoint.mixed`.
        """
        if self.kind == "dp_zero_gather_scatter":
            return self._read_vectors(opened, weights, common, model)
        reshaped = next((v.entry.key for v in self._vectors() if v.entry.key in v.part.metadata.original_shapes), None)
        if (self._unread or reshaped) is not None or not self._buffers:
            said = printable(self._unread or reshaped or "an object")
            raise LayoutError(f"{said} is of another form of these states, which is not read")
        if (other := next((v for v in self._vectors() if not v.entry.dtype.floating), None)) is not None:
            raise LayoutError(f"{printable(other.entry.key)} is of {other.entry.dtype.name}")
        objects = self._opened(opened, ("optimizer", "per_bucket_numel", "per_bucket_numel_unpadded"))
        lengths = {owner: self._lengths(owner, held) for owner, held in objects.items()}
        groups = self._groups(objects)
        fit = Fit(Run.of(common), weights, self._buffers, lengths, self.is_in_order)
        fit.check_owners(lengths)
        places = fit.places()
        chunks = ChunkTensors(self._builder, self._state.files, self._vectors(), self._ledger)
        for (owner, number), slots in places.items():
            self._add_slots(self._buffers[owner][number], slots, fit, chunks, owner)
        self._join(fit, model)
        self.agreements += chunks.agreements
        return groups

    def _read_vectors(
        self,
        opened: Callable[[Sequence[SavedValue]], list[Node]],
        weights: Mapping[str, SavedWeight],
        common: CommonState,
        model: ModelBuilder,
    ) -> list[Node]:
        """As `read`, of objects that hold all vectors of a rank."""
        if self._buffers:
            raise LayoutError(f"{printable(next(self._vectors()).entry.key)} is there beside vectors of ranks")
        groups = self._groups(self._opened(opened, ("optimizer",)))
        if missing := next((rank for (_, rank), held in self._objects.items() if _VECTORS not in held), None):
            raise SourceError(
                "checkpoint.incomplete", f"the model-parallel rank {missing} has no object `{_VECTORS}`", fix=_FIX
            )
        owners, values = [*self._objects], [held[_VECTORS] for held in self._objects.values()]
        files: dict[Owner, VectorFile] = {}
        buffers: dict[Owner, list[BufferVectors]] = {}
        for owner, value, parsed in zip(
            owners, values, open_values(self._state.files, values, self._ledger), strict=True
        ):
            where = f"dp_group_idx_{owner[1]}.{_VECTORS}"
            files[owner] = VectorFile(parsed, value.part.first_file + value.entry.file, parsed.file.begin)
            buffers[owner] = buffers_of(only_one(parsed.root, where), where)
        fit = Fit(Run.of(common), weights, {}, {}, self.is_in_order)
        fit.check_owners(buffers)
        for (owner, number), slots in fit.places_in_vectors(buffers).items():
            for state, vector in buffers[owner][number].vectors.items():
                for slot in slots:
                    shape = fit.local_shape(owner, slot.name)
                    part = add_from_vector(self._builder, slot, state, shape, vector=vector, source=files[owner])
                    fit.parts.setdefault((slot.name, state), {})[owner] = part
        self._join(fit, model)
        return groups

    def _vectors(self) -> Iterator[SavedTensor]:
        for buffer in (b for buffers in self._buffers.values() for b in buffers.values()):
            for states in buffer.buckets.values():
                yield from states.values()

    # Objects.

    def _opened(
        self, opened: Callable[[Sequence[SavedValue]], list[Node]], wanted: Sequence[str]
    ) -> dict[Owner, dict[str, Node]]:
        """The objects of these names of each rank.

        Raises:
            SourceError: `checkpoint.incomplete` for a rank that lacks one.
        """
        places = [(owner, name) for owner in {**self._buffers, **self._objects} for name in wanted]
        for owner, name in places:
            if name not in self._objects.get(owner, {}):
                raise SourceError(
                    "checkpoint.incomplete",
                    f"the model-parallel rank {owner[1]} has states of an optimizer, and no object `{name}`",
                    fix=_FIX,
                )
        nodes = opened([self._objects[owner][name] for owner, name in places])
        found: dict[Owner, dict[str, Node]] = {}
        for (owner, name), node in zip(places, nodes, strict=True):
            found.setdefault(owner, {})[name] = only_one(node, f"dp_group_idx_{owner[1]}.{name}")
        return found

    def _lengths(self, owner: Owner, objects: Mapping[str, Node]) -> list[list[Bucket]]:
        """The buckets of each buffer of a rank, as its objects say them; the stored vectors are as long.

        Raises:
            SourceError: `checkpoint.malformed`.
        """
        padded, stored = (
            [_by_type(n, owner) for n in sequence_items(objects[name], what=name)]
            for name in ("per_bucket_numel", "per_bucket_numel_unpadded")
        )
        held = self._buffers.get(owner, {})
        said, others = (
            [(dtype, len(of_type)) for buffer in side for dtype, of_type in buffer.items()] for side in (stored, padded)
        )
        types = [(held[number].dtype, len(held[number].buckets)) for number in sorted(held)]
        one_type_each = len(said) == len(stored) == len(padded)
        if not one_type_each or said != others or said != types or sorted(held) != [*range(len(said))]:
            raise SourceError(
                "checkpoint.malformed",
                f"the rank {owner[1]} says that it has {len(said)} buffers with {sum(n for _, n in said)} buckets, and "
                f"the file holds {len(held)} with {sum(len(b.buckets) for b in held.values())}",
                fix=_FIX,
            )
        found: list[list[Bucket]] = []
        for number, (one, other) in enumerate(zip(padded, stored, strict=True)):
            numels, lengths = next(iter(one.values())), next(iter(other.values()))
            found.append([Bucket(*pair) for pair in zip(numels, lengths, strict=True)])
            for bucket, length in enumerate(lengths):
                vectors = held[number].buckets.get(bucket, {})
                if any(v.entry.shape != (length,) for v in vectors.values()) or _MASTERS not in vectors:
                    text = ", ".join(f"{k} {v.entry.shape}" for k, v in vectors.items()) or "nothing"
                    raise SourceError(
                        "checkpoint.malformed",
                        f"bucket {bucket} of buffer {number} of rank {owner[1]} is said to have {length} elements, and "
                        f"the file holds {printable(text)}",
                        fix=_FIX,
                    )
        return found

    @staticmethod
    def _groups(objects: Mapping[Owner, Mapping[str, Node]]) -> list[Node]:
        """The dict of each optimizer: all ranks hold equal ones.

        Raises:
            SourceError: `checkpoint.mixed` for ranks that are at another step.
        """
        first: dict[int, tuple[int, Node]] = {}
        for (chained, rank), held in sorted(objects.items()):
            node = held["optimizer"]
            known = first.setdefault(chained, (rank, node))
            if steps_in(known[1]) != steps_in(node):
                raise SourceError(
                    "checkpoint.mixed",
                    f"the param groups of rank {rank} are at the steps {steps_in(node)}, and those of rank {known[0]} "
                    f"at {steps_in(known[1])}",
                    fix=_FIX,
                )
        return [node for _, node in first.values()]

    # The order of keys.

    def is_in_order(self, weights: Mapping[str, SavedWeight], run: Run) -> bool:
        """True if one data-parallel rank of each model-parallel one saved the model, in the model's order.

        A fully parallel save deals the tensors to all data-parallel ranks, and then the metadata has the keys of the
        first rank, those of the second, and so on.
        """
        ranks: set[str] = set()
        for weight in weights.values():
            for number in np.unique(weight.boxes.file).tolist():
                match = _FILE_OF_RANK.fullmatch(self._state.files[int(number)].name)
                if match is None:
                    return False
                ranks.add(match[1])
        return run.experts == 1 and len(ranks) <= run.tensor * run.pipeline

    # Tensors.

    def _add_slots(self, buffer: _Buffer, slots: Sequence[Slot], fit: Fit, chunks: ChunkTensors, owner: Owner) -> None:
        """Register each parameter's part in this buffer, for each state."""
        for bucket, states in buffer.buckets.items():
            for state, vector in states.items():
                name = "fp32" if state == _MASTERS else checked_state(state)
                boxes = chunks.boxes(vector.entry.key, name, [vector])
                order = np.argsort(boxes.boxes[:, 0, 0], kind="stable")
                begins, lengths = boxes.boxes[order, 0, 0], boxes.boxes[order, 1, 0]
                for slot in slots:
                    if slot.bucket != bucket:
                        continue
                    number = self._builder.tensor(
                        slot.name, name, vector.entry.dtype, fit.local_shape(owner, slot.name)
                    )
                    first = int(np.searchsorted(begins + lengths, slot.begin, side="right"))
                    last = int(np.searchsorted(begins, slot.end, side="left"))
                    rows, size = order[first:last], vector.entry.dtype.itemsize_bytes
                    begin = np.maximum(begins[first:last], slot.begin)
                    end = np.minimum((begins + lengths)[first:last], slot.end)
                    offset = boxes.offset[rows] + (begin - begins[first:last]) * size
                    numbers = np.full(len(rows), number, dtype=np.int64)
                    self._builder.pieces(
                        numbers, begin - slot.begin, end - slot.begin, file=boxes.file[rows], offset=offset
                    )
                    fit.parts.setdefault((slot.name, name), {})[owner] = number

    def _join(self, fit: Fit, model: ModelBuilder) -> None:
        """Join the parts of all ranks to the states of the whole model."""
        states = list(dict.fromkeys(state for _, state in fit.parts))
        copies: dict[str, int] = {}
        whole: dict[str, int] = {}
        for name in dict.fromkeys((*fit.names, OUTPUT_LAYER)):
            for state in states:
                parts = fit.parts.get((name, state))
                if parts is None:
                    continue
                tensors = [parts[owner] for owner in sorted(parts)]
                where = [f"the buffers of model-parallel rank {rank}" for _, rank in sorted(parts)]
                source = WORD_EMBEDDINGS if name not in fit.weights else name
                if name not in fit.weights:
                    copies[state] = model.whole(source, state, fit.cut(source), tensors, where)
                    continue
                number = model.add_parts(name, state, fit.cut(name), tensors, where)
                whole |= {state: number} if name == WORD_EMBEDDINGS else {}
        for state, copy in copies.items():
            model.agree(WORD_EMBEDDINGS, state, whole[state], copy, _COPY)


def _by_type(node: Node, owner: Owner) -> dict[str, list[int]]:
    """The lengths in a dict whose keys are pairs of element types: `{(torch.bfloat16, torch.float32): [512]}`.

    Raises:
        SourceError: `checkpoint.malformed`.
    """
    found: dict[str, list[int]] = {}
    for key, value in zip(node.pairs[::2], node.pairs[1::2], strict=True) if isinstance(node, PDict) else ():
        kind = key.items[0] if isinstance(key, PTuple) and key.items else None
        lengths = sequence_items(value, what="per_bucket_numel")
        if isinstance(kind, Global) and kind.module == "torch" and all(type(n) is int for n in lengths):
            found[kind.name] = lengths
    if not isinstance(node, PDict) or len(found) != len(node.pairs) // 2:
        raise SourceError(
            "checkpoint.malformed", f"the lengths of the buckets of rank {owner[1]} are not by element type", fix=_FIX
        )
    return found


class Fit:
    """The parameters of each buffer, and their places."""

    def __init__(
        self,
        run: Run,
        weights: Mapping[str, SavedWeight],
        buffers: Mapping[Owner, Mapping[int, _Buffer]],
        lengths: Mapping[Owner, Sequence[Sequence[Bucket]]],
        in_order: Callable[[Mapping[str, SavedWeight], Run], bool],
    ) -> None:
        self._run, self.weights, self._buffers, self._lengths = run, weights, buffers, lengths
        self.names = [n for n in weights if BUFFERS.fullmatch(n) is None]
        self._in_order = in_order(weights, run)
        self._cuts: dict[str, Cut] = {}
        self._cuts_of_kinds: dict[object, Cut] = {}
        self._known: dict[tuple[int, int, int], list[_Group]] = {}
        """The parameters of each stage, in the order that is tried."""
        self._experts = self._count_experts()
        self.tied = run.pipeline > 1 and tied(weights)
        """True if the last stage holds a copy of the embedding."""
        self.parts: dict[tuple[str, str], dict[Owner, int]] = {}
        """The tensors that hold a state of a parameter, by the model-parallel ranks that hold them."""

    def orders(self) -> list[list[str]]:
        """The orders in which the model may register its parameters.

        Raises:
            LayoutError: No order is known.
        """
        return orders_of(self.names, self._run, saved=self._in_order)

    def expert_rank(self, name: str) -> int | None:
        """The expert-parallel rank that holds an expert's parameter; None for all other parameters."""
        return self._run.expert_rank(name, self._experts.get(name.partition(".local_experts.")[0], 0))

    def _count_experts(self) -> dict[str, int]:
        """The number of experts of each layer that has some."""
        held: dict[str, set[str]] = {}
        for name in self.names:
            head, found, tail = name.partition(".local_experts.")
            if found:
                held.setdefault(head, set()).add(tail.partition(".")[0])
        return {head: len(numbers) for head, numbers in held.items()}

    def check_owners(self, owners: Iterable[Owner]) -> None:
        """Refuse ranks that the arguments of the run do not have.

        Raises:
            LayoutError: There are others.
        """
        run = self._run
        wanted = {(0, rank) for rank in range(run.tensor * run.pipeline)}
        if run.experts > 1:
            wanted |= {(1, rank) for rank in range(run.expert_tensor * run.experts * run.pipeline)}
        if (found := {*owners}) != wanted:
            raise LayoutError(
                f"the arguments of the run make {len(wanted)} model-parallel ranks (tensor {run.tensor}, pipeline "
                f"{run.pipeline}, expert {run.experts}), and the file has {len(found)}"
            )

    # Parameters and their parts.

    def cut(self, name: str) -> Cut:
        """How the chunks of a weight show that it is cut.

        Raises:
            LayoutError: They are not those of the ranks that hold parts of it.
        """
        if name not in self._cuts:
            held = self.weights[name]
            # Equal layers have equal chunks: a model of 17,000 tensors has a dozen kinds of them.
            kind = held.shape, held.boxes.boxes.tobytes(), self._run.is_shared(name), GATED.fullmatch(name) is None
            if kind not in self._cuts_of_kinds:
                self._cuts_of_kinds[kind] = self._cut_of_chunks(name)
            self._cuts[name] = self._cuts_of_kinds[kind]
        return self._cuts[name]

    def _cut_of_chunks(self, name: str) -> Cut:
        weight = self.weights[name]
        ranks = self._run.tensor if self._run.is_shared(name) else self._run.expert_tensor
        boxes = np.unique(weight.boxes.boxes.reshape(len(weight.boxes.file), -1), axis=0)
        dims, shape = len(weight.shape), np.array(weight.shape, dtype=np.int64)
        offsets, sizes = boxes[:, :dims], boxes[:, dims:]
        along = np.flatnonzero((sizes != shape).any(axis=0)).tolist()
        if not along:
            return Cut()
        if len(along) == 1:
            dim = int(along[0])
            length = int(shape[dim])
            for sections in (1, 2) if GATED.fullmatch(name) else (1,):
                count = ranks * sections
                width = length // count
                even = length % count == 0 and len(boxes) == count and bool((sizes[:, dim] == width).all())
                if even and np.array_equal(np.sort(offsets[:, dim]), np.arange(count) * width):
                    return Cut(dim=dim, sections=(length // 2,) * 2) if sections == 2 else Cut(dim=dim)
        raise LayoutError(f"{printable(name)} has {len(boxes)} chunks, which are not parts of {ranks} ranks")

    def local_shape(self, owner: Owner, name: str) -> tuple[int, ...]:
        """The shape of the part of a parameter that a model-parallel rank holds.

        Raises:
            LayoutError: As `cut`.
        """
        name = WORD_EMBEDDINGS if name not in self.weights else name
        ranks = self._run.tensor if owner[0] == 0 else self._run.expert_tensor
        try:
            return local_grid(self.cut(name), self.weights[name].shape, ranks, owner[1] % ranks)
        except CutError as error:
            raise LayoutError(f"{printable(name)}: {error}") from error

    def _members(self, order: Sequence[str], owner: Owner) -> list[_Group]:
        """The parameters of each buffer of a rank, in the order of buffers."""
        run, (chained, rank) = self._run, owner
        inner = run.tensor if not chained else run.expert_tensor * run.experts
        stage, expert_rank = rank // inner, rank % inner // run.expert_tensor if chained else 0
        key = chained, stage, expert_rank
        if key not in self._known:
            # Tensor-parallel ranks hold equally many elements of the same parameters.
            self._known[key] = self._members_of(order, owner, stage, expert_rank)
        return self._known[key]

    def _members_of(self, order: Sequence[str], owner: Owner, stage: int, expert_rank: int) -> list[_Group]:
        return [
            _Group(stage, chunk, dtype, members)
            for chunk in range(self._run.chunks)
            for dtype, members in self.members_in(chunk, order, owner, stage, expert_rank).items()
        ]

    def members_in(
        self, chunk: int, order: Sequence[str], owner: Owner, stage: int, expert_rank: int
    ) -> dict[str, list[Member]]:
        """The parameters of one model chunk of a rank by their element type, each type in the order of registration.

        Raises:
            LayoutError: As `cut`, and as `Run.of_chunk`.
        """
        run, chained = self._run, owner[0]
        by_type: dict[str, list[Member]] = {}
        last = (stage, chunk) == (run.pipeline - 1, run.chunks - 1)
        names = run.of_chunk(order, stage, chunk)
        for name in (*names, OUTPUT_LAYER) if last and self.tied else names:
            if run.is_shared(name) != (chained == 0):
                continue
            if chained and self.expert_rank(name) != expert_rank:
                continue
            weight = self.weights.get(name) or self.weights[WORD_EMBEDDINGS]
            numel = prod(self.local_shape(owner, name))
            alone = self.tied and name in (WORD_EMBEDDINGS, OUTPUT_LAYER)
            by_type.setdefault(weight.dtype.name, []).append(Member(name, numel, alone))
        return by_type

    # Places.

    def places(self) -> _Places:
        """The places of all parameters in buckets, by rank and buffer.

        Raises:
            LayoutError: No order of registration fits what the files say, or several fit with different places.
        """
        return self._fitting(self._lengths, self._places_of)

    def places_in_vectors(self, buffers: Mapping[Owner, Sequence[BufferVectors]]) -> _Places:
        """The places of all parameters in vectors that hold the buckets of a buffer one after another.

        Raises:
            LayoutError: As `places`.
        """

        def places_of(order: Sequence[str], owner: Owner) -> _Places:
            groups = self._groups_of(order, owner, [b.dtype for b in buffers[owner]])
            found: _Places = {}
            for number, (group, buffer) in enumerate(zip(groups, buffers[owner], strict=True)):
                sizes = self._run.bucket_sizes(group.stage, group.chunk, self._elements(order))
                try:
                    found[owner, number] = slots_in_vector(group.members, sizes, buffer.numel)
                except LayoutError as error:
                    raise LayoutError(f"model-parallel rank {owner[1]}, buffer {number}: {error}") from error
            return found

        return self._fitting(buffers, places_of)

    def _elements(self, order: Sequence[str]) -> int:
        """The elements of all parameters of the first rank, where the arguments ask for a number of buckets; else 0."""
        if self._run.common.number("ddp_num_buckets") is None:
            return 0
        first = [(0, 0), (1, 0)] if self._run.experts > 1 else [(0, 0)]
        return sum(m.numel for owner in first for group in self._members(order, owner) for m in group.members)

    def _fitting(self, owners: Iterable[Owner], places_of: Callable[[Sequence[str], Owner], _Places]) -> _Places:
        fitting: list[_Places] = []
        problem: LayoutError | None = None
        for order in self.orders():
            self._known.clear()
            try:
                found = {k: v for owner in owners for k, v in places_of(order, owner).items()}
            except LayoutError as error:
                problem = problem or error
                continue
            if found not in fitting:
                fitting.append(found)
        if len(fitting) > 1:
            raise LayoutError(f"{len(fitting)} orders of parameters fit the lengths")
        if not fitting:
            raise problem or LayoutError("no order of parameters is known")
        return fitting[0]

    def _groups_of(self, order: Sequence[str], owner: Owner, types: Sequence[str]) -> list[_Group]:
        """The parameters of the buffers of a rank, which hold parameters of these types.

        Raises:
            LayoutError: The parameters are of others.
        """
        groups = self._members(order, owner)
        if [group.dtype for group in groups] != [*types]:
            raise LayoutError(
                f"model-parallel rank {owner[1]} should have {len(groups)} buffers of the types "
                f"{', '.join(g.dtype for g in groups)}, and the file has {', '.join(types) or 'none'}"
            )
        return groups

    def _places_of(self, order: Sequence[str], owner: Owner) -> _Places:
        lengths, buffers = self._lengths[owner], self._buffers.get(owner, {})
        groups = self._groups_of(order, owner, [buffers[number].dtype for number in range(len(lengths))])
        ranks = self._run.data_ranks if owner[0] == 0 else self._run.expert_data_ranks
        found: _Places = {}
        for number, (group, buckets) in enumerate(zip(groups, lengths, strict=True)):
            try:
                slots = slots_of(group.members, buckets)
                for at, bucket in enumerate(buckets):
                    within = [s for s in slots if s.bucket == at]
                    for vector in buffers[number].buckets[at].values():
                        begins = vector.entry.boxes[:, 0, 0].tolist()
                        check_cuts(within, bucket, [*begins, bucket.unpadded], ranks)
            except LayoutError as error:
                raise LayoutError(f"model-parallel rank {owner[1]}, buffer {number}: {error}") from error
            found[owner, number] = slots
        return found
