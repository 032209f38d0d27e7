"""Real Megatron-DeepSpeed checkpoints: our universal form is the truth; DeepSpeed reads it in our native files too."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from house.repository import real_checkpoint
from oracle.driver import Oracle
from oracle.outputs import Bag, convert, load, raw, tensor_of
from oracle.real_folders import EXPECTED, PEER_UNREADABLE, atom, expected, facts, load_any, wrong_atoms
from oracle.truth import RawTensor
from reshard.choices import NameScheme, WeightDtype, ZeroStage
from reshard.engine import load_engine
from reshard.errors import RequestError, SourceError
from reshard.models.reports import DiffOptions
from reshard.options import RunLayout, SourceSpec

TAG = "global_step3"
# (tensor parallel, pipeline, data parallel): another in every dimension that the model allows.
ELSEWHERE = {
    "gpt_bf16_z1_tp2pp2dp2": (4, 1, 1),
    "gpt_bf16_z2_nopipe_tp2dp2": (4, 1, 3),
    "gpt_fp16_z1_tp2pp1dp2": (1, 2, 3),
    "gpt_fp32_z1_tp2pp1dp2": (4, 2, 1),
    "gptheadqkvsubw_fp32_z1_tp2pp1dp2": (4, 2, 1),
    "llama_bf16_z3_nopipe_tp2dp2": (1, 1, 3),
    "llama_fp32_z1_tp2pp2dp2": (1, 4, 1),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_our_universal_form_is_the_truth(name: str, tmp_path: Path) -> None:
    folder = real_checkpoint(name)
    target = tmp_path / f"{TAG}_universal"
    convert(folder / "src", target, "universal")
    wanted = expected(folder)
    assert wrong_atoms(target, wanted) == []
    names = {str(path.parent.relative_to(target / "zero")) for path in target.glob("zero/**/fp32.pt")}
    assert names == {key.rpartition("/")[0] for key in wanted}
    for parameter, said in facts(folder).items():
        ours = load(target / "zero" / parameter / "fp32.pt")
        for key in ("cat_dim", "vocab_tensor", "param_n_sub_params"):
            assert ours.get(key) == said.get(key), (parameter, key)
        if "step" in said:
            assert float(load(target / "zero" / parameter / "step.pt")) == said["step"]


@pytest.mark.parametrize("name", EXPECTED)
def test_deepspeed_reads_the_truth_in_our_native_form(name: str, oracle: Oracle, tmp_path: Path) -> None:
    folder = real_checkpoint(name)
    tp, pp, dp = ELSEWHERE[name]
    native = tmp_path / "native" / TAG
    convert(folder / "src", native, "zero", layout=RunLayout(tp=tp, pp=pp, dp=dp))
    error = oracle.peer_universal(native, tmp_path / "peer", megatron=True, nested="nopipe" in name)
    assert error is None
    assert wrong_atoms(tmp_path / "peer", expected(folder)) == []


def _tree(node: Any) -> Any:
    return {key: _tree(value) for key, value in node.items()} if isinstance(node, dict) else "tensor"


def _shapes(folder: Path, name: str) -> list[dict[str, tuple[int, ...]]]:
    return [{n: tuple(s) for n, s in group.items()} for group in load_any(folder / name)["param_shapes"]]


def test_a_pipeline_without_pipeline_has_the_names_shapes_orders_and_nesting_of_a_real_one(tmp_path: Path) -> None:
    """The two folders hold one model, trained with pipeline and without."""
    piped = real_checkpoint("llama_fp32_z1_tp2pp2dp2") / "src"
    plain = real_checkpoint("llama_bf16_z3_nopipe_tp2dp2") / "src" / TAG
    layout = dict[str, Any](tp=2, dp=2, zero_stage=ZeroStage.STAGE_3)
    convert(piped, tmp_path / TAG, "zero", **layout, names=NameScheme.MEGATRON_PLAIN, dtype=WeightDtype.BF16)
    for rank in ("zero_pp_rank_0_mp_rank_00", "zero_pp_rank_1_mp_rank_01"):
        file = f"{rank}_model_states.pt"
        ours, theirs = load_any(tmp_path / TAG / file), load_any(plain / file)
        assert _tree(ours["module"]) == _tree(theirs["module"])
        # At stage 3 there is one group, in the model's order.
        (real,), (group,) = _shapes(plain, file), _shapes(tmp_path / TAG, file)
        assert list(group.items()) == list(real.items())
        assert ours["args"].no_pipeline_parallel is True


@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        ("llama_fp32_z1_tp2pp2dp2", "megatron-no-pipeline", "megatron-pipeline"),
        ("gpt_fp32_z1_tp2pp1dp2", "megatron-no-pipeline", "megatron-pipeline"),
        ("gpt_bf16_z2_nopipe_tp2dp2", "megatron-pipeline", "megatron-no-pipeline"),
        ("llama_bf16_z3_nopipe_tp2dp2", "megatron-pipeline", "megatron-no-pipeline"),
    ],
)
def test_names_go_there_and_back(name: str, there: str, back: str, tmp_path: Path) -> None:
    folder = real_checkpoint(name)
    pp = 2 if there == "megatron-pipeline" else 1
    layout = dict[str, Any](tp=2, pp=pp, dp=1, zero_stage=ZeroStage.STAGE_1)
    convert(folder / "src", tmp_path / TAG, "zero", **layout, names=NameScheme(there))
    convert(tmp_path / TAG, tmp_path / "universal", "universal", names=NameScheme(back))
    assert wrong_atoms(tmp_path / "universal", expected(folder)) == []


@pytest.mark.parametrize("name", ["gpt_bf16_z1_tp2pp2dp2", "llama_bf16_z3_nopipe_tp2dp2"])
def test_a_universal_form_by_deepspeed_is_read(name: str, oracle: Oracle, tmp_path: Path) -> None:
    folder = real_checkpoint(name)
    peer = tmp_path / "peer"
    assert oracle.peer_universal(folder / "src" / TAG, peer, megatron=True, nested="nopipe" in name) is None
    convert(peer, tmp_path / "ours", "universal")
    assert wrong_atoms(tmp_path / "ours", expected(folder)) == []


def test_heads_are_not_cut_through(tmp_path: Path) -> None:
    folder = real_checkpoint("llama_fp32_z1_tp2pp2dp2")
    with pytest.raises(RequestError) as caught:
        convert(folder / "src", tmp_path / TAG, "zero", layout=RunLayout(tp=4, dp=1))
    assert caught.value.code == "request.unsatisfiable"
    assert "2 heads do not divide by 4" in caught.value.message
    assert caught.value.fix == "--tp 2"


def _said(folder: Path, target: Path, **layout: Any) -> tuple[str, ...]:
    return convert(folder / "src", target / TAG, "zero", **layout).warnings


def test_warnings_stand_where_they_matter(tmp_path: Path) -> None:
    """Heads are cut anew where tensor parallelism changes; positions on the last stage are never in use."""
    folder = real_checkpoint("gpt_bf16_z1_tp2pp2dp2")
    same, other = _said(folder, tmp_path / "same", tp=2, pp=1, dp=2), _said(folder, tmp_path / "other", tp=4, dp=1)
    assert not any(text in line for line in same for text in ("query_key_value", "pipeline stage", "padding", "zeros"))
    assert any("query_key_value" in line for line in other)
    padded = _said(real_checkpoint("gpt_bf16_z2_nopipe_tp2dp2"), tmp_path / "padded", tp=4, dp=1)
    text = "16 rows of zeros are added behind the vocabulary: 224 rows, 208 in the source"
    assert any(text in line for line in padded)


@pytest.mark.parametrize("name", ["gpt_bf16_z1_tp2pp2dp2", "gpt_bf16_z2_nopipe_tp2dp2", "llama_fp32_z1_tp2pp2dp2"])
def test_only_the_layout_differs_after_a_conversion(name: str, tmp_path: Path) -> None:
    folder = real_checkpoint(name)
    tp, pp, dp = ELSEWHERE[name]
    convert(folder / "src", tmp_path / "to" / TAG, "zero", layout=RunLayout(tp=tp if tp < 4 else 1, pp=pp, dp=dp))
    sides = SourceSpec(url=str(folder / "src")), SourceSpec(url=str(tmp_path / "to"))
    report = load_engine().diff(*sides, DiffOptions())
    assert report.equal, report.differences
    assert (tmp_path / "to" / "latest_checkpointed_iteration.txt").read_text() == "3"


@pytest.mark.parametrize(("stage", "groups"), [("1", 2), ("3", 1)])
def test_groups_are_those_of_the_stage(stage: str, groups: int, tmp_path: Path) -> None:
    """One at ZeRO-3 without weight decay; elsewhere matrices apart, with that of the run's scheduler."""
    folder = real_checkpoint("llama_bf16_z3_nopipe_tp2dp2")
    layout = dict[str, Any](tp=2, dp=1, zero_stage=ZeroStage(stage))
    result = convert(folder / "src", tmp_path / TAG, "zero", **layout)
    assert any("param groups: 1 became 2" in line for line in result.warnings) is (groups == 2)
    file = load_any(tmp_path / TAG / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    found = (file["base_optimizer_state"] if groups == 2 else file["optimizer_state_dict"])["param_groups"]
    piped = load_any(
        real_checkpoint("llama_fp32_z1_tp2pp2dp2") / "src" / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
    wanted = piped if groups == 2 else piped[1:]
    for ours, theirs in zip(found, wanted, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    (real,) = _shapes(folder / "src" / TAG, "zero_pp_rank_0_mp_rank_00_model_states.pt")
    vectors = [name for name, shape in real.items() if len(shape) == 1]
    matrices = [name for name in real if name not in vectors]
    file = next(f.name for f in sorted((tmp_path / TAG).glob("*mp_rank_00_model_states.pt")))
    held = [list(group) for group in _shapes(tmp_path / TAG, file)]
    assert held == ([matrices, vectors] if groups == 2 else [list(real)])


def _moments(folder: Path) -> dict[str, RawTensor]:
    """Masters and moments of a data-parallel rank's experts, read without our engine: name and state to bits.

    The flat tensors of a group of experts are cut over the ranks that hold the same ones, here ranks r and r + 2.
    """
    found: dict[str, RawTensor] = {}
    shapes = load_any(folder / "mp_rank_00_model_states.pt")["param_shapes"]
    ranks = [
        load_any(folder / f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt")["optimizer_state_dict"] for r in range(4)
    ]
    for ep in range(2):
        for group in (2, 3):
            mine = [ranks[ep], ranks[ep + 2]]
            flats = {"fp32": [r["single_partition_of_fp32_groups"][group] for r in mine]}
            for key in ("exp_avg", "exp_avg_sq"):
                flats[key] = [r["base_optimizer_state"]["state"][group][key] for r in mine]
            for state, pieces in flats.items():
                flat, at = torch.cat([p.detach().flatten() for p in pieces]), 0
                for name, shape in shapes[group].items():
                    numel = int(torch.Size(shape).numel())
                    head, _, tail = name.partition("deepspeed_experts.")
                    local, _, rest = tail.partition(".")
                    full = f"{head}deepspeed_experts.{2 * ep + int(local)}.{rest}"
                    found[f"{full}/{state}"] = raw(flat[at : at + numel].reshape(shape))
                    at += numel
    return found


def test_experts_have_their_global_numbers(tmp_path: Path) -> None:
    source = real_checkpoint(PEER_UNREADABLE) / "src" / TAG
    target = tmp_path / f"{TAG}_universal"
    convert(source, target, "universal")
    wanted = _moments(source)
    assert len({key.split("deepspeed_experts.")[1].partition(".")[0] for key in wanted}) == 4
    assert wrong_atoms(target, wanted) == []
    # The files of experts carry global numbers of their own: their weights are the rounded masters.
    for file in source.glob("layer_*_expert_*_model_states.pt"):
        for name, weight in load_any(file).items():
            master = tensor_of(atom(target, name, "fp32", tuple(weight.shape)))
            assert raw(master.to(weight.dtype)) == raw(weight)


@pytest.mark.parametrize(("dp", "ep"), [(4, 4), (2, 1)])
def test_experts_on_other_ranks_are_the_same(dp: int, ep: int, tmp_path: Path) -> None:
    source = real_checkpoint(PEER_UNREADABLE) / "src"
    convert(source, tmp_path / "native" / TAG, "zero", layout=RunLayout(dp=dp, ep=ep))
    convert(tmp_path / "native", tmp_path / "again", "universal")
    convert(source, tmp_path / "direct", "universal")
    ours = {p.relative_to(tmp_path / "again"): p.read_bytes() for p in (tmp_path / "again").glob("zero/**/*.pt")}
    theirs = {p.relative_to(tmp_path / "direct"): p.read_bytes() for p in (tmp_path / "direct").glob("zero/**/*.pt")}
    differing = [str(path) for path in theirs if ours.get(path) != theirs[path]]
    # The group's name is the number of its expert-parallel ranks.
    assert set(differing) <= {"zero/optimizer_state.pt"}
    assert ours.keys() == theirs.keys()


# Parameters whose tensor-parallel copies are averaged: real checkpoints that are said to have some, and the peer.


STATES = ("fp32", "exp_avg", "exp_avg_sq")
# Cut along dimension 0 in truth: as copies they differ everywhere. The norms' copies are equal.
DRIFTED = r"\d+.mlp.dense_h_to_4h.bias"
EQUAL = r"\d+.input_layernorm.(weight|bias)"


def _averaging(source: Path, target: Path) -> list[str]:
    """A copy of a checkpoint that says of some parameters that their copies are averaged; returns their names."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    names: dict[str, None] = {}
    for path in sorted(target.glob("mp_rank_*_model_states.pt")):
        state: dict[str, Any] = {k: v for k, v in load_any(path).items() if not isinstance(v, Bag)}
        info = state["universal_checkpoint_info"]
        info["parameter_to_average_patterns"] = [DRIFTED, EQUAL]
        info["tp_replicated_parameter_patterns"] = [
            p for p in info["tp_replicated_parameter_patterns"] if "input_layernorm" not in p
        ]
        shapes = [name for group in state["param_shapes"] for name in group]
        names |= dict.fromkeys(n for n in shapes if "dense_h_to_4h.bias" in n or "input_layernorm" in n)
        path.chmod(0o644)
        torch.save(state, path)
    return list(names)


@pytest.mark.parametrize("name", ["gpt_fp32_z1_tp2pp1dp2", "gpt_bf16_z1_tp2pp2dp2"])
def test_averages_are_those_of_deepspeed(name: str, oracle: Oracle, tmp_path: Path) -> None:
    source = real_checkpoint(name) / "src" / TAG
    names = _averaging(source, tmp_path / "from" / TAG)
    assert len(names) == 12
    result = convert(tmp_path / "from" / TAG, tmp_path / "ours", "universal")
    assert any(f"{len(names)} parameters are the mean of 2" in warning for warning in result.warnings)
    assert oracle.peer_universal(tmp_path / "from" / TAG, tmp_path / "peer") is None
    plain = tmp_path / "plain"
    convert(source, plain, "universal")
    drifted = 0
    for state in STATES:
        for fqn in names:
            shape = tuple(load(tmp_path / "ours" / "zero" / fqn / f"{state}.pt")["param"].shape)
            ours = atom(tmp_path / "ours", fqn, state, shape)
            if "input_layernorm" in fqn:
                # Equal copies are no less exact than without the rule.
                assert ours == atom(plain, fqn, state, shape)
            assert ours == atom(tmp_path / "peer", fqn, state, shape)
            halves = tensor_of(atom(plain, fqn, state, (2 * shape[0],))) if DRIFTED[-8:] in fqn else None
            if halves is not None:
                assert ours == raw((halves[: shape[0]] + halves[shape[0] :]) / 2)
                drifted += ours != raw(halves[: shape[0]])
    assert drifted == 3 * 4  # every state of every layer


def test_an_average_reaches_every_target(tmp_path: Path) -> None:
    source = real_checkpoint("gpt_bf16_z1_tp2pp2dp2") / "src" / TAG
    names = _averaging(source, tmp_path / "from" / TAG)
    convert(tmp_path / "from" / TAG, tmp_path / "direct", "universal")
    native = RunLayout(tp=1, dp=3, pp=2)
    convert(tmp_path / "from" / TAG, tmp_path / "native" / TAG, "zero", layout=native)
    convert(tmp_path / "native" / TAG, tmp_path / "again", "universal")
    for fqn in names:
        for state in STATES:
            shape = tuple(load(tmp_path / "direct" / "zero" / fqn / f"{state}.pt")["param"].shape)
            assert atom(tmp_path / "direct", fqn, state, shape) == atom(tmp_path / "again", fqn, state, shape)
    for path in sorted((tmp_path / "native" / TAG).glob("layer_*-model_00-model_states.pt")):
        number = int(path.name[6:8])
        for inner, weight in load(path).items():
            if (fqn := f"{number}.{inner}") in names:
                master = atom(tmp_path / "direct", fqn, "fp32", tuple(weight.shape))
                assert raw(tensor_of(master).to(weight.dtype)) == raw(weight)


def test_each_copy_must_still_be_its_masters_rounding(tmp_path: Path) -> None:
    source = real_checkpoint("gpt_fp32_z1_tp2pp1dp2") / "src" / TAG
    names = _averaging(source, tmp_path / TAG)
    path = tmp_path / TAG / "layer_02-model_01-model_states.pt"
    weights = load_any(path)
    assert "2.mlp.dense_h_to_4h.bias" in names
    weights["mlp.dense_h_to_4h.bias"] += 1.0
    path.chmod(0o644)
    torch.save(weights, path)
    with pytest.raises(SourceError) as caught:
        convert(tmp_path / TAG, tmp_path / "to", "universal")
    assert caught.value.code == "checkpoint.disagreement"
    assert "tensor-parallel rank 1" in caught.value.message
