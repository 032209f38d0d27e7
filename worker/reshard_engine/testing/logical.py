"""The training state before a framework partitions it: the oracle of every law.

Source formats write a `LogicalState` to files, targets are compared with it. Tensors are bits, so that equality means
bits: NaN payloads, negative zeros and subnormals count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias, cast

import numpy as np

from reshard_engine.tensors.dtypes import BY_NAME

Tree: TypeAlias = Any
"""None, bool, int, float, str, bytes, `Bits`, `Instance`, and lists, tuples, sets and dicts of them."""
MASTER = "fp32"
"""The state that holds a parameter's master weight, whatever its element type."""
_EXPONENTS = {"bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00), "float32": (np.uint32, 0x7F800000)}


@dataclass(frozen=True)
class Bits:
    """A tensor as its bytes: torch's name of the element type, the shape, packed row-major little-endian data."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Check that the number of bytes matches shape and type."""
        if prod(self.shape) * BY_NAME[self.dtype].itemsize_bytes != len(self.data):
            raise AssertionError(f"{len(self.data)} bytes for {self.dtype}{list(self.shape)}")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: FBT001 - Hypothesis calls it so
        """Print the tensor without its data, also in the examples that Hypothesis prints."""
        printer.text(repr(self))

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def floating(self) -> bool:
        """True if the elements are floating-point numbers."""
        return BY_NAME[self.dtype].floating

    def with_plain_nans(self) -> Bits:
        """The bits with one payload for all NaNs, signs kept: casts agree on the rest (see `execute.casts.cast`)."""
        if self.dtype not in _EXPONENTS:
            return self
        word, exponent = _EXPONENTS[self.dtype]
        values = np.frombuffer(self.data, dtype=word)
        sign = word(1 << (8 * values.itemsize - 1))
        nan = (values & ~sign) > exponent
        plain = np.where(nan, (values & sign) | word(exponent) | word(1), values).astype(word)
        return Bits(self.dtype, self.shape, plain.tobytes())


@dataclass(frozen=True)
class Instance:
    """An object of a named class with its attributes, as data."""

    dotted: str
    attributes: Mapping[str, Tree]


@dataclass(frozen=True)
class LogicalParameter:
    """A parameter of the model, whole.

    Attributes:
        fqn: its name, the owner's where weights are tied.
        shape: its shape; equal for all its tensors.
        group: index of its optimizer param group; None for frozen ones and ones without elements.
        weight: its value in the model's element type; None where the files do not keep it.
        states: master (`MASTER`) and per-element optimizer states by name; empty if the optimizer does not own it.
    """

    fqn: str
    shape: tuple[int, ...]
    group: int | None
    weight: Bits | None
    states: Mapping[str, Bits]

    @property
    def value(self) -> Bits | None:
        """The best value that is kept: the master, else the weight."""
        return self.states.get(MASTER, self.weight)


@dataclass(frozen=True)
class LogicalState:
    """The whole state that a training run must find again.

    Attributes:
        dtype: the model's element type.
        parameters: in the model's order.
        buffers: persistent buffers by name.
        aliases: further names of tied parameters, to their owners.
        order: all names (parameters, buffers, aliases) in the model's order; owners come before their aliases.
        groups: hyper-parameters of each optimizer param group; None where they are not kept.
        steps: per group the optimizer's counter, a Python number or a tensor; None where it does not count.
        values: non-tensor state beside the model, by the framework's or the client's key.
        optimizer_values: non-tensor state of the optimizer wrapper (loss scaler, ...), by the framework's key.
    """

    dtype: str
    parameters: tuple[LogicalParameter, ...]
    buffers: Mapping[str, Bits]
    aliases: Mapping[str, str]
    order: tuple[str, ...]
    groups: tuple[Mapping[str, Tree], ...] | None
    steps: tuple[int | float | Bits | None, ...]
    values: Mapping[str, Tree]
    optimizer_values: Mapping[str, Tree]

    def parameter(self, fqn: str) -> LogicalParameter:
        """The parameter of this name."""
        return next(p for p in self.parameters if p.fqn == fqn)

    def of_group(self, group: int | None) -> tuple[LogicalParameter, ...]:
        """The parameters of a param group, or those that the optimizer does not own, in the model's order."""
        return tuple(p for p in self.parameters if p.group == group)

    @property
    def trained(self) -> tuple[LogicalParameter, ...]:
        """The parameters that the optimizer owns."""
        return tuple(p for p in self.parameters if p.group is not None)

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the per-element states beside the master, in order."""
        names = dict.fromkeys(name for p in self.trained for name in p.states)
        return tuple(name for name in names if name != MASTER)

    def renamed(self, names: Mapping[str, str]) -> LogicalState:
        """The state under other names; those that are not given stay."""
        return replace(
            self,
            parameters=tuple(replace(p, fqn=names.get(p.fqn, p.fqn)) for p in self.parameters),
            buffers={names.get(n, n): b for n, b in self.buffers.items()},
            aliases={names.get(a, a): names.get(o, o) for a, o in self.aliases.items()},
            order=tuple(names.get(n, n) for n in self.order),
        )


def tree_difference(left: Tree, right: Tree, where: str = "") -> str | None:
    """The first difference of two trees in a type, a key, an order or a bit of a value; None if they are equal."""
    if type(left) is not type(right):
        return f"{where or 'the root'}: {type(left).__name__} {left!r:.80} is no {type(right).__name__} {right!r:.80}"
    pairs: Iterable[tuple[str, Tree, Tree]]
    if isinstance(left, Instance):
        pairs = [(f"{where}:class", left.dotted, right.dotted), (where, dict(left.attributes), dict(right.attributes))]
    elif isinstance(left, dict):
        first, second = cast("dict[Any, Tree]", left), cast("dict[Any, Tree]", right)
        if list(first) != list(second):
            return f"{where}: keys {list(first)!r:.200} and {list(second)!r:.200}"
        pairs = ((f"{where}.{k}", first[k], second[k]) for k in first)
    elif isinstance(left, list | tuple):
        one, other = cast("Sequence[Tree]", left), cast("Sequence[Tree]", right)
        if len(one) != len(other):
            return f"{where}: {len(one)} and {len(other)} items"
        pairs = ((f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True)))
    else:
        # `repr` tells 0.0 from -0.0 and finds one NaN equal to another; sets print in any order, bits not at all.
        same = repr(left) == repr(right) if isinstance(left, float) else left == right
        return None if same else f"{where}: {left!r:.80} and {right!r:.80}"
    return next((found for name, a, b in pairs if (found := tree_difference(a, b, name)) is not None), None)
