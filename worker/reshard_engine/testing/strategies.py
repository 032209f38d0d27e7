"""Hypothesis strategies for logical states, which cover the zoo: every unusual property of real runs.

Values are drawn as bits from a seed, with the awkward ones sprinkled in: drawing each element would spend Hypothesis'
budget on what never decides anything but equality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.testing.logical import MASTER, Bits, LogicalParameter, LogicalState, Tree

_T = TypeVar("_T")
HUGE_ELEMS = 4_096
"""Number of elements from which a tensor spans many units of the smallest part size."""
MODEL_DTYPES = ("float32", "bfloat16", "float16")
BUFFER_DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "bool", "bfloat16", "float16", "float32", "float64"),
    *("bool", "float64", "uint16", "complex64", "float8_e4m3fn"),
)
ODD_NAMES = (
    *(
        "层.权重",
        "naïve.é",
        "naïve.e\u0301",
        "module.🔥.weight",
        "a b.c",
        "x" * 200,
        "-dash",
        "UPPER.lower",
        "upper.LOWER",
    ),
    *("fp32", "step", "zero", "param", "..dots", "dots..", ".hidden", "block/weight", "block/inner/weight", "%2e%2e"),
    *("quote'\"", "semi;colon", "star*", "{brace}", "tab?", "0", "00", "-1", "None", "weight.pt", "exp_avg", "latest"),
)
_WORDS = ("weight", "bias", "attn.qkv.weight", "mlp.up.weight", "norm.weight", "lora_A.default.weight", "gain")
_SPECIAL_BITS: Mapping[int, tuple[int, ...]] = {
    # -0, least and largest subnormal, infinities, quiet and signalling NaNs with payloads, the largest finite number,
    # ties of rounding; for bf16 and fp16 words in turn.
    2: (0x8000, 1, 0x007F, 0x03FF, 0x7F80, 0xFF80, 0x7C00, 0xFC00, 0x7FC1, 0x7F81, 0xFFFF, 0x7D01, 0x7F7F, 0x7BFF),
    4: (
        *(0x80000000, 1, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF),
        *(0x3F808000, 0x3F818000, 0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001, 0x7F7F8000, 0x387FE000),
    ),
    8: (1 << 63, 1, 0x7FF0000000000000, 0x7FF8000000000001, 0x7FF0000000000001, 0x7FEFFFFFFFFFFFFF),
}
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


class BitSource:
    """Bits of tensors from one seed."""

    def __init__(self, seed: int) -> None:
        """Equal seeds give equal bits."""
        self._random = np.random.default_rng(seed)

    def tensor(self, dtype: str, shape: Sequence[int]) -> Bits:
        """Random bits, a tenth of the floating elements special."""
        size = BY_NAME[dtype].itemsize_bytes
        numel = prod(shape)
        raw = self._random.integers(0, 256, numel * size, dtype=np.uint8)
        if dtype == "bool":
            raw &= 1
        elif BY_NAME[dtype].floating and size in _SPECIAL_BITS:
            raw = self._sprinkled(raw, size)
        return Bits(dtype, tuple(shape), raw.tobytes())

    def _sprinkled(self, raw: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
        words = raw.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[size])
        special = np.array(_SPECIAL_BITS[size], dtype=words.dtype)
        chosen = self._random.random(len(words)) < 0.1
        words[chosen] = special[self._random.integers(0, len(special), int(chosen.sum()))]
        return words.view(np.uint8)


def evenly(*options: _T) -> st.SearchStrategy[_T]:
    """Draw each option about equally often (`sampled_from` repeats itself); shrinks to the first."""

    # Knuth's multiplicative hash: whatever Hypothesis prefers among integers, it prefers no option.
    def chosen(number: int) -> _T:
        return options[(number * 2_654_435_761 % 2**32 >> 7) % len(options)]

    return st.integers(0, 2**32 - 1).map(chosen)


@dataclass(frozen=True)
class Rules:
    """The properties of runs that a format can hold; the defaults are those of ZeRO.

    Attributes:
        dtypes: element types of the model.
        frozen_dtypes: element types of frozen parameters beside the model's own.
        distinct_shapes: no two parameters share a shape, so that states without names can be told apart.
        max_groups: optimizer param groups.
        frozen: whether there may be parameters that the optimizer does not own; those without elements are such.
        stepped: the optimizer has states, since it has taken a step.
        stepped_adam: the optimizer is an Adam that has taken a step and counts beside each state.
    """

    dtypes: tuple[str, ...] = MODEL_DTYPES
    frozen_dtypes: tuple[str, ...] = ("uint8", "int8", "float32")
    distinct_shapes: bool = False
    max_groups: int = 3
    frozen: bool = True
    stepped: bool = False
    stepped_adam: bool = False


@dataclass(frozen=True)
class _Switches:
    """The properties of a run. They are drawn first and evenly, so that every item of the zoo is met often."""

    dtype: str
    shapes: str
    groups: int
    counter: str
    optimizer: int
    client_tensor: bool
    buffers: tuple[str, ...]


def _switches(rules: Rules) -> st.SearchStrategy[_Switches]:
    kinds = st.sampled_from(BUFFER_DTYPES)
    others = () if rules.stepped_adam else range(2, len(_OPTIMIZERS) - rules.stepped)
    first = evenly((), ("bool",), ("float64",), ("int64", "bool"), ("float32", "float64"))
    return st.builds(
        _Switches,
        evenly(*rules.dtypes),
        evenly("few", "huge", "tiny"),
        evenly(*range(1, rules.max_groups + 1)),
        evenly("tensor", "number"),
        evenly(0, 1, 0, 1, *others),
        evenly(False, True),
        first.flatmap(lambda some: st.lists(kinds, max_size=2).map(lambda more: (*some, *more))),
    )


def trees(tensors: BitSource | None = None) -> st.SearchStrategy[Tree]:
    """Nested values as schedulers and scripts keep them; with tensors where a source of bits is given."""
    numbers = st.integers(-(2**70), 2**70) | st.floats() | st.booleans()
    leaves = st.none() | numbers | _TEXT | st.binary(max_size=8)
    if tensors is not None:
        shapes = st.sampled_from([(), (0,), (3,), (2, 3)])
        leaves |= st.builds(tensors.tensor, st.sampled_from(("float32", "int64", "bfloat16", "bool")), shapes)
    keys = _TEXT | st.integers(-9, 9)
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=4)
            | st.sets(st.integers(0, 99), max_size=3)
        ),
        max_leaves=8,
    )


def _names(count: int) -> st.SearchStrategy[list[str]]:
    plain = st.builds("layers.{}.{}".format, st.integers(0, 99), st.sampled_from(_WORDS))
    odd = st.sampled_from(ODD_NAMES)
    # Of many, only some are drawn: an example that takes too much of Hypothesis' entropy is thrown away.
    drawn = min(count, 8)
    rest = [f"blocks.{i}.{_WORDS[i % len(_WORDS)]}" for i in range(count - drawn)]
    names = st.lists(st.one_of(plain, plain, odd), min_size=drawn, max_size=drawn, unique=True)
    return names.map(lambda found: [*found, *rest])


def _shapes(count: int, rules: Rules) -> st.SearchStrategy[list[tuple[int, ...]]]:
    dims = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)
    scalar: st.SearchStrategy[tuple[int, ...]] = st.just(())
    empty = st.sampled_from([(0,), (3, 0), (0, 2, 5)])
    one = st.one_of(dims, dims, dims, scalar, *([empty] if rules.frozen else []))
    return st.lists(one, min_size=count, max_size=count, unique=rules.distinct_shapes)


@st.composite
def _shape_lists(draw: st.DrawFn, kind: str, rules: Rules) -> list[tuple[int, ...]]:
    """Shapes of a model: a few of any kind, one huge among them, or many tiny ones."""
    if kind == "tiny" and not rules.distinct_shapes:
        count = draw(st.integers(20, 22))
        return draw(st.lists(st.sampled_from([(1,), (2,), (3,), (1, 2), ()]), min_size=count, max_size=count))
    if kind == "tiny":
        # Pairwise distinct, so they grow a little.
        return [(1 + i % 4,) + (1,) * (i // 4) for i in range(draw(st.integers(20, 22)))]
    shapes = draw(_shapes(draw(st.integers(1, 7)), rules))
    if kind == "huge":
        huge = draw(st.sampled_from([(HUGE_ELEMS,), (HUGE_ELEMS + 1,), (71, 67), (3, 41, 53)]))
        shapes.insert(draw(st.integers(0, len(shapes))), huge)
    return shapes


_OPTIMIZERS: tuple[tuple[tuple[str, ...], Mapping[str, Tree], bool], ...] = (
    (("exp_avg", "exp_avg_sq"), {"betas": (0.9, 0.95), "eps": 1e-08, "amsgrad": False, "fused": None}, True),
    (("exp_avg", "exp_avg_sq"), {"betas": (0.9, 0.999), "eps": 1e-15, "bias_correction": True}, True),
    (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), {"betas": (0.5, 0.9), "eps": 1e-06, "amsgrad": True}, True),
    (("exp_avg",), {"betas": (0.95, 0.98)}, False),
    (("momentum_buffer",), {"momentum": 0.9, "dampening": 0, "nesterov": True}, False),
    (("sum",), {"lr_decay": 0, "initial_accumulator_value": 0}, True),
    ((), {"betas": (0.9, 0.95), "eps": 1e-08}, False),
)
"""Per-element states, hyper-parameters, whether the optimizer counts. First Adams; last one before its first step."""


def _steps(kind: str) -> st.SearchStrategy[int | Bits]:
    counts = st.integers(0, 2**24)
    return counts if kind == "number" else counts.map(lambda n: Bits("float32", (), np.float32(n).tobytes()))


@st.composite
def _groups(
    draw: st.DrawFn, count: int, switches: _Switches
) -> tuple[tuple[Mapping[str, Tree], ...], tuple[int | Bits | None, ...]]:
    """Hyper-parameters and counters: groups may have stepped differently often."""
    _, common, counts = _OPTIMIZERS[switches.optimizer]
    rates = st.floats(0, 1) | st.just(0.001)
    groups = tuple({"lr": draw(rates), "weight_decay": draw(rates), **common} for _ in range(count))
    return groups, tuple(draw(_steps(switches.counter)) if counts else None for _ in range(count))


_COUNTERS = ("skipped_steps", "global_steps", "global_samples")


@st.composite
def _values(draw: st.DrawFn, bits: BitSource, *, tensor: bool) -> dict[str, Tree]:
    values: dict[str, Tree] = {key: draw(st.integers(0, 2**40)) for key in _COUNTERS}
    values["lr_scheduler"] = draw(st.none() | st.fixed_dictionaries({"last_batch_iteration": st.integers(-1, 10**6)}))
    client: dict[str, Tree] = draw(st.dictionaries(_TEXT.map("client:{}".format), trees(bits), max_size=3))
    if tensor:
        client["client:rng"] = {"cpu": [bits.tensor("uint8", (5,)), (3, None)]}
    return values | client


@st.composite
def _parameters(
    draw: st.DrawFn,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    switches: _Switches,
    *,
    rules: Rules,
    bits: BitSource,
) -> tuple[LogicalParameter, ...]:
    dtype, states = switches.dtype, _OPTIMIZERS[switches.optimizer][0]
    # The dtypes of masters and states follow the optimizer's options, for all parameters alike.
    master = draw(st.sampled_from(("float32",) * 6 + (dtype,)))
    moments = draw(st.sampled_from((master,) * 6 + ("bfloat16",)))
    frozen_dtypes = st.sampled_from((dtype,) * 3 + rules.frozen_dtypes)
    number = draw(_owners([prod(shape) > 0 for shape in shapes], switches.groups, frozen=rules.frozen))
    found: list[LogicalParameter] = []
    for name, shape, group in zip(names, shapes, number, strict=True):
        if group is None:
            kept = draw(frozen_dtypes) if prod(shape) else dtype
            found.append(LogicalParameter(name, shape, None, bits.tensor(kept, shape), {}))
            continue
        # The weight is drawn apart from the master, so that taking one for the other shows.
        tensors = {MASTER: bits.tensor(master, shape)} | {s: bits.tensor(moments, shape) for s in states}
        found.append(LogicalParameter(name, shape, group, bits.tensor(dtype, shape), tensors))
    return tuple(found)


@st.composite
def _owners(draw: st.DrawFn, trainable: Sequence[bool], wanted: int, *, frozen: bool) -> list[int | None]:
    """The param group of each parameter, None for frozen ones; each group that is numbered has a parameter."""
    drawn = st.sampled_from(range(-1 if frozen else 0, wanted))
    owners = [draw(drawn) if is_trainable else -1 for is_trainable in trainable]
    first = [i for i, is_trainable in enumerate(trainable) if is_trainable]
    for group, index in enumerate(first[:wanted]):
        owners[index] = group
    return [None if group < 0 else min(group, len(first) - 1) for group in owners]


@st.composite
def logical_states(draw: st.DrawFn, rules: Rules) -> LogicalState:
    """Logical states within the rules: at least one parameter that the optimizer owns."""
    bits = BitSource(draw(st.integers(0, 2**32 - 1)))
    switches = draw(_switches(rules))
    shapes = draw(_shape_lists(switches.shapes, rules).filter(lambda found: any(prod(s) for s in found)))
    buffers = [(dtype, draw(_buffer_shapes())) for dtype in switches.buffers]
    tied = draw(st.integers(0, 2))
    names = draw(_names(len(shapes) + len(buffers) + tied))
    own, rest = names[: len(shapes)], names[len(shapes) :]
    parameters = draw(_parameters(own, shapes, switches, rules=rules, bits=bits))
    groups, steps = draw(_groups(1 + max(p.group or 0 for p in parameters), switches))
    named_buffers = {n: bits.tensor(d, s) for n, (d, s) in zip(rest, buffers, strict=False)}
    owners = st.sampled_from([p.fqn for p in parameters if prod(p.shape)])
    aliases = {alias: draw(owners) for alias in rest[len(buffers) :]}
    order = [*own]
    for name in named_buffers:
        order.insert(draw(st.integers(0, len(order))), name)
    for alias, owner in aliases.items():
        order.insert(draw(st.integers(order.index(owner) + 1, len(order))), alias)
    return LogicalState(
        switches.dtype,
        parameters,
        {n: named_buffers[n] for n in order if n in named_buffers},
        {n: aliases[n] for n in order if n in aliases},
        tuple(order),
        groups,
        steps,
        draw(_values(bits, tensor=switches.client_tensor)),
        {},
    )


def _buffer_shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.sampled_from([(), (), (5,), (2, 3), (0,), (1,), (4, 1, 2)])


def execution_options() -> st.SearchStrategy[dict[str, Any]]:
    """Fields of `ConvertRequest` that may not change a byte: grain, threads and memory."""
    return st.fixed_dictionaries(
        {
            "part_bytes": st.sampled_from([1 << 10, 1 << 10, 1500, 4096, 10_007, 1 << 20]),
            "threads": st.sampled_from([1, 2, 5]),
            "memory_limit_bytes": st.sampled_from([1 << 21, 1 << 22, 1 << 30]),
        }
    )
