"""The zoo (the items that examples of the laws must have), and a census of the items that the examples had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, cast

from reshard_engine.testing.logical import Bits, LogicalState, Saved, Tree
from reshard_engine.testing.strategies import HUGE_ELEMS, ODD_NAMES

EVERYWHERE = (
    *("0-d tensor", "zero-length dim", "int", "bool", "bf16", "fp16", "fp32", "fp64", "tied weights", "huge tensor"),
    *("many tiny tensors", "odd name", "unicode name", "several groups", "frozen parameter", "buffer", "odd bits"),
    *("counter is a tensor", "counter is a number", "nested client state", "tensor in client state"),
)
"""Items that every source of training state must meet."""
CUTS = ("rank with nothing", "uneven cut", "replicas")
"""Items of formats that cut tensors over ranks."""
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "bool": "bool"}


def labels_of(saved: Saved) -> frozenset[str]:
    """The items of the zoo that are in a saved case, found in the values themselves."""
    return frozenset(_labels(saved.state)) | saved.labels


def _labels(state: LogicalState) -> Iterator[str]:
    for bits in _tensors(state):
        yield _DTYPES.get(bits.dtype, "int" if "int" in bits.dtype else bits.dtype)
        if bits.shape == ():
            yield "0-d tensor"
        if 0 in bits.shape:
            yield "zero-length dim"
        if bits.numel >= HUGE_ELEMS:
            yield "huge tensor"
        if bits.dtype == "float32" and bits.with_plain_nans() != bits:
            yield "odd bits"
    for name in state.order:
        if name in ODD_NAMES:
            yield "odd name" if name.isascii() else "unicode name"
    client = [value for key, value in state.values.items() if key.startswith("client:")]
    found = {
        "nested client state": any(isinstance(value, dict | list | tuple) for value in client),
        "tensor in client state": any(_has_tensor(value) for value in client),
        "many tiny tensors": sum(prod(p.shape) <= 8 for p in state.parameters) >= 20,
        "tied weights": bool(state.aliases),
        "several groups": len(state.groups or ()) > 1,
        "frozen parameter": any(prod(p.shape) for p in state.of_group(None)),
        "buffer": bool(state.buffers),
        "counter is a tensor": any(isinstance(s, Bits) for s in state.steps),
        "counter is a number": any(isinstance(s, int) for s in state.steps),
    }
    yield from (label for label, present in found.items() if present)


def _tensors(state: LogicalState) -> Iterator[Bits]:
    for parameter in state.parameters:
        yield from parameter.states.values()
        if parameter.weight is not None:
            yield parameter.weight
    yield from state.buffers.values()


def _has_tensor(tree: Tree) -> bool:
    items: Iterable[Tree] = ()
    if isinstance(tree, dict):
        items = cast("dict[Any, Tree]", tree).values()
    elif isinstance(tree, list | tuple):
        items = cast("Sequence[Tree]", tree)
    return isinstance(tree, Bits) or any(_has_tensor(item) for item in items)


class Census:
    """Counts the examples that met each item, by source format."""

    def __init__(self) -> None:
        """Nothing was met yet."""
        self._met: dict[str, Counter[str]] = {}
        self._examples: Counter[str] = Counter()

    def note(self, source: str, labels: Iterable[str]) -> None:
        """Count one example."""
        self._examples[source] += 1
        self._met.setdefault(source, Counter()).update(set(labels))

    def examples(self, sources: Iterable[str]) -> int:
        """The number of examples of these sources."""
        return sum(self._examples[s] for s in sources)

    def table(self, sources: Sequence[str]) -> list[str]:
        """One line per item over these sources, the rarest first."""
        met: Counter[str] = Counter()
        for source in sources:
            met.update(self._met.get(source, Counter()))
        found = sorted(met.items(), key=lambda entry: (entry[1], entry[0]))
        return [f"{count:6d} of {self.examples(sources)}  {item}" for item, count in found]
