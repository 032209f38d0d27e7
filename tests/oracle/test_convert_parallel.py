"""Model-parallel layouts into one another: real runs, written by our engine for other ranks, resumed by DeepSpeed.

The state is compared bit for bit right after plain ``engine.load_checkpoint``, as whole tensors that the test's own
definition of the model puts together; then the next losses, which in fp32 do not depend on the layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from house.tiers import rest_full
from oracle.outputs import convert
from oracle.parallel_cases import AUTOTP_CASES, GPT_CASES, MOE_CASES, GptCase, Layout, gpt_rules_yaml
from oracle.parallel_driver import ParallelOracle, Reloaded, Saved
from oracle.parallel_fixtures import TrainedOn
from oracle.truth import differences, meta_differences
from reshard.errors import RequestError, SourceError
from reshard.local import load_engine
from reshard.models.reports import DiffOptions
from reshard.options import NativeLayout, SourceSpec

FULL = Layout(2, 2, 2)
LAYOUTS = tuple(Layout(*ranks) for ranks in ((1, 1, 1), (1, 2, 2), (2, 1, 2), (1, 4, 1), (4, 1, 1)))
PIPELINE_LAYERS = 8  # embedding, positions, four blocks, the last norm, the head
LOSS_TOLERANCE = 2e-6  # of losses around 3: six digits


def _layout(case: GptCase, layout: Layout, **options: Any) -> NativeLayout:
    if layout.pp > 1:
        layers = PIPELINE_LAYERS - (case.positions == "tied")
        options = {"partition_method": case.partition_method, "pipeline_layers": layers} | options
    return NativeLayout(tp=layout.tp, pp=layout.pp, dp=layout.dp, vocab_divisor=case.pad_to, **options)


def _assert_is(run: Saved, again: Reloaded, *, losses: bool = True) -> None:
    assert differences(run.truth, again.state) == []
    assert meta_differences(run.truth, again.state) == []
    assert again.state.meta["replica_differences"] == []
    if losses:
        assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("layout", rest_full(LAYOUTS, Layout(1, 2, 2), Layout(4, 1, 1)), ids=str)
def test_a_pipeline_with_tensor_parallelism_resumes_on_any_layout(
    layout: Layout, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    case, run = GPT_CASES["gpt_fp32"], trained_on("gpt_fp32", FULL)
    convert(run.dir, tmp_path / "to" / run.tag, "zero", layout=_layout(case, layout))
    again = parallel.resume(case, layout, tmp_path / "to", tmp_path / "out")
    _assert_is(run, again)
    assert again.state.meta["wrong_weights"] == []


@pytest.mark.parametrize(
    ("name", "source", "target"),
    rest_full(
        [
            ("gpt_fp32_bare", FULL, Layout(1, 2, 1)),
            ("gpt_fp32_bare", Layout(1, 1, 1), Layout(2, 1, 1)),
            ("gpt_fp32_glu", FULL, Layout(4, 1, 1)),
            ("gpt_fp32_qkv_blocks", FULL, Layout(1, 1, 2)),
            ("gpt_fp32_gqa", FULL, Layout(1, 2, 1)),
            ("gpt_fp32_by_parameters", FULL, Layout(1, 3, 1)),
            ("gpt_bf16opt_glu", FULL, Layout(4, 1, 1)),
        ],
        ("gpt_fp32_bare", Layout(1, 1, 1), Layout(2, 1, 1)),
        ("gpt_fp32_qkv_blocks", FULL, Layout(1, 1, 2)),
        ("gpt_fp32_by_parameters", FULL, Layout(1, 3, 1)),
        ("gpt_bf16opt_glu", FULL, Layout(4, 1, 1)),
    ),
    ids=str,
)
def test_every_rule_resumes_on_another_layout(
    name: str, source: Layout, target: Layout, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    case, run = GPT_CASES[name], trained_on(name, source)
    # DeepSpeed's lists leave out what is cut along dimension 0; rules of a user have to say that they mean it.
    rules = None if case.info else f"default: column\n{gpt_rules_yaml(case)}"
    convert(run.dir, tmp_path / "to" / run.tag, "zero", layout=_layout(case, target), rules=rules)
    again = parallel.resume(case, target, tmp_path / "to", tmp_path / "out")
    _assert_is(run, again, losses=case.dtype == "fp32")


def test_positions_beside_a_tied_embedding_are_the_first_stages(
    trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    case, run = GPT_CASES["gpt_fp32_tied_positions"], trained_on("gpt_fp32_tied_positions", FULL)
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", layout=_layout(case, Layout(1, 2, 2)))
    assert any("another pipeline stage" in warning for warning in result.warnings)
    again = parallel.resume(case, Layout(1, 2, 2), tmp_path / "to", tmp_path / "out")
    # Stages load a layer's weights from its file, and the head has none: its unused copy stays as it was drawn.
    assert differences(run.truth, again.state, without=("module",)) == []
    assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


def test_a_universal_checkpoint_of_a_pipeline_resumes_with_tensor_parallelism(
    trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    case, run = GPT_CASES["gpt_fp32"], trained_on("gpt_fp32", FULL)
    convert(run.dir, tmp_path / "to" / f"{run.tag}_universal", "universal")
    for layout in (Layout(1, 1, 2), Layout(2, 2, 1), Layout(4, 1, 1)):
        out = tmp_path / str(layout)
        again = parallel.resume(case, layout, tmp_path / "to", out, load_universal=True)
        _assert_is(run, again)


def test_a_universal_checkpoint_of_a_pipeline_is_read_back(trained_on: TrainedOn, tmp_path: Path) -> None:
    case, run = GPT_CASES["gpt_fp32"], trained_on("gpt_fp32", FULL)
    convert(run.dir, tmp_path / "universal", "universal")
    convert(tmp_path / "universal", tmp_path / "to", "zero", layout=_layout(case, Layout(2, 1, 2)))
    source = SourceSpec(url=str(run.dir))
    for target in ("universal", "to"):
        report = load_engine().diff(source, SourceSpec(url=str(tmp_path / target)), DiffOptions())
        assert report.tensors > 0
        assert report.equal, report.differences


def test_without_rules_nothing_is_guessed(trained_on: TrainedOn, tmp_path: Path) -> None:
    case, run = GPT_CASES["gpt_fp32_bare"], trained_on("gpt_fp32_bare", FULL)
    with pytest.raises(SourceError) as caught:
        convert(run.dir, tmp_path / "to" / run.tag, "universal")
    assert caught.value.code == "checkpoint.unexplained"
    assert "2.attention.qkv.weight" in caught.value.details["parameters"]
    one = trained_on("gpt_fp32_bare", Layout(1, 1, 1))
    with pytest.raises(RequestError) as refused:
        convert(one.dir, tmp_path / "to" / run.tag, "zero", layout=_layout(case, Layout(2, 1, 1)))
    assert refused.value.code == "request.unsatisfiable"
    assert "--rules" in refused.value.fix


@pytest.mark.parametrize(
    ("name", "source", "target"),
    rest_full(
        [
            ("moe_fp32_z1", (4, 2), (4, 4)),
            ("moe_fp32_z1", (4, 2), (2, 1)),
            ("moe_fp32_z2", (2, 2), (4, 2)),
            ("moe_fp32_z2", (2, 1), (3, 1)),
            ("moe_bf16opt", (4, 4), (2, 2)),
        ],
        ("moe_fp32_z1", (4, 2), (2, 1)),
        ("moe_fp32_z2", (2, 2), (4, 2)),
        ("moe_bf16opt", (4, 4), (2, 2)),
    ),
    ids=str,
)
def test_experts_resume_on_other_ranks(
    name: str, source: tuple[int, int], target: tuple[int, int], parallel: ParallelOracle, tmp_path: Path
) -> None:
    case = MOE_CASES[name]
    run = parallel.train(case, Layout(dp=source[0], ep=source[1]), tmp_path / "from")
    layout = NativeLayout(dp=target[0], ep=target[1])
    convert(run.dir, tmp_path / "to" / run.tag, "zero", layout=layout)
    again = parallel.resume(case, Layout(dp=target[0], ep=target[1]), tmp_path / "to", tmp_path / "out")
    _assert_is(run, again, losses=case.dtype == "fp32")


@pytest.mark.parametrize(
    ("name", "source", "target"),
    rest_full(
        [
            ("autotp_z1", (2, 2), (1, 1)),
            ("autotp_z1", (2, 2), (4, 4)),
            ("autotp_z1", (4, 4), (4, 2)),
            ("autotp_z1_gqa", (2, 2), (2, 1)),
            ("autotp_z1_uneven", (2, 2), (1, 1)),
            ("autotp_z1_tied", (2, 2), (1, 1)),
            ("autotp_z1_vocab", (2, 2), (1, 1)),
            ("autotp_z2_bf16", (2, 2), (2, 1)),
            ("autotp_z3", (2, 2), (1, 1)),
            ("autotp_z3", (2, 2), (4, 4)),
        ],
        ("autotp_z1", (4, 4), (4, 2)),
        ("autotp_z1_gqa", (2, 2), (2, 1)),
        ("autotp_z1_uneven", (2, 2), (1, 1)),
        ("autotp_z1_tied", (2, 2), (1, 1)),
        ("autotp_z2_bf16", (2, 2), (2, 1)),
        ("autotp_z3", (2, 2), (4, 4)),
    ),
    ids=str,
)
def test_autotp_resumes_at_another_size(
    name: str, source: tuple[int, int], target: tuple[int, int], parallel: ParallelOracle, tmp_path: Path
) -> None:
    case = AUTOTP_CASES[name]
    run = parallel.train(case, Layout(tp=source[1], dp=source[0] // source[1]), tmp_path / "from")
    layout = NativeLayout(dp=target[0] // target[1], tp=target[1])
    convert(run.dir, tmp_path / "to" / run.tag, "zero", layout=layout)
    again = parallel.resume(case, Layout(tp=target[1], dp=target[0] // target[1]), tmp_path / "to", tmp_path / "out")
    _assert_is(run, again, losses=case.dtype == "fp32")


@pytest.mark.parametrize("name", rest_full(["autotp_z1", "autotp_z3"], "autotp_z3"))
def test_autotp_goes_down_and_back(name: str, parallel: ParallelOracle, tmp_path: Path) -> None:
    case = AUTOTP_CASES[name]
    run = parallel.train(case, Layout(tp=2, dp=1), tmp_path / "from")
    convert(run.dir, tmp_path / "one" / run.tag, "zero", layout=NativeLayout(dp=2, tp=1))
    convert(tmp_path / "one", tmp_path / "back" / run.tag, "zero", layout=NativeLayout(dp=1, tp=2))
    again = parallel.resume(case, Layout(tp=2, dp=1), tmp_path / "back", tmp_path / "out")
    _assert_is(run, again)
