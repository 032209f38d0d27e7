"""Compares two checkpoints: pairs of tensors and facts by name, read block by block, and what differs.

Memory is flat: a few blocks of each side at a time, whatever the checkpoints hold. Neither side is loaded, nothing in
them is executed, and bits are compared, so that a payload of a NaN or the sign of a zero counts.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from reshard.errors import JobError, counted, listed
from reshard.models.jobs import Progress
from reshard.models.reports import Difference, DifferenceKind, DiffOptions, DiffReport, DiffSide
from reshard_engine.checkpoint import (
    OF_TRAINING,
    Checkpoint,
    Counters,
    FormatFacts,
    OptimizerState,
    ParamGroup,
    Question,
    Scalar,
)
from reshard_engine.execute.casts.cast import CastKernel
from reshard_engine.execute.casts.placing import default_kernel
from reshard_engine.execute.gather import TensorReader
from reshard_engine.formats.format import RunFacts
from reshard_engine.formats.registry import format_of, formats
from reshard_engine.pickles.nodes import Node, PTensorRef
from reshard_engine.pickles.trees import TensorsAt, compare_trees, same_scalar, text_of
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.shard_map import LogicalTensor, index_at

# Pairs of tensors and values to compare in two checkpoints, and differences that need no reading.

MASTER = "fp32"
_CASTS_FROM = ("float64", "float32", "float16", "bfloat16")
_CASTS_TO = ("float32", "float16", "bfloat16")
"""The types to which `execute.casts.cast` rounds those of `_CASTS_FROM`."""


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors that should hold the same elements, compared as `dtype`."""

    name: str
    state: str
    a: int
    b: int
    dtype: Dtype
    rounded: bool
    """True if one side is rounded to `dtype` first."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A parameter or a buffer of one side."""

    role: str
    shape: tuple[int, ...]
    weight: int | None
    states: Mapping[str, int]
    scalars: Mapping[str, Scalar]
    group: int | None
    padding: Mapping[str, int]


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints, with its parameters and buffers by name."""

    checkpoint: Checkpoint
    entries: Mapping[str, _Entry] = field(init=False)

    def __post_init__(self) -> None:
        tensors = self.checkpoint.shard_map.tensors
        entries = {
            p.fqn: _Entry(role, p.shape, p.weight, p.states, p.scalars, p.group, p.padding)
            for p in self.checkpoint.parameters
            for role in ["trained" if p.trained else "frozen"]
        }
        for buffer in self.checkpoint.buffers:
            entries[buffer.fqn] = _Entry("buffer", tensors[buffer.tensor].shape, buffer.tensor, {}, {}, None, {})
        object.__setattr__(self, "entries", entries)

    @property
    def knows_roles(self) -> bool:
        """True if it shows the trained parameters. Files of weights do not, and may hold tied names twice."""
        return self.checkpoint.optimizer is not None

    def tensor(self, number: int) -> LogicalTensor:
        """A tensor of the shard map."""
        return self.checkpoint.shard_map.tensors[number]

    def names_of(self, owner: str) -> frozenset[str]:
        """All names of a tensor."""
        return frozenset({owner, *(a for a, o in self.checkpoint.shared.items() if o == owner)})

    def owner_of(self, name: str) -> str | None:
        """The name under which this side holds the tensor `name`; None if it has no such tensor."""
        owner = self.checkpoint.shared.get(name, name)
        return owner if owner in self.entries else None


class Matching:
    """The pairs of two sides, and the differences that show before any element is read."""

    def __init__(self, a: Side, b: Side, *, weights_only: bool) -> None:
        """Match everything at once."""
        self.a, self.b = a, b
        self.pairs: list[TensorPair] = []
        self.differences: list[Difference] = []
        self.rounded: Counter[tuple[str, str]] = Counter()
        """Tensors that are compared rounded, by side and element type."""
        self.groups: Counter[tuple[int, int]] = Counter()
        """The number of parameters that are in a group of `a` and in a group of `b`, by these two groups."""
        self.first_of: dict[tuple[int, int], str] = {}
        self.padded: dict[tuple[int, int], int] = {}
        """The number of vocabularies by their rows of padding on the two sides, where these differ."""
        self.values = 0
        self._weights_only = weights_only
        met: set[str] = set()
        for name, mine in a.entries.items():
            theirs = self._partner(name)
            if theirs is None:
                self._lone(name, mine, a)
                continue
            met.add(theirs)
            self._match(name, mine, b.entries[theirs])
        for name, entry in b.entries.items():
            if name not in met:
                self._lone(name, entry, b)
        self._compare_ties()

    def _partner(self, name: str) -> str | None:
        found = (self.b.owner_of(n) for n in (name, *sorted(self.a.names_of(name) - {name})))
        return next((f for f in found if f is not None), None)

    def _lone(self, name: str, entry: _Entry, side: Side) -> None:
        if side is self.b and (owner := self.a.owner_of(name)) is not None:
            # Side `b` has a tensor of this name; side `a` has the name as an alias of another tensor.
            self._weights(name, self.a.entries[owner], entry)
            return
        number = entry.weight if entry.weight is not None else entry.states.get(MASTER)
        dtype = "" if number is None else f" {side.tensor(number).dtype.name}"
        self._one_sided(DifferenceKind.MISSING, name, "", f"{entry.role}{dtype} {list(entry.shape)}", side)

    def _one_sided(self, kind: DifferenceKind, name: str, state: str, what: str, side: Side) -> None:
        mine, theirs = (what, None) if side is self.a else (None, what)
        self.differences.append(Difference(kind=kind, name=name, state=state, a=mine, b=theirs))

    def _match(self, name: str, mine: _Entry, theirs: _Entry) -> None:
        if name in self.a.checkpoint.unexplained or name in self.b.checkpoint.unexplained:
            texts = [f"{s.checkpoint.world.get('tp', 1)} parts" for s in (self.a, self.b)]
            self._differ(DifferenceKind.UNEXPLAINED, name, "", *texts)
            return
        if mine.shape != theirs.shape:
            self._differ(DifferenceKind.SHAPE, name, "", str(list(mine.shape)), str(list(theirs.shape)))
            return
        self._weights(name, mine, theirs)
        self._padding(name, mine, theirs)
        if 0 in mine.shape:
            # No optimizer has anything to keep of it: torch counts it among the trained ones, DeepSpeed does not.
            return
        if not (self.a.knows_roles and self.b.knows_roles):
            return
        open_ = name in self.a.checkpoint.unproven | self.b.checkpoint.unproven
        if mine.role != theirs.role and (not open_ or "trained" in (mine.role, theirs.role)):
            self._differ(DifferenceKind.ROLE, name, "", mine.role, theirs.role)
        if self._weights_only:
            return
        self._states(name, mine, theirs)
        if mine.group is not None and theirs.group is not None:
            self.groups[mine.group, theirs.group] += 1
            self.first_of.setdefault((mine.group, theirs.group), name)

    def _compare_ties(self) -> None:
        """Note names that are tied on one side, and not tied in the same way on the other side."""
        if not (self.a.knows_roles and self.b.knows_roles):
            return
        reported: set[str] = set()
        for side, other in ((self.a, self.b), (self.b, self.a)):
            for names in (side.names_of(n) for n in side.entries):
                apart = {other.names_of(o) if (o := other.owner_of(n)) else None for n in names}
                if len(names) == 1 or apart == {names} or reported & names:
                    continue
                reported |= names
                known = sorted(", ".join(sorted(group)) for group in apart if group)
                here, there = " = ".join(sorted(names)), "; ".join(known) or None
                mine, theirs = (here, there) if side is self.a else (there, here)
                first = min(names)
                self.differences.append(Difference(kind=DifferenceKind.TIED, name=first, a=mine, b=theirs))

    def _differ(self, kind: DifferenceKind, name: str, state: str, a: str, b: str) -> None:
        self.differences.append(Difference(kind=kind, name=name, state=state, a=a, b=b))

    # -- elements ---------------------------------------------------------------------------------------

    def _weights(self, name: str, mine: _Entry, theirs: _Entry) -> None:
        """Pair the masters, and pair each stored weight with the other side's weight of its type or rounded master."""
        if mine.shape != theirs.shape:
            return
        found: dict[tuple[int, int], TensorPair] = {}
        if MASTER in mine.states and MASTER in theirs.states:
            left, right = mine.states[MASTER], theirs.states[MASTER]
            if self.a.tensor(left).dtype is self.b.tensor(right).dtype:
                found[left, right] = self._pair(name, MASTER, left, right, dtype=self.a.tensor(left).dtype)
        state = "buffer" if "buffer" in (mine.role, theirs.role) else "weight"
        if mine.weight is not None and (right := _counterpart(self.a, mine.weight, self.b, theirs)) is not None:
            pair = self._pair(name, state, mine.weight, right, dtype=self.a.tensor(mine.weight).dtype)
            found.setdefault((pair.a, pair.b), pair)
        if theirs.weight is not None and (left := _counterpart(self.b, theirs.weight, self.a, mine)) is not None:
            pair = self._pair(name, state, left, theirs.weight, dtype=self.b.tensor(theirs.weight).dtype)
            found.setdefault((pair.a, pair.b), pair)
        for pair in found.values():
            self._take(pair)
        if not found:
            numbers = [e.states.get(MASTER) if e.weight is None else e.weight for e in (mine, theirs)]
            names = [
                "nothing" if n is None else s.tensor(n).dtype.name
                for n, s in zip(numbers, (self.a, self.b), strict=True)
            ]
            self._differ(DifferenceKind.DTYPE, name, state, *names)

    def _padding(self, name: str, mine: _Entry, theirs: _Entry) -> None:
        """Pair the padding rows behind a vocabulary, where both sides have the same number of them."""
        counts = [
            max((s.tensor(n).shape[0] for n in e.padding.values()), default=0)
            for s, e in ((self.a, mine), (self.b, theirs))
        ]
        if counts[0] != counts[1]:
            self.padded[counts[0], counts[1]] = self.padded.get((counts[0], counts[1]), 0) + 1
            return
        for state in mine.padding if not self._weights_only else (MASTER, "weight"):
            left, right = mine.padding.get(state), theirs.padding.get(state)
            if left is None or right is None:
                continue
            if (dtype := self.a.tensor(left).dtype) is self.b.tensor(right).dtype:
                self._take(self._pair(name, f"{state} of padding", left, right, dtype=dtype))

    def _take(self, pair: TensorPair) -> None:
        self.pairs.append(pair)
        if pair.rounded:
            side = "A" if self.a.tensor(pair.a).dtype is not pair.dtype else "B"
            self.rounded[side, pair.dtype.name] += 1

    def _pair(self, name: str, state: str, a: int, b: int, *, dtype: Dtype) -> TensorPair:
        left, right = self.a.tensor(a), self.b.tensor(b)
        return TensorPair(name, state, a, b, dtype, not (left.dtype is right.dtype is dtype), left.shape)

    def _states(self, name: str, mine: _Entry, theirs: _Entry) -> None:
        for state in dict.fromkeys((*mine.states, *theirs.states)):
            if state == MASTER:
                continue
            left, right = mine.states.get(state), theirs.states.get(state)
            if left is None or right is None:
                side, number = (self.b, right) if left is None else (self.a, left)
                if number is not None:
                    self._one_sided(DifferenceKind.MISSING, name, state, side.tensor(number).dtype.name, side)
            elif (dtype := self.a.tensor(left).dtype) is not self.b.tensor(right).dtype:
                self._differ(DifferenceKind.DTYPE, name, state, dtype.name, self.b.tensor(right).dtype.name)
            else:
                self._take(self._pair(name, state, left, right, dtype=dtype))
        for state in dict.fromkeys((*mine.scalars, *theirs.scalars)):
            one, other = mine.scalars.get(state), theirs.scalars.get(state)
            self.values += 1
            if one is None or other is None:
                side, scalar = (self.b, other) if one is None else (self.a, one)
                if scalar is not None:
                    self._one_sided(DifferenceKind.MISSING, name, state, text_of(scalar.value), side)
            elif not same_scalar(one.value, other.value):
                self._differ(DifferenceKind.SCALAR, name, state, text_of(one.value), text_of(other.value))

    # -- value pairs that the caller compares -----------------------------------------------------------

    def group_pairs(self) -> Iterator[tuple[tuple[int, int], str, int]]:
        """Pairs of param groups that share parameters: their numbers, the first shared parameter, the count."""
        for numbers, count in self.groups.items():
            yield numbers, self.first_of[numbers], count


