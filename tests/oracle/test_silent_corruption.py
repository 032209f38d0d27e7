"""Where DeepSpeed and its converters are silently wrong: our result is right there, or refused.

Each test names the mistake that others make. Where it costs little, the mistake itself is shown on the same checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from deepspeed.runtime.utils import partition_balanced, partition_uniform
from hypothesis import given, settings, strategies as st

from house.repository import real_checkpoint
from laws import pipeline_source
from laws.deepspeed_files import Layout as DataRanks
from laws.pipeline_source import TIED, Model, ParallelWriter, Part, Ranks, seeded_model
from laws.torch_values import bits_of, load as load_archive
from oracle.driver import Oracle, ParallelOracle, Saved
from oracle.fixtures import TrainedFactory, TrainedOn
from oracle.outputs import convert, load, tensor_of
from oracle.parallel_cases import AUTOTP_CASES, GPT_CASES, VOCAB, GptCase, Layout, gpt_rules, gpt_rules_yaml
from oracle.real_folders import expected, wrong_atoms
from oracle.truth import differences, meta_differences
from reshard.errors import RequestError, SourceError
from reshard.options import DeepSpeedOptions, RunLayout
from reshard_engine.formats.deepspeed.parallel.ranks import boundaries

ONE, FULL = Layout(1, 1, 1), Layout(2, 2, 2)
LOSS_TOLERANCE = 2e-6  # of losses around 3: six digits


def _rules(case: GptCase) -> str:
    return f"default: column\n{gpt_rules_yaml(case)}"


# -- a source without tensor parallelism, grown ------------------------------------------------------------------------


def test_growing_from_one_rank_needs_rules(parallel: ParallelOracle, oracle: Oracle, tmp_path: Path) -> None:
    # 37 rows are 40 on one rank and on two: with other padding the peer would notice.
    case = GptCase("gpt_fp32_bare_padded_to_4", info=False, pad_to=4)
    two = Layout(2, 1, 1)
    run = parallel.train(case, ONE, tmp_path / "from")

    layout = dict[str, Any](tp=2, dp=1, vocab_divisor=case.pad_to)
    with pytest.raises(RequestError) as caught:
        convert(run.dir, tmp_path / "refused" / run.tag, "zero", **layout)
    assert caught.value.code == "request.unsatisfiable"
    assert "nothing says how tensor parallelism cuts" in caught.value.message
    assert "--rules" in caught.value.fix

    convert(run.dir, tmp_path / "to" / run.tag, "zero", **layout, rules=_rules(case))
    ours = parallel.resume(case, two, tmp_path / "to", tmp_path / "ours")
    assert differences(run.truth, ours.state) == []
    assert ours.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)

    # The peer converts and loads without a word, and cuts everything along dimension 0.
    assert oracle.peer_universal(run.tag_dir, tmp_path / "peer" / "universal") is None
    theirs = parallel.resume(case, two, tmp_path / "peer", tmp_path / "theirs", tag="universal", load_universal=True)
    wrong = {line.split(":")[0] for line in differences(run.truth, theirs.state)}
    assert {f"fp32/{layer}.attention.dense.weight" for layer in (2, 3, 4, 5)} <= wrong
    assert theirs.losses != pytest.approx(run.losses_after, abs=100 * LOSS_TOLERANCE)


# -- [Q | K | V] in every part, and metadata that do not say so --------------------------------------------------------


def _without_blocks(parallel: ParallelOracle, run: Saved, folder: Path) -> Path:
    """A copy of a run whose metadata do not say that parts hold [Q | K | V]; the folder above its tag."""
    wrong = folder / "wrong"
    parallel.worlds.run(
        "oracle.parallel_planted:without_rule",
        world=1,
        tag_dir=str(run.tag_dir),
        out_dir=str(wrong / run.tag),
        key="parameter_with_sub_params",
    )
    return wrong


def test_rules_of_the_request_win_over_the_checkpoints_own(
    trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    case, run = GPT_CASES["gpt_fp32_qkv_blocks"], trained_on("gpt_fp32_qkv_blocks", FULL)
    wrong = _without_blocks(parallel, run, tmp_path)
    layout = dict[str, Any](tp=1, pp=1, dp=2, vocab_divisor=case.pad_to)
    convert(wrong / run.tag, tmp_path / "to" / run.tag, "zero", **layout, rules=_rules(case))
    again = parallel.resume(case, Layout(1, 1, 2), tmp_path / "to", tmp_path / "out")
    assert differences(run.truth, again.state) == []
    assert meta_differences(run.truth, again.state) == []
    assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)
    # What it was told is in what was written: the next conversion cuts it rightly without being told again.
    on = dict[str, Any](tp=2, pp=1, dp=1, vocab_divisor=case.pad_to)
    convert(tmp_path / "to" / run.tag, tmp_path / "on" / run.tag, "zero", **on)
    cut = parallel.resume(case, Layout(2, 1, 1), tmp_path / "on", tmp_path / "out_on")
    assert differences(run.truth, cut.state) == []


def test_rules_of_the_request_add_to_the_checkpoints_own(
    trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path
) -> None:
    case, run = GPT_CASES["gpt_fp32_qkv_blocks"], trained_on("gpt_fp32_qkv_blocks", FULL)
    wrong = _without_blocks(parallel, run, tmp_path)
    layout = dict[str, Any](tp=1, pp=1, dp=2, vocab_divisor=case.pad_to)
    # One sentence of the user; all others are the checkpoint's.
    one = yaml.safe_dump({"parameter_with_sub_params": gpt_rules(case)["parameter_with_sub_params"]})
    convert(wrong / run.tag, tmp_path / "to" / run.tag, "zero", **layout, rules=one)
    again = parallel.resume(case, Layout(1, 1, 2), tmp_path / "to", tmp_path / "out")
    assert differences(run.truth, again.state) == []
    assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)
    # Unless the user says that nothing else counts.
    with pytest.raises(SourceError) as caught:
        convert(wrong / run.tag, tmp_path / "no" / run.tag, "zero", **layout, rules=f"default: refuse\n{one}")
    assert caught.value.code == "checkpoint.unexplained"
    assert "--rules" in caught.value.fix
    assert "--family" in caught.value.fix
    assert "2.attention.qkv.weight" not in caught.value.details["parameters"]


# -- gradients dealt out in another order ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flipped"), [("z2_round_robin", False), ("z1_round_robin_two_groups", False), ("z2_bf16", True)]
)
def test_round_robin_switched(
    name: str, flipped: bool, trained: TrainedFactory, oracle: Oracle, tmp_path: Path
) -> None:
    run = trained(name)
    case = replace(run.case, round_robin=flipped)
    # The same files under the other option load without an error, as other numbers.
    theirs = oracle.resume_native(case, run.dir, tmp_path / "theirs", world=run.world)
    assert any(line.startswith("fp32/") for line in differences(run.truth, theirs.state))

    layout = dict[str, Any](dp=run.world, round_robin_gradients=flipped)
    convert(run.dir, tmp_path / "to" / run.tag, "zero", **layout)
    ours = oracle.resume_native(case, tmp_path / "to", tmp_path / "ours", world=run.world)
    assert differences(run.truth, ours.state) == []
    assert ours.wrong_weights == []


# -- more ranks than two digits ----------------------------------------------------------------------------------------

MANY = 128


def _assert_holds(folder: Path, model: Model) -> None:
    """Fail unless the folder's only rank holds the whole model."""
    file = _archive(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    shapes = _archive(folder / "mp_rank_00_model_states.pt")["param_shapes"][0]
    states = file["base_optimizer_state"]["state"][0]
    flats = {"fp32": file["single_partition_of_fp32_groups"][0], **{k: states[k] for k in ("exp_avg", "exp_avg_sq")}}
    assert list(shapes) == [p.fqn for p in model.state.parameters]
    at = 0
    for parameter in model.state.parameters:
        numel = torch.Size(parameter.shape).numel()
        for key, flat in flats.items():
            found = flat.detach()[at : at + numel].reshape(parameter.shape)
            assert bits_of(found) == parameter.states[key], f"{key} of {parameter.fqn}"
        at += numel


def _numbers(folder: Path) -> list[int]:
    return sorted(int(p.name[len("mp_rank_") : -len("_model_states.pt")]) for p in folder.glob("mp_rank_*"))


def _archive(path: Path) -> Any:
    return load_archive(path.read_bytes())


@pytest.mark.parametrize("kind", ["stages", "parts"])
def test_ranks_with_three_digits(kind: str, tmp_path: Path) -> None:
    shapes: dict[str, tuple[tuple[int, ...], Part]]
    if kind == "stages":
        shapes = {f"{layer}.weight": ((2, 3), Part("column", layer)) for layer in range(MANY)}
        model = seeded_model(shapes, piped=True, layers=MANY, told=False)
        ranks = Ranks(1, tuple(range(MANY)), DataRanks(1, 1))
        back = dict[str, Any](dp=1, pp=MANY, partition_method=",".join(map(str, range(MANY))))
    else:
        shapes = {"up.weight": ((MANY, 2), Part("column", 0)), "down.weight": ((2, 2 * MANY), Part("row", 0))}
        model = seeded_model(shapes, piped=False, layers=1, told=False)
        ranks, back = Ranks(MANY, (0,), DataRanks(1, 1)), {"dp": 1, "tp": MANY}
    ParallelWriter(model, ranks, tmp_path / "from").write()
    source = tmp_path / "from" / ranks.data.tag
    assert _numbers(source) == list(range(MANY))
    # As texts, 100 comes before 11: whoever sorts names joins other parts.
    names = sorted(p.name for p in source.glob("mp_rank_*"))
    assert names.index("mp_rank_100_model_states.pt") < names.index("mp_rank_11_model_states.pt")

    rules = "default: column\nparameter_with_row_parallelism_patterns: ['down.*']\n"
    convert(source, tmp_path / "one" / "step", "zero", layout=RunLayout(dp=1), rules=rules)
    _assert_holds(tmp_path / "one" / "step", model)
    convert(tmp_path / "one" / "step", tmp_path / "many" / "step", "zero", **back, rules=rules)
    assert _numbers(tmp_path / "many" / "step") == list(range(MANY))
    for path in source.glob("*_optim_states.pt"):
        ours, theirs = (_archive(folder / path.name) for folder in (tmp_path / "many" / "step", source))
        key = "single_partition_of_fp32_groups"
        flats = [found["optimizer_state_dict"][key][0].detach() for found in (ours, theirs)]
        assert torch.equal(*flats), path.name


# -- heads that do not divide ------------------------------------------------------------------------------------------


def test_uneven_heads_of_autotp(parallel: ParallelOracle, tmp_path: Path) -> None:
    case = AUTOTP_CASES["autotp_z1_uneven"]  # three key-value heads: two ranks hold two and one
    run = parallel.train(case, Layout(tp=2, dp=1), tmp_path / "from")
    convert(run.dir, tmp_path / "to" / run.tag, "zero", layout=RunLayout(dp=1, tp=3))
    again = parallel.resume(case, Layout(tp=3, dp=1), tmp_path / "to", tmp_path / "out")
    assert differences(run.truth, again.state) == []
    assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


def test_heads_of_autotp_are_not_cut_through(parallel: ParallelOracle, tmp_path: Path) -> None:
    # 24 rows divide by four ranks, three heads do not; only the widths of the two ranks tell that there are three.
    run = parallel.train(AUTOTP_CASES["autotp_z1_uneven"], Layout(tp=2, dp=1), tmp_path / "from")
    with pytest.raises(RequestError) as caught:
        convert(run.dir, tmp_path / "to" / run.tag, "zero", layout=RunLayout(dp=1, tp=4))
    assert (caught.value.code, caught.value.fix) == ("request.unsatisfiable", "--tp 3")
    assert "3 heads are fewer than 4 ranks" in caught.value.message
    assert not (tmp_path / "to" / run.tag).exists()


def test_heads_that_share_keys_are_not_cut_through(trained_on: TrainedOn, tmp_path: Path) -> None:
    case, run = GPT_CASES["gpt_fp32_gqa"], trained_on("gpt_fp32_gqa", FULL)
    # 32 rows of the fused matrix divide by four ranks, its two groups of heads do not.
    heads = "parameter_with_heads: [{patterns: ['.*attention.qkv.weight'], heads: 2}]"
    with pytest.raises(RequestError) as caught:
        convert(
            run.dir,
            tmp_path / "to" / run.tag,
            "zero",
            tp=4,
            dp=1,
            vocab_divisor=case.pad_to,
            rules=f"{_rules(case)}{heads}\n",
        )
    assert (caught.value.code, caught.value.fix) == ("request.unsatisfiable", "--tp 2")
    assert "2 heads do not divide by 4" in caught.value.message


# -- padding of vocabularies -------------------------------------------------------------------------------------------


def test_vocabularies_are_padded_anew(trained_on: TrainedOn, parallel: ParallelOracle, tmp_path: Path) -> None:
    case, run = GPT_CASES["gpt_fp32"], trained_on("gpt_fp32", FULL)
    truth = tensor_of(run.truth.tensors["module/tied_modules.embed.tokens.weight"])
    assert len(truth) == VOCAB
    source = run.dir
    for tp, rows in ((1, 40), (4, 64), (2, 48)):  # each made from the one before
        target = tmp_path / f"tp{tp}"
        convert(source, target / run.tag, "zero", tp=tp, dp=1, vocab_divisor=case.pad_to)
        parts = [load(target / run.tag / f"layer_00-model_{r:02d}-model_states.pt")["tokens.weight"] for r in range(tp)]
        assert {len(part) for part in parts} == {rows // tp}
        whole = torch.cat(parts)
        assert torch.equal(whole[:VOCAB], truth)
        assert not whole[VOCAB:].any()
        for rank in range(tp):
            shapes = load(target / run.tag / f"mp_rank_{rank:02d}_model_states.pt")["param_shapes"]
            assert shapes[0][f"{TIED}tokens.weight"][0] == rows // tp
        source = target
        again = parallel.resume(case, Layout(tp, 1, 1), target, tmp_path / f"out{tp}")
        assert differences(run.truth, again.state) == []
        assert again.losses == pytest.approx(run.losses_after, abs=LOSS_TOLERANCE)


# -- stage 3 under tensor parallelism, universal -----------------------------------------------------------------------


def test_stage_3_of_autotp_as_universal(parallel: ParallelOracle, tmp_path: Path) -> None:
    case = AUTOTP_CASES["autotp_z3"]
    run = parallel.train(case, Layout(tp=2, dp=2), tmp_path / "from")
    convert(run.dir, tmp_path / "to" / f"{run.tag}_universal", "universal")
    folder = tmp_path / "to" / f"{run.tag}_universal"
    wanted = {f"{fqn}/fp32": value for fqn, value in run.truth.kind("fp32").items()}
    wanted |= {f"{n}/{k}": value for k in ("exp_avg", "exp_avg_sq") for n, value in run.truth.kind(k).items()}
    assert len(wanted) > 30
    assert wrong_atoms(folder, wanted) == []
    for world, tp in ((2, 1), (4, 4)):
        again = parallel.resume(
            case, Layout(tp=tp, dp=world // tp), tmp_path / "to", tmp_path / f"out{tp}", load_universal=True
        )
        assert differences(run.truth, again.state) == []


def test_stage_3_of_megatron_as_universal(tmp_path: Path) -> None:
    folder = real_checkpoint("llama_bf16_z3_nopipe_tp2dp2")
    convert(folder / "src", tmp_path / "universal", "universal")
    assert wrong_atoms(tmp_path / "universal", expected(folder)) == []
    # And by way of another layout at another stage.
    convert(folder / "src", tmp_path / "way" / "step", "zero", tp=1, dp=3, zero_stage="1")
    convert(tmp_path / "way" / "step", tmp_path / "again", "universal")
    assert wrong_atoms(tmp_path / "again", expected(folder)) == []


# -- layers on other stages than the run's -----------------------------------------------------------------------------


def _stage(cuts: list[int], layer: int) -> int:
    return max(stage for stage, first in enumerate(cuts[:-1]) if first <= layer)


_SIZES = (1, 2, 3, 7, 7, 7, 40, 1000)


@st.composite
def _layer_sizes(draw: st.DrawFn, *, tied: bool) -> list[int]:
    """Parameters of each layer. The last layer has some, and so has a first layer to which a later layer is tied."""
    some = st.sampled_from(_SIZES)
    sizes = [*draw(st.lists(st.sampled_from((0, 0, *_SIZES)), max_size=13)), draw(some)]
    return [draw(some), *sizes[1:]] if tied and not sizes[0] else sizes


@settings(max_examples=500, deadline=None, database=None)
@given(data=st.data(), tied=st.booleans(), trailing=st.integers(0, 3))
def test_stages_hold_the_layers_that_deepspeed_gives_them(data: st.DataObject, tied: bool, trailing: int) -> None:
    """Blocks have one size: with other boundaries every tensor fits, and the layers are mixed up."""
    weights = data.draw(_layer_sizes(tied=tied))
    whole = [*weights, *([weights[0]] if tied else []), *[0] * trailing]
    stages = data.draw(st.integers(1, min(6, len(whole))))
    own = {layer: weight for layer, weight in enumerate(weights) if weight}
    asked = DeepSpeedOptions(partition_method="parameters", pipeline_layers=len(whole))
    expected = [int(cut) for cut in partition_balanced(whole, stages)]
    assert boundaries(stages, asked, own, {}, tied=tied) == expected
    uniform = asked.model_copy(update={"partition_method": "uniform"})
    assert boundaries(stages, uniform, own, {}, tied=tied) == partition_uniform(len(whole), stages)
    if {_stage(expected, layer) for layer in own} == set(range(stages)):
        # Where every stage holds parameters, nobody needs to say how many layers without any come last.
        known = boundaries(stages, asked.model_copy(update={"pipeline_layers": None}), own, {}, tied=tied)
        assert [_stage(known, layer) for layer in own] == [_stage(expected, layer) for layer in own]
    kinds = {layer: weight for layer, weight in own.items() if weight == 7}
    if len(kinds) > 1:
        by_type = asked.model_copy(update={"partition_method": "type:block"})
        shapes = {layer: "block" if layer in kinds else layer for layer in own}
        matching = [int(layer in kinds) for layer in range(len(whole))]
        assert boundaries(stages, by_type, own, shapes, tied=tied) == partition_balanced(matching, stages)


# -- what a conversion must not forget ---------------------------------------------------------------------------------


def test_heads_are_remembered(tmp_path: Path) -> None:
    model = seeded_model({"qkv.weight": ((12, 3), Part("column", 0))}, piped=False, layers=1, told=False)
    ParallelWriter(model, Ranks(1, (0,), DataRanks(1, 1)), tmp_path / "from").write()
    rules = "parameter_with_column_parallelism_patterns: ['qkv.*']\n"
    heads = "parameter_with_heads: [{patterns: ['qkv.*'], heads: 6}]\n"
    way = tmp_path / "way" / "step"
    convert(tmp_path / "from", way, "zero", layout=RunLayout(tp=2, dp=1), rules=rules + heads)
    with pytest.raises(RequestError, match="6 heads do not divide by 4"):
        convert(way, tmp_path / "to" / "step", "zero", layout=RunLayout(tp=4, dp=1))


@pytest.mark.parametrize("widths", [((3, 3), (3, 3)), ((4, 2), (2, 4))], ids=["even", "uneven"])
def test_widths_of_sections_are_remembered(
    widths: tuple[tuple[int, int], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both ranks' parts are of one shape however the sections were cut: only the widths tell.
    def cut(tensor: torch.Tensor, _part: Part, _tp: int, rank: int, *, rows: int) -> torch.Tensor:
        assert rows == 0
        sections = zip(tensor.split([6, 6]), widths, strict=True)
        return torch.cat([section.split(list(width))[rank] for section, width in sections])

    model = seeded_model({"qkv.weight": ((12, 3), Part("column", 0))}, piped=False, layers=1, told=False)
    monkeypatch.setattr(pipeline_source, "cut", cut)
    ParallelWriter(model, Ranks(2, (0,), DataRanks(1, 1)), tmp_path / "from").write()
    rules = (
        "universal_checkpoint_version: 0.4\n"
        "parameter_with_sub_params: [{patterns: ['qkv.*'], shape: [[6, 6], 3], partition_dim: 0}]\n"
        f"sub_param_shard_widths: {{'qkv.*': {[list(w) for w in widths]}}}\n"
    )
    way = tmp_path / "way" / "step"
    convert(tmp_path / "from", way, "zero", layout=RunLayout(tp=2, dp=1), rules=rules)
    convert(way, tmp_path / "to" / "step", "zero", layout=RunLayout(dp=1))
    _assert_holds(tmp_path / "to" / "step", model)


def test_buffers_of_a_pipelines_layers_are_kept(tmp_path: Path) -> None:
    shapes = {f"{layer}.weight": ((2, 3), Part("whole", layer)) for layer in range(2)}
    model = seeded_model(shapes, piped=True, layers=2, told=False)
    ParallelWriter(model, Ranks(1, (0,), DataRanks(1, 1)), tmp_path / "from").write()
    tag = tmp_path / "from" / "global_step3"
    for name, change in (
        ("layer_01-model_00-model_states.pt", {"mask": torch.arange(5.0)}),
        ("mp_rank_00_model_states.pt", {"buffer_names": ["1.mask"]}),
    ):
        torch.save(_archive(tag / name) | change, tag / name)
    convert(tag, tmp_path / "to" / "step", "zero", layout=RunLayout(dp=2))
    found = _archive(tmp_path / "to" / "step" / "layer_01-model_00-model_states.pt")
    assert torch.equal(found["mask"], torch.arange(5.0))
