"""Runs that are shaped as Megatron-DeepSpeed's: one param group against two, trained padding, TP 1 without rules.

The state is compared bit for bit right after plain ``engine.load_checkpoint``, into a model that groups, nests and
checks as Megatron does; then the next losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import reshard
from oracle.outputs import convert
from oracle.parallel_cases import VOCAB, Layout
from oracle.parallel_driver import ParallelOracle, Reloaded, Saved
from oracle.parallel_megatron_cases import MegatronCase
from oracle.truth import Truth, differences, meta_differences
from reshard.diffs import DiffOptions
from reshard.local import load_engine
from reshard.models import NativeLayout, SourceSpec, VerifyLevel, ZeroStage

WORDS = "language_model.embedding.word_embeddings.weight"
LOSS_TOLERANCE = 2e-6  # of losses around 4: six digits
ONE_GROUP, TWO_GROUPS = MegatronCase(stage=3), MegatronCase(stage=2)
CUT = Layout(tp=2, dp=2)

Trained: TypeAlias = Callable[[MegatronCase, Layout], Saved]


@pytest.fixture(scope="module")
def trained(parallel: ParallelOracle, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A real checkpoint of a case on a layout, trained once.  Read-only for all tests."""
    done: dict[tuple[MegatronCase, Layout], Saved] = {}

    def train(case: MegatronCase, layout: Layout) -> Saved:
        if (case, layout) not in done:
            folder = tmp_path_factory.mktemp(f"z{case.stage}-{layout}")
            done[case, layout] = parallel.train_megatron(case, layout, folder)
        return done[case, layout]

    return train


def _layout(case: MegatronCase, layout: Layout, **options: Any) -> NativeLayout:
    return NativeLayout(tp=layout.tp, dp=layout.dp, zero_stage=ZeroStage(str(case.stage)), **options)


def _padding(state: Truth) -> dict[str, Any]:
    found: dict[str, Any] = state.meta["padding"]
    return found


def _assert_holds(run: Saved, again: Reloaded, *, padding: bool = True) -> None:
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
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", layout=_layout(target, layout))
    assert _says(result.warnings, "as Megatron-DeepSpeed groups parameters")
    again = parallel.resume_megatron(target, layout, tmp_path / "to", tmp_path / "out")
    _assert_holds(run, again)
    fresh = trained(target, CUT).truth
    # What a run of the target's own kind has: the same groups, the same order in them, the same weight decay.
    assert _groups(again.state) == _groups(fresh)
    assert again.state.hyper_parameters == fresh.hyper_parameters
    # Weight decay is another one from here on: the first loss is of the state that was loaded, the next are not.
    assert again.losses[0] == pytest.approx(run.losses_after[0], abs=LOSS_TOLERANCE)

    convert(tmp_path / "to" / run.tag, tmp_path / "back" / run.tag, "zero", layout=_layout(source, layout))
    back = parallel.resume_megatron(source, layout, tmp_path / "back", tmp_path / "out_back")
    _assert_holds(run, back)
    assert meta_differences(run.truth, back.state) == []
    assert back.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