def _counterpart(side: Side, weight: int, other: Side, entry: _Entry) -> int | None:
    """The tensor to compare with a stored weight: one of its type, else one that can be rounded to its type."""
    dtype = side.tensor(weight).dtype
    if entry.weight is not None and other.tensor(entry.weight).dtype is dtype:
        return entry.weight
    for number in (entry.states.get(MASTER), entry.weight):
        if number is not None and rounds_to(other.tensor(number).dtype, dtype):
            return number
    return None


def rounds_to(wide: Dtype, narrow: Dtype) -> bool:
    """True if elements of the first type can be compared with those of the second one after they were rounded."""
    if wide is narrow:
        return True
    return wide.name in _CASTS_FROM and narrow.name in _CASTS_TO and wide.itemsize_bytes > narrow.itemsize_bytes


# Non-tensor state of two checkpoints compared: hyper-parameters, counters, schedulers, client state, loss scale.

_COUNTER = "step"
"""An entry of groups that is compared per parameter."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The result of comparing the state that is not a tensor of a parameter."""

    differences: tuple[Difference, ...]
    pairs: tuple[TensorPair, ...]
    """Tensors inside the trees, still to be compared."""
    notes: tuple[str, ...]
    values: int
    """The number of values that were compared; a nested value counts as one."""


