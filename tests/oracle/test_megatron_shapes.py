"""Runs that are shaped as Megatron-DeepSpeed's: one param group against two, trained padding, TP 1 without rules.

The state is compared bit for bit right after plain ``engine.load_checkpoint``, into a model that groups, nests and
checks as Megatron does; then the next losses.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import reshard
from house.tiers import rest_full
from oracle.driver import Oracle, ParallelOracle, Saved
from oracle.outputs import contents, convert
from oracle.parallel_cases import VOCAB, Layout, MegatronCase
from oracle.truth import Resumed, Truth, differences, meta_differences
from reshard.choices import VerifyLevel, WeightDecayGroups, ZeroStage
from reshard.engine import load_engine
from reshard.models.reports import DiffOptions
from reshard.options import SourceSpec

WORDS = "language_model.embedding.word_embeddings.weight"
LOSS_TOLERANCE = 2e-6  # of losses around 4: six digits
ONE_GROUP, TWO_GROUPS = MegatronCase(stage=3), MegatronCase(stage=2)
OWN_CODE = MegatronCase(stage=3, whole_shapes=True)
CUT = Layout(tp=2, dp=2)

Trained: TypeAlias = Callable[[MegatronCase, Layout], Saved]


@pytest.fixture(scope="module")
def trained(parallel: ParallelOracle, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A real checkpoint of a case on a layout, trained once.  Read-only for all tests."""
    done: dict[tuple[MegatronCase, Layout], Saved] = {}

    def train(case: MegatronCase, layout: Layout) -> Saved:
        if (case, layout) not in done:
            folder = tmp_path_factory.mktemp(f"z{case.stage}-{layout}")
            done[case, layout] = parallel.train(case, layout, folder)
        return done[case, layout]

    return train


def _layout(case: MegatronCase, layout: Layout, **options: Any) -> dict[str, Any]:
    return {"tp": layout.tp, "dp": layout.dp, "zero_stage": ZeroStage(str(case.stage)), **options}


def _padding(state: Truth) -> dict[str, Any]:
    found: dict[str, Any] = state.meta["padding"]
    return found


def _assert_holds(run: Saved, again: Resumed, *, padding: bool = True) -> None:
    """All values bit for bit, counters too; hyper-parameters apart, which groups may change."""
    assert differences(run.truth, again.state) == []
    assert again.state.meta["replica_differences"] == []
    for counter in ("global_steps", "global_samples", "skipped_steps", "client_state"):
        assert run.truth.meta[counter] == again.state.meta[counter]
    if padding:
        assert _padding(run.truth) == _padding(again.state)


def _decays(state: Truth) -> dict[str, float]:
    return {name: values["weight_decay"] for name, values in state.hyper_parameters.items()}


def _groups(state: Truth) -> list[tuple[str, list[str]]]:
    return [(group["name"], group["names"]) for group in state.meta["groups"]]


def _says(warnings: tuple[str, ...], text: str) -> bool:
    return any(text in warning for warning in warnings)


# -- one param group at ZeRO-3, two elsewhere --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "layout"),
    [(ONE_GROUP, TWO_GROUPS, Layout(tp=2, dp=1)), (TWO_GROUPS, ONE_GROUP, Layout(tp=2, dp=1))],
    ids=["3to2", "2to3"],
)
def test_groups_are_those_of_the_target_and_come_back(
    source: MegatronCase,
    target: MegatronCase,
    layout: Layout,
    trained: Trained,
    parallel: ParallelOracle,
    tmp_path: Path,
) -> None:
    run = trained(source, CUT)
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", **_layout(target, layout))
    assert _says(result.warnings, f"param groups: {1 if source is ONE_GROUP else 2} became")
    assert _says(result.warnings, "10 of 26 parameters have weight decay 0.1")
    assert _says(result.warnings, "--weight-decay-groups keep")
    again = parallel.resume(target, layout, tmp_path / "to", tmp_path / "out")
    _assert_holds(run, again)
    fresh = trained(target, CUT).truth
    # What a run of the target's own kind has: the same groups, the same order in them, the same weight decay.
    assert _groups(again.state) == _groups(fresh)
    assert again.state.hyper_parameters == fresh.hyper_parameters
    # Weight decay is another one from here on: the first loss is of the state that was loaded, the next are not.
    assert again.losses[0] == pytest.approx(run.losses_after[0], abs=LOSS_TOLERANCE)

    convert(tmp_path / "to" / run.tag, tmp_path / "back" / run.tag, "zero", **_layout(source, layout))
    back = parallel.resume(source, layout, tmp_path / "back", tmp_path / "out_back")
    _assert_holds(run, back)
    assert meta_differences(run.truth, back.state) == []
    assert back.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


