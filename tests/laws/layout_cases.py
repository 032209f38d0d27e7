"""Which models and layouts the laws of layouts draw: kinds of cuts, ranks of every sort, options that move elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from laws.deepspeed_files import Layout, Stage
from laws.deepspeed_source import _config, _optimizer_values
from laws.pipeline_source import TIED, Model, Part, Ranks, rules_of
from laws.torch_values import cast
from reshard_engine.testing.logical import MASTER, Bits, LogicalParameter, LogicalState
from reshard_engine.testing.strategies import evenly

# Lengths that are cut are multiples of the first; the others divide it.
_UNITS = {4: (1, 2, 4), 6: (1, 2, 3, 6)}
_SPECIAL = np.array([0x80000000, 1, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x477FEFFF], np.uint32)


@dataclass(frozen=True)
class Drawn:
    """A model and what it can be cut over.

    Attributes:
        model: the model.
        tps: numbers of tensor-parallel ranks that its cuts allow.
        blocks: layers that hold parameters of every param group: each stage needs one.
    """

    model: Model
    tps: tuple[int, ...]
    blocks: int


class _Values:
    """Bits of masters from one seed: awkward numbers among them, no NaN, whose payloads casts may change."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> Bits:
        """Bits in the given type."""
        values = (self._random.standard_normal(shape) * 10.0 ** self._random.integers(-6, 5, shape)).astype(np.float32)
        words = np.atleast_1d(values).view(np.uint32).copy().reshape(-1)
        chosen = self._random.random(words.size) < 0.1
        words[chosen] = self._random.choice(_SPECIAL, int(chosen.sum()))
        return cast(Bits("float32", shape, words.tobytes()), dtype)


def _block(unit: int, width: int, draw: st.DrawFn) -> list[tuple[str, tuple[int, ...], Part]]:
    """Names, shapes and cuts of one block's parameters; the norm is always there."""
    found: list[tuple[str, tuple[int, ...], Part]] = [("norm.weight", (width,), Part("whole", 0))]
    kind = draw(evenly("column", "sections", "grid", "heads"))
    sections = (2 * unit, unit, unit) if kind == "sections" else (unit, 2 * unit)
    rows = {"column": 2 * unit, "sections": sum(sections), "grid": 2 * sum(sections), "heads": 3 * unit}[kind]
    cut = Part(kind, 0, sections if kind in ("sections", "grid") else ())
    others = [
        ("dense.weight", (width, unit), Part("row", 0)),
        ("dense.bias", (width,), Part("whole", 0)),
        ("up.weight", (2 * unit, width), Part("two", 0)),
        ("up.bias", (unit,), Part("column", 0)),
        ("conv.weight", (unit, 2, 3), Part("column", 0)),
        ("kernel.weight", (2, unit, 3), Part("row", 0)),
    ]
    kept = draw(st.lists(st.sampled_from(others), min_size=1, max_size=4, unique_by=lambda o: o[0]))
    return [*found, ("qkv.weight", (rows, width), cut), *kept]