class FactComparison:
    """Compares the state that is not a tensor of a parameter."""

    def __init__(self, a: Checkpoint, b: Checkpoint, matching: Matching) -> None:
        """Take the two sides, and their matching, which pairs param groups with common parameters."""
        self._a, self._b, self._matching = a, b, matching
        self._differences: list[Difference] = []
        self._pairs: list[TensorPair] = []
        self._notes: list[str] = []
        self._values = 0

    def compare(self) -> Facts:
        """Compare all state that is not a tensor of a parameter.

        Raises:
            SourceError: `checkpoint.malformed` for trees of the wrong shape.
        """
        mine, theirs = self._facts()
        if self._a.optimizer is not None and self._b.optimizer is not None:
            self._hyper_parameters(self._a.optimizer, self._b.optimizer)
            self._optimizer_facts(mine, theirs)
        elif self._a.optimizer is not self._b.optimizer:
            self._lone("optimizer states", in_a=self._a.optimizer is not None)
        self._run_state(mine, theirs)
        self._extra_states(self._a.extra_states, self._b.extra_states)
        return Facts(tuple(self._differences), tuple(self._pairs), tuple(self._notes), self._values)

    def _facts(self) -> tuple[RunFacts, RunFacts]:
        """The facts of both runs. Runs of two families have only facts that every format has, and common counters."""
        a, b = self._a, self._b
        if a.family == b.family:
            return format_of(a).presentation.run_facts(a), format_of(b).presentation.run_facts(b)
        counted = [f.name for f in fields(Counters)]
        known = [n for n in counted if None not in (getattr(a.counters, n), getattr(b.counters, n))]
        return _shared_facts(a, known), _shared_facts(b, known)

    def _lone(self, what: str, *, in_a: bool) -> None:
        mine, theirs = ("present", None) if in_a else (None, "present")
        self._differences.append(Difference(kind=DifferenceKind.MISSING, name=what, a=mine, b=theirs))

    def _hyper_parameters(self, a: OptimizerState, b: OptimizerState) -> None:
        if not a.groups or not b.groups:
            self._notes.append("a side carries no hyper-parameters (list-form states): not compared")
            return
        lone: dict[str, None] = {}
        for (left, right), first, count in self._matching.group_pairs():
            mine, theirs = hyper_parameters(a.groups[left]), hyper_parameters(b.groups[right])
            for key in dict.fromkeys((*mine, *theirs)):
                if self._a.family != self._b.family and not (key in mine and key in theirs):
                    lone[str(key)] = None
                    continue
                self._tree(
                    (mine.get(key), theirs.get(key)),
                    DifferenceKind.HYPER_PARAMETER,
                    first,
                    state=str(key),
                    parameters=count,
                )
        if lone:
            self._notes.append(f"hyper-parameters that the optimizer of one framework alone has: {listed(list(lone))}")

    def _optimizer_facts(self, mine: RunFacts, theirs: RunFacts) -> None:
        """Compare values beside the param groups; optional values only where both sides have them."""
        for name in dict.fromkeys((*mine.optimizer, *theirs.optimizer)):
            both = name in mine.optimizer and name in theirs.optimizer
            if both or name not in mine.optional | theirs.optional:
                self._tree((mine.optimizer.get(name), theirs.optimizer.get(name)), DifferenceKind.STATE, name)

    def _run_state(self, mine: RunFacts, theirs: RunFacts) -> None:
        if mine.state is None or theirs.state is None:
            if mine.state is not theirs.state:
                self._lone("counters and client state", in_a=mine.state is not None)
            return
        for key in dict.fromkeys((*mine.state, *theirs.state)):
            self._tree((mine.state.get(key), theirs.state.get(key)), DifferenceKind.STATE, key)

    def _extra_states(self, mine: Mapping[str, Node], theirs: Mapping[str, Node]) -> None:
        """Compare the entries of the models' state dicts that are not tensors."""
        for name in dict.fromkeys((*mine, *theirs)):
            if name in mine and name in theirs:
                self._tree((mine[name], theirs[name]), DifferenceKind.STATE, f"module.{name}")
            else:
                self._lone(f"module.{name}", in_a=name in mine)

    def _tree(
        self, nodes: tuple[Node, Node], kind: DifferenceKind, name: str, *, state: str = "", parameters: int = 1
    ) -> None:
        """Compare two values; None and an entry that is not there are the same."""
        self._values += 1
        a, b = nodes
        if (a is None) != (b is None):
            mine, theirs = None if a is None else text_of(a), None if b is None else text_of(b)
            found = Difference(
                kind=DifferenceKind.MISSING, name=name, state=state, a=mine, b=theirs, parameters=parameters
            )
            self._differences.append(found)
            return
        for part in compare_trees(a, b, state or name):
            inner, where = (name, part.path) if state else (part.path, "")
            if isinstance(part, TensorsAt):
                assert isinstance(part.a, PTensorRef)
                assert isinstance(part.b, PTensorRef)
                self._tensors((part.a.index, part.b.index), inner, where)
                continue
            self._differences.append(
                Difference(kind=kind, name=inner, state=where, a=part.a, b=part.b, parameters=parameters)
            )

    def _tensors(self, numbers: tuple[int, int], name: str, state: str) -> None:
        left, right = self._matching.a.tensor(numbers[0]), self._matching.b.tensor(numbers[1])
        if left.shape != right.shape or left.dtype is not right.dtype:
            kind = DifferenceKind.SHAPE if left.shape != right.shape else DifferenceKind.DTYPE
            texts = [f"{t.dtype.name} {list(t.shape)}" for t in (left, right)]
            self._differences.append(Difference(kind=kind, name=name, state=state, a=texts[0], b=texts[1]))
            return
        pair = TensorPair(name, state or "value", *numbers, left.dtype, rounded=False, shape=left.shape)
        self._pairs.append(pair)


