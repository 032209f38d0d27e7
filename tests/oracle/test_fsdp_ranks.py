"""Checkpoints of verl, Accelerate and torch_checkpointing, and full files: read as the live run had them.

The truth of each case was taken from the running model and optimizer before the save (`house.rank_cases`); the tensors
are compared bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import reshard
from house.rank_cases import RankCase, rank_case
from laws.item_files import folder_differences
from oracle.dcp_driver import TIMEOUT_S, FsdpOracle
from oracle.whole_tensors import differences, named, whole

VERL = (
    "verl_fsdp2_tied_w4", "verl_fsdp2_buf_w2", "verl_fsdp2_hsdp_2x2", "verl_fsdp2_lora_w4", "verl_fsdp2_cudatag_w2",
    "verl_fsdp1_flat_w2", "verl_fsdp1_orig_w4",
)  # fmt: skip
ACCELERATE = ("acc_nodcp_fsdp2_w4", "acc_nodcp_fsdp1_w2")
ITEMS = ("tc_fsdp2_w4", "tc_sts_w4")
"""Of torch_checkpointing."""
FULL = ("acc_full_fsdp2_w2", "trainer_full_fsdp2_w2")


def written(case: RankCase, target: Path, **options: Any) -> dict[str, Any]:
    reshard.convert(case.checkpoint, target, to="dcp", grammar="state-dict", progress=False, **options)
    return whole(target)


@pytest.mark.parametrize("name", [*VERL, *ACCELERATE, *ITEMS, *FULL])
def test_each_tensor_state_and_group_is_that_of_the_run(name: str, place: Path, tmp_path: Path) -> None:
    case = rank_case(name, place)
    found = written(case, tmp_path / "dcp")
    assert differences(case, named(found)) == []
    groups = [{k: v for k, v in g.items() if k != "params"} for g in found["optimizer"]["param_groups"]]
    assert json.loads(json.dumps(groups)) == case.facts["groups"]
    if name in VERL:
        assert found["lr_scheduler"]["last_epoch"] == case.facts["scheduler"]["last_epoch"]
        assert found["lr_scheduler"]["_last_lr"] == case.facts["scheduler"]["lr"]
    if name in (*ITEMS, *FULL):
        said = torch.load(next(case.checkpoint.glob("*scheduler*.*")))
        # A function without attributes is an empty dict or None, and LambdaLR loads both alike.
        assert {**found["lr_scheduler"], "lr_lambdas": None} == {**said, "lr_lambdas": None}


_VERLS = "{item}_world_size_4_rank_{rank}.pt"


@pytest.mark.parametrize(
    ("name", "pattern", "more"),
    [
        ("verl_fsdp2_tied_w4", _VERLS, {"param_order": "model"}),
        ("verl_fsdp2_hsdp_2x2", _VERLS, {"param_order": "model"}),
        ("acc_nodcp_fsdp2_w4", "{item}_0_rank{rank}.bin", {}),
        ("acc_nodcp_fsdp1_w2", "{item}_0_rank{rank}.bin", {}),
    ],
)
def test_a_pattern_reads_what_a_known_name_does(
    name: str, pattern: str, more: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    case = rank_case(name, place)
    found = written(case, tmp_path / "dcp", rank_files=pattern, **more)
    assert differences(case, named(found)) == []
    groups = [{k: v for k, v in g.items() if k != "params"} for g in found["optimizer"]["param_groups"]]
    assert json.loads(json.dumps(groups)) == case.facts["groups"]


@pytest.mark.parametrize("name", ["verl_fsdp2_tied_w4", "verl_fsdp1_flat_w2", "acc_nodcp_fsdp2_w4", "tc_sts_w4", *FULL])
def test_torch_loads_it_on_another_number_of_ranks(name: str, place: Path, tmp_path: Path, fsdp: FsdpOracle) -> None:
    case = rank_case(name, place)
    written(case, tmp_path / "dcp")
    out = tmp_path / "loaded.safetensors"
    jobs = {"path": str(tmp_path / "dcp"), "expected": str(case.truth), "tied": case.facts["tied"], "out": str(out)}
    fsdp.worlds.run("oracle.fsdp_ranks_load:load", world=3, timeout_s=TIMEOUT_S, **jobs)
    assert differences(case, load_file(out)) == []


@pytest.mark.parametrize("name", ["verl_fsdp2_hsdp_2x2", "verl_fsdp1_orig_w4", "tc_fsdp2_w4", "trainer_full_fsdp2_w2"])
def test_zero_and_universal_hold_the_same_state(name: str, place: Path, tmp_path: Path) -> None:
    case = rank_case(name, place)
    zero, universal = tmp_path / "zero" / "global_step3", tmp_path / "universal" / "global_step3"
    reshard.convert(case.checkpoint, zero, to="zero", dp=3, zero_stage="2", progress=False)
    reshard.convert(case.checkpoint, universal, to="universal", progress=False)
    for target in (zero, universal):
        found = reshard.diff(case.checkpoint, target, progress=False)
        assert [d for d in found.differences if d.name != "counters and client state"] == []


@pytest.mark.parametrize(
    ("name", "dp"),
    [("verl_fsdp2_tied_w4", 3), ("verl_fsdp2_tied_w4", 2), ("verl_fsdp2_buf_w2", 3), ("acc_nodcp_fsdp2_w4", 3)],
)
def test_a_run_goes_on_with_its_files_on_another_number_of_ranks(
    name: str, dp: int, place: Path, tmp_path: Path, fsdp: FsdpOracle
) -> None:
    case, out = rank_case(name, place), tmp_path / "loaded.safetensors"
    reshard.convert(case.checkpoint, tmp_path / "out", to="fsdp_ranks", dp=dp, progress=False)
    jobs = {
        "path": str(tmp_path / "out"), "framework": case.facts["framework"], "case": case.facts["case_args"],
        "out": str(out),
    }  # fmt: skip
    found = fsdp.worlds.run("oracle.fsdp_ranks_load:resume", world=dp, timeout_s=TIMEOUT_S, **jobs)
    assert differences(case, load_file(out)) == []
    assert all(f["rates"] == [g["lr"] for g in case.facts["groups"]] for f in found)
    assert [f["losses"] for f in found] == [pytest.approx(case.facts["losses_after"], abs=2e-6)] * dp
    if name in VERL:  # rank r has the random states of source rank r mod N
        sums = case.facts["rng_torch_byte_sum_by_rank"]
        assert [f["random_sum"] for f in found] == [sums[r % len(sums)] for r in range(dp)]


@pytest.mark.parametrize(("name", "stage"), [("verl_fsdp2_tied_w4", 2), ("verl_fsdp1_flat_w2", 3)])
def test_deepspeed_goes_on_with_a_run_of_verl(
    name: str, stage: int, place: Path, tmp_path: Path, fsdp: FsdpOracle
) -> None:
    """The recipe's command; DeepSpeed loads what it wrote, and the next losses are those of the run."""
    case, out = rank_case(name, place), tmp_path / "loaded.safetensors"
    path = reshard.ensure(case.checkpoint, to="zero", dp=3, zero_stage=stage, out=tmp_path / "zero")
    jobs = {"path": path, "case": case.facts["case_args"], "stage": stage, "out": str(out)}
    found = fsdp.worlds.run("oracle.fsdp_ranks_load:resume_zero", world=3, timeout_s=TIMEOUT_S, **jobs)
    loaded = load_file(out)
    loaded |= {f"{alias}/model": loaded[f"{owner}/model"] for alias, owner in case.facts["tied"].items()}
    assert differences(case, loaded) == []
    assert all(f["rates"] == [g["lr"] for g in case.facts["groups"]] for f in found)
    assert [f["losses"] for f in found] == [pytest.approx(case.facts["losses_after"], abs=2e-6)] * 3


