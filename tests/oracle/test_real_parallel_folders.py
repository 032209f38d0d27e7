"""Real Megatron-DeepSpeed checkpoints: our universal form is the truth; DeepSpeed reads it in our native files too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.driver import Oracle
from oracle.outputs import convert, load, raw, tensor_of
from oracle.real_folders import EXPECTED, PEER_UNREADABLE, atom, expected, facts, load_any, real_folder, wrong_atoms
from oracle.truth import RawTensor
from reshard.errors import RequestError
from reshard.models import NameScheme, NativeLayout, WeightDtype, ZeroStage

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
    folder = real_folder(name)
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
    folder = real_folder(name)
    tp, pp, dp = ELSEWHERE[name]
    native = tmp_path / "native" / TAG
    convert(folder / "src", native, "zero", layout=NativeLayout(tp=tp, pp=pp, dp=dp))
    error = oracle.peer_universal(native, tmp_path / "peer", megatron=True, nested="nopipe" in name)
    assert error is None
    assert wrong_atoms(tmp_path / "peer", expected(folder)) == []


def _tree(node: Any) -> Any:
    return {key: _tree(value) for key, value in node.items()} if isinstance(node, dict) else "tensor"


def _shapes(folder: Path, name: str) -> list[dict[str, tuple[int, ...]]]:
    return [{n: tuple(s) for n, s in group.items()} for group in load_any(folder / name)["param_shapes"]]


def test_a_pipeline_without_pipeline_has_the_names_shapes_orders_and_nesting_of_a_real_one(tmp_path: Path) -> None:
    """The two folders hold one model, trained with pipeline and without."""
    piped = real_folder("llama_fp32_z1_tp2pp2dp2") / "src"
    plain = real_folder("llama_bf16_z3_nopipe_tp2dp2") / "src" / TAG
    layout = NativeLayout(tp=2, dp=2, zero_stage=ZeroStage.STAGE_3)
    convert(piped, tmp_path / TAG, "zero", layout=layout, names=NameScheme.MEGATRON_PLAIN, dtype=WeightDtype.BF16)
    for rank in ("zero_pp_rank_0_mp_rank_00", "zero_pp_rank_1_mp_rank_01"):
        file = f"{rank}_model_states.pt"
        ours, theirs = load_any(tmp_path / TAG / file), load_any(plain / file)
        assert _tree(ours["module"]) == _tree(theirs["module"])
        # At stage 3 that run put its parameters into other groups; within a group the model's order rules.
        (real,) = _shapes(plain, file)
        groups = _shapes(tmp_path / TAG, file)
        assert {name: shape for group in groups for name, shape in group.items()} == real
        for group in groups:
            assert list(group) == [name for name in real if name in group]
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
    folder = real_folder(name)
    pp = 2 if there == "megatron-pipeline" else 1
    layout = NativeLayout(tp=2, pp=pp, dp=1, zero_stage=ZeroStage.STAGE_1)
    convert(folder / "src", tmp_path / TAG, "zero", layout=layout, names=NameScheme(there))
    convert(tmp_path / TAG, tmp_path / "universal", "universal", names=NameScheme(back))
    assert wrong_atoms(tmp_path / "universal", expected(folder)) == []


@pytest.mark.parametrize("name", ["gpt_bf16_z1_tp2pp2dp2", "llama_bf16_z3_nopipe_tp2dp2"])
def test_a_universal_form_by_deepspeed_is_read(name: str, oracle: Oracle, tmp_path: Path) -> None:
    folder = real_folder(name)
    peer = tmp_path / "peer"
    assert oracle.peer_universal(folder / "src" / TAG, peer, megatron=True, nested="nopipe" in name) is None
    convert(peer, tmp_path / "ours", "universal")
    assert wrong_atoms(tmp_path / "ours", expected(folder)) == []


def test_heads_are_not_cut_through(tmp_path: Path) -> None:
    folder = real_folder("llama_fp32_z1_tp2pp2dp2")
    with pytest.raises(RequestError) as caught:
        convert(folder / "src", tmp_path / TAG, "zero", layout=NativeLayout(tp=4, dp=1))
    assert caught.value.code == "request.unsatisfiable"
    assert "2 heads do not divide by 4" in caught.value.message
    assert caught.value.fix == "--tp 2"


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
    source = real_folder(PEER_UNREADABLE) / "src" / TAG
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
    source = real_folder(PEER_UNREADABLE) / "src"
    convert(source, tmp_path / "native" / TAG, "zero", layout=NativeLayout(dp=dp, ep=ep))
    convert(tmp_path / "native", tmp_path / "again", "universal")
    convert(source, tmp_path / "direct", "universal")
    ours = {p.relative_to(tmp_path / "again"): p.read_bytes() for p in (tmp_path / "again").glob("zero/**/*.pt")}
    theirs = {p.relative_to(tmp_path / "direct"): p.read_bytes() for p in (tmp_path / "direct").glob("zero/**/*.pt")}
    differing = [str(path) for path in theirs if ours.get(path) != theirs[path]]
    # The group's name is the number of its expert-parallel ranks.
    assert set(differing) <= {"zero/optimizer_state.pt"}
    assert ours.keys() == theirs.keys()