def hyper_parameters(group: ParamGroup) -> dict[str | int, Node]:
    """The values of a param group that say something in every layout and framework.

    A layout decides some of them, some say what is so without them, and the step is a number of each parameter.
    """
    left_out = {_COUNTER}.union(*(known.presentation.layout_fields(group) for known in formats()))
    implied = {key: value for known in formats() for key, value in known.presentation.implied_fields.items()}
    said = ((key, value) for key, value in group.hyper_parameters.items() if key not in left_out)
    return {key: value for key, value in said if not (key in implied and implied[key] is value)}


def _shared_facts(side: Checkpoint, counters: Sequence[str]) -> RunFacts:
    """The run state under the names that every format has, with only these counters."""
    if not FormatFacts().run_state(side):
        return RunFacts()
    found = Counters(**{name: getattr(side.counters, name) for name in counters})
    state = FormatFacts().run_state(replace(side, counters=found))
    return RunFacts({str(k): v for k, v in state.items()})


# Comparison of blocks of elements: by bits, and by distance where bits differ.

Bytes = npt.NDArray[np.uint8]
_WIDE = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
_PLAIN = {
    "int64": np.int64,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
}
_COMPLEX = {"complex64": np.complex64, "complex128": np.complex128}


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """The differences between some elements of two tensors. Element numbers count in row-major order."""

    count: int
    """Elements whose bits differ."""
    nonfinite: int
    """Differing elements that are infinite or NaN on a side, and so have no distance."""
    max_abs: float | None
    """The largest distance of finite elements; None if the type has no distance, or no finite elements differ."""
    max_rel: float | None
    """The largest distance divided by the larger magnitude of the two elements."""
    first: int
    first_a: str
    first_b: str

    def joined(self, later: ValueDifference) -> ValueDifference:
        """The sum of two differences, where `later` is of elements further on."""
        return replace(
            self,
            count=self.count + later.count,
            nonfinite=self.nonfinite + later.nonfinite,
            max_abs=_larger(self.max_abs, later.max_abs),
            max_rel=_larger(self.max_rel, later.max_rel),
        )


