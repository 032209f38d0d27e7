"""Native output: plain ``engine.load_checkpoint`` on another number of ranks, another stage, gives the run's state.

Every bit of masters and moments, counters, hyper-parameters, buffers and frozen weights is compared right after
loading, then the losses of the next three steps with the uninterrupted run's.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from house.expected import raised
from house.tiers import rest_full
from oracle.cases import CASES, Case, Stage
from oracle.conversions import (
    TWO_GROUPS_AT_STAGE_3,
    UniversalFactory,
    agree,
    assert_continues,
    assert_native_continues,
    hyper_parameters_of,
    target_of,
)
from oracle.driver import Oracle, Trained
from oracle.fixtures import TrainedFactory
from oracle.launcher import WorldError
from oracle.outputs import convert, raw, read_bin, read_safetensors, read_universal, tensor_of
from oracle.truth import NOT_LOADED_BY_UNIVERSAL, RawTensor, Truth, differences, meta_differences
from reshard.errors import RequestError, SourceError

WORLDS = (1, 3, 4)
# Each stage and dtype, and each feature that moves boundaries; `-m full` runs the rest of the zoo.
ALWAYS = (
    ("z0_fp32", 3),
    ("z1_fp32", 4),
    ("z2_fp32", 3),
    ("z3_fp32", 3),
    ("bf16opt_two_groups", 3),
    ("z1_two_groups", 3),
    ("z2_bf16", 4),
    ("z3_sub_groups_two_groups", 4),
    ("z1_round_robin_two_groups", 3),
    ("z2_round_robin_alignment", 4),
    ("z2_fp16_skipped", 3),
    ("z3_fp16", 1),
    ("z1_adagrad", 4),
    ("z2_empty_param", 3),
    ("z3_fast_writer", 3),
    ("z3_nvme", 3),
    ("z2_legacy_stream", 3),
    ("z1_elastic", 3),
    ("z3_frozen_late", 3),
    ("z3_frozen_late_only", 3),
)
# The files of a nameless stage 0 have no states to write.
_WITHOUT_STATE = ("z0_before_first_step",)
EVERYTHING = tuple((name, world) for name in CASES if name not in _WITHOUT_STATE for world in WORLDS)
STAGE_CHANGES = (
    ("z1_fp32", 2),
    ("z2_fp32", 3),
    ("z3_fp32", 1),
    ("z3_fp32", 0),
    ("z0_fp32", 2),
    ("z1_two_groups", "bf16opt"),
    ("bf16opt_two_groups", 2),
    ("bf16opt_two_groups", 3),
    ("z3_sub_groups_two_groups", 2),
    ("z2_fp16_skipped", 3),
    ("z0_fp16", 1),
    ("z2_fp16_skipped", 0),
    ("z2_frozen_late", 3),
    ("z3_frozen_late", 2),
    ("z3_frozen_late_only", 1),
)
# From each stage and to each.
STAGES_ALWAYS = (
    ("z1_fp32", 2),
    ("z2_fp32", 3),
    ("z0_fp32", 2),
    ("z1_two_groups", "bf16opt"),
    ("bf16opt_two_groups", 3),
    ("z3_sub_groups_two_groups", 2),
    ("z2_fp16_skipped", 0),
    ("z3_frozen_late_only", 1),
)


def _native(run: Trained, folder: Path, world: int, case: Case) -> Path:
    stage = "bf16" if case.stage == "bf16opt" else str(case.stage)
    wanted: dict[str, Any] = {"dp": world, "zero_stage": stage}
    if case.sub_group_size is not None:
        wanted["sub_group_size"] = case.sub_group_size
    convert(run.dir, folder / run.tag, "zero", **wanted)
    assert (folder / "latest").read_text() == run.tag
    return folder


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=() if case in ALWAYS else pytest.mark.full)
        for case in dict.fromkeys((*ALWAYS, *EVERYTHING))
    ],
)
def test_plain_load_checkpoint_resumes_on_another_world(
    name: str, world: int, trained: TrainedFactory, oracle: Oracle, tmp_path: Path, bf16_spread: float
) -> None:
    run = trained(name)
    case = replace(run.case, elastic=False, zip_files=True, writer=None, nvme=None)
    folder = _native(run, tmp_path / "out", world, case)
    resumed = oracle.resume_native(case, folder, tmp_path / "state", world=world)
    assert_native_continues(run, resumed, case, bf16_spread)


@pytest.mark.parametrize(
    ("name", "stage"), rest_full(STAGE_CHANGES, *STAGES_ALWAYS), ids=[f"{n}-to-{s}" for n, s in STAGE_CHANGES]
)
def test_another_stage_resumes(
    name: str, stage: Any, trained: TrainedFactory, oracle: Oracle, tmp_path: Path, bf16_spread: float
) -> None:
    run = trained(name)
    case = replace(run.case, stage=stage)
    folder = _native(run, tmp_path / "out", 3, case)
    resumed = oracle.resume_native(case, folder, tmp_path / "state", world=3)
    assert_native_continues(run, resumed, case, bf16_spread)


@pytest.mark.parametrize(("name", "stage", "world"), [("z2_bf16", 2, 3), ("z1_fp32", 3, 4), ("z3_two_groups", 3, 1)])
def test_a_universal_checkpoint_becomes_native(
    name: str,
    stage: Any,
    world: int,
    universal: UniversalFactory,
    oracle: Oracle,
    tmp_path: Path,
    bf16_spread: float,
) -> None:
    converted = universal(name)
    run, case = converted.run, replace(converted.run.case, stage=stage)
    layout = dict[str, Any](dp=world, zero_stage=str(stage))
    convert(converted.root, tmp_path / "out" / run.tag, "zero", **layout)
    resumed = oracle.resume_native(case, tmp_path / "out", tmp_path / "state", world=world)
    assert_native_continues(run, resumed, case, bf16_spread)


# One universal directory for every stage, and what stage 3 of DeepSpeed 0.19.8 makes of it.
#
# Its loader gives every parameter group the first group's hyper-parameters and all sub-groups one step counter, from
# whatever universal checkpoint: states are compared all the same, hyper-parameters as DeepSpeed sets them, and losses
# where there is one sub-group.


@pytest.mark.parametrize(
    ("source", "stage"),
    rest_full(
        product(("z2_bf16", "z3_bf16"), (1, 2, 3, "bf16opt")),
        *(("z2_bf16", 1), ("z2_bf16", 3), ("z3_bf16", 2), ("z3_bf16", "bf16opt")),
    ),
)
def test_one_directory_loads_at_every_stage(
    source: str, stage: Stage, oracle: Oracle, universal: UniversalFactory, bf16_spread: float, tmp_path: Path
) -> None:
    converted = universal(source)
    target = target_of(converted.run.case, stage)
    resumed = oracle.resume_universal(target, converted.root, tmp_path, world=3, restore_from=converted.run.truth)
    # BF16_Optimizer has no loss scale, and stage 3 computes its bf16 losses by another kernel.
    same = replace(converted.run.case, stage=stage) == converted.run.case
    wrong = differences(converted.run.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL)
    wrong += [
        text for text in meta_differences(converted.run.truth, resumed.state) if text != "loss_scale: 1.0 != None"
    ]
    assert (wrong, resumed.wrong_weights) == ([], [])
    if same:
        assert resumed.losses == pytest.approx(converted.run.losses_after, rel=0, abs=bf16_spread)


@pytest.mark.parametrize(
    ("source", "stage"),
    rest_full([("z2_fp32", 3), ("z3_fp32", 1), ("z3_fp32", 2), ("z1_fp32", 3)], ("z3_fp32", 1), ("z1_fp32", 3)),
)
def test_losses_go_on_at_another_stage_in_fp32(
    source: str, stage: Stage, oracle: Oracle, universal: UniversalFactory, tmp_path: Path
) -> None:
    converted = universal(source)
    target = target_of(converted.run.case, stage)
    resumed = oracle.resume_universal(target, converted.root, tmp_path, world=3, restore_from=converted.run.truth)
    assert_continues(resumed, converted, 0.0)


@pytest.mark.parametrize("name", TWO_GROUPS_AT_STAGE_3)
@pytest.mark.parametrize("world", [1, pytest.param(3, marks=pytest.mark.full)])
def test_two_groups_of_stage_3_go_on_at_stage_2(
    name: str, world: int, oracle: Oracle, universal: UniversalFactory, tmp_path: Path
) -> None:
    converted = universal(name)
    target = target_of(converted.run.case, 2)
    resumed = oracle.resume_universal(target, converted.root, tmp_path, world=world, restore_from=converted.run.truth)
    assert_continues(resumed, converted, 0.0, losses=False)


@pytest.mark.parametrize("name", TWO_GROUPS_AT_STAGE_3)
@pytest.mark.parametrize("world", [1, 3])
def test_stage_3_restores_states_but_the_first_groups_hyper_parameters(
    name: str, world: int, oracle: Oracle, universal: UniversalFactory, tmp_path: Path
) -> None:
    # The loader's fault, not the files': `optimizer_state.pt` holds both groups.  When this fails, it is mended.
    converted = universal(name)
    (said,) = (text for text in converted.warnings if text.startswith("at ZeRO-3"))
    assert "gives the 2 param groups the first one's lr, weight_decay: set them after loading" in said
    truth = converted.run.truth
    resumed = oracle.resume_universal(converted.run.case, converted.root, tmp_path, world=world, steps=0)
    assert differences(truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == []
    assert hyper_parameters_of(truth, "gain") == (5e-3, 0.0)
    assert hyper_parameters_of(resumed.state, "gain") == hyper_parameters_of(truth, "embed.weight") == (1e-2, 0.1)


def test_amsgrad_goes_on_at_stage_2_and_fails_at_stage_3_as_a_warning_says(oracle: Oracle, tmp_path: Path) -> None:
    run = oracle.train(Case("amsgrad", 2, "fp32", optimizer="amsgrad"), tmp_path)
    result = convert(run.dir, tmp_path / "any" / run.tag, "universal")
    (said,) = result.warnings
    assert said.startswith("at ZeRO-3 DeepSpeed's universal loader does not load max_exp_avg_sq (the first step of am")
    resumed = oracle.resume_universal(run.case, tmp_path / "any", tmp_path / "out", world=3, restore_from=run.truth)
    assert differences(run.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == []
    assert agree(resumed.losses, run.losses_after, significant=6)
    with pytest.raises(WorldError, match="KeyError: 'max_exp_avg_sq'"):
        oracle.resume_universal(replace(run.case, stage=3), tmp_path / "any", tmp_path / "no", world=2)
    # What the warning advises.
    convert(run.dir, tmp_path / "zero" / run.tag, "zero", layout={"dp": 3}, options={"deepspeed": {"zero_stage": "3"}})
    resumed = oracle.resume_native(replace(run.case, stage=3), tmp_path / "zero", tmp_path / "three", world=3)
    assert differences(run.truth, resumed.state) == []
    assert agree(resumed.losses, run.losses_after, significant=6)


def test_amsgrad_without_its_third_state_is_warned_of(oracle: Oracle, tmp_path: Path) -> None:
    """DeepSpeed's own converter leaves the state out: what it wrote loads, and the first step ends."""
    run, peer = oracle.train(Case("amsgrad", 2, "fp32", optimizer="amsgrad"), tmp_path), tmp_path / "peer" / "universal"
    assert oracle.peer_universal(run.tag_dir, peer) is None
    wanted = "no max_exp_avg_sq"
    assert not [text for text in reshard.inspect(run.dir).warnings if wanted in text]
    (said,) = (text for text in reshard.inspect(peer).warnings if wanted in text)
    assert said.startswith("param group 0 has amsgrad=True, and ")
    assert "ends with KeyError: 'max_exp_avg_sq'" in said
    weights = convert(peer, tmp_path / "weights", "safetensors")
    assert not [text for text in weights.warnings if wanted in text]
    convert_to = {"universal": {}, "zero": {"dp": 2, "zero_stage": "2"}}
    for to, layout in convert_to.items():
        result = convert(peer, tmp_path / to / run.tag, to, **layout)
        assert said in result.warnings
        resume = oracle.resume_universal if to == "universal" else oracle.resume_native
        with pytest.raises(WorldError, match="KeyError: 'max_exp_avg_sq'"):
            resume(run.case, tmp_path / to, tmp_path / f"{to}-state", world=2, steps=1)


