"""Non-tensor state of two checkpoints compared: hyper-parameters, counters, schedulers, client state, loss scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from reshard.diffs import Difference, DifferenceKind
from reshard.errors import listed
from reshard_engine.checkpoint import Checkpoint, Counters, FormatFacts, OptimizerState
from reshard_engine.formats.format import RunFacts
from reshard_engine.formats.registry import format_of
from reshard_engine.operations.diff.pairs import Matching, TensorPair
from reshard_engine.pickles.differences import TensorsAt, compare_trees, text_of
from reshard_engine.pickles.nodes import Node, PTensorRef

_COUNTER = "step"
"""An entry of groups that is compared per parameter."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The result of comparing the state that is no tensor of a parameter."""

    differences: tuple[Difference, ...]
    pairs: tuple[TensorPair, ...]
    """Tensors inside the trees, still to be compared."""
    notes: tuple[str, ...]
    values: int
    """The number of values that were compared; a nested value counts as one."""


class FactComparison:
    """Compares the state that is no tensor of a parameter."""

    def __init__(self, a: Checkpoint, b: Checkpoint, matching: Matching) -> None:
        """Take the two sides, and their matching, which pairs param groups with common parameters."""
        self._a, self._b, self._matching = a, b, matching
        self._differences: list[Difference] = []
        self._pairs: list[TensorPair] = []
        self._notes: list[str] = []
        self._values = 0

    def compare(self) -> Facts:
        """Compare all state that is no tensor of a parameter.

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
            return format_of(a).run_facts(a), format_of(b).run_facts(b)
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
            mine, theirs = a.groups[left].hyper_parameters, b.groups[right].hyper_parameters
            for key in dict.fromkeys((*mine, *theirs)):
                if key == _COUNTER:
                    continue
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
        """Compare the entries of the models' state dicts that are no tensors."""
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


def _shared_facts(side: Checkpoint, counters: Sequence[str]) -> RunFacts:
    """The run state under the names that every format has, with only these counters."""
    if not FormatFacts().run_state(side):
        return RunFacts()
    found = Counters(**{name: getattr(side.counters, name) for name in counters})
    state = FormatFacts().run_state(replace(side, counters=found))
    return RunFacts({str(k): v for k, v in state.items()})