def _larger(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)


def compare_elements(a: Bytes, b: Bytes, dtype: Dtype, *, first: int) -> ValueDifference | None:
    """The difference between two packed runs of elements of one type; None if their bits are equal.

    Args:
        a: Little-endian bytes of one side.
        b: As many of the other one.
        dtype: Element type of both.
        first: Number of the first element, for `ValueDifference.first`.
    """
    size = dtype.itemsize_bytes
    # Compare eight bytes at a time: nearly all blocks are equal, and need no more than this.
    cut = len(a) // 8 * 8
    if np.array_equal(a[:cut].view(np.uint64), b[:cut].view(np.uint64)) and np.array_equal(a[cut:], b[cut:]):
        return None
    rows_a, rows_b = a.reshape(-1, size), b.reshape(-1, size)
    places = np.flatnonzero((rows_a != rows_b).any(axis=1))
    left, right = _numbers(rows_a[places], dtype), _numbers(rows_b[places], dtype)
    at = int(places[0])
    text_a, text_b = _text(rows_a[at], left), _text(rows_b[at], right)
    if text_a == text_b:
        # Payloads of NaNs, and numbers that print alike: only the bits tell them apart.
        text_a, text_b = (f"{t} (0x{bytes(r[at])[::-1].hex()})" for t, r in ((text_a, rows_a), (text_b, rows_b)))
    nonfinite, max_abs, max_rel = 0, None, None
    if left is not None and right is not None:
        finite = np.isfinite(left) & np.isfinite(right)
        nonfinite = int(len(finite) - finite.sum())
        max_abs, max_rel = _distances(left[finite], right[finite])
    return ValueDifference(len(places), nonfinite, max_abs, max_rel, first + at, text_a, text_b)


