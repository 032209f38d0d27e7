"""The training state before a framework partitions it: the oracle of every law, and what a format adds.

Source formats write a `LogicalState` to files, targets are compared with it. Tensors are bits, so that equality means
bits: NaN payloads, negative zeros and subnormals count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from hypothesis.strategies import SearchStrategy

from reshard.models.jobs import ConvertRequest
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
        return f"{where or 'the root'}: {type(left).__name__} {left!r:.80} is not {type(right).__name__} {right!r:.80}"
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


# The protocols by which a format inherits the laws: a writer of logical states, or a reader of the engine's output.


@dataclass(frozen=True)
class Case:
    """A run, and the partitioning that its framework would choose.

    Attributes:
        state: what the run holds.
        layout: the format's own description of the cut; printed when a law is broken.
    """

    state: LogicalState
    layout: Any


@dataclass(frozen=True)
class Saved:
    """A case in files.

    Attributes:
        state: what the files keep of the logical state; a format may keep less than a run holds.
        labels: items of the zoo that only the format can see (see the glossary).
        frozen_late: parameters that the optimizer owns and that were frozen since: some targets hold them as both.
        never_updated: parameters that the optimizer owns and that no gradient reached: the state has zeros for them.
        copies: aliases of which the files say only that they are equal: targets have them as tensors of their own.
        run_names: names by which DeepSpeed finds tensors again, where others leave them out, as of `torch.compile`.
        choices: fields of `SourceSpec` by which a user says what the files do not.
    """

    state: LogicalState
    labels: frozenset[str] = frozenset()
    frozen_late: frozenset[str] = frozenset()
    never_updated: frozenset[str] = frozenset()
    copies: frozenset[str] = frozenset()
    run_names: Mapping[str, str] = field(default_factory=dict[str, str])
    choices: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def in_the_run(self) -> Saved:
        """The saved state under the names by which DeepSpeed finds tensors again."""
        names = self.run_names
        late, never, copies = (
            frozenset(names.get(n, n) for n in found) for found in (self.frozen_late, self.never_updated, self.copies)
        )
        return Saved(self.state.renamed(names), self.labels, late, never, copies)


class SourceFormat(Protocol):
    """A way of saving training state, written the way the real framework writes it.

    Attributes:
        name: for reports.
        full: whether the files hold everything that a resumable target needs; else they hold weights.
        zoo: the items that examples must have, each with the share of examples that usually has it.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    full: bool

    @property
    def zoo(self) -> Mapping[str, float]: ...  # noqa: D102

    def cases(self) -> SearchStrategy[Case]:
        """Runs that can be saved this way."""
        ...

    def write(self, case: Case, directory: Path) -> Saved:
        """Write the files that the framework would write into an empty directory: what the user then names."""
        ...

    def checks_metadata(self, case: Case) -> bool:
        """True if checksums cover everything but tensor data, so that every flipped bit outside of it is found."""
        ...


@dataclass(frozen=True)
class Content:
    """The contents of a target, as an independent reader finds them.

    Attributes:
        tensors: by a name that says role and fqn.
        cast: names of the tensors that were cast; NaN payloads in them may differ.
        values: non-tensor state by name.
        overflows: by fqn, how many finite elements became infinite; only of expected contents.
    """

    tensors: Mapping[str, Bits]
    cast: frozenset[str] = frozenset()
    values: Mapping[str, Tree] = field(default_factory=dict[str, Tree])
    overflows: Mapping[str, int] = field(default_factory=dict[str, int])


class TargetOracle(Protocol):
    """A target format, read by a reader that shares no code with the engine."""

    name: str
    wants_full_state: bool
    """True if only sources with optimizer states can be converted to this target."""

    def options(self) -> SearchStrategy[Mapping[str, Any]]:
        """Fields of `ConvertRequest` that choose this target and its options."""
        ...

    def expected(self, saved: Saved, request: ConvertRequest) -> Content:
        """The contents that the target must have for a source."""
        ...

    def read(self, files: Mapping[str, bytes]) -> Content:
        """Read the contents of a target's files; an assertion fails for any unexpected file."""
        ...
