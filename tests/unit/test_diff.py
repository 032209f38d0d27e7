"""`reshard diff`: equal across cuts and formats, and for each kind of difference exactly that one."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from house.conversions import convert
from house.repository import DATA
from laws.deepspeed_files import Layout, write_checkpoint
from laws.deepspeed_source import cases_of, rules_of
from laws.universal_source import UniversalSource
from reshard.choices import TargetFormat, WeightDtype
from reshard.cli.main import run
from reshard.engine import load_engine
from reshard.models.jobs import Progress
from reshard.models.reports import DifferenceKind, DiffOptions, DiffReport, FingerprintOptions
from reshard.options import SourceSpec
from reshard_engine import local as engine_module
from reshard_engine.operations import diff as comparison
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.testing.logical import MASTER, Bits, Case, Instance, LogicalParameter, LogicalState

HYPER: Mapping[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}
GROUPS = (HYPER, {**HYPER, "weight_decay": 0.0})
SCALER = "deepspeed.runtime.fp16.loss_scaler.LossScaler"


def bf16(master: np.ndarray[Any, Any]) -> bytes:
    """Rounded to nearest, ties to even: the numbers here are finite."""
    bits = master.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def trained(fqn: str, shape: tuple[int, ...], group: int, seed: int) -> LogicalParameter:
    chance = np.random.default_rng(seed)
    values = {n: chance.standard_normal(shape).astype(np.float32) for n in (MASTER, "exp_avg", "exp_avg_sq")}
    states = {n: Bits("float32", shape, v.tobytes()) for n, v in values.items()}
    return LogicalParameter(fqn, shape, group, Bits("bfloat16", shape, bf16(values[MASTER])), states)


def small_state() -> LogicalState:
    frozen = Bits("bfloat16", (3, 2), bf16(np.arange(6, dtype=np.float32)))
    parameters = (
        trained("embed.weight", (7, 3), 0, 1),
        trained("up.weight", (5, 4), 0, 2),
        LogicalParameter("adapter", (3, 2), None, frozen, {}),
        trained("up.bias", (5,), 1, 3),
    )
    step = Bits("float32", (), struct.pack("<f", 3))
    return LogicalState(
        dtype="bfloat16",
        parameters=parameters,
        buffers={"seen": Bits("int64", (2,), struct.pack("<2q", 5, -1))},
        aliases={"head.weight": "embed.weight"},
        order=("embed.weight", "up.weight", "adapter", "up.bias", "seen", "head.weight"),
        groups=GROUPS,
        steps=(step, step),
        values={
            "ds_config": {"train_batch_size": 4},
            "lr_scheduler": {"last_batch_iteration": 2},
            "skipped_steps": 0,
            "global_steps": 3,
            "global_samples": 36,
            "epoch": 1,
            "client": {"list": [1, 2.5, None], "seeds": Bits("uint8", (4,), bytes(range(4)))},
        },
        optimizer_values={
            "loss_scaler": Instance(
                "deepspeed.runtime.fp16.loss_scaler.LossScaler", {"cur_scale": 1.0, "dynamic": False}
            )
        },
    )


def saved(place: Path, state: LogicalState, layout: Layout) -> Path:
    place.mkdir(parents=True)
    write_checkpoint(state, layout, place)
    return place


def diff(a: Path, b: Path, **options: Any) -> DiffReport:
    return load_engine().diff(SourceSpec(url=str(a)), SourceSpec(url=str(b)), DiffOptions(**options))


def same(a: Path, b: Path, *parts: str) -> bool:
    """True if two checkpoints have the same fingerprint: of the whole and of the run, or only of these components."""
    one, other = (load_engine().fingerprint(SourceSpec(url=str(p)), FingerprintOptions()) for p in (a, b))
    whole = bool(parts) or one.digest == other.digest
    return whole and all(one.components[p] == other.components[p] for p in parts or ("run",))


def found(report: DiffReport) -> list[tuple[str, str, str]]:
    return [(d.kind.value, d.name, d.state) for d in report.differences]


# -- equal ----------------------------------------------------------------------------------------------

CUTS: tuple[Layout, ...] = (
    Layout(1, 3),
    Layout(2, 2, round_robin=True),
    Layout(2, 1, alignment=True),
    Layout(3, 4, sub_group_size=8),
    Layout("bf16", 5),
    Layout(0, 1),
)


@pytest.mark.parametrize("cut", CUTS, ids=lambda c: f"{c.stage}x{c.world}")
def test_one_state_in_two_cuts_is_equal(cut: Layout, tmp_path: Path) -> None:
    state = small_state()
    a, b = saved(tmp_path / "a", state, Layout(3, 2)), saved(tmp_path / "b", state, cut)
    for report in (diff(a, b), diff(b, a)):
        assert found(report) == []
        assert report.equal
        # Masters, two moments, weights (rounded for stage 3), the frozen one, the buffer, the client's tensor.
        assert report.tensors == (3 * 3 + 2 + 1) + (0 if cut.stage == 3 else 3)
        assert report.identical == report.tensors
        assert report.elements >= 3 * 46 + 6 + 2 + 4
        assert report.values > 10
    assert same(a, b)
    rounded = [n for n in diff(a, b).notes if "rounded to bfloat16" in n]
    assert len(rounded) == (0 if cut.stage == 3 else 1)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_drawn_runs_are_equal_in_any_two_cuts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    stages = data.draw(st.sampled_from([(1, 2), (2, 3), (3, 1), (3, 3)]))
    case = data.draw(cases_of(stages[0], rules_of(3)))
    case = replace(case, layout=replace(case.layout, elastic=False))
    place = tmp_path_factory.mktemp("drawn")
    other = replace(
        case.layout,
        stage=stages[1],
        world=data.draw(st.integers(1, 4)),
        round_robin=False,
        alignment=False,
        sub_group_size=data.draw(st.sampled_from([1, 10**9])),
    )
    a, b = saved(place / "a", case.state, case.layout), saved(place / "b", case.state, other)
    # Special values are drawn for weights and masters one by one: the weight is not the rounded master.
    report = diff(a, b, ignore=("*/weight",))
    assert found(report) == []
    # The pattern matches a parameter whose own name ends so, with all its states.
    assert report.tensors >= sum(not p.fqn.endswith("/weight") for p in case.state.trained)
    assert same(a, b, "masters", "moments", "counters", "groups", "run")


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=UniversalSource().cases())
def test_the_universal_form_is_equal_to_its_source(tmp_path_factory: pytest.TempPathFactory, case: Case) -> None:
    place = tmp_path_factory.mktemp("universal")
    source = saved(place / "source", case.state, case.layout)
    tool = place / "tool"
    tool.mkdir()
    UniversalSource().write(case, tool)
    ours = place / "ours" / "u"
    convert(source, ours, to=TargetFormat.UNIVERSAL)
    assert found(diff(source, tool)) == []
    assert found(diff(source, ours)) == []
    assert same(source, tool)
    assert same(source, ours)


def test_weights_alone_are_compared_rounded_and_the_rest_is_said_to_be_missing(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", small_state(), Layout(3, 2))
    for dtype in WeightDtype:
        target = tmp_path / dtype.value
        convert(source, target, to=TargetFormat.SAFETENSORS, dtype=dtype)
        # Neither of bf16 and fp16 can be rounded to the other without loss; the frozen weight has no master.
        lossy = [("dtype", "adapter", "weight")] if dtype is WeightDtype.FP16 else []
        assert found(diff(source, target)) == [
            ("missing", "counters and client state", ""),
            ("missing", "optimizer states", ""),
            *lossy,
        ]
        report = diff(source, target, weights_only=True)
        assert found(report) == lossy
        assert report.tensors == 5 - len(lossy)
        assert found(diff(target, source, common=True)) == lossy
        expected = 0 if dtype is WeightDtype.FP32 else 3
        assert any(n.startswith(f"{expected} tensors of A were rounded") for n in report.notes) == bool(expected)


# -- different ------------------------------------------------------------------------------------------


def changed_bits(bits: Bits, at: int, value: bytes) -> Bits:
    data = bytearray(bits.data)
    size = BY_NAME[bits.dtype].itemsize_bytes
    data[at * size : (at + 1) * size] = value
    return replace(bits, data=bytes(data))


def with_parameter(name: str, change: Callable[[LogicalParameter], LogicalParameter]) -> LogicalState:
    state = small_state()
    return replace(state, parameters=tuple(change(p) if p.fqn == name else p for p in state.parameters))


def with_state(name: str, key: str, at: int, value: bytes) -> LogicalState:
    return with_parameter(name, lambda p: replace(p, states={**p.states, key: changed_bits(p.states[key], at, value)}))


def with_values(**values: Any) -> LogicalState:
    state = small_state()
    return replace(state, values={**state.values, **values})


def with_groups(second: Mapping[str, Any]) -> LogicalState:
    return replace(small_state(), groups=(GROUPS[0], {**GROUPS[1], **second}))


F3 = struct.pack("<f", 3.0)
PLANTED: dict[str, tuple[LogicalState, list[tuple[str, str, str]]]] = {
    "a moment": (with_state("up.weight", "exp_avg", 13, F3), [("elements", "up.weight", "exp_avg")]),
    "a master, but for its rounding": (
        with_state("up.weight", MASTER, 0, F3),
        [("elements", "up.weight", "fp32"), ("elements", "up.weight", "weight")],
    ),
    "a buffer": (
        replace(small_state(), buffers={"seen": Bits("int64", (2,), struct.pack("<2q", 5, -2))}),
        [("elements", "seen", "buffer")],
    ),
    "a frozen weight": (
        with_parameter("adapter", lambda p: replace(p, weight=changed_bits(p.weight or p.states[MASTER], 3, b"\0\0"))),
        [("elements", "adapter", "weight")],
    ),
    "a tensor of the client": (
        with_values(client={"list": [1, 2.5, None], "seeds": Bits("uint8", (4,), bytes(4))}),
        [("elements", "client.seeds", "value")],
    ),
    "a step": (
        replace(small_state(), steps=(small_state().steps[0], Bits("float32", (), struct.pack("<f", 4)))),
        [("scalar", "up.bias", "step")],
    ),
    "a learning rate": (with_groups({"lr": 0.2}), [("hyper-parameter", "up.bias", "lr")]),
    "one of two betas": (with_groups({"betas": (0.9, 0.99)}), [("hyper-parameter", "up.bias", "betas[1]")]),
    "a lost hyper-parameter": (
        replace(small_state(), groups=(GROUPS[0], {k: v for k, v in GROUPS[1].items() if k != "weight_decay"})),
        [("missing", "up.bias", "weight_decay")],
    ),
    "a counter": (with_values(global_steps=4), [("state", "global_steps", "")]),
    "client state": (
        with_values(client={"list": [1, 2.75, None], "seeds": Bits("uint8", (4,), bytes(range(4)))}),
        [("state", "client.list[1]", "")],
    ),
    "a lost client value": (with_values(epoch=None), [("missing", "epoch", "")]),
    "the loss scale": (
        replace(
            small_state(),
            optimizer_values={"loss_scaler": Instance(SCALER, {"cur_scale": 2.0, "dynamic": False})},
        ),
        [("state", "loss_scaler.cur_scale", "")],
    ),
    "a name": (
        replace(
            small_state(),
            buffers={"saw": small_state().buffers["seen"]},
            order=tuple("saw" if n == "seen" else n for n in small_state().order),
        ),
        [("missing", "saw", ""), ("missing", "seen", "")],
    ),
    "a shape": (
        replace(small_state(), buffers={"seen": Bits("int64", (2, 1), struct.pack("<2q", 5, -1))}),
        [("shape", "seen", "")],
    ),
    "a type": (
        replace(small_state(), buffers={"seen": Bits("int32", (2,), struct.pack("<2i", 5, -1))}),
        [("dtype", "seen", "buffer")],
    ),
    "a tie": (
        replace(small_state(), aliases={}, order=tuple(n for n in small_state().order if n != "head.weight")),
        [("tied", "embed.weight", "")],
    ),
}


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("stages", [(1, 3), (2, 2)], ids=str)
def test_each_difference_is_found_and_nothing_else(what: str, stages: tuple[Any, Any], tmp_path: Path) -> None:
    state, expected = PLANTED[what]
    a = saved(tmp_path / "a", small_state(), Layout(stages[0], 2))
    b = saved(tmp_path / "b", state, Layout(stages[1], 3))
    if what.startswith("a master") and stages == (2, 2):
        expected = expected[:1]  # both sides store the weight, and it is the same
    report = diff(a, b)
    assert sorted(found(report)) == expected
    assert not report.equal
    assert not same(a, b)
    assert found(diff(a, b, ignore=tuple(name for _, name, _ in expected))) == []


def test_a_frozen_parameter_that_was_trained_before_is_said_to_be(tmp_path: Path) -> None:
    state = small_state()
    thawed = trained("adapter", (3, 2), 0, 9)
    weight = state.parameter("adapter").weight
    thawed = replace(thawed, weight=weight)
    other = with_parameter("adapter", lambda _: thawed)
    a, b = saved(tmp_path / "a", state, Layout(2, 2)), saved(tmp_path / "b", other, Layout(2, 2))
    assert found(diff(a, b)) == [
        ("missing", "adapter", "exp_avg"),
        ("missing", "adapter", "exp_avg_sq"),
        ("missing", "adapter", "step"),
        ("role", "adapter", ""),
    ]
    assert found(diff(a, b, common=True)) == [("role", "adapter", "")]


def test_groups_in_another_order_are_the_same_groups(tmp_path: Path) -> None:
    state = small_state()
    swapped = tuple(replace(p, group=None if p.group is None else 1 - p.group) for p in state.parameters)
    other = replace(state, parameters=swapped, groups=(GROUPS[1], GROUPS[0]))
    a, b = saved(tmp_path / "a", state, Layout(2, 2)), saved(tmp_path / "b", other, Layout(1, 3))
    assert found(diff(a, b)) == []
    assert same(a, b)


# -- tensor parallelism ---------------------------------------------------------------------------------


def test_what_no_rule_explains_is_never_called_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = saved(tmp_path / "a", small_state(), Layout(2, 2)), saved(tmp_path / "b", small_state(), Layout(3, 1))
    read = engine_module.named_checkpoint

    def unexplained(location: Any, *arguments: Any) -> Any:
        found = read(location, *arguments)
        return replace(found, unexplained=("up.weight",)) if location.url.endswith("/b") else found

    monkeypatch.setattr(engine_module, "named_checkpoint", unexplained)
    assert found(diff(a, b)) == [("unexplained", "up.weight", "")]
    assert found(diff(b, a)) == [("unexplained", "up.weight", "")]
    assert found(diff(a, b, ignore=("up.weight",))) == []


# -- block by block --------------------------------------------------------------------------------------


def test_blocks_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "BLOCK_BYTES", 16)
    monkeypatch.setattr(comparison, "_REPORT_EVERY_S", 0.0)

    def twice(p: LogicalParameter) -> LogicalParameter:
        moment = changed_bits(p.states["exp_avg"], 20, struct.pack("<f", 100.0))
        return replace(p, states={**p.states, "exp_avg": changed_bits(moment, 4, struct.pack("<f", 50.0))})

    state = with_parameter("embed.weight", twice)
    a, b = saved(tmp_path / "a", small_state(), Layout(2, 2)), saved(tmp_path / "b", state, Layout(3, 3))
    seen: list[Progress] = []
    report = load_engine().diff(SourceSpec(url=str(a)), SourceSpec(url=str(b)), DiffOptions(), on_progress=seen.append)
    (difference,) = report.differences
    assert (difference.differing, difference.first_index, difference.elements) == (2, (1, 1), 21)
    assert difference.max_abs is not None
    assert 99 < difference.max_abs < 101 + 3
    assert difference.b == "50"
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
    assert seen[-1].bytes_done == seen[-1].bytes_total
    # A sample says that it is one, and finds what it meets.
    sampled = diff(a, b, sample=0.5)
    assert sampled.sampled == 0.5
    assert 0 < sampled.elements < report.elements
    assert report.verdict() == "different: 1 tensor differs bit by bit, in 2 of 21 elements"


def test_the_verdict_counts_what_it_names(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", small_state(), Layout(2, 2))
    other = with_parameter("up.weight", lambda p: replace(p, states={**p.states, "exp_avg": p.states["exp_avg_sq"]}))
    report = diff(a, saved(tmp_path / "b", other, Layout(2, 2)))
    (found,) = report.differences
    before, after = (np.frombuffer(bits_of("up.weight", name), "u4") for name in ("exp_avg", "exp_avg_sq"))
    counted = int((before != after).sum())
    assert (found.differing, found.elements) == (counted, 20)
    assert report.verdict() == f"different: 1 tensor differs bit by bit, in {counted} of 20 elements"


def bits_of(fqn: str, state: str) -> bytes:
    return next(p for p in small_state().parameters if p.fqn == fqn).states[state].data


def test_a_sample_counts_only_what_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "BLOCK_BYTES", 8)
    sides = DATA / "zero2_tiny", DATA / "zero3_tiny"
    report = diff(*sides, sample=0.5)
    assert sum(d.elements or 0 for d in report.differences) <= report.elements
    assert f"of {sum(d.elements or 0 for d in report.differences):,} elements" in report.verdict()


# -- the command ----------------------------------------------------------------------------------------


def test_the_command_says_equal_and_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(DATA / "zero2_tiny"), str(DATA / "zero2_tiny" / "global_step3"), "-q"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "equal"
    assert "39 of 39 tensors equal bit for bit" in shown.out
    assert shown.err == ""


def test_the_command_lists_the_worst_and_ends_with_7(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["diff", str(DATA / "zero2_tiny"), str(DATA / "zero3_tiny"), "-q"]
    assert run(arguments) == 7
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "different: 23 tensors differ bit by bit, in 656 of 1,029 elements"
    assert "embed.weight/weight: 1 of 174 elements, max |a-b| 0.000977" in lines[5]
    assert lines[-1] == "  ... and 3 more: --all"
    assert run([*arguments, "--all"]) == 7
    assert len(capsys.readouterr().out.splitlines()) == len(lines) + 2
    assert run([*arguments, "--ignore", "*/exp_avg*", "--states", "weights", "--json"]) == 7
    report = DiffReport.model_validate(json.loads(capsys.readouterr().out))
    assert report.schema_version == 1
    assert {d.kind for d in report.differences} == {DifferenceKind.ELEMENTS}
    assert {d.state for d in report.differences} == {"fp32", "weight"}
    worst = report.differences[0]
    assert worst.max_abs == max(d.max_abs or 0 for d in report.differences)


def test_errors_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", str(DATA / "zero2_tiny"), str(tmp_path / "none"), "-q"]) == 3
    assert run(["diff", str(DATA / "zero2_tiny"), ""]) == 2
    assert run(["diff", str(DATA / "zero2_tiny"), str(DATA / "zero2_tiny"), "--sample", "0%"]) == 2
    assert "error: request.invalid" in capsys.readouterr().err