def test_asgd_is_refused_and_goes_on_by_what_the_error_says(oracle: Oracle, tmp_path: Path) -> None:
    run = oracle.train(Case("asgd", 2, "fp32", optimizer="asgd"), tmp_path)
    with pytest.raises(RequestError, match="optimizer state 'eta' is one number per group") as refused:
        convert(run.dir, tmp_path / "any" / run.tag, "universal")
    assert refused.value.fix.startswith("--to zero --dp N keeps it")
    convert(run.dir, tmp_path / "zero" / run.tag, "zero", layout={"dp": 3})
    resumed = oracle.resume_native(run.case, tmp_path / "zero", tmp_path / "out", world=3)
    assert differences(run.truth, resumed.state) == []
    assert agree(resumed.losses, run.losses_after, significant=6)


@pytest.mark.parametrize("world", [1, 3])
def test_sub_groups_of_the_target_get_the_right_states(
    world: int, oracle: Oracle, universal: UniversalFactory, tmp_path: Path
) -> None:
    # No losses: DeepSpeed lets all sub-groups share one step tensor after a universal load, so it advances too fast.
    converted = universal("z3_sub_groups")
    resumed = oracle.resume_universal(converted.run.case, converted.root, tmp_path, world=world, steps=0)
    assert_continues(resumed, converted, 0.0, losses=False)


