"""Layouts that cannot be: each is refused with a code, the numbers, and a `fix` that works."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from house.expected import raised
from house.requests import asked
from laws.deepspeed_files import Layout, write_checkpoint
from laws.pipeline_source import Part, seeded_model
from laws.small_models import PLAIN, model_with_experts, piped_model, write_source
from reshard.choices import TargetFormat
from reshard.cli.main import run
from reshard.errors import RequestError, ReshardError, SourceError
from reshard.models.jobs import ConvertRequest
from reshard.options import RunLayout, SourceSpec
from reshard_engine.local import LocalEngine


def _refused(source: Path, options: dict[str, Any] | None = None, **layout: Any) -> ReshardError:
    return raised(ReshardError, _plan, source, options, **layout)


def _plan(source: Path, options: dict[str, Any] | None = None, **layout: Any) -> None:
    target = str(source.parent / "to" / "step3")
    fields = {"source": SourceSpec(url=str(source)), "target": target, "to": TargetFormat.ZERO, "dp": 1, **layout}
    LocalEngine().plan(asked(**(fields | (options or {}))))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_source(tmp_path / "plain", seeded_model(PLAIN, piped=False, layers=2, heads=6))


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    return write_source(tmp_path / "bare", seeded_model(PLAIN, piped=False, layers=2, told=False))


@pytest.fixture
def piped(tmp_path: Path) -> Path:
    return write_source(tmp_path / "piped", piped_model())


# -- tensor parallelism ---------------------------------------------------------------------------------------------


def test_heads_are_not_cut_through(plain: Path) -> None:
    error = _refused(plain, tp=4)
    assert (error.code, error.fix) == ("request.unsatisfiable", "--tp 3")
    assert "layers.1.qkv.weight (12, 3) cannot be cut over 4 ranks: 6 heads do not divide by 4" in error.message
    _plan(plain, tp=3)


def test_a_length_that_does_not_divide(tmp_path: Path) -> None:
    shapes = {**PLAIN, "layers.1.dense.weight": ((3, 10), Part("row", 1))}
    del shapes["layers.1.qkv.weight"]
    source = write_source(tmp_path / "source", seeded_model(shapes, piped=False, layers=2))
    error = _refused(source, tp=4)
    assert (error.code, error.fix) == ("request.unsatisfiable", "--tp 2")
    assert "(3, 10) cannot be cut over 4 ranks: 10 does not divide by 4" in error.message
    _plan(source, tp=2)


def test_a_source_that_does_not_say_how_it_is_cut(bare: Path) -> None:
    error = _refused(bare, tp=2)
    assert error.code == "request.unsatisfiable"
    assert "embed.tokens.weight" in error.message
    assert "--family" in error.fix
    assert "--rules" in error.fix
    rules = "parameter_with_row_parallelism_patterns: ['.*dense.*']\ntp_replicated_parameter_patterns: ['.*norm.*']\n"
    _plan(bare, {"rules": f"default: column\n{rules}"}, tp=2)


def test_parts_that_nothing_explains(tmp_path: Path) -> None:
    model = seeded_model(PLAIN, piped=False, layers=2, told=False)
    # The rules of a model are what its writer cuts by, whether the files say them or not.
    source = write_source(tmp_path / "parts", model, tp=2)
    error = _refused(source, tp=1)
    assert error.code == "checkpoint.unexplained"
    assert set(PLAIN) == set(error.details["parameters"])
    assert "--rules" in error.fix


# -- pipelines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "pp", "message"),
    [
        ("0,3,2", 3, "boundaries [0, 3, 2, 6] do not cut layers 0 to 5 into 3 stages"),
        ("0,3,3", 3, "boundaries [0, 3, 3, 6] do not cut"),
        ("1,3", 2, "boundaries [1, 3, 6] do not cut"),
        ("0,2,4", 2, "boundaries [0, 2, 4] do not cut layers 0 to 5 into 2 stages"),
        ("0,2,3,4", 2, "do not cut layers 0 to 5 into 2 stages"),
        ("0,2,x", 3, "boundaries '0,2,x'"),
    ],
)
def test_boundaries_that_do_not_cover(method: str, pp: int, message: str, piped: Path) -> None:
    error = _refused(piped, pp=pp, partition_method=method)
    assert error.code == "request.invalid"
    assert message in error.message
    assert error.fix is not None
    assert "from 0 on" in error.fix or "0,3,6" in error.fix
    _plan(piped, pp=2, partition_method="0,3")


def test_more_stages_than_layers(piped: Path) -> None:
    error = _refused(piped, pp=7, partition_method="parameters")
    assert (error.code, error.fix) == ("request.unsatisfiable", "--pp 6 or less")
    assert "7 pipeline stages for 6 layers" in error.message


def test_uniform_needs_the_number_of_layers(piped: Path) -> None:
    error = _refused(piped, pp=2, partition_method="uniform")
    assert error.code == "request.invalid"
    assert "--pipeline-layers N (at least 6)" in error.fix
    assert _refused(piped, pp=2, partition_method="uniform", pipeline_layers=5).fix == "at least 6"
    _plan(piped, pp=2, partition_method="uniform", pipeline_layers=6)


@pytest.mark.parametrize("method", ["best", "layer:3", "", "-1,3"])
def test_an_unknown_partition_method(method: str, piped: Path) -> None:
    error = _refused(piped, pp=2, partition_method=method)
    assert error.code == "request.invalid"
    assert "uniform, parameters, type:REGEX" in error.fix


def test_a_method_must_be_known(piped: Path) -> None:
    error = _refused(piped, pp=2)
    assert error.code == "request.invalid"
    assert "the layers of the 2 stages depend on the model's partition_method" in error.message
    # Every method that it offers is enough for a plan, with what stands beside it.
    assert error.fix.startswith("--partition-method parameters (DeepSpeed's default)")
    assert "type:REGEX, uniform with --pipeline-layers N" in error.fix
    assert "at least 6" in error.fix
    for method, layers in (("parameters", None), ("type:block", None), ("uniform", 6), ("0,3", None)):
        _plan(piped, pp=2, partition_method=method, pipeline_layers=layers)


def test_no_pipeline_has_no_stages(plain: Path) -> None:
    error = _refused(plain, pp=2, partition_method="parameters")
    assert error.code == "request.unsatisfiable"
    assert "--pp 1" in error.fix
    _plan(plain, pp=1)


# -- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "layout", "message", "fix"),
    [
        (6, {"dp": 4, "ep": 4}, "6 experts do not divide by --ep 4", "--ep 2"),
        (4, {"dp": 6, "ep": 4}, "6 data-parallel ranks do not divide by --ep 4", "--ep 2"),
        (4, {"dp": 3, "ep": 2}, "3 data-parallel ranks do not divide by --ep 2", "--ep 1"),
    ],
)
def test_expert_parallel_ranks_divide(
    experts: int, layout: dict[str, int], message: str, fix: str, tmp_path: Path
) -> None:
    source = write_source(tmp_path / "experts", model_with_experts(experts))
    error = _refused(source, **layout)
    assert (error.code, error.fix) == ("request.unsatisfiable", fix)
    assert message in error.message


def test_expert_parallel_ranks_need_experts(plain: Path) -> None:
    error = _refused(plain, dp=4, ep=2)
    assert (error.code, error.fix) == ("request.unsatisfiable", "--ep 1")
    assert "no experts" in error.message


@pytest.mark.parametrize("stage", ["0", "3"])
def test_stages_that_hold_no_experts(stage: str, tmp_path: Path) -> None:
    error = _refused(write_source(tmp_path / "experts", model_with_experts(4)), dp=2, zero_stage=stage)
    assert (error.code, error.fix) == ("request.unsatisfiable", "--zero-stage 1, 2 or bf16")
    assert f"stage {stage}" in error.message


# -- stages and types -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["2", "3"])
def test_pipelines_run_at_stage_1(stage: str, piped: Path) -> None:
    error = _refused(piped, pp=2, partition_method="0,3", zero_stage=stage)
    assert (error.code, error.fix) == (
        "request.unsatisfiable",
        "--zero-stage 1 or bf16; for Megatron-DeepSpeed also --names megatron-no-pipeline",
    )
    assert f"stage {stage}" in error.message


@pytest.mark.parametrize("stage", ["2", "3"])
def test_pipelines_of_one_stage_run_at_stage_1(stage: str, piped: Path) -> None:
    error = _refused(piped, pp=1, zero_stage=stage)
    assert error.code == "request.unsatisfiable"
    assert "--zero-stage 1 or bf16" in error.fix


def test_stage_0_grows_by_rules(tmp_path: Path) -> None:
    shapes = {"a.weight": ((4, 6), Part("row", 0)), "b.weight": ((4,), Part("whole", 0))}
    state = seeded_model(shapes, piped=False, layers=1, told=False).state
    values = {**state.values, "ds_config": {"zero_optimization": {"stage": 0}}}
    write_checkpoint(replace(state, values=values, optimizer_values={}), Layout(0, 1), tmp_path)
    rules = "parameter_with_row_parallelism_patterns: ['a.*']\ntp_replicated_parameter_patterns: ['b.*']\n"
    _plan(tmp_path, {"rules": rules, "target": str(tmp_path.parent / "out")}, tp=2, zero_stage="1")


def test_stage_0_holds_no_parts(plain: Path) -> None:
    error = _refused(plain, tp=2, zero_stage="0")
    assert (error.code, error.fix) == ("request.unsatisfiable", "--zero-stage 1")
    _plan(plain, zero_stage="0")


def test_the_bf16_optimizer_trains_in_bf16(plain: Path) -> None:
    error = _refused(plain, {"dtype": "fp16"}, zero_stage="bf16")
    assert (error.code, error.fix) == ("request.invalid", "--dtype bf16")
    assert "not float16" in error.message
    _plan(plain, {"dtype": "bf16"}, zero_stage="bf16")


def test_a_layout_belongs_to_native_targets(plain: Path) -> None:
    layout = RunLayout(dp=1)
    request = asked(
        source=SourceSpec(url=str(plain)), target=str(plain.parent / "u"), to=TargetFormat.UNIVERSAL, layout=layout
    )
    error = raised(RequestError, LocalEngine().plan, request)
    assert (error.code, error.fix) == ("request.invalid", "leave out --dp, or --to zero")
    assert "--to universal does not take --dp; it is for --to zero," in error.message


def test_native_targets_need_a_layout(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = ConvertRequest(source=SourceSpec(url=str(plain)), target=str(plain.parent / "n"), to=TargetFormat.ZERO)
    error = raised(RequestError, LocalEngine().plan, request)
    assert error.code == "request.invalid"
    assert "--dp" in error.fix
    assert run(["convert", str(plain), str(plain.parent / "n"), "--to", "zero"]) == 2
    assert "--dp" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--tp", "2"], ["--dp", "2"], ["--zero-stage", "1"]])
def test_layout_flags_belong_to_native_targets(
    flags: list[str], plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", str(plain), str(plain.parent / "u"), "--to", "universal", *flags]) == 2
    assert "--to zero" in capsys.readouterr().err


# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("a: &x [1]\ndefault: *x\n", "aliases are not read"),
        ("- just\n- a list\n", "not a mapping"),
        ("columns: ['.*']\n", "unknown key 'columns'"),
        ("default: row\n", "`refuse` or `column`"),
        ("default: [unclosed\n", "not a YAML document"),
        ("default: !!python/object/apply:os.getcwd []\n", "not a YAML document"),
        ("[" * 5000, "not a YAML document"),
    ],
)
def test_documents_that_are_no_rules(rules: str, message: str, bare: Path) -> None:
    error = _refused(bare, {"rules": rules})
    assert error.code == "request.invalid"
    assert message in error.message
    assert isinstance(error, RequestError)


def test_rules_have_a_size() -> None:
    with pytest.raises(ValueError, match="at most 65536 characters"):
        asked(source=SourceSpec(url="/x"), target="/y", to=TargetFormat.ZERO, rules="#" * (1 << 16) + "#")


@pytest.mark.parametrize(
    "rules",
    [
        "parameter_with_heads: [{patterns: ['x'], heads: 0}]",
        "parameter_with_heads: [{patterns: ['x']}]",
        "parameter_with_sub_params: [{patterns: ['x'], shape: [4, 4], partition_dim: 2}]",
        "parameter_with_sub_params: [{patterns: ['x'], shape: [[4, -4], 4], partition_dim: 0}]",
        "vocabulary_parameter_patterns: ['x']",
        "parameter_with_row_parallelism_patterns: [3]",
        "parameter_with_row_parallelism_patterns: ['(']",
        "parameter_with_row_parallelism_patterns: ['(?=x)']",
        "tp_replicated_parameter_patterns: x",
    ],
)
def test_rules_that_say_nothing(rules: str, bare: Path) -> None:
    error = _refused(bare, {"rules": rules}, tp=2)
    assert isinstance(error, SourceError)
    assert error.code == "rules.invalid"


def test_an_unknown_family(bare: Path) -> None:
    error = _refused(bare, {"family": "gpt-nobody"}, tp=2)
    assert error.code == "request.invalid"
    assert "'gpt-nobody'" in error.message
    assert error.fix == "known are bloom, gpt-megatron, llama-megatron"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        # Both ranks hold (6, 3): no dimension 1 of vectors, halves of an odd length, and another number of elements.
        ("parameter_with_row_parallelism_patterns: ['.*norm.weight']", "dimension 1 of [[3], [3]]"),
        ("parameter_with_2_sub_params_cat_dim_0: ['.*norm.weight']", "two halves of [[3], [3]]"),
        (
            "parameter_with_sub_params: [{patterns: ['.*qkv.weight'], shape: [[5, 4], 3], partition_dim: 0}]",
            "36 elements as [9, 3]",
        ),
        (
            "parameter_with_sub_params: [{patterns: ['.*qkv.weight'], shape: [[9, 3], 3], partition_dim: 0}]",
            "9 does not divide by 2",
        ),
    ],
)
def test_rules_that_contradict_the_parts(rules: str, message: str, tmp_path: Path) -> None:
    source = write_source(tmp_path / "parts", seeded_model(PLAIN, piped=False, layers=2, told=False), tp=2)
    error = _refused(source, {"rules": f"{rules}\ndefault: column\n"})
    assert error.code == "rules.contradiction"
    assert message in error.message
    assert "--rules" in error.fix


def test_rules_that_claim_one_parameter_twice(bare: Path) -> None:
    rules = "default: column\nparameter_with_row_parallelism_patterns: ['layers.*', '.*dense.*']\n"
    error = _refused(bare, {"rules": rules}, tp=2)
    assert error.code == "rules.ambiguous"
    assert "layers.1.dense.weight" in error.message
    assert "'layers.*' and '.*dense.*'" in error.message


def test_copies_that_are_none(tmp_path: Path) -> None:
    source = write_source(tmp_path / "parts", seeded_model(PLAIN, piped=False, layers=2, told=False), tp=2)
    wrong = "default: column\ntp_replicated_parameter_patterns: ['.*']\n"
    request = asked(
        source=SourceSpec(url=str(source)),
        target=str(tmp_path / "to" / "step3"),
        to=TargetFormat.ZERO,
        layout=RunLayout(dp=1),
        rules=wrong,
    )
    error = raised(SourceError, LocalEngine().convert, request)
    assert error.code == "checkpoint.disagreement"
    assert "layers.1.qkv.weight" in error.details["parameters"]
    assert not (tmp_path / "to" / "step3").exists()


def test_patterns_are_matched_in_linear_time(tmp_path: Path) -> None:
    """Python's own matcher would take 2**60 steps for the first, and for the second longer than the universe is old."""
    name = "a" * 60
    shapes = {f"{name}.{n}": ((4, 4), Part("whole", 0)) for n in range(50)}
    source = write_source(tmp_path / "source", seeded_model(shapes, piped=False, layers=1, told=False))
    patterns = [r"(a+)+$", r"(a|aa)*b(a|aa)*c", r"(.*)*x", r"(x+x+)+y"]
    rules = f"default: column\nparameter_with_row_parallelism_patterns: {patterns}\n"
    started = time.process_time()
    _plan(source, {"rules": rules}, tp=2)
    assert time.process_time() - started < 5