@pytest.mark.parametrize("name", ["verl_fsdp2_tied_w4", "trainer_full_fsdp2_w2"])
def test_transformers_computes_with_the_weights(name: str, place: Path, tmp_path: Path) -> None:
    """They have Hugging Face's names; beside `config.json` the logits are those of the run's weights, bit for bit."""
    case = rank_case(name, place)
    config = next(f for f in (case.checkpoint, case.checkpoint / "huggingface") if (f / "config.json").exists())
    reshard.convert(case.checkpoint, tmp_path / "out", to="safetensors", model_files=config, progress=False)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    wanted: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config)).eval()
    weights = {k.removesuffix("/fp32"): v for k, v in load_file(case.truth).items() if k.endswith("/fp32")}
    weights |= {alias: weights[owner] for alias, owner in case.facts["tied"].items()}
    wanted.load_state_dict(weights)
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        logits, expected = model(input_ids=tokens).logits, wanted(input_ids=tokens).logits
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("verl_fsdp1_flat_w2", {"fsdp_version": 2}),
        ("verl_fsdp1_orig_w4", {"fsdp_version": 2}),
        ("acc_nodcp_fsdp1_w2", {"fsdp_version": 2, "device_type": "cpu"}),
        ("verl_fsdp2_hsdp_2x2", {}),
        ("verl_fsdp2_lora_w4", {}),
        ("verl_fsdp2_cudatag_w2", {}),
        ("acc_full_fsdp2_w2", {"rank_framework": "accelerate", "device_type": "cpu", "buffers": "model.b16"}),
        ("trainer_full_fsdp2_w2", {"rank_framework": "accelerate", "device_type": "cpu"}),
    ],
)
def test_files_for_other_ranks_hold_each_tensor_of_the_run(
    name: str, options: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    case = rank_case(name, place)
    reshard.convert(case.checkpoint, tmp_path / "out", to="fsdp_ranks", dp=6, progress=False, **options)
    reshard.convert(tmp_path / "out", tmp_path / "dcp", to="dcp", grammar="state-dict", progress=False)
    found = whole(tmp_path / "dcp")
    assert differences(case, named(found)) == []
    groups = [{k: v for k, v in g.items() if k != "params"} for g in found["optimizer"]["param_groups"]]
    assert json.loads(json.dumps(groups)) == case.facts["groups"]


@pytest.mark.parametrize(("name", "other"), [("verl_fsdp1_flat_w2", 3), ("verl_fsdp1_orig_w4", 3)])
def test_files_of_fsdp1_for_the_same_ranks_are_those_of_verl(
    name: str, other: int, place: Path, tmp_path: Path
) -> None:
    """Also by way of another number of ranks: tensor for tensor, with meshes, numbers and module versions."""
    case = rank_case(name, place)
    world = case.facts["world"]
    for source, target, dp in ((None, "same", world), (None, "other", other), ("other", "back", world)):
        read = case.checkpoint if source is None else tmp_path / source
        reshard.convert(read, tmp_path / target, to="fsdp_ranks", dp=dp, progress=False)
    assert folder_differences(case.checkpoint, tmp_path / "same") == []
    lost = {f"extra_state_world_size_{world}_rank_{r}.pt" for r in range(other, world)}  # it has another random state
    assert {d.partition(".rng")[0] for d in folder_differences(case.checkpoint, tmp_path / "back")} <= lost
    versions = [
        torch.load(d / f"model_world_size_{world}_rank_0.pt", weights_only=True)._metadata
        for d in (case.checkpoint, tmp_path / "back")
    ]
    assert versions[0] == versions[1]


@pytest.mark.parametrize("name", FULL)
def test_a_trainers_files_beside_full_files_are_written_again(name: str, place: Path, tmp_path: Path) -> None:
    case, framework = rank_case(name, place), name.partition("_")[0].replace("acc", "accelerate")
    reshard.convert(case.checkpoint, tmp_path / "dcp", to="dcp", framework=framework, progress=False)
    states = sorted(f.name for f in case.checkpoint.glob("r*_?.p*"))
    assert len(states) == case.facts["world"]
    for file in states:
        saved, written_again = (torch.load(d / file, weights_only=False) for d in (case.checkpoint, tmp_path / "dcp"))
        assert repr(saved) == repr(written_again)
    for text in case.checkpoint.glob("trainer_state.json"):
        assert (tmp_path / "dcp" / text.name).read_bytes() == text.read_bytes()
    for scheduler in case.checkpoint.glob("scheduler.*"):
        kept, now = (torch.load(d / scheduler.name) for d in (case.checkpoint, tmp_path / "dcp"))
        assert {**kept, "lr_lambdas": None} == {**now, "lr_lambdas": None}


@pytest.mark.parametrize("name", ITEMS)
def test_items_for_the_same_ranks_are_those_of_the_manager(name: str, place: Path, tmp_path: Path) -> None:
    case = rank_case(name, place)
    reshard.convert(case.checkpoint, tmp_path / "out", to="torch_checkpointing", dp=case.facts["world"], progress=False)
    assert folder_differences(case.checkpoint, tmp_path / "out") == []


@pytest.mark.parametrize("name", ITEMS)
def test_items_go_over_other_ranks_and_over_dcp_and_back(name: str, place: Path, tmp_path: Path) -> None:
    case = rank_case(name, place)
    options: dict[str, Any] = {"to": "torch_checkpointing", "progress": False}
    reshard.convert(case.checkpoint, tmp_path / "three", dp=3, **options)
    written(case, tmp_path / "dcp")
    buffers = ",".join(b.removesuffix("/buffer") for b in case.facts["buffers"]) or "none"
    reshard.convert(tmp_path / "dcp", tmp_path / "two", dp=2, device_type="cpu", buffers=buffers, **options)
    for way in ("three", "two"):
        reshard.convert(tmp_path / way, tmp_path / f"{way}.dcp", to="dcp", grammar="state-dict", progress=False)
        found = whole(tmp_path / f"{way}.dcp")
        assert differences(case, named(found)) == []
        groups = [{k: v for k, v in g.items() if k != "params"} for g in found["optimizer"]["param_groups"]]
        assert json.loads(json.dumps(groups)) == case.facts["groups"]
        assert int(found["train_state"]["tokens"]) == 360