# Values move as bits: NaN payloads, minus zero, subnormals and infinities survive; casts round as torch's do.


# A signalling NaN, a negative quiet one with payload, -0.0, two subnormals, infinities, the greatest number, a tie.
WORDS = [0x7FA00001, 0xFFC0DEAD, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000]
HALVES = [0x7FA1, 0xFFC3, 0x8000, 0x0001, 0x807F, 0xFF80]  # the like in bf16
BIT_CASES = ["z1_bf16", "z2_bf16", "z3_bf16", "bf16opt"]


@dataclass(frozen=True)
class Planted:
    """A checkpoint with planted bits, and what every tensor must be."""

    source: Path
    masters: dict[str, RawTensor]
    first_moments: dict[str, RawTensor]
    frozen: RawTensor


def places(run: Trained, partition_elems: int) -> Iterator[tuple[int, str, int]]:
    """(word, parameter, element) for each planted word, by the layouts of the stages; padding has no place."""
    names: list[str] = run.truth.meta["flat_order"][0]
    masters = run.truth.kind("fp32")
    for rank in range(run.world):
        offset = 0 if run.case.stage == 3 else -rank * partition_elems
        for name in names:
            numel = math.prod(masters[name].shape)
            # Stage 3 gives each rank a share of each parameter; elsewhere the ranks' flat groups follow one another.
            share = -(-numel // run.world) if run.case.stage == 3 else numel
            first = rank * share if run.case.stage == 3 else 0
            for word, element in enumerate(range(first - offset, first - offset + len(WORDS))):
                if first <= element < min(first + share, numel):
                    yield word, name, element
            offset += share


def planted_into(run: Trained, kind: str, partition_elems: int) -> dict[str, RawTensor]:
    """The tensors of one kind with ``WORDS`` where the first elements of each rank's flat group belong."""
    tensors = run.truth.kind(kind)
    for word, name, element in places(run, partition_elems):
        old = tensors[name]
        data = old.data[: 4 * element] + struct.pack("<I", WORDS[word]) + old.data[4 * element + 4 :]
        tensors[name] = RawTensor(old.dtype, old.shape, data)
    return tensors


@pytest.fixture(params=BIT_CASES)
def planted(request: pytest.FixtureRequest, oracle: Oracle, trained: TrainedFactory, tmp_path: Path) -> Planted:
    """A copy of a real checkpoint with planted bits."""
    run = trained(request.param)
    shutil.copytree(run.dir, tmp_path / "ckpt")
    elems = oracle.plant(tmp_path / "ckpt" / run.tag, WORDS, HALVES)
    assert {word for word, _, _ in places(run, elems)} == set(range(len(WORDS)))
    frozen = run.truth.tensors["frozen/adapter.weight"]
    halves = struct.pack(f"<{len(HALVES)}H", *HALVES)
    return Planted(
        tmp_path / "ckpt",
        planted_into(run, "fp32", elems),
        planted_into(run, "exp_avg", elems),
        RawTensor(frozen.dtype, frozen.shape, halves + frozen.data[len(halves) :]),
    )


def widened(value: RawTensor) -> RawTensor:
    """bf16 bits as the upper halves of fp32 bits: exact, whatever the value."""
    halves = struct.unpack(f"<{len(value.data) // 2}H", value.data)
    return RawTensor("F32", value.shape, struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves)))


