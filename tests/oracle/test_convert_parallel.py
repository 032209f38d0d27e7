"""Model-parallel layouts into one another: real runs, written by our engine for other ranks, resumed by DeepSpeed.

The state is compared bit for bit right after plain ``engine.load_checkpoint``, as whole tensors that the test's own
definition of the model puts together; then the next losses, which in fp32 do not depend on the layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from house.tiers import rest_full
from oracle.checkpoint_cases import (
    DATA_FIRST,
    FULL,
    FUSED_EXPERTS,
    LOSS_TOLERANCE,
    NATIVE_EXPERTS,
    OTHER_STAGES,
    PIPELINES,
    RULES,
    SPLIT_EXPERTS,
    TENSOR_RANKS,
    CheckpointCase,
    assert_resumed,
    gpt_layout,
    sampled,
)
from oracle.driver import ParallelOracle
from oracle.fixtures import TrainedOn
from oracle.outputs import convert, load, plain, raw, read_safetensors
from oracle.parallel_cases import AUTOEP_CASES, AUTOTP_CASES, EXPERTS, GPT_CASES, AutoEpCase, Layout
from oracle.real_folders import load_any
from oracle.truth import Resumed, differences
from reshard.engine import load_engine
from reshard.errors import RequestError, SourceError
from reshard.models.reports import DiffOptions
from reshard.options import RunLayout, SourceSpec


@pytest.mark.parametrize("case", sampled(PIPELINES, "gpt_fp32-tp2pp2dp2-pp2dp2", "gpt_fp32-tp2pp2dp2-tp4"), ids=str)
def test_a_pipeline_with_tensor_parallelism_resumes_on_any_layout(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(case.name, case.source)
    case.assert_resumed(run, case.converted(run, parallel, tmp_path))


@pytest.mark.parametrize(
    "case",
    sampled(
        RULES,
        "gpt_fp32_bare-one-tp2",
        "gpt_fp32_qkv_blocks-tp2pp2dp2-dp2",
        "gpt_fp32_by_parameters-tp2pp2dp2-pp3",
        "gpt_bf16opt_glu-tp2pp2dp2-tp4",
    ),
    ids=str,
)
def test_every_rule_resumes_on_another_layout(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(case.name, case.source)
    case.assert_resumed(run, case.converted(run, parallel, tmp_path))


def test_positions_beside_a_tied_embedding_are_the_first_stages(
    trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    case, run = GPT_CASES["gpt_fp32_tied_positions"], trained_on("gpt_fp32_tied_positions", FULL)
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", **gpt_layout(case, Layout(1, 2, 2)))
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
        assert_resumed(run, again)


def test_a_universal_checkpoint_of_a_pipeline_is_read_back(trained_on: TrainedOn, tmp_path: Path) -> None:
    case, run = GPT_CASES["gpt_fp32"], trained_on("gpt_fp32", FULL)
    convert(run.dir, tmp_path / "universal", "universal")
    convert(tmp_path / "universal", tmp_path / "to", "zero", **gpt_layout(case, Layout(2, 1, 2)))
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
        convert(one.dir, tmp_path / "to" / run.tag, "zero", **gpt_layout(case, Layout(2, 1, 1)))
    assert refused.value.code == "request.unsatisfiable"
    assert "--rules" in refused.value.fix


@pytest.mark.parametrize(
    "case",
    sampled(NATIVE_EXPERTS, "moe_fp32_z1-dp4ep2-dp2", "moe_fp32_z2-dp2ep2-dp4ep2", "moe_bf16opt-dp4ep4-dp2ep2"),
    ids=str,
)
def test_experts_resume_on_other_ranks(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(case.name, case.source)
    case.assert_resumed(run, case.converted(run, parallel, tmp_path))


@pytest.mark.parametrize(
    "case",
    sampled(
        TENSOR_RANKS,
        "autotp_z1-tp4-tp2dp2",
        "autotp_z1_gqa-tp2-dp2",
        "autotp_z1_uneven-tp2-one",
        "autotp_z1_tied-tp2-one",
        "autotp_z2_bf16-tp2-dp2",
        "autotp_z3-tp2-tp4",
    ),
    ids=str,
)
def test_autotp_resumes_at_another_size(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(case.name, case.source)
    case.assert_resumed(run, case.converted(run, parallel, tmp_path))


@pytest.mark.parametrize("name", rest_full(["autotp_z1", "autotp_z3"], "autotp_z3"))
def test_autotp_goes_down_and_back(name: str, parallel: ParallelOracle, tmp_path: Path) -> None:
    case = AUTOTP_CASES[name]
    run = parallel.train(case, Layout(tp=2, dp=1), tmp_path / "from")
    convert(run.dir, tmp_path / "one" / run.tag, "zero", layout=RunLayout(dp=2, tp=1))
    convert(tmp_path / "one", tmp_path / "back" / run.tag, "zero", layout=RunLayout(dp=1, tp=2))
    again = parallel.resume(case, Layout(tp=2, dp=1), tmp_path / "back", tmp_path / "out")
    assert_resumed(run, again)


# AutoEP runs onto other ranks and stages: real runs, written by our engine, resumed by DeepSpeed's plain loader.


STATES = ("fp32", "exp_avg", "exp_avg_sq")
STAGES: dict[str, Any] = {"1": 1, "2": 2, "3": 3, "bf16": "bf16opt"}


def _ranks(world: int, ep: int) -> Layout:
    return Layout(dp=world, ep=ep)


def _resume(
    parallel: ParallelOracle, case: AutoEpCase, tmp_path: Path, ranks: Layout, *, load_universal: bool = False
) -> Resumed:
    return parallel.resume(case, ranks, tmp_path / "to", tmp_path / "out", load_universal=load_universal)


@pytest.mark.full
def test_layouts_lose_alike_in_deepspeed_itself(trained_on: TrainedOn) -> None:
    runs = [trained_on("autoep_z1", _ranks(*ranks)) for ranks in ((1, 1), (2, 2), (4, 2))] + [
        trained_on("autoep_z3", _ranks(4, 2))
    ]
    assert differences(runs[0].initial, runs[1].initial) == []
    for run in runs[1:]:
        assert run.losses_after == pytest.approx(runs[0].losses_after, abs=LOSS_TOLERANCE)
        assert any(loss != runs[0].losses_after[0] for loss in run.losses_after)


@pytest.mark.parametrize(
    "case",
    sampled(
        FUSED_EXPERTS,
        "autoep_z1-dp4ep2-one",
        "autoep_z2-dp4ep4-dp6ep2",
        "autoep_z2_round_robin-dp4ep2-dp2",
        "autoep_bf16opt-dp2ep2-dp4ep4",
        "autoep_z1_data_first-dp4ep2-dp6ep2",
        "autoep_z1_frozen-dp2ep2-dp4ep4",
        "autoep_z3-dp2ep2-dp3",
        "autoep_z3_sub_groups-dp4ep2-dp2ep2",
    ),
    ids=str,
)
def test_fused_experts_resume_on_other_ranks(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(case.name, case.source)
    case.assert_resumed(run, case.converted(run, parallel, tmp_path))


@pytest.mark.parametrize(
    "case", sampled(SPLIT_EXPERTS, "autoep_z1_split-one-dp4ep4", "autoep_z3_split-one-dp4ep4"), ids=str
)
def test_groups_of_experts_are_cut_by_size_as_deepspeed_cuts_them(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(case.name, case.source)
    case.assert_resumed(run, case.converted(run, parallel, tmp_path))


@pytest.mark.parametrize(
    "case",
    sampled(OTHER_STAGES, "autoep_z1-dp4ep2-dp4ep4-autoep_z3", "autoep_z3_bf16-dp4ep2-dp4ep4-autoep_bf16opt"),
    ids=str,
)
def test_fused_experts_resume_at_another_stage(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(case.name, case.source)
    case.assert_resumed(run, case.converted(run, parallel, tmp_path))


@pytest.mark.parametrize("case", sampled(DATA_FIRST, "moe_fp32_z1_data_first-dp4ep2-dp4ep4"), ids=str)
def test_native_experts_resume_where_equal_ones_follow_one_another(
    case: CheckpointCase, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(case.name, case.source)
    case.assert_resumed(run, case.converted(run, parallel, tmp_path))


def test_the_same_layout_is_written_as_deepspeed_writes_it(trained_on: TrainedOn, tmp_path: Path) -> None:
    model_keys = ("ds_autoep_layers", "universal_checkpoint_info", "param_shapes", "num_experts")
    optimizer_keys = ("ds_zero_partition_groups", "partition_count", "param_slice_mappings", "group_paddings")
    for name in ("autoep_z1", "autoep_bf16opt", "autoep_z3_sub_groups"):
        run = trained_on(name, _ranks(4, 2))
        target = tmp_path / name / run.tag
        convert(run.dir, target, "zero", layout=RunLayout(dp=4, ep=2))
        theirs = {path.name: path for path in run.tag_dir.glob("*.pt")}
        assert {path.name for path in target.glob("*.pt")} == set(theirs)
        for file, path in theirs.items():
            wanted, found = plain(load_any(path)), plain(load_any(target / file))
            if "optim_states" in file:
                wanted, found = wanted["optimizer_state_dict"], found["optimizer_state_dict"]
                for key in optimizer_keys:
                    assert found.get(key) == wanted.get(key), (file, key)
            elif "_expert_" in file:
                assert found == wanted
            else:
                for key in model_keys:
                    assert found[key] == wanted[key], (file, key)
                assert found["ds_config"]["expert_parallel"] == wanted["ds_config"]["expert_parallel"]


def test_fused_experts_are_whole_in_every_other_form(trained_on: TrainedOn, tmp_path: Path) -> None:
    run = trained_on("autoep_z1_frozen", _ranks(4, 2))
    convert(run.dir, tmp_path / "universal", "universal")
    for key, value in run.truth.tensors.items():
        state, _, fqn = key.partition("/")
        if state in STATES:
            atom = load(tmp_path / "universal" / "zero" / fqn / f"{state}.pt")
            assert raw(atom["param"]) == value
            assert atom.get("ep_num_experts") == (EXPERTS if ".experts." in fqn else None)
    convert(run.dir, tmp_path / "weights", "safetensors")
    weights = read_safetensors(tmp_path / "weights").tensors
    expected = run.truth.kind("fp32") | run.truth.kind("frozen")
    assert weights == expected
    assert weights["layers.0.moe.experts.w2"].shape[0] == EXPERTS


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("autoep_z1", {"dp": 4, "ep": 3}, "do not divide"),
        ("autoep_z1", {"dp": 3, "ep": 2}, "do not divide"),
        ("autoep_z1", {"dp": 2, "ep": 2, "zero_stage": "0"}, "stage 0"),
        ("autoep_z1_frozen", {"dp": 2, "ep": 2, "zero_stage": "2"}, "frozen"),
        ("autoep_z1_frozen", {"dp": 2, "ep": 1, "zero_stage": "3"}, "frozen"),
    ],
)
def test_impossible_targets_are_refused(
    name: str, options: dict[str, Any], what: str, trained_on: TrainedOn, tmp_path: Path
) -> None:
    run = trained_on(name, _ranks(2, 2))
    with pytest.raises(RequestError, match=what) as caught:
        convert(run.dir, tmp_path / run.tag, "zero", **options)
    assert caught.value.code == "request.unsatisfiable"
    assert caught.value.fix.startswith("--")


def test_the_universal_form_loads_and_goes_back(
    trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run, case = trained_on("autoep_z1", _ranks(4, 2)), AUTOEP_CASES["autoep_z1"]
    convert(run.dir, tmp_path / "to" / f"{run.tag}_universal", "universal")
    again = _resume(parallel, case, tmp_path, _ranks(2, 2), load_universal=True)
    assert_resumed(run, again)
    # At stage 3 the loader gives all groups the first one's hyper-parameters (0.19.8): losses are not the source's.
    sharded = AUTOEP_CASES["autoep_z3"]
    again = _resume(parallel, sharded, tmp_path, _ranks(4, 4), load_universal=True)
    assert differences(run.truth, again.state) == []
    back = tmp_path / "back" / run.tag
    convert(tmp_path / "to", back, "zero", dp=4, ep=4, zero_stage="1")
    loaded = parallel.resume(case, _ranks(4, 4), back.parent, tmp_path / "out_back")
    assert_resumed(run, loaded)


@pytest.mark.parametrize("name", rest_full(["autoep_z1", "autoep_z3"], "autoep_z3"))
def test_the_peers_universal_form_is_read(
    name: str, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(name, _ranks(4, 2))
    got = parallel.worlds.run(
        "oracle.peers:peer_universal", world=1, tag_dir=str(run.tag_dir), out_dir=str(tmp_path / "peer")
    )
    assert got[0]["error"] is None
    convert(tmp_path / "peer", tmp_path / "to" / run.tag, "zero", dp=2, ep=2, zero_stage=name[-1])
    again = _resume(parallel, AUTOEP_CASES[name], tmp_path, _ranks(2, 2))
    assert differences(run.truth, again.state) == []


@pytest.mark.parametrize("name", ["autoep_z1", "autoep_z3"])
def test_deepspeed_converts_what_we_write(
    name: str, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(name, _ranks(4, 2))
    native = tmp_path / "native" / run.tag
    convert(run.dir, native, "zero", layout=RunLayout(dp=4, ep=4))
    got = parallel.worlds.run(
        "oracle.peers:peer_universal", world=1, tag_dir=str(native), out_dir=str(tmp_path / "peer")
    )
    assert got[0]["error"] is None
    for key, value in run.truth.tensors.items():
        state, _, fqn = key.partition("/")
        if state in STATES:
            found = load(tmp_path / "peer" / "zero" / fqn / f"{state}.pt")
            tensor = found["param"] if isinstance(found, dict) else found
            assert raw(tensor.reshape(value.shape)) == value, key


@pytest.mark.full
def test_deepspeed_itself_resumes_frozen_experts_wrongly_at_stage_2(
    trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    # Why that target is refused: its loader gives every rank the frozen experts of the first. Our source is right.
    run, case = trained_on("autoep_z2_frozen", _ranks(2, 2)), AUTOEP_CASES["autoep_z2_frozen"]
    same = parallel.resume(case, _ranks(2, 2), run.dir, tmp_path / "same")
    assert differences(run.truth, same.state) == ["frozen/layers.0.moe.experts.w2: bits differ"]
    convert(run.dir, tmp_path / "universal", "universal")
    convert(tmp_path / "universal", tmp_path / "to" / run.tag, "zero", dp=2, ep=2, zero_stage="1")
    again = _resume(parallel, AUTOEP_CASES["autoep_z1_frozen"], tmp_path, _ranks(2, 2))
    assert_resumed(run, again)
