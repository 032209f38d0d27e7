"""`reshard fingerprint`: digests of a checkpoint's state that do not depend on its layout and format.

A tensor's digest is that of manifests (`reshard_engine.integrity.checksums`). The digest of a component is the SHA-256
of its lines, one for each tensor or value, and the digest of the whole is the SHA-256 of lines that name components.
docs/formats/fingerprint.md specifies every line. Memory is flat: only block digests are kept of what was read.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reshard.errors import counted, printable
from reshard.models.jobs import Progress
from reshard.models.reports import FingerprintOptions, FingerprintReport
from reshard_engine.checkpoint import OF_TRAINING, Agreement, Checkpoint, Question
from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.execute.casts.placing import default_kernel
from reshard_engine.execute.checks.source import complete_records, damage_note, record_reads
from reshard_engine.execute.executor import stop_check
from reshard_engine.execute.gather import ReadItem, TensorReader
from reshard_engine.formats.registry import format_of
from reshard_engine.integrity.checksums import (
    BLOCK_BYTES,
    BlockRun,
    TensorDigests,
    block_count,
    block_digest,
    tensor_digest,
)
from reshard_engine.operations.diff import (
    MASTER,
    ReadMeter,
    Side,
    hyper_parameters,
    reading_threads,
    rounds_to,
    run_in_order,
)
from reshard_engine.operations.requested import refuse_unexplained
from reshard_engine.pickles.nodes import Node, PLiteral, PTensorRef
from reshard_engine.pickles.trees import canonical
from reshard_engine.tensors.dtypes import BY_NAME, Dtype

VERSION = 1
"""The version of the specification. It is a part of the text of the whole digest."""
WHOLE = ("model", "unrounded", "moments", "counters", "groups")
"""The components of the whole digest in their order. The model is the masters, or the weights without masters."""
_OF_MODEL = ("weights", "masters", "unrounded")
COMPONENTS = (*_OF_MODEL, "moments", "counters", "groups", "run", "copies")
"""All components, in the order in which they are shown."""
_BATCH_BYTES = 8 << 20
"""Bytes of tensors that a thread reads at once. Small tensors share a batch, so that their reads are joined."""
_CUT_ELEMS = BLOCK_BYTES
"""Large tensors are cut at multiples of so many elements, which end a block in every element type."""

Lines = dict[str, list[str]]
"""The lines of each component that the source has."""


def fingerprint_of(
    checkpoint: Checkpoint,
    options: FingerprintOptions,
    *,
    refuse_damaged: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> FingerprintReport:
    """Digest the state of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        options: What is digested.
        refuse_damaged: Refuse records that do not match their CRC-32. Without it a note names them: the digests tell
            which tensors differ from those of another checkpoint.
        on_progress: Is told how much was read.
        should_stop: Is asked whether to stop.

    Raises:
        SourceError: `checkpoint.unexplained`, `checkpoint.ambiguous`, `source.changed`, `zip.crc`, and the errors of
            reading.
        JobError: `job.cancelled` if `should_stop` returns True.
    """
    started = time.monotonic()
    refuse_unexplained(checkpoint)
    checkpoint.refuse_undecided(Question.BUFFERS, *(OF_TRAINING if options.weights_only else ()))
    state = _State(checkpoint, weights_only=options.weights_only)
    reading = _Reading(checkpoint, state.wanted())
    reading.run(on_progress, should_stop)
    complete_records(checkpoint, reading.records, stop_check(should_stop), every=False, refuse=refuse_damaged)
    damage = damage_note(checkpoint, reading.records)
    lines = state.lines(reading)
    components = {name: component_digest(lines[name]) if lines.get(name) else None for name in COMPONENTS}
    return FingerprintReport(
        url=checkpoint.url,
        tag=checkpoint.tag,
        format=checkpoint.format,
        step=checkpoint.counters.steps,
        weights_only=options.weights_only,
        digest=whole_digest(components),
        components=components,
        lines={name: tuple(found) for name, found in lines.items()} if options.lines else {},
        tensors=len(reading.wanted),
        read_bytes=reading.read_bytes,
        notes=(*([damage] if damage else []), *state.notes(lines)),
        not_carried=checkpoint.not_carried,
        seconds=time.monotonic() - started,
    )


def component_digest(lines: Iterable[str]) -> str:
    """The SHA-256, in hex, of lines that are sorted and each ended by a line feed."""
    return hashlib.sha256("".join(f"{line}\n" for line in sorted(lines)).encode("ascii")).hexdigest()


def whole_digest(components: Mapping[str, str | None]) -> str:
    """The digest of the whole from those of its components."""
    held = {**components, "model": components.get("masters") or components.get("weights")}
    named = [_line(name, digest) for name in WHOLE if (digest := held.get(name)) is not None]
    text = "".join(f"{line}\n" for line in (_line("reshard-fingerprint", VERSION), *named))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _line(*values: Any) -> str:
    return json.dumps(values, separators=(",", ":"))


# The lines of a checkpoint, and the tensors that have to be read for them.


class _State:
    """The statements of a fingerprint about one checkpoint, as lines that want the digests of tensors."""

    def __init__(self, checkpoint: Checkpoint, *, weights_only: bool) -> None:
        self._checkpoint = checkpoint
        self._side = Side(checkpoint)
        self._weights_only = weights_only
        self._tensors = checkpoint.shard_map.tensors
        aliases = defaultdict[str, list[str]](list)
        for alias, owner in checkpoint.shared.items():
            if alias not in self._side.entries:
                aliases[owner].append(alias)
        self._names = {owner: (owner, *aliases[owner]) for owner in self._side.entries}

    def wanted(self) -> dict[int, set[str]]:
        """The tensors to read, each with the narrower types in which it is digested as well."""
        found = defaultdict[int, set[str]](set)
        for entry in self._side.entries.values():
            master, weight = entry.states.get(MASTER), entry.weight
            for number in (weight, *(entry.states.values() if not self._weights_only else (master,))):
                if number is not None:
                    found[number].add(self._tensors[number].dtype.name)
            if master is not None and weight is not None and self._rounds(master, weight):
                found[master].add(self._tensors[weight].dtype.name)
        for agreement in self._copies():
            for number in (agreement.first, agreement.other):
                found[number].add(self._tensors[number].dtype.name)
        if not self._weights_only:
            # The trees are written once without digests, only to see which tensors they hold.
            met: list[int] = []
            self._of_trees(lambda node: met.append(node.index) if isinstance(node, PTensorRef) else None)
            for number in met:
                found[number].add(self._tensors[number].dtype.name)
        return dict(found)

    def lines(self, read: _Reading) -> Lines:
        """The lines of all components."""
        entries = self._side.entries
        found: Lines = {"copies": [self._copy(a, read) for a in self._copies() if self._differs(a, read)]}
        found["unrounded"] = [
            line
            for name, entry in entries.items()
            if (number := entry.weight) is not None and not self._is_rounded(entry.states.get(MASTER), number, read)
            for line in self._tensor_lines(name, number, read)
        ]
        if all(entry.weight is not None for entry in entries.values()):
            found["weights"] = self._model(read, masters=False)
        if any(MASTER in entry.states for entry in entries.values()):
            found["masters"] = self._model(read, masters=True)
        if not self._weights_only:
            found["moments"] = [*self._moments(read)]
            found["counters"] = [*self._counters()]
            found |= self._of_trees(lambda node: self._of_tree(node, read))
        return {name: sorted(held) for name, held in found.items() if held}

    def notes(self, lines: Lines) -> Iterator[str]:
        """Notes on what the digests do not say, and on what contradicts itself in the checkpoint."""
        padded = sum(1 for p in self._checkpoint.parameters if p.padding)
        if padded:
            yield f"rows of padding behind {counted(padded, 'vocabulary', 'vocabularies')} are in no digest"
        if found := lines.get("unrounded"):
            yield f"{counted(len(found), 'weight is', 'weights are')} not the rounded masters, such as {_name(found)}"
        if found := lines.get("copies"):
            yield f"{counted(len(found), 'copy differs', 'copies differ')} from the first one, such as {_name(found)}"
        optimizer = self._checkpoint.optimizer
        if optimizer is not None and optimizer.unread and not self._weights_only:
            yield f"optimizer states that only their own format keeps are in no digest: {', '.join(optimizer.unread)}"

    # -- the model and the optimizer's tensors ----------------------------------------------------------

    def _model(self, read: _Reading, *, masters: bool) -> list[str]:
        """The lines of the whole model: of masters where they are asked for and stored, else of weights."""
        found: list[str] = []
        for name, entry in self._side.entries.items():
            number = entry.states.get(MASTER, entry.weight) if masters else entry.weight
            found += () if number is None else self._tensor_lines(name, number, read)
        return found

    def _tensor_lines(self, owner: str, number: int, read: _Reading, *, state: str | None = None) -> Iterator[str]:
        """The line of a tensor, under each name of its parameter."""
        for name in self._names[owner]:
            yield _line(name, *([] if state is None else [state]), *read.described(number))

    def _moments(self, read: _Reading) -> Iterator[str]:
        for owner, entry in self._side.entries.items():
            for state, number in entry.states.items():
                if state != MASTER:
                    yield from self._tensor_lines(owner, number, read, state=state)
            for state, scalar in entry.scalars.items():
                value = canonical(scalar.value, lambda _: None)
                yield from (f"[{json.dumps(name)},{json.dumps(state)},{value}]" for name in self._names[owner])

    def _counters(self) -> Iterator[str]:
        for name, value in asdict(self._checkpoint.counters).items():
            # DeepSpeed's files must count skipped steps, others need not: none skipped is no statement.
            if value is not None and not (name == "skipped_steps" and value == 0):
                yield _line(name, value)

    def _rounds(self, master: int, weight: int) -> bool:
        return rounds_to(self._tensors[master].dtype, self._tensors[weight].dtype)

    def _is_rounded(self, master: int | None, weight: int, read: _Reading) -> bool:
        """True if a weight says nothing more than its master, or if it has none and stands for itself."""
        if master is None or master == weight:
            return True
        dtype = self._tensors[weight].dtype
        return self._rounds(master, weight) and read.digest(master, dtype) == read.digest(weight, dtype)

    def _copies(self) -> Iterator[Agreement]:
        """The pairs of tensors that must be equal as they are stored."""
        of_model = {n for e in self._side.entries.values() for n in (e.weight, e.states.get(MASTER)) if n is not None}
        for agreement in self._checkpoint.agreements:
            if not agreement.rounded and not (self._weights_only and agreement.first not in of_model):
                yield agreement

    def _differs(self, agreement: Agreement, read: _Reading) -> bool:
        return read.described(agreement.first) != read.described(agreement.other)

    def _copy(self, agreement: Agreement, read: _Reading) -> str:
        return _line(agreement.fqn, agreement.state, agreement.where, *read.described(agreement.other))

    # -- trees ------------------------------------------------------------------------------------------

    def _of_trees(self, tensor: Callable[[Any], Node]) -> Lines:
        """The lines of what is no tensor of a parameter; `tensor` describes a tensor within a tree."""
        checkpoint = self._checkpoint
        optimizer = checkpoint.optimizer
        found: Lines = {"groups": [], "run": []}
        if optimizer is not None and optimizer.groups:
            texts = [_present(hyper_parameters(group), tensor) for group in optimizer.groups]
            for owner, entry in self._side.entries.items():
                if entry.group is not None:
                    found["groups"] += (f"[{json.dumps(n)},{texts[entry.group]}]" for n in self._names[owner])
        facts = format_of(checkpoint).presentation.run_facts(checkpoint)
        beside = {name: value for name, value in facts.optimizer.items() if name not in facts.optional}
        for kind, values in (("state", facts.state or {}), ("optimizer", beside), ("module", checkpoint.extra_states)):
            for name, value in values.items():
                if value is not None:
                    found["run"].append(f"[{json.dumps(kind)},{json.dumps(name)},{canonical(value, tensor)}]")
        return found

    @staticmethod
    def _of_tree(node: Node, read: _Reading) -> list[Any]:
        """The type, shape and digest of a tensor within a tree."""
        if isinstance(node, PLiteral):
            data = memoryview(node.data)
            return [node.dtype, list(node.shape), tensor_digest(_block_digests(data))]
        return read.described(node.index)


def _present(values: Mapping[str | int, Node], tensor: Callable[[Any], Node]) -> str:
    """The canonical text of a mapping without the entries that are None: they are as good as absent."""
    pairs = sorted((str(key), canonical(value, tensor)) for key, value in values.items() if value is not None)
    return "{" + ",".join(f"{json.dumps(key)}:{text}" for key, text in pairs) + "}"


def _name(lines: list[str]) -> str:
    return printable(str(json.loads(lines[0])[0]))


# Reading: all tensors once, in batches, digested block by block.


@dataclass(frozen=True, slots=True)
class _Batch:
    items: tuple[ReadItem, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Digested:
    runs: list[BlockRun]
    read_bytes: int
    size_bytes: int


class _Reading:
    """Reads tensors of a checkpoint once and keeps their block digests: of stored elements, and of rounded ones."""

    def __init__(self, checkpoint: Checkpoint, wanted: Mapping[int, set[str]]) -> None:
        self.wanted = wanted
        self.read_bytes = 0
        self._checkpoint = checkpoint
        self._tensors = checkpoint.shard_map.tensors
        self._kernel: CastKernel = default_kernel()
        self._digests = TensorDigests()
        self.records = record_reads(checkpoint)

    def run(self, on_progress: Callable[[Progress], None] | None, should_stop: Callable[[], bool] | None) -> None:
        """Read everything."""
        total = sum(self._tensors[number].size_bytes for number in self.wanted)
        meter = ReadMeter("the fingerprint", total, on_progress=on_progress, should_stop=should_stop)

        def take(done: _Digested) -> None:
            for run in done.runs:
                self._digests.add(run)
            self.read_bytes += done.read_bytes
            meter.add(done.size_bytes)

        run_in_order(self._batches(), self._digest_batch, take, threads=reading_threads(self._checkpoint))

    def digest(self, number: int, dtype: Dtype) -> str:
        """The digest of a tensor whose elements are stored as, or rounded to, a type."""
        found = self._digests.digest(number, dtype.name, self._tensors[number].numel * dtype.itemsize_bytes)
        assert found is not None
        return found

    def described(self, number: int) -> list[Any]:
        """The type, shape and digest of a tensor, as values of JSON."""
        tensor = self._tensors[number]
        return [tensor.dtype.name, list(tensor.shape), self.digest(number, tensor.dtype)]

    def _batches(self) -> Iterator[_Batch]:
        """Runs of elements of all tensors, in the order of the shard map."""
        items: list[ReadItem] = []
        size_bytes = 0
        for number in sorted(self.wanted):
            tensor = self._tensors[number]
            size = tensor.dtype.itemsize_bytes
            step = max(_BATCH_BYTES // (size * _CUT_ELEMS), 1) * _CUT_ELEMS
            for begin in range(0, tensor.numel, step):
                end = min(begin + step, tensor.numel)
                if items and size_bytes + (end - begin) * size > _BATCH_BYTES:
                    yield _Batch(tuple(items), size_bytes)
                    items, size_bytes = [], 0
                items.append(ReadItem(number, tensor.dtype, begin, end, size_bytes))
                # Elements of every type lie at an address that numpy can view.
                size_bytes += -(-(end - begin) * size // 16) * 16
        if items:
            yield _Batch(tuple(items), size_bytes)

    def _digest_batch(self, batch: _Batch) -> _Digested:
        reader = TensorReader(self._checkpoint, self._kernel, reads=self.records)
        memory = np.empty(batch.size_bytes, dtype=np.uint8)
        reader.read(batch.items, memory)
        runs: list[BlockRun] = []
        for item in batch.items:
            data = memory[item.at : item.at + (item.end - item.begin) * item.dtype.itemsize_bytes]
            for name in self.wanted[item.tensor]:
                dtype = BY_NAME[name]
                shown = data if dtype is item.dtype else self._kernel.cast(data, item.dtype, dtype)
                first = block_count(item.begin * dtype.itemsize_bytes)
                runs.append(BlockRun(item.tensor, name, first, _block_digests(shown.data)))
        return _Digested(runs, reader.counts.read_bytes, batch.size_bytes)


def _block_digests(data: memoryview) -> bytes:
    """The digests of the blocks of packed elements that begin at a block."""
    return b"".join(block_digest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))