def test_bits_survive_into_atoms(planted: Planted, tmp_path: Path) -> None:
    convert(planted.source, tmp_path / "universal", "universal")
    found = read_universal(tmp_path / "universal")
    atoms = found.kind("fp32")
    assert atoms.pop("adapter.weight") == widened(planted.frozen)
    assert atoms == planted.masters
    assert found.kind("exp_avg") == planted.first_moments
    module = found.model["module"]
    assert raw(module["adapter.weight"]) == planted.frozen
    assert raw(module["mask"]) == RawTensor("BOOL", (3,), bytes([1, 0, 1]))
    assert raw(module["scale"]) == RawTensor("F32", (), struct.pack("<f", 1.1))


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_bits_survive_into_fp32_weights(planted: Planted, form: str, tmp_path: Path) -> None:
    convert(planted.source, tmp_path / "out", form, dtype="fp32")
    tensors = (read_safetensors if form == "safetensors" else read_bin)(tmp_path / "out").tensors
    assert {name: tensors[name] for name in planted.masters} == planted.masters
    assert tensors["adapter.weight"] == widened(planted.frozen)
    assert tensors["mask"] == RawTensor("BOOL", (3,), bytes([1, 0, 1]))
    assert tensors["scale"] == RawTensor("F32", (), struct.pack("<f", 1.1))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_casts_round_as_torch_does(planted: Planted, dtype: str, tmp_path: Path) -> None:
    result = convert(planted.source, tmp_path / "out", "safetensors", dtype=dtype)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    found = read_safetensors(tmp_path / "out").tensors
    for name, master in planted.masters.items():
        before, after = tensor_of(master), tensor_of(found[name])
        numbers = ~before.isnan()
        assert torch.equal(after.isnan(), before.isnan())
        # As integers: -0.0 and 0.0 are equal as floats.
        assert torch.equal(after[numbers].view(torch.int16), before.to(wanted)[numbers].view(torch.int16)), name
    assert found["mask"].dtype == "BOOL"
    assert found["scale"] == RawTensor("F32", (), struct.pack("<f", 1.1))
    assert [text for text in result.warnings if "became infinite" in text]  # 0x7F7FFFFF has no place in 16 bits