@st.composite
def models(draw: st.DrawFn, *, dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")) -> Drawn:
    """Models of a few blocks between an embedding, which the head is tied to, and a last norm."""
    piped, unit = draw(st.booleans()), draw(evenly(*_UNITS))
    width, blocks, rows = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 23))
    dtype, master = draw(evenly(*dtypes)), draw(evenly("float32", "float32", "float32", ""))
    names = ("exp_avg", "exp_avg_sq") if draw(evenly(True, True, False)) else ()
    block = _block(unit, width, draw)
    head, layer = (TIED, "{}.") if piped else ("embed.", "layers.{}.")
    found: list[tuple[str, tuple[int, ...], Part]] = [(f"{head}tokens.weight", (rows, width), Part("vocabulary", 0))]
    if draw(st.booleans()):
        found.append((f"{head}scale", (width,), Part("whole", 0)))
    for number in range(1, blocks + 1):
        prefix = layer.format(number)
        found += [(prefix + name, shape, replace(part, layer=number)) for name, shape, part in block]
    found.append((f"{layer.format(blocks + 1)}final.weight", (width,), Part("whole", blocks + 1)))
    groups = draw(evenly(1, 2))
    frozen = draw(evenly(None, None, block[-1][0]))
    values = _Values(draw(st.integers(0, 2**32 - 1)))
    parameters: list[LogicalParameter] = []
    for name, shape, _ in found:
        if frozen is not None and name.endswith(frozen):
            parameters.append(LogicalParameter(name, shape, None, values.tensor(dtype, shape), {}))
            continue
        states = {MASTER: values.tensor(master or dtype, shape)}
        states |= {n: values.tensor(master or dtype, shape) for n in names}
        group = groups - 1 if len(shape) < 2 else 0
        parameters.append(LogicalParameter(name, shape, group, cast(states[MASTER], dtype), states))
    step = Bits("float32", (), np.float32(draw(st.integers(1, 9999))).tobytes()) if names else None
    aliases = {} if piped or draw(st.booleans()) else {"head.weight": f"{head}tokens.weight"}
    state = LogicalState(
        dtype,
        tuple(parameters),
        {},
        aliases,
        (*(p.fqn for p in parameters), *aliases),
        tuple(
            {"lr": 0.25 / (g + 1), "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5 * g} for g in range(groups)
        ),
        (step,) * groups,
        {"lr_scheduler": {"last_batch_iteration": 7}, "skipped_steps": 1, "global_steps": 9, "global_samples": 72},
        {},
    )
    parts = {name: part for name, _, part in found}
    rules = rules_of(parts, {name: shape for name, shape, _ in found}, unit)
    pad_to, told = draw(evenly(1, 2, 8)), draw(st.booleans())
    return Drawn(Model(state, parts, piped, blocks + 3, pad_to, told, rules), _UNITS[unit], blocks)


@st.composite
def ranks_of(draw: st.DrawFn, drawn: Drawn) -> Ranks:
    """A layout on which the model can run."""
    model = drawn.model
    stages: list[Stage] = [1] if model.piped else [1, 2, 3]
    stages += ["bf16"] if model.state.dtype == "bfloat16" else []
    stage = draw(evenly(*stages))
    first = [0]
    if model.piped and drawn.blocks > 1:
        cuts = draw(st.sets(st.integers(2, drawn.blocks), max_size=3))
        first += sorted(cuts)
    flat = stage in (1, 2)
    data = Layout(
        stage,
        draw(st.integers(1, 4)),
        round_robin=flat and draw(st.booleans()),
        alignment=flat and draw(st.booleans()),
        sub_group_size=draw(evenly(10**9, 1, 20)) if stage == 3 else 10**9,
    )
    return Ranks(draw(st.sampled_from(drawn.tps)), tuple(first), data)


def configured(model: Model, ranks: Ranks) -> Model:
    """The model with the configuration and the optimizer's values of a run on these ranks."""
    state, layout = model.state, ranks.data
    config: dict[str, Any] = {**_config(state, layout), "gradient_clipping": 0.5}
    if layout.stage == "bf16":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    extras = _optimizer_values(state.dtype, layout, 1.0, 0.5)
    return replace(model, state=replace(state, values={**state.values, "ds_config": config}, optimizer_values=extras))


def native(ranks: Ranks, *, pad_to: int | None = None) -> dict[str, Any]:
    """The request's options of the layout for these ranks, every option said."""
    data = ranks.data
    return {
        "zero_stage": str(data.stage),
        "dp": data.world,
        "tp": ranks.tp,
        "pp": ranks.pp,
        "partition_method": ",".join(map(str, ranks.first)) if ranks.pp > 1 else None,
        "vocab_divisor": pad_to,
        "round_robin_gradients": data.round_robin,
        "parameter_alignment": data.alignment,
        "sub_group_size": data.sub_group_size,
    }
