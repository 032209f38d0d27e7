"""Universal output: the files are the run's state bit for bit, and real DeepSpeed resumes from them.

DeepSpeed 0.19.8 itself loads neither buffers nor frozen parameters from a universal checkpoint: our files hold them,
which is asserted, and the tests put them back before they train.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from house.tiers import rest_full
from oracle.cases import CASES
from oracle.conversions import (
    TWO_GROUPS_AT_STAGE_3,
    UNIVERSAL_CASES,
    UniversalFactory,
    assert_continues,
    target_of,
    universal_problems,
)
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.outputs import convert, load, read_safetensors, read_universal, tensor_of
from oracle.truth import NOT_LOADED_BY_UNIVERSAL, differences
from reshard.errors import SourceError

# Covers each stage, dtype, optimizer class and layout feature at least once; `-m full` runs the others.
RESUMED_ALWAYS = (
    "z0_fp32",
    "z1_fp32",
    "z1_bf16",
    "z2_fp32",
    "z2_bf16",
    "z3_fp32",
    "z3_bf16",
    "bf16opt",
    "bf16opt_two_groups",
    "z2_fp16_skipped",
    "z3_fp16",
    "z2_before_first_step",
    "z1_round_robin_two_groups",
    "z2_round_robin_alignment",
    "z2_alignment",
    "z2_two_groups",
    "z3_sub_groups",
    "z1_elastic",
    "z2_lion",
    "z2_fast_writer",
    "z3_legacy_stream",
    "z3_nvme",
    "z2_empty_param",
)
SOURCES_ON_OTHER_WORLDS = (
    "z1_round_robin_two_groups",
    "z2_round_robin_alignment",
    "z3_sub_groups_two_groups",
    "bf16opt_two_groups",
)
# DeepSpeed's stage 0 in fp16 does not train as its stage 1 does (losses from scratch differ by 0.03).
LOSSES_DIFFER_IN_DEEPSPEED = ("z0_fp16",)

_rest = [name for name in UNIVERSAL_CASES if name not in RESUMED_ALWAYS and name not in TWO_GROUPS_AT_STAGE_3]
RESUMED = list(product([*RESUMED_ALWAYS, *_rest], (1, 3)))
# Each of them on one world, fewer ranks and more by turns.
_ON_ONE_WORLD = [(name, (1, 3)[number % 2]) for number, name in enumerate(RESUMED_ALWAYS)]

# Each feature of these is in another case too, beside the same stage or the same type.
_LIKE_OTHERS = {
    *("z0_bf16", "z0_fp16", "z1_before_first_step", "z3_before_first_step", "z2_round_robin", "z1_two_groups"),
    *("z3_nvme_two_groups", "z2_elastic", "z3_sgd", "z3_python_writer", "z2_local_buffer", "z2_frozen_late_only"),
    *("z2_plain", "z3_two_groups"),
}


@pytest.mark.parametrize("name", rest_full(UNIVERSAL_CASES, *(n for n in UNIVERSAL_CASES if n not in _LIKE_OTHERS)))
def test_files_hold_the_run_bit_for_bit(name: str, universal: UniversalFactory) -> None:
    converted = universal(name)
    assert universal_problems(converted) == []
    assert (converted.root / "latest_universal").read_text() == converted.folder.name


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("name", SOURCES_ON_OTHER_WORLDS)
def test_sources_of_any_size_are_read(name: str, world: int, universal: UniversalFactory) -> None:
    assert universal_problems(universal(name, world)) == []


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("name", [name for name in UNIVERSAL_CASES if name not in SOURCES_ON_OTHER_WORLDS])
def test_all_sources_of_any_size_are_read(name: str, world: int, universal: UniversalFactory) -> None:
    assert universal_problems(universal(name, world)) == []


@pytest.mark.parametrize(("name", "world"), rest_full(RESUMED, *_ON_ONE_WORLD))
def test_deepspeed_resumes_on_another_world(
    name: str, world: int, oracle: Oracle, universal: UniversalFactory, bf16_spread: float, tmp_path: Path
) -> None:
    converted = universal(name)
    target = target_of(converted.run.case)
    truth = converted.run.truth
    resumed = oracle.resume_universal(target, converted.root, tmp_path, world=world, restore_from=truth)
    assert_continues(resumed, converted, bf16_spread, losses=name not in LOSSES_DIFFER_IN_DEEPSPEED)


@pytest.mark.parametrize(
    "name", rest_full(("z1_fp32", "z2_bf16", "z2_fp16", "z3_bf16", "bf16opt"), "z2_bf16", "z3_bf16")
)
def test_losses_are_exactly_those_after_the_peers_conversion(
    name: str, oracle: Oracle, universal: UniversalFactory, tmp_path: Path
) -> None:
    converted = universal(name)
    run = converted.run
    assert oracle.peer_universal(run.tag_dir, tmp_path / "theirs" / "universal") is None
    roots = {"ours": converted.root, "theirs": tmp_path / "theirs"}
    losses = {
        who: oracle.resume_universal(run.case, root, tmp_path / f"{who}-out", world=3, restore_from=run.truth).losses
        for who, root in roots.items()
    }
    assert losses["ours"] == losses["theirs"]


@pytest.mark.parametrize("state", ["fp32", "exp_avg_sq", "step"])
def test_the_comparison_notices_one_bit(state: str, universal: UniversalFactory, tmp_path: Path) -> None:
    converted = universal("z3_bf16")
    shutil.copytree(converted.root, tmp_path / "copy")
    spoiled = replace(converted, folder=tmp_path / "copy" / converted.folder.name)
    path = spoiled.folder / "zero" / "layers.1.up.weight" / f"{state}.pt"
    value = load(path)
    (value if state == "step" else value["param"]).view(-1).view(torch.int32)[-1] ^= 1
    torch.save(value, path)
    (problem,) = universal_problems(spoiled)
    assert problem.startswith("steps" if state == "step" else f"{state}/layers.1.up.weight: differs")


def test_the_comparison_of_losses_notices_a_lost_state(
    oracle: Oracle, universal: UniversalFactory, bf16_spread: float, tmp_path: Path
) -> None:
    # First moments exchanged for zeros: the states differ, and so do the losses, by more than the spread.
    converted = universal("z2_bf16")
    shutil.copytree(converted.root, tmp_path / "copy")
    for path in (tmp_path / "copy" / converted.folder.name / "zero").glob("*/exp_avg.pt"):
        torch.save({"param": torch.zeros_like(load(path)["param"])}, path)
    run = converted.run
    resumed = oracle.resume_universal(run.case, tmp_path / "copy", tmp_path / "out", world=3, restore_from=run.truth)
    lost = [
        f"exp_avg/{fqn}: bits differ" for fqn, value in sorted(run.truth.kind("exp_avg").items()) if any(value.data)
    ]
    assert differences(run.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == lost
    assert resumed.losses != pytest.approx(run.losses_after, rel=0, abs=bf16_spread)


def test_buffers_keep_their_types(universal: UniversalFactory) -> None:
    for name in ("z2_bf16", "z3_bf16"):
        module = load(universal(name).folder / "mp_rank_00_model_states.pt")["module"]
        assert module["seen"].dtype == torch.int64
        assert module["seen"].shape == ()
        assert int(module["seen"]) == CASES[name].steps


def test_states_without_names_are_refused_and_the_weights_are_not(trained: TrainedFactory, tmp_path: Path) -> None:
    # Stage 0 numbers its states; before the first step nothing shows which parameter is frozen.
    run = trained("z0_before_first_step")
    with pytest.raises(SourceError, match="nothing says which parameter has which number") as caught:
        convert(run.dir, tmp_path / "universal", "universal")
    assert caught.value.code == "checkpoint.ambiguous"
    assert "--to safetensors" in (caught.value.fix or "")
    result = convert(run.dir, tmp_path / "weights", "safetensors")
    assert [text for text in result.warnings if text.startswith("weights only")]
    tensors = read_safetensors(tmp_path / "weights").tensors
    wanted = run.truth.kind("module") | run.truth.kind("frozen") | run.truth.kind("buffer")
    assert tensors == wanted


def test_frozen_parameters_can_be_left_out(universal: UniversalFactory, tmp_path: Path) -> None:
    run = universal("z2_bf16").run
    convert(run.dir, tmp_path / "lean", "universal", exclude_frozen=True)
    found = read_universal(tmp_path / "lean")
    assert not any("adapter" in key for key in found.atoms)
    assert not any("adapter" in key for key in found.model["module"])
    assert found.kind("fp32") == run.truth.kind("fp32")


def test_frozen_atoms_widen_the_weights_exactly(universal: UniversalFactory) -> None:
    converted = universal("z3_bf16")
    atom = read_universal(converted.folder).atoms["fp32/adapter.weight"]
    frozen = converted.run.truth.tensors["frozen/adapter.weight"]
    assert (atom.dtype, frozen.dtype) == ("F32", "BF16")
    assert torch.equal(tensor_of(atom), tensor_of(frozen).float())