# Every directory that users name: the save folder, one tag, HF Trainer's, Accelerate's and Lightning's.


STAGES = ["zero2_tiny", "zero3_tiny"]


@pytest.fixture(params=STAGES)
def run(request: pytest.FixtureRequest, trained: TrainedFactory) -> Trained:
    """A small real checkpoint."""
    return trained(request.param)


def masters(source: Path, out: Path, *, tag: str | None = None) -> object:
    """The trained weights that a conversion of ``source`` gives."""
    convert(source, out, "safetensors", tag=tag)
    tensors = read_safetensors(out).tensors
    return {name: value for name, value in tensors.items() if name not in ("adapter.weight", "seen", "wave")}


def nested(run: Trained, folder: Path, tag: str) -> Path:
    """``folder/<tag>/`` and ``folder/latest``, as ``engine.save_checkpoint(folder, tag)`` leaves them."""
    shutil.copytree(run.tag_dir, folder / tag)
    (folder / "latest").write_text(tag)
    shutil.copy(run.dir / "zero_to_fp32.py", folder)
    return folder


def test_the_save_folder_and_one_tag(run: Trained, tmp_path: Path) -> None:
    assert masters(run.dir, tmp_path / "by-latest") == run.truth.kind("fp32")
    assert masters(run.tag_dir, tmp_path / "by-folder") == run.truth.kind("fp32")
    assert masters(run.dir, tmp_path / "by-tag", tag=run.tag) == run.truth.kind("fp32")