def test_a_nested_module_without_leaves_keeps_its_places(
    trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run, layout = trained(ONE_GROUP, CUT), Layout(tp=2, dp=1)
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", **_layout(ONE_GROUP, layout))
    assert not _says(result.warnings, "param groups")
    again = parallel.resume(ONE_GROUP, layout, tmp_path / "to", tmp_path / "out")
    _assert_holds(run, again)
    assert meta_differences(run.truth, again.state) == []
    assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


@pytest.mark.parametrize(
    ("source", "target"),
    rest_full([(OWN_CODE, OWN_CODE), (TWO_GROUPS, OWN_CODE), (OWN_CODE, TWO_GROUPS)], (TWO_GROUPS, OWN_CODE)),
    ids=["3to3", "2to3", "3to2"],
)
def test_groups_that_do_not_follow_the_stage_are_kept(
    source: MegatronCase, target: MegatronCase, trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    """A source at ZeRO-3 with weight decay shows that its code groups otherwise; of another the user says it."""
    run, layout = trained(source, CUT), Layout(tp=2, dp=1)
    told = {} if source is OWN_CODE else {"weight_decay_groups": WeightDecayGroups.KEEP}
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", **_layout(target, layout, **told))
    assert not _says(result.warnings, "param groups")
    again = parallel.resume(target, layout, tmp_path / "to", tmp_path / "out")
    _assert_holds(run, again)
    assert again.state.hyper_parameters == run.truth.hyper_parameters
    assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("source", [OWN_CODE, TWO_GROUPS], ids=["from3", "from2"])
def test_kept_groups_stay_kept_on_the_way_through_the_universal_form(
    source: MegatronCase, trained: Trained, tmp_path: Path
) -> None:
    run = trained(source, CUT)
    told = {} if source is OWN_CODE else {"weight_decay_groups": WeightDecayGroups.KEEP}
    convert(run.dir, tmp_path / "u" / run.tag, "universal", **told)
    layout = _layout(ONE_GROUP, Layout(tp=2, dp=1))
    result = convert(tmp_path / "u" / run.tag, tmp_path / "to" / run.tag, "zero", **layout)
    assert not _says(result.warnings, "param groups")
    direct = convert(run.dir, tmp_path / "direct" / run.tag, "zero", **layout | told)
    assert not _says(direct.warnings, "param groups")
    groups = [
        [
            {k: v for k, v in group.items() if k != "params"}
            for group in _optimizer_file(tmp_path / where)["param_groups"]
        ]
        for where in ("to", "direct")
    ]
    assert groups[0] == groups[1]
    assert [group["weight_decay"] for group in groups[0]] == [0.1, 0.0]


def _optimizer_file(save: Path) -> Any:
    file = next(save.glob("*/zero_pp_rank_0_mp_rank_00_optim_states.pt"))
    return torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]["optimizer_state_dict"]


@pytest.mark.parametrize("source", [ONE_GROUP, TWO_GROUPS], ids=["from3", "from2"])
def test_a_universal_form_has_the_groups_of_every_stage(
    source: MegatronCase, trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained(source, CUT)
    result = convert(run.dir, tmp_path / "to" / f"{run.tag}_universal", "universal")
    assert _says(result.warnings, "param groups are written twice")
    assert _says(result.warnings, "10 of 26 parameters have weight decay 0.1 in runs at stages 1 and 2")
    assert not _says(result.warnings, "vocabulary")
    # DeepSpeed's own loader of stage 3 loads no tensor-parallel runs.
    for target, layout in ((TWO_GROUPS, Layout(tp=2)), (ONE_GROUP, Layout(dp=2))):
        out = tmp_path / f"z{target.stage}"
        again = parallel.resume(target, layout, tmp_path / "to", out, load_universal=True)
        _assert_holds(run, again)
        fresh = trained(TWO_GROUPS if target.stage < 3 else ONE_GROUP, CUT).truth
        assert again.state.hyper_parameters == fresh.hyper_parameters
        # Weight decay acts from the first step on, so that only the first loss is the same at the other kind of stage.
        same = 3 if target is source else 1
        assert again.losses[:same] == pytest.approx(run.losses_after[:same], abs=LOSS_TOLERANCE)
    report = load_engine().diff(
        SourceSpec(url=str(run.dir)), SourceSpec(url=str(tmp_path / "to")), DiffOptions(ignore=("*/weight_decay",))
    )
    kinds = {(d.state or d.name) for d in report.differences}
    assert kinds <= ({"name", "wd_mult"} if source is ONE_GROUP else set())


# -- rows of padding that training wrote into --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=1), Layout(tp=1, dp=2)], ids=str)
def test_padding_of_the_same_size_is_kept(
    layout: Layout, trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained(TWO_GROUPS, CUT)
    assert all(found["rows"] == 48 and found["nonzero"] > 0 for found in _padding(run.truth).values())
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", **_layout(TWO_GROUPS, layout))
    assert not _says(result.warnings, "padding")
    assert not _says(result.warnings, "zeros")
    again = parallel.resume(TWO_GROUPS, layout, tmp_path / "to", tmp_path / "out")
    _assert_holds(run, again)
    assert meta_differences(run.truth, again.state) == []
    assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)
    report = load_engine().diff(SourceSpec(url=str(run.dir)), SourceSpec(url=str(tmp_path / "to")), DiffOptions())
    assert report.equal, report.differences
    assert not _says(report.notes, "padding")


@pytest.mark.parametrize(
    ("pad_to", "rows", "said"), [(20, 40, "8 rows of padding"), (32, 64, "16 rows of zeros")], ids=["fewer", "more"]
)
def test_padding_of_another_size_is_said(
    pad_to: int, rows: int, said: str, trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run, case = trained(TWO_GROUPS, CUT), replace(TWO_GROUPS, pad_to=pad_to)
    layout = Layout(tp=2, dp=1)
    options = {**_layout(case, layout, vocab_divisor=pad_to), "verify": VerifyLevel.FULL}
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", **options)
    assert _says(result.warnings, said)
    assert _says(result.warnings, "softmax")
    again = parallel.resume(case, layout, tmp_path / "to", tmp_path / "out", steps=1)
    assert differences(run.truth, again.state) == []
    kept = min(rows, 48) - VOCAB
    for key, found in _padding(again.state).items():
        source = _padding(run.truth)[key]
        assert found["rows"] == rows
        assert found["row_crcs"][:kept] == source["row_crcs"][:kept]
        assert found["nonzero"] > 0
    # What it does to the loss: little, and not nothing.
    assert 1e-5 < abs(again.losses[0] - run.losses_after[0]) < 1.0
    report = load_engine().diff(SourceSpec(url=str(run.dir)), SourceSpec(url=str(tmp_path / "to")), DiffOptions())
    assert report.equal, report.differences
    assert _says(report.notes, f"not compared: A has 11, B has {rows - VOCAB}")


@pytest.mark.parametrize("to", ["zero", "universal"])
def test_the_option_that_a_warning_names_keeps_every_row(
    to: str, trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    """Padded to multiples of 8 and 2 x 8, the 37 words have 40 rows on one tensor-parallel rank and 48 on two."""
    run, layout = trained(replace(TWO_GROUPS, pad_to=8), Layout(tp=2)), Layout()
    options: dict[str, Any] = {"dp": layout.dp} if to == "zero" else {}
    result = convert(run.dir, tmp_path / "fewer" / run.tag, to, **options)
    (said,) = (
        warning for warning in result.warnings if "8 rows of padding behind the vocabulary are cut off" in warning
    )
    assert "40 rows, 48 in the source" in said
    found = re.search(r"--vocab-divisor (\d+), and --make-vocab-size-divisible-by (\d+) for the run", said)
    assert found is not None
    assert found[1] == found[2]
    result = convert(run.dir, tmp_path / "to" / run.tag, to, vocab_divisor=int(found[1]), **options)
    assert not _says(result.warnings, "vocabulary")
    target = replace(TWO_GROUPS, pad_to=int(found[1]))
    again = parallel.resume(target, layout, tmp_path / "to", tmp_path / "out", load_universal=to == "universal")
    _assert_holds(run, again)
    assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


def test_a_vocabulary_below_one_multiple_is_padded_if_the_user_says_so(
    trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    """Padded, it would have the shape of one rank's part: what is right on one rank is wrong on several."""
    run, target = trained(replace(TWO_GROUPS, pad_to=40), Layout(dp=2)), replace(ONE_GROUP, pad_to=40)
    bare = convert(run.dir, tmp_path / "bare" / run.tag, "universal")
    assert _says(bare.warnings, "3 rows of padding behind the vocabulary are left out")
    assert _says(bare.warnings, "Do not load this at ZeRO-3")
    assert _says(bare.warnings, "--vocab-divisor 40")
    # The warning is true: what follows the vocabulary is shifted, and nobody says so.
    again = parallel.resume(target, Layout(), tmp_path / "bare", tmp_path / "no", load_universal=True, steps=0)
    assert any("final_layernorm" in line for line in differences(run.truth, again.state))
    told = convert(run.dir, tmp_path / "told" / run.tag, "universal", vocab_divisor=40)
    assert _says(told.warnings, "load this without tensor parallelism only")
    again = parallel.resume(target, Layout(), tmp_path / "told", tmp_path / "yes", load_universal=True)
    _assert_holds(run, again)
    assert again.losses[0] == pytest.approx(run.losses_after[0], abs=LOSS_TOLERANCE)


def test_a_divisor_that_nothing_says_is_asked_for(trained: Trained, tmp_path: Path) -> None:
    run = trained(TWO_GROUPS, CUT)
    shutil.copytree(run.tag_dir, tmp_path / "source" / run.tag)
    for path in (tmp_path / "source" / run.tag).glob("*model_states.pt"):
        state = torch.load(path, map_location="cpu", weights_only=False)
        del state["args"].make_vocab_size_divisible_by
        torch.save(state, path)
    result = convert(tmp_path / "source" / run.tag, tmp_path / "bare", "universal")
    assert _says(
        result.warnings, "11 rows of padding behind the vocabulary are left out: nothing says to which multiple"
    )
    assert _says(result.warnings, "Do not load this at ZeRO-3")
    assert _says(result.warnings, "--vocab-divisor N")
    told = convert(tmp_path / "source" / run.tag, tmp_path / "told", "universal", vocab_divisor=24)
    assert not _says(told.warnings, "vocabulary")
    # What it was told is in what was written: the next conversion needs no option.
    convert(tmp_path / "told", tmp_path / "again", "universal")
    assert contents(tmp_path / "again") == contents(tmp_path / "told")


@pytest.mark.parametrize(
    ("case", "layout"),
    rest_full(
        [(TWO_GROUPS, Layout(dp=2)), (ONE_GROUP, CUT), (ONE_GROUP, Layout(dp=2)), (TWO_GROUPS, CUT)],
        (TWO_GROUPS, Layout(dp=2)),
        (ONE_GROUP, CUT),
    ),
    ids=str,
)
def test_a_universal_form_by_deepspeed_has_zeros_for_padding(
    case: MegatronCase, layout: Layout, trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    """`ds_to_universal` strips padding, writes the shapes of one rank's parts, and at stage 3 no counters."""
    run, peer = trained(case, layout), tmp_path / "peer" / "universal"
    assert Oracle(parallel.worlds).peer_universal(run.tag_dir, peer, megatron=True, nested=case.stage < 3) is None
    stripped = not (case is ONE_GROUP and layout.tp == 1)
    result = convert(peer, tmp_path / "ours" / run.tag, "universal")
    assert (
        _says(result.warnings, "11 rows of zeros are added behind the vocabulary: 48 rows, 37 in the source")
        is stripped
    )
    assert not _says(result.warnings, "no step counter")
    again = parallel.resume(ONE_GROUP, Layout(dp=2), tmp_path / "ours", tmp_path / "out", load_universal=True, steps=0)
    _assert_holds(run, again, padding=not stripped)
    convert(tmp_path / "ours" / run.tag, tmp_path / "next" / run.tag, "universal")
    report = load_engine().diff(
        SourceSpec(url=str(tmp_path / "ours")), SourceSpec(url=str(tmp_path / "next")), DiffOptions()
    )
    assert report.equal, report.differences


def test_weights_have_no_rows_of_padding(trained: Trained, tmp_path: Path) -> None:
    weights = convert(trained(TWO_GROUPS, CUT).dir, tmp_path / "weights", "safetensors")
    assert _says(weights.warnings, "11 rows of padding behind the vocabulary are left out")


# -- one tensor-parallel rank: nothing says how to cut -----------------------------------------------------------------


def test_one_rank_without_rules_is_said_to_be_fit_for_one_rank(
    trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained(TWO_GROUPS, Layout(dp=2))
    inspected = {t.name: t for t in load_engine().inspect(SourceSpec(url=str(run.dir))).targets}
    assert "--tp 1 only" in inspected["universal"].detail
    assert "--family" in inspected["universal"].detail
    assert not inspected["zero --tp"].possible

    result = convert(run.dir, tmp_path / "bare" / f"{run.tag}_universal", "universal")
    assert _says(result.warnings, "tensor parallelism 1 only")
    assert _says(result.warnings, "--family gpt-megatron")
    one = parallel.resume(TWO_GROUPS, Layout(), tmp_path / "bare", tmp_path / "one", load_universal=True)
    _assert_holds(run, one, padding=False)
    # The warning is true: DeepSpeed loads it on two ranks without an error, and wrongly.
    bare = parallel.resume(TWO_GROUPS, Layout(tp=2), tmp_path / "bare", tmp_path / "two", load_universal=True, steps=1)
    assert any("dense.weight" in line for line in differences(run.truth, bare.state))

    told = convert(run.dir, tmp_path / "told" / f"{run.tag}_universal", "universal", family="gpt-megatron")
    assert not _says(told.warnings, "tensor parallelism 1 only")
    right = parallel.resume(
        TWO_GROUPS, Layout(tp=2), tmp_path / "told", tmp_path / "right", load_universal=True, steps=1
    )
    _assert_holds(run, right, padding=False)
    assert abs(right.losses[0] - run.losses_after[0]) < 0.05


def test_a_family_grows_one_rank_natively(trained: Trained, parallel: ParallelOracle, tmp_path: Path) -> None:
    run, layout = trained(TWO_GROUPS, Layout(dp=2)), Layout(tp=2, dp=1)
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", **_layout(TWO_GROUPS, layout), family="gpt-megatron")
    # It changes how heads are cut, and nothing proves their order.
    assert _says(result.warnings, "query_key_value")
    again = parallel.resume(TWO_GROUPS, layout, tmp_path / "to", tmp_path / "out")
    _assert_holds(run, again)
    assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


# -- what lies beside the tag, and what warnings are for ---------------------------------------------------------------


def test_the_tracker_lies_beside_latest(trained: Trained, tmp_path: Path) -> None:
    run = trained(TWO_GROUPS, CUT)
    result = convert(run.dir, tmp_path / run.tag, "zero", **_layout(TWO_GROUPS, Layout(tp=2, dp=1)))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_bytes() == b"3"
    # Neither the cut nor the padding changes: there is nothing to warn of.
    assert result.warnings == ()


def test_ensure_writes_the_iteration_of_the_tag(trained: Trained, tmp_path: Path) -> None:
    run = trained(TWO_GROUPS, CUT)
    save = tmp_path / "save"
    save.mkdir()
    (save / run.tag).symlink_to(run.tag_dir)
    (save / "latest").write_text(run.tag)
    (save / "latest_checkpointed_iteration.txt").write_text("7")  # of a newer save that is gone
    found = reshard.ensure(save, tp=2, dp=1, out=tmp_path / "out")
    assert (Path(found) / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_arguments_that_name_the_layout_are_no_difference(trained: Trained, tmp_path: Path) -> None:
    run = trained(TWO_GROUPS, CUT)
    convert(run.dir, tmp_path / "to" / run.tag, "zero", **_layout(TWO_GROUPS, Layout(tp=1, dp=3)))
    sides = SourceSpec(url=str(run.dir)), SourceSpec(url=str(tmp_path / "to"))
    report = load_engine().diff(*sides, DiffOptions())
    assert report.equal, report.differences
    # The other arguments are compared.
    path = tmp_path / "to" / run.tag / "mp_rank_00_model_states.pt"
    state = torch.load(path, map_location="cpu", weights_only=False)
    state["args"].lr = 0.5
    torch.save(state, path)
    report = load_engine().diff(*sides, DiffOptions())
    assert [(d.name, d.a, d.b) for d in report.differences] == [("args.lr", "0.01", "0.5")]
