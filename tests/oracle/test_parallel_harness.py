"""The parallel oracles are right: DeepSpeed's losses and states do not depend on the layout, and it reloads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from house.tiers import rest_full
from oracle.driver import Oracle, ParallelOracle
from oracle.fixtures import TrainedOn
from oracle.launcher import WorldError
from oracle.parallel_cases import AUTOTP_CASES, GPT_CASES, MOE_CASES, Layout
from oracle.truth import Truth, differences, meta_differences

LAYOUTS = [Layout(*ranks) for ranks in ((2, 1, 1), (1, 2, 1), (1, 1, 3), (1, 4, 1), (4, 1, 1), (2, 1, 2), (2, 2, 2))]
FULL = Layout(2, 2, 2)
FP32_CASES = [name for name, case in GPT_CASES.items() if case.dtype == "fp32"]
TIED_PLACES = "tied_modules.embed.places."
LOSS_TOLERANCE = 2e-6  # fp32 losses of about 3; what layouts change is the order of sums


@pytest.mark.parametrize("layout", rest_full(LAYOUTS, Layout(2, 2, 2)), ids=str)
def test_losses_do_not_depend_on_the_layout(layout: Layout, trained_on: TrainedOn) -> None:
    one, other = trained_on("gpt_fp32", Layout()), trained_on("gpt_fp32", layout)
    assert other.losses_before == pytest.approx(one.losses_before, abs=LOSS_TOLERANCE)
    assert other.losses_after == pytest.approx(one.losses_after, abs=LOSS_TOLERANCE)
    assert len(set(one.losses_before + one.losses_after)) == 6


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in FP32_CASES if name != "gpt_fp32"])
def test_losses_of_every_model_do_not_depend_on_the_layout(name: str, trained_on: TrainedOn) -> None:
    one, other = trained_on(name, Layout()), trained_on(name, FULL)
    assert other.losses_before + other.losses_after == pytest.approx(
        one.losses_before + one.losses_after, abs=LOSS_TOLERANCE
    )


@pytest.mark.full
@pytest.mark.parametrize("name", GPT_CASES)
def test_all_layouts_start_from_one_model(name: str, trained_on: TrainedOn) -> None:
    one = trained_on(name, Layout()).initial
    assert one.kinds == {"fp32", "module"}
    for layout in LAYOUTS if name == "gpt_fp32" else [FULL]:
        assert differences(one, trained_on(name, layout).initial) == []


def test_ranks_that_heads_do_not_fit_are_refused(parallel: ParallelOracle, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match="4 ranks do not divide 2 key-value heads"):
        parallel.train(GPT_CASES["gpt_fp32_gqa"], Layout(4, 1, 1), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout"),
    [("gpt_fp32", Layout()), ("gpt_fp32", Layout(2, 1, 1)), ("gpt_fp32", Layout(1, 2, 2))]
    + [(name, FULL) for name in GPT_CASES],
    ids=str,
)
def test_deepspeed_reloads_the_truth(
    name: str, layout: Layout, trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(name, layout)
    again = parallel.resume(GPT_CASES[name], layout, run.dir, tmp_path)
    assert differences(run.truth, again.state) == []
    assert meta_differences(run.truth, again.state) == []
    assert again.losses == run.losses_after
    assert run.truth.meta["wrong_weights"] == []
    # Of a tied module DeepSpeed loads masters on every stage, but weights on the first, and shares only what is tied.
    lost = [n for n in again.state.meta["wrong_weights"] if not (layout.pp > 1 and n.startswith(TIED_PLACES))]
    assert lost == []
    for meta in (run.truth.meta, again.state.meta):
        assert {pad["nonzero"] for pad in meta["padding"].values()} == {0}


def test_padding_depends_on_the_layout(trained_on: TrainedOn) -> None:
    rows = {
        layout.tp: trained_on("gpt_fp32", layout).truth.meta["padding"]["fp32/tied_modules.embed.tokens.weight"]["rows"]
        for layout in (Layout(), Layout(2, 1, 1), Layout(4, 1, 1))
    }
    assert rows == {1: 40, 2: 48, 4: 64}


@pytest.mark.full
def test_copies_agree_but_for_those_without_a_gradient(trained_on: TrainedOn) -> None:
    for name in GPT_CASES:
        differing = trained_on(name, FULL).truth.meta["replica_differences"]
        if GPT_CASES[name].positions == "tied":
            assert f"fp32/{TIED_PLACES}positions" in differing
            assert all(TIED_PLACES in key for key in differing)
        else:
            assert differing == []


def test_another_layout_is_refused(trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path) -> None:
    run = trained_on("gpt_fp32", FULL)
    with pytest.raises(WorldError):
        parallel.resume(GPT_CASES["gpt_fp32"], Layout(), run.dir, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt_fp32", "gpt_fp32_glu", "gpt_fp32_qkv_blocks", "gpt_bf16opt"])
def test_universal_by_the_peer_gives_the_truth(
    name: str, trained_on: TrainedOn, oracle: Oracle, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained_on(name, FULL)
    assert oracle.peer_universal(run.tag_dir, tmp_path / "universal") is None
    again = parallel.resume(GPT_CASES[name], Layout(1, 2, 1), tmp_path, tmp_path / "out", load_universal=True)
    assert differences(run.truth, again.state) == []
    if GPT_CASES[name].dtype == "fp32":
        assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


def test_losses_notice_rows_in_wrong_order(
    trained_on: TrainedOn, oracle: Oracle, parallel: ParallelOracle, tmp_path: Path
) -> None:
    # The peer without a rule for [Q | K | V] joins slices plainly: states and losses must both show it.
    run = trained_on("gpt_fp32_qkv_blocks", FULL)
    wrong = tmp_path / "without_rule"
    oracle.worlds.run(
        "oracle.parallel_planted:without_rule",
        world=1,
        tag_dir=str(run.tag_dir),
        out_dir=str(wrong / run.tag),
        key="parameter_with_sub_params",
    )
    assert oracle.peer_universal(wrong / run.tag, tmp_path / "universal") is None
    case = GPT_CASES["gpt_fp32_qkv_blocks"]
    again = parallel.resume(case, Layout(), tmp_path, tmp_path / "out", load_universal=True)
    assert {line.split(":")[0] for line in differences(run.truth, again.state, without=("exp_avg", "exp_avg_sq"))} == {
        f"{kind}/{layer}.attention.qkv.weight" for kind in ("fp32", "module") for layer in (2, 3, 4, 5)
    }
    assert again.losses != pytest.approx(run.losses_after, abs=100 * LOSS_TOLERANCE)


def test_truth_is_whole(trained_on: TrainedOn) -> None:
    truth: Truth = trained_on("gpt_fp32_glu", FULL).truth
    assert truth.tensors["fp32/tied_modules.embed.tokens.weight"].shape == (37, 16)
    assert truth.tensors["exp_avg/2.mlp.up.weight"].shape == (48, 16)
    assert truth.tensors["exp_avg_sq/5.mlp.down.weight"].shape == (16, 24)
    assert set(truth.step) == set(truth.kind("fp32")) == set(truth.kind("module")) == set(truth.hyper_parameters)
    assert set(truth.step.values()) == {3.0}


MOE_LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # ranks, expert-parallel ranks


@pytest.mark.full
@pytest.mark.parametrize(("world", "ep"), MOE_LAYOUTS)
def test_moe_losses_and_start_do_not_depend_on_the_layout(
    world: int, ep: int, parallel: ParallelOracle, tmp_path: Path
) -> None:
    for name in ("moe_fp32_z1", "moe_fp32_z2", "moe_fp32_z1_data_first"):
        case = MOE_CASES[name]
        one = parallel.train(case, Layout(dp=1, ep=1), tmp_path / name / "one")
        other = parallel.train(case, Layout(dp=world, ep=ep), tmp_path / name / "other")
        ours, theirs = one.losses_before + one.losses_after, other.losses_before + other.losses_after
        assert theirs == pytest.approx(ours, abs=LOSS_TOLERANCE)
        assert differences(one.initial, other.initial) == []


@pytest.mark.full
@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("name", MOE_CASES)
def test_deepspeed_reloads_the_truth_of_experts(
    name: str, world: int, ep: int, parallel: ParallelOracle, tmp_path: Path
) -> None:
    case = MOE_CASES[name]
    run = parallel.train(case, Layout(dp=world, ep=ep), tmp_path)
    again = parallel.resume(case, Layout(dp=world, ep=ep), run.dir, tmp_path / "out")
    assert differences(run.truth, again.state) == []
    assert meta_differences(run.truth, again.state) == []
    assert again.losses == run.losses_after
    for meta in (run.truth.meta, again.state.meta):
        assert (meta["wrong_weights"], meta["replica_differences"]) == ([], [])
    # Global numbers: expert files carry them in names and keys, and were written by another road than the gather.
    files = parallel.expert_files(run.tag_dir, tmp_path / "experts.safetensors").tensors
    assert len(files) == 2 * 4 * 4
    assert {key: run.truth.tensors[key] for key in files} == files
    assert len({tensor.data for tensor in files.values()}) == len(files)


@pytest.mark.full
def test_experts_on_other_ranks_are_refused(parallel: ParallelOracle, tmp_path: Path) -> None:
    case = MOE_CASES["moe_fp32_z1"]
    run = parallel.train(case, Layout(dp=4, ep=2), tmp_path)
    for world, ep in ((4, 4), (4, 1), (2, 2)):
        with pytest.raises(WorldError):
            parallel.resume(case, Layout(dp=world, ep=ep), run.dir, tmp_path / "out")


# A size above the key-value heads leaves ranks without any.  Not at stage 3: there DeepSpeed waits for their empty
# parameters to become available, and fails.
AUTOTP_SIZES = {"autotp_z1": [(4, 2), (4, 4)], "autotp_z1_uneven": [(2, 2), (4, 4)], "autotp_z3": [(4, 2), (4, 4)]}


@pytest.mark.full
@pytest.mark.parametrize("name", AUTOTP_CASES)
def test_autotp_starts_trains_and_reloads_as_without(name: str, parallel: ParallelOracle, tmp_path: Path) -> None:
    case = AUTOTP_CASES[name]
    one = parallel.train(case, Layout(tp=1, dp=1), tmp_path / "one")
    for world, tp in AUTOTP_SIZES.get(name, [(2, 2)]):
        folder = tmp_path / f"{world}-{tp}"
        run = parallel.train(case, Layout(tp=tp, dp=world // tp), folder)
        assert differences(one.initial, run.initial) == []
        if case.dtype == "fp32":
            ours, theirs = one.losses_before + one.losses_after, run.losses_before + run.losses_after
            assert theirs == pytest.approx(ours, abs=LOSS_TOLERANCE)
        again = parallel.resume(case, Layout(tp=tp, dp=world // tp), run.dir, folder / "out")
        assert differences(run.truth, again.state) == []
        assert meta_differences(run.truth, again.state) == []
        assert again.losses == run.losses_after
        for meta in (run.truth.meta, again.state.meta):
            assert (meta["wrong_weights"], meta["replica_differences"]) == ([], [])


@pytest.mark.full
def test_autotp_of_another_size_is_refused(parallel: ParallelOracle, tmp_path: Path) -> None:
    case = AUTOTP_CASES["autotp_z1"]
    run = parallel.train(case, Layout(tp=2, dp=1), tmp_path)
    for world, tp in ((1, 1), (4, 4), (4, 2)):
        with pytest.raises(WorldError):
            parallel.resume(case, Layout(tp=tp, dp=world // tp), run.dir, tmp_path / "out")


@pytest.mark.full
@pytest.mark.parametrize("name", ["autotp_z1", "autotp_z1_uneven", "autotp_z1_tied", "autotp_z3"])
def test_universal_of_autotp_by_the_peer_gives_the_truth(
    name: str, oracle: Oracle, parallel: ParallelOracle, tmp_path: Path
) -> None:
    case = AUTOTP_CASES[name]
    run = parallel.train(case, Layout(tp=2, dp=1), tmp_path)
    assert oracle.peer_universal(run.tag_dir, tmp_path / "universal") is None
    again = parallel.resume(case, Layout(tp=4, dp=1), tmp_path, tmp_path / "out", load_universal=True)
    assert differences(run.truth, again.state) == []
    if case.stage != 3:  # there its loader gives all groups the hyper-parameters of the first, and one shared step
        assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)
