"""Pairs of tensors and values to compare in two checkpoints, and differences that need no reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from reshard.diffs import Difference, DifferenceKind
from reshard_engine.checkpoint import Checkpoint, Scalar
from reshard_engine.pickles.differences import same_scalar, text_of
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.shard_map import LogicalTensor

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
        if number is not None and _rounds(other.tensor(number).dtype, dtype):
            return number
    return None


def _rounds(wide: Dtype, narrow: Dtype) -> bool:
    if wide is narrow:
        return True
    return wide.name in _CASTS_FROM and narrow.name in _CASTS_TO and wide.itemsize_bytes > narrow.itemsize_bytes
