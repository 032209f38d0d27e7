"""Broken laws that were found and mended, as their smallest examples."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from laws.deepspeed_files import Layout
from laws.deepspeed_source import DeepSpeedSource
from laws.targets import UniversalTarget, WeightsTarget
from reshard.choices import TargetFormat
from reshard.errors import SourceError
from reshard_engine.testing.laws import Trial, gather_then_slice, what_was_written_reads_back
from reshard_engine.testing.logical import MASTER, Bits, Case, LogicalParameter, LogicalState, Tree

UNIVERSAL, SAFETENSORS, TORCH = (
    UniversalTarget(),
    WeightsTarget(TargetFormat.SAFETENSORS),
    WeightsTarget(TargetFormat.TORCH),
)


def _floats(*values: float, dtype: Any = np.float32, shape: tuple[int, ...] | None = None) -> Bits:
    array = np.array(values, dtype=dtype)
    return Bits(array.dtype.name, array.shape if shape is None else shape, array.tobytes())


def _trained(fqn: str, value: Bits, *states: str) -> LogicalParameter:
    return LogicalParameter(fqn, value.shape, 0, value, dict.fromkeys((MASTER, *states), value))


def _state(*parameters: LogicalParameter, step: int | None, **others: Any) -> LogicalState:
    group: dict[str, Tree] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    counters = {"skipped_steps": 0, "global_steps": 1, "global_samples": 1, "lr_scheduler": None, "ds_config": {}}
    fields: dict[str, Any] = {"buffers": {}, "aliases": {}, "order": tuple(p.fqn for p in parameters)}
    return LogicalState(
        "float32",
        parameters,
        **(fields | others),
        groups=(group,),
        steps=(step,),
        values=counters,
        optimizer_values={},
    )


def _trial(state: LogicalState, layout: Layout, target: Any, **options: Any) -> Trial:
    execution = {k: options.pop(k) for k in ("part_bytes",) if k in options}
    source = DeepSpeedSource(layout.stage)
    return Trial(source, Case(state, layout), target, {"to": target.name, **options}, execution, Random(0))


@pytest.mark.parametrize("names", [("scale",), ("scale", "weight")])
def test_states_of_a_parameter_without_dimensions_are_tensors_at_stage_0(names: tuple[str, ...]) -> None:
    """They were taken for one number per group, and the conversion was refused."""
    shapes = {"scale": _floats(1.5, shape=()), "weight": _floats(1.0, 2.0)}
    state = _state(*(_trained(n, shapes[n], "exp_avg", "exp_avg_sq") for n in names), step=3)
    gather_then_slice(_trial(state, Layout(0, 2), UNIVERSAL))


def test_the_counter_of_a_param_group_survives_stage_0() -> None:
    """Fused optimizers count there; the step was written as 0."""
    state = _state(_trained("weight", _floats(1.0), "exp_avg", "exp_avg_sq"), step=7)
    gather_then_slice(_trial(state, Layout(0, 1, counter="group"), UNIVERSAL))


@pytest.mark.parametrize(("states", "counted"), [(("exp_avg",), False), (("exp_avg", "exp_avg_sq"), True)])
def test_list_form_states_without_a_counter_read_back(states: tuple[str, ...], counted: bool) -> None:
    """The groups come from `ds_config`; only the second conversion saw that they are Adam's, and wrote a step of 0."""
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.95]}}}
    state = _state(_trained("weight", _floats(1.0, 2.0), *states), step=None)
    state = replace(state, values={**state.values, "ds_config": config})
    trial = _trial(state, Layout(2, 2, elastic=True), UNIVERSAL)
    gather_then_slice(trial)
    what_was_written_reads_back(trial)
    assert any("no step counter" in w for w in trial.reference.result.warnings) is counted
    assert ("zero/weight/step.pt" in trial.reference.files) is counted


def test_a_float64_that_float32_cannot_hold_is_reported() -> None:
    """Counting it failed with a ValueError; and one beyond float32 was not counted when it became bf16."""
    buffers = {"wide": _floats(1e300, 1.0, -1e300, np.inf, np.nan, dtype=np.float64)}
    state = _state(_trained("weight", _floats(1.0)), step=None, buffers=buffers, order=("weight", "wide"))
    for dtype in ("fp32", "bf16", "fp16"):
        gather_then_slice(_trial(state, Layout(2, 1), SAFETENSORS, dtype=dtype))


def test_an_element_that_two_chunks_share_overflows_once() -> None:
    """It was cast for both chunks, and counted for both."""
    state = _state(
        _trained("weight", _floats(*[70000.0] * 3000)),
        step=None,
        buffers={"odd": Bits("bool", (1,), b"\1")},
        order=("odd", "weight"),
    )
    for part_bytes in (1031, 1500, 4097):
        gather_then_slice(_trial(state, Layout(1, 3), SAFETENSORS, dtype="fp16", part_bytes=part_bytes))


def test_other_names_of_frozen_parameters_go_with_them() -> None:
    """The alias stayed, and what had been its owner's name was lost when the result was read again."""
    frozen = LogicalParameter("frozen", (2,), None, _floats(1.0, 2.0), {})
    state = _state(
        _trained("weight", _floats(3.0), "exp_avg", "exp_avg_sq"),
        frozen,
        step=3,
        aliases={"alias": "frozen"},
        order=("weight", "frozen", "alias"),
    )
    for stage in (1, 2, 3):
        trial = _trial(state, Layout(stage, 2), UNIVERSAL, exclude_frozen=True)
        gather_then_slice(trial)
        what_was_written_reads_back(trial)


@pytest.mark.parametrize(("owner", "alias"), [("__metadata__", "alias"), ("weight", "format")])
def test_names_that_safetensors_keeps_for_itself_are_refused(owner: str, alias: str) -> None:
    """The header's own entry replaced the tensor's, and the file was no safetensors file."""
    state = _state(_trained(owner, _floats(1.0)), step=None, aliases={alias: owner}, order=(owner, alias))
    with pytest.raises(SourceError) as caught:
        gather_then_slice(_trial(state, Layout(2, 1), SAFETENSORS))
    assert caught.value.code == "name.invalid"
    gather_then_slice(_trial(state, Layout(2, 1), TORCH))