def _distances(
    left: npt.NDArray[np.float64 | np.complex128], right: npt.NDArray[np.float64 | np.complex128]
) -> tuple[float | None, float | None]:
    if not len(left):
        return None, None
    with np.errstate(over="ignore"):  # two large float64 of different sign
        distance = np.abs(left - right)
        size = np.maximum(np.abs(left), np.abs(right))
    relative = np.divide(distance, size, out=np.zeros(len(size), dtype=np.float64), where=size > 0)
    return float(distance.max()), float(relative.max())


def _numbers(rows: Bytes, dtype: Dtype) -> npt.NDArray[np.float64 | np.complex128] | None:
    """The elements as wide numbers; None for types that numpy does not know."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    if dtype.name == "bfloat16":
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype.name in _COMPLEX:
        return flat.view(_COMPLEX[dtype.name]).astype(np.complex128)
    plain = _WIDE.get(dtype.name) or _PLAIN.get(dtype.name)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return None if plain is None else flat.view(plain).astype(np.float64)


def _text(row: Bytes, numbers: npt.NDArray[np.float64 | np.complex128] | None) -> str:
    return f"0x{bytes(row)[::-1].hex()}" if numbers is None else f"{numbers[0]:.9g}"


# Compares two whole checkpoints, block by block, on several threads.

BLOCK_BYTES = 4 << 20
"""Bytes of one side that are compared at once."""
_THREADS = 4
_REMOTE_THREADS = 16
_REPORT_EVERY_S = 0.5
_ORDER = {kind: place for place, kind in enumerate(DifferenceKind)}


@dataclass(frozen=True, slots=True)
class _Block:
    pair: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    block: _Block
    difference: ValueDifference | None
    read_bytes: int


def diff_checkpoints(
    a: Checkpoint,
    b: Checkpoint,
    options: DiffOptions,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> DiffReport:
    """Compare two checkpoints by logical tensor.

    Raises:
        SourceError: `checkpoint.ambiguous`, `source.changed`, and the other errors of reading.
        JobError: `job.cancelled` if `should_stop` returns True.
    """
    started = time.monotonic()
    for side in (a, b):
        side.refuse_undecided(Question.BUFFERS, *(OF_TRAINING if options.weights_only else ()))
    sides = Side(a), Side(b)
    matching = Matching(*sides, weights_only=options.weights_only)
    facts = Facts((), (), (), 0) if options.weights_only else FactComparison(a, b, matching).compare()
    pairs = [p for p in (*matching.pairs, *facts.pairs) if not _ignored(p.name, p.state, options)]
    reading = _Reading(a, b, pairs, sample=options.sample, on_progress=on_progress, should_stop=should_stop)
    reading.run()
    found = [d for d in (*matching.differences, *facts.differences) if _counts(d, options)]
    found += [_of_elements(pairs[i], d, reading.compared[i]) for i, d in reading.differences.items()]
    return DiffReport(
        a=_side(a),
        b=_side(b),
        equal=not found,
        tensors=len(pairs),
        identical=len(pairs) - len(reading.differences),
        elements=sum(reading.compared),
        values=matching.values + facts.values,
        read_bytes=reading.read_bytes,
        sampled=options.sample,
        differences=tuple(sorted(found, key=_severity)),
        notes=(*_rounding_notes(matching), *_padding_notes(matching), *facts.notes),
        seconds=time.monotonic() - started,
    )


def _padding_notes(matching: Matching) -> list[str]:
    return [
        f"rows of padding behind {counted(count, 'vocabulary', 'vocabularies')} are not compared: A has {a}, B has {b}"
        for (a, b), count in matching.padded.items()
    ]


def _side(checkpoint: Checkpoint) -> DiffSide:
    return DiffSide(
        url=checkpoint.url,
        tag=checkpoint.tag,
        format=checkpoint.format,
        step=checkpoint.counters.steps,
        zero_stage=None
        if (stage := format_of(checkpoint).presentation.zero_stage(checkpoint)) is None
        else stage.number,
        world=dict(checkpoint.world),
    )


def _ignored(name: str, state: str, options: DiffOptions) -> bool:
    # A name may have characters that are special in patterns (`client.list[1]`): names are compared as text too.
    texts = (name, f"{name}/{state}")
    return any(p in texts or any(fnmatchcase(t, p) for t in texts) for p in options.ignore)


def _counts(difference: Difference, options: DiffOptions) -> bool:
    if options.common and (difference.a is None or difference.b is None):
        return False
    return not _ignored(difference.name, difference.state, options)


def _severity(difference: Difference) -> tuple[int, float, float, str, str]:
    # Worst first: by kind, then by the largest distance of elements.
    absolute = float("inf") if difference.nonfinite else difference.max_abs or 0.0
    count = difference.differing or 0
    return _ORDER[difference.kind], -absolute, -count, difference.name, difference.state


def _rounding_notes(matching: Matching) -> Iterator[str]:
    for (side, dtype), count in sorted(matching.rounded.items()):
        other = "B" if side == "A" else "A"
        were = "was" if count == 1 else "were"
        yield f"{counted(count, 'tensor')} of {side} {were} rounded to {dtype} before comparing: {other} stores {dtype}"


def _of_elements(pair: TensorPair, found: ValueDifference, compared_elems: int) -> Difference:
    return Difference(
        kind=DifferenceKind.ELEMENTS,
        name=pair.name,
        state=pair.state,
        a=found.first_a,
        b=found.first_b,
        compared_as=pair.dtype.name if pair.rounded else None,
        elements=compared_elems,
        differing=found.count,
        nonfinite=found.nonfinite,
        max_abs=found.max_abs,
        max_rel=found.max_rel,
        first_index=index_at(found.first, pair.shape),
    )


JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")


def reading_threads(*checkpoints: Checkpoint) -> int:
    """The number of threads that read these checkpoints."""
    return min(_THREADS, os.cpu_count() or 1) if all(c.is_local for c in checkpoints) else _REMOTE_THREADS


def run_in_order(
    jobs: Iterable[JobT], work: Callable[[JobT], ResultT], take: Callable[[ResultT], None], *, threads: int
) -> None:
    """Do jobs on several threads, and take their results on this thread in the order of the jobs.

    Few jobs are begun ahead of the results that were taken, so that memory is bounded.
    """
    under_way: deque[Future[ResultT]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for job in jobs:
                if len(under_way) > 2 * threads:
                    take(under_way.popleft().result())
                under_way.append(pool.submit(work, job))
            while under_way:
                take(under_way.popleft().result())
        finally:
            for future in under_way:
                future.cancel()


class ReadMeter:
    """Counts the bytes of an operation that only reads, reports its progress, and stops it."""

    def __init__(
        self,
        what: str,
        bytes_total: int,
        *,
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        """`what` is the operation as the subject of a sentence."""
        self._what, self._bytes_total = what, bytes_total
        self._on_progress, self._should_stop = on_progress, should_stop
        self._bytes_done = 0
        self._started = self._reported = time.monotonic()

    def add(self, count_bytes: int) -> None:
        """Count bytes that were read.

        Raises:
            JobError: `job.cancelled` if `should_stop` returns True.
        """
        self._bytes_done += count_bytes
        if self._should_stop is not None and self._should_stop():
            raise JobError(
                "job.cancelled",
                f"{self._what} was stopped; nothing was written",
                fix="run the same command again; it starts anew",
            )
        now = time.monotonic()
        if self._on_progress is None or now - self._reported < _REPORT_EVERY_S:
            return
        self._reported = now
        rate = self._bytes_done / max(now - self._started, 1e-9)
        total = max(self._bytes_total, self._bytes_done)
        self._on_progress(
            Progress(
                phase="running",
                bytes_done=self._bytes_done,
                bytes_total=total,
                rate_bytes_per_s=rate,
                eta_s=(total - self._bytes_done) / rate if rate else None,
            )
        )


class _Reading:
    """Reads the pairs block by block, a few at a time."""

    def __init__(
        self,
        a: Checkpoint,
        b: Checkpoint,
        pairs: Sequence[TensorPair],
        *,
        sample: float | None,
        on_progress: Callable[[Progress], None] | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        self.differences: dict[int, ValueDifference] = {}
        self.read_bytes = 0
        self.compared = [0] * len(pairs)
        """Elements that were compared, by the number of the pair."""
        self._a, self._b, self._pairs = a, b, pairs
        self._sample = sample
        self._kernel: CastKernel = default_kernel()
        bytes_total = int(sum(prod(p.shape) * p.dtype.itemsize_bytes for p in pairs) * (sample or 1.0))
        self._meter = ReadMeter("the comparison", bytes_total, on_progress=on_progress, should_stop=should_stop)

    def run(self) -> None:
        """Compare every block, or the chosen ones, in the order of the pairs."""
        run_in_order(self._blocks(), self._compare, self._take, threads=reading_threads(self._a, self._b))

    def _blocks(self) -> Iterator[_Block]:
        chance = random.SystemRandom()
        for number, pair in enumerate(self._pairs):
            numel, step = prod(pair.shape), BLOCK_BYTES // pair.dtype.itemsize_bytes
            for begin in range(0, numel, step):
                if self._sample is None or chance.random() < self._sample:
                    yield _Block(number, begin, min(begin + step, numel))

    def _compare(self, block: _Block) -> _Outcome:
        pair = self._pairs[block.pair]
        left, right = TensorReader(self._a, self._kernel), TensorReader(self._b, self._kernel)
        a = left.elements(pair.a, pair.dtype, block.begin, block.end)
        b = right.elements(pair.b, pair.dtype, block.begin, block.end)
        found = compare_elements(a, b, pair.dtype, first=block.begin)
        return _Outcome(block, found, left.counts.read_bytes + right.counts.read_bytes)

    def _take(self, outcome: _Outcome) -> None:
        pair, count = self._pairs[outcome.block.pair], outcome.block.end - outcome.block.begin
        self.read_bytes += outcome.read_bytes
        self.compared[outcome.block.pair] += count
        if outcome.difference is not None:
            known = self.differences.get(outcome.block.pair)
            # Blocks come in order: the first one of a tensor that differs holds its first difference.
            self.differences[outcome.block.pair] = (
                outcome.difference if known is None else known.joined(outcome.difference)
            )
        self._meter.add(count * pair.dtype.itemsize_bytes)