def test_a_nested_module_without_leaves_keeps_its_places(
    trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run, layout = trained(ONE_GROUP, CUT), Layout(tp=2, dp=1)
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", layout=_layout(ONE_GROUP, layout))
    assert not _says(result.warnings, "param groups")
    again = parallel.resume_megatron(ONE_GROUP, layout, tmp_path / "to", tmp_path / "out")
    _assert_holds(run, again)
    assert meta_differences(run.truth, again.state) == []
    assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


@pytest.mark.parametrize("source", [ONE_GROUP, TWO_GROUPS], ids=["from3", "from2"])
def test_a_universal_form_has_the_groups_of_every_stage(
    source: MegatronCase, trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained(source, CUT)
    convert(run.dir, tmp_path / "to" / f"{run.tag}_universal", "universal")
    # DeepSpeed's own loader of stage 3 loads neither tensor-parallel runs nor padded vocabularies.
    for target, layout in ((TWO_GROUPS, Layout(tp=2)), (replace(ONE_GROUP, pad_to=1), Layout(dp=2))):
        out = tmp_path / f"z{target.stage}"
        again = parallel.resume_megatron(target, layout, tmp_path / "to", out, load_universal=True, steps=0)
        # The loader fills the padding with zeros.
        _assert_holds(run, again, padding=False)
        fresh = trained(TWO_GROUPS if target.stage < 3 else ONE_GROUP, CUT).truth
        assert again.state.hyper_parameters == fresh.hyper_parameters
    report = load_engine().diff(
        SourceSpec(url=str(run.dir)), SourceSpec(url=str(tmp_path / "to")), DiffOptions(ignore=("*/weight_decay",))
    )
    kinds = {(d.state or d.name) for d in report.differences}
    assert kinds <= ({"name", "wd_mult"} if source is ONE_GROUP else set())


def test_a_padded_vocabulary_at_stage_3_is_warned_of(
    trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained(TWO_GROUPS, CUT)
    result = convert(run.dir, tmp_path / "to" / f"{run.tag}_universal", "universal")
    assert _says(result.warnings, "DeepSpeed's loader of stage 3 knows no padding")
    # The warning is true: what follows the vocabulary is shifted, and nobody says so.
    target, out = replace(ONE_GROUP, pad_to=40), tmp_path / "out"
    again = parallel.resume_megatron(target, Layout(), tmp_path / "to", out, load_universal=True, steps=0)
    assert any("final_layernorm" in line for line in differences(run.truth, again.state))


# -- rows of padding that training wrote into --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=1), Layout(tp=1, dp=2)], ids=str)
def test_padding_of_the_same_size_is_kept(
    layout: Layout, trained: Trained, parallel: ParallelOracle, tmp_path: Path
) -> None:
    run = trained(TWO_GROUPS, CUT)
    assert all(found["rows"] == 48 and found["nonzero"] > 0 for found in _padding(run.truth).values())
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", layout=_layout(TWO_GROUPS, layout))
    assert not _says(result.warnings, "padding")
    assert not _says(result.warnings, "zeros")
    again = parallel.resume_megatron(TWO_GROUPS, layout, tmp_path / "to", tmp_path / "out")
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
    options = {"layout": _layout(case, layout, vocab_divisor=pad_to), "verify": VerifyLevel.FULL}
    result = convert(run.dir, tmp_path / "to" / run.tag, "zero", **options)
    assert _says(result.warnings, said)
    assert _says(result.warnings, "softmax")
    again = parallel.resume_megatron(case, layout, tmp_path / "to", tmp_path / "out", steps=1)
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


def test_a_universal_form_says_what_it_leaves_out(trained: Trained, tmp_path: Path) -> None:
    run = trained(TWO_GROUPS, CUT)
    result = convert(run.dir, tmp_path / f"{run.tag}_universal", "universal")
    assert _says(result.warnings, "11 rows of padding behind the vocabulary are left out")
    layout = _layout(TWO_GROUPS, Layout(tp=2))
    native = convert(tmp_path / f"{run.tag}_universal", tmp_path / "to" / run.tag, "zero", layout=layout)
    assert _says(native.warnings, "11 rows of zeros are added behind the vocabulary")
    weights = convert(run.dir, tmp_path / "weights", "safetensors")
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
    one = parallel.resume_megatron(TWO_GROUPS, Layout(), tmp_path / "bare", tmp_path / "one", load_universal=True)
    _assert_holds(run, one, padding=False)
    # The warning is true: DeepSpeed loads it on two ranks without an error, and wrongly.
    bare = parallel.resume_megatron(
        TWO_GROUPS, Layout(tp=2), tmp_path / "bare", tmp_path / "two", load_universal=True, steps=1
    )
    assert any("dense.weight" in line for line in differences(run.truth, bare.state))

    told = convert(run.dir, tmp_path / "told" / f"{run.tag}_universal", "universal", family="gpt-megatron")
    assert not _says(told.warnings, "tensor parallelism 1 only")
    right = parallel.resume_megatron(
        TWO_GROUPS, Layout(tp=2), tmp_path / "told", tmp_path / "right", load_universal=True, steps=1
    )
    _assert_holds(run, right, padding=False)
    assert abs(right.losses[0] - run.losses_after[0]) < 0.05


def test_a_family_grows_one_rank_natively(trained: Trained, parallel: ParallelOracle, tmp_path: Path) -> None:
    run, layout = trained(TWO_GROUPS, Layout(dp=2)), Layout(tp=2, dp=1)
    result = convert(
        run.dir, tmp_path / "to" / run.tag, "zero", layout=_layout(TWO_GROUPS, layout), family="gpt-megatron"
    )
    # It changes how heads are cut, and nothing proves their order.
    assert _says(result.warnings, "query_key_value")
    again = parallel.resume_megatron(TWO_GROUPS, layout, tmp_path / "to", tmp_path / "out")
    _assert_holds(run, again)
    assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


# -- what lies beside the tag, and what warnings are for ---------------------------------------------------------------


def test_the_tracker_lies_beside_latest(trained: Trained, tmp_path: Path) -> None:
    run = trained(TWO_GROUPS, CUT)
    result = convert(run.dir, tmp_path / run.tag, "zero", layout=_layout(TWO_GROUPS, Layout(tp=2, dp=1)))
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
    convert(run.dir, tmp_path / "to" / run.tag, "zero", layout=_layout(TWO_GROUPS, Layout(tp=1, dp=3)))
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