def test_a_tag_wins_over_latest(trained: TrainedFactory, tmp_path: Path) -> None:
    two, three = trained("zero2_tiny"), trained("zero3_tiny")
    save = nested(two, tmp_path / "save", "global_step2")
    nested(three, save, "global_step10")
    assert masters(save, tmp_path / "latest") == three.truth.kind("fp32")
    assert masters(save, tmp_path / "tagged", tag="global_step2") == two.truth.kind("fp32")
    error = raised(SourceError, convert, save, tmp_path / "none", "safetensors", tag="global_step3")
    assert error.code == "source.not_found"
    assert "global_step" in error.fix


def test_latest_that_names_nothing(run: Trained, tmp_path: Path) -> None:
    save = nested(run, tmp_path / "save", "global_step3")
    (save / "latest").write_text("global_step9")
    error = raised(SourceError, convert, save, tmp_path / "out", "safetensors")
    assert error.code == "checkpoint.bad_latest"
    assert "--tag global_step3" in error.fix


def test_a_hugging_face_trainer_checkpoint_resumes(run: Trained, oracle: Oracle, tmp_path: Path) -> None:
    # transformers writes these beside DeepSpeed's folder, and resumes from a folder that matches global_step*.
    folder = nested(run, tmp_path / "checkpoint-3", "global_step3")
    (folder / "config.json").write_text("{}")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    for name in ("scheduler.pt", "training_args.bin", "rng_state_0.pth", "rng_state_1.pth"):
        torch.save({"not": "DeepSpeed's"}, folder / name)
    convert(folder, folder / "global_step3_universal", "universal")
    assert (folder / "latest_universal").read_text() == "global_step3_universal"
    assert read_universal(folder / "global_step3_universal").kind("exp_avg") == run.truth.kind("exp_avg")
    resumed = oracle.resume_universal(run.case, folder, tmp_path / "out", world=3, steps=0)
    assert differences(run.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == []
    # What was written beside the source does not change what the source is.
    assert masters(folder, tmp_path / "again") == run.truth.kind("fp32")


def test_a_trainer_output_folder_is_not_a_checkpoint(run: Trained, tmp_path: Path) -> None:
    nested(run, tmp_path / "output" / "checkpoint-3", "global_step3")
    error = raised(RequestError, convert, tmp_path / "output", tmp_path / "out", "safetensors")
    assert error.code == "request.run_directory"
    assert f"{tmp_path}/output/checkpoint-3" in error.fix


def test_an_accelerate_folder(run: Trained, tmp_path: Path) -> None:
    # `Accelerator.save_state` names the tag after the model's index.
    folder = nested(run, tmp_path / "state", "pytorch_model")
    for name in ("random_states_0.pkl", "random_states_1.pkl", "scheduler.bin"):
        torch.save({"not": "DeepSpeed's"}, folder / name)
    assert masters(folder, tmp_path / "out") == run.truth.kind("fp32")


def test_a_lightning_folder(run: Trained, tmp_path: Path) -> None:
    folder = nested(run, tmp_path / "epoch=0-step=3.ckpt", "checkpoint")
    assert masters(folder, tmp_path / "out") == run.truth.kind("fp32")
    assert masters(folder / "checkpoint", tmp_path / "out2") == run.truth.kind("fp32")


@pytest.mark.parametrize("name", STAGES)
def test_the_frozen_test_data_read_as_expected(name: str, tmp_path: Path) -> None:
    data = Path(__file__).resolve().parent.parent / "data" / name
    expected = Truth(data / "expected.safetensors", data / "expected.json")
    assert masters(data, tmp_path / "out") == expected.kind("fp32")
    convert(data, tmp_path / "universal", "universal")
    found = read_universal(tmp_path / "universal")
    assert {kind: found.kind(kind) for kind in ("exp_avg", "exp_avg_sq")} == {
        kind: expected.kind(kind) for kind in ("exp_avg", "exp_avg_sq")
    }
    assert found.steps == expected.step
