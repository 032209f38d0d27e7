"""Older file shapes: real checkpoints, rewritten as older versions wrote them, give the same tensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from house.expected import raised
from house.tiers import rest_full
from oracle.conversions import Converted, expected_atoms, expected_steps, universal_problems
from oracle.driver import Oracle, Trained
from oracle.fixtures import TrainedFactory
from oracle.outputs import contents, convert, plain, read_safetensors, read_universal
from oracle.truth import NOT_LOADED_BY_UNIVERSAL, differences
from reshard.engine import load_engine
from reshard.errors import SourceError
from reshard.options import SourceSpec

# Nothing is lost in these shapes: the whole universal directory is as from the new one.
LOSSLESS = {
    "before_0_5_4_one_mapping_of_shapes": ["z2_bf16", "z2_two_groups", "z3_bf16", "z3_sub_groups_two_groups"],
    "before_0_6_0_shapes_in_the_optimizer_file": ["z1_fp32", "z2_two_groups", "z3_sub_groups"],
    "before_0_6_0_plain_numbers": ["z1_bf16", "z2_two_groups"],
    "before_0_6_0_placeholders_of_one_element": ["z3_bf16"],
    "before_0_7_3_no_slice_mappings": ["z2_two_groups", "bf16opt"],
    "before_0_9_0_no_shared_params": ["z1_bf16", "z2_bf16", "z3_bf16"],
    "before_0_19_5_no_parallel_dimensions": ["z2_bf16", "z3_bf16"],
    "before_0_19_7_no_alignment_paddings": ["z2_two_groups"],
    "fragment_addresses_of_bf16_optimizer": ["z2_bf16", "bf16opt"],
    "no_ds_version": ["z1_bf16", "z2_bf16", "z3_bf16", "bf16opt"],
    "optimizer_files_without_underscore": ["z2_bf16", "z3_bf16"],
    "optimizer_files_with_fp16_prefix": ["z2_fp16", "z3_fp16", "z1_fp32"],
    "optimizer_files_without_prefix": ["z2_bf16", "z3_bf16"],
}
# Every shape once, and so that every run is there: stages 1 to 3, BF16_Optimizer, fp16, several groups and sub-groups.
LOSSLESS_ALWAYS = (
    ("before_0_5_4_one_mapping_of_shapes", "z3_sub_groups_two_groups"),
    ("before_0_6_0_shapes_in_the_optimizer_file", "z1_fp32"),
    ("before_0_6_0_plain_numbers", "z2_two_groups"),
    ("before_0_6_0_placeholders_of_one_element", "z3_bf16"),
    ("before_0_7_3_no_slice_mappings", "bf16opt"),
    ("before_0_9_0_no_shared_params", "z1_bf16"),
    ("before_0_19_5_no_parallel_dimensions", "z3_bf16"),
    ("before_0_19_7_no_alignment_paddings", "z2_two_groups"),
    ("fragment_addresses_of_bf16_optimizer", "bf16opt"),
    ("no_ds_version", "z1_bf16"),
    ("optimizer_files_without_underscore", "z2_bf16"),
    ("optimizer_files_with_fp16_prefix", "z3_fp16"),
    ("optimizer_files_without_prefix", "z2_bf16"),
)


# All of them at once; the frozen matrix of stage 3 was not saved then.
VERSION_0_5_3 = (
    "before_0_5_4_one_mapping_of_shapes",
    "before_0_6_0_shapes_in_the_optimizer_file",
    "before_0_6_0_step_in_param_groups",
    "before_0_6_0_plain_numbers",
    "before_0_7_3_no_slice_mappings",
    "before_0_9_1_no_frozen_entries",
    "before_0_19_5_no_parallel_dimensions",
    "before_0_19_7_no_alignment_paddings",
    "optimizer_files_without_prefix",
    "before_0_6_0_placeholders_of_one_element",
    "before_0_9_0_no_shared_params",
)
TOO_OLD = {
    "before_0_3_17_sub_partitions": ["z1_bf16"],
    "before_param_shapes": ["z2_bf16", "z3_bf16"],
}
Reshape: TypeAlias = Callable[..., Trained]


def pairs(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    """(transform, case) for each case of each transform."""
    return [(transform, name) for transform, names in table.items() for name in names]


@pytest.fixture
def reshaped(oracle: Oracle, trained: TrainedFactory, tmp_path: Path) -> Reshape:
    """``reshaped(case_name, *transforms)``: a copy of a real checkpoint in an older shape."""

    def make(name: str, *transforms: str) -> Trained:
        run = trained(name)
        shutil.copytree(run.dir, tmp_path / "old" / "ckpt")
        for file in ("truth.safetensors", "truth.json"):
            shutil.copy(run.dir.parent / file, tmp_path / "old")
        old = replace(run, dir=tmp_path / "old" / "ckpt")
        oracle.reshape(old.tag_dir, *transforms)
        return old

    return make


def as_universal(run: Trained, folder: Path) -> Converted:
    """Converts a reshaped checkpoint, and what came out: it must give itself, without the old files."""
    converted = Converted(run, folder, convert(run.dir, folder, "universal").warnings)
    convert(folder, folder.parent / "again", "universal")
    assert contents(folder.parent / "again") == contents(folder)
    return converted


@pytest.mark.parametrize(("transform", "name"), rest_full(pairs(LOSSLESS), *LOSSLESS_ALWAYS))
def test_an_old_shape_reads_like_the_new_one(transform: str, name: str, reshaped: Reshape, tmp_path: Path) -> None:
    run = reshaped(name, transform)
    assert universal_problems(as_universal(run, tmp_path / "universal")) == []
    convert(run.dir, tmp_path / "weights", "safetensors")
    weights = read_safetensors(tmp_path / "weights")
    assert weights.aliases == run.truth.meta["aliases"]
    assert {fqn: weights.tensors[fqn] for fqn in run.truth.kind("fp32")} == run.truth.kind("fp32")


@pytest.mark.parametrize("name", ["z1_bf16", "z2_bf16"])
def test_frozen_weights_before_0_9_1_are_in_module(name: str, reshaped: Reshape, tmp_path: Path) -> None:
    converted = as_universal(reshaped(name, "before_0_9_1_no_frozen_entries"), tmp_path / "universal")
    found = read_universal(converted.folder)
    assert "fp32/adapter.weight" in found.atoms
    assert found.atoms == expected_atoms(converted.run)


@pytest.mark.parametrize("placeholders", [(), ("before_0_6_0_placeholders_of_one_element",)])
def test_frozen_weights_of_stage_3_before_0_9_1_are_lost_and_said_so(
    placeholders: tuple[str, ...], reshaped: Reshape, tmp_path: Path
) -> None:
    # No file held them; a placeholder must never pass for a weight.
    run = reshaped("z3_bf16", "before_0_9_1_no_frozen_entries", *placeholders, "before_0_9_0_no_shared_params")
    converted = as_universal(run, tmp_path / "universal")
    assert [text for text in converted.warnings if "adapter.weight" in text and "left out" in text]
    wanted = expected_atoms(run)
    del wanted["fp32/adapter.weight"]
    assert read_universal(converted.folder).atoms == wanted
    convert(run.dir, tmp_path / "weights", "safetensors")
    weights = read_safetensors(tmp_path / "weights")
    assert set(weights.tensors) == {*run.truth.kind("fp32"), *run.truth.kind("buffer")}
    assert weights.aliases == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("name", ["z1_bf16", "z2_two_groups", "z3_sub_groups_two_groups", "bf16opt"])
def test_a_step_in_the_param_groups_is_each_parameters(name: str, reshaped: Reshape, tmp_path: Path) -> None:
    run = reshaped(name, "before_0_6_0_step_in_param_groups")
    converted = as_universal(run, tmp_path / "universal")
    assert [text for text in universal_problems(converted) if not text.startswith("param_groups")] == []
    groups = plain(read_universal(converted.folder).optimizer["param_groups"])
    wanted = [{**group, "step": run.case.steps} for group in run.truth.meta["groups"]]
    without = ("names", "params")
    assert [{k: v for k, v in g.items() if k not in without} for g in groups] == [
        {k: v for k, v in g.items() if k not in without} for g in wanted
    ]


@pytest.mark.parametrize("name", ["z1_bf16", "z2_plain"])
def test_elastic_lists_take_hyper_parameters_from_ds_config(name: str, reshaped: Reshape, tmp_path: Path) -> None:
    run = reshaped(name, "before_0_5_6_elastic_lists")
    converted = as_universal(replace(run, case=replace(run.case, elastic=True)), tmp_path / "universal")
    assert universal_problems(converted) == []
    assert [text for text in converted.warnings if "ds_config" in text]


@pytest.mark.parametrize(
    "name",
    rest_full(
        ["z2_bf16", "z2_two_groups", "z3_bf16", "z3_sub_groups_two_groups"], "z2_two_groups", "z3_sub_groups_two_groups"
    ),
)
def test_a_checkpoint_of_0_5_3_resumes_today(name: str, oracle: Oracle, reshaped: Reshape, tmp_path: Path) -> None:
    run = reshaped(name, *VERSION_0_5_3)
    converted = as_universal(run, tmp_path / "new" / "universal")
    found = read_universal(converted.folder)
    assert found.steps == expected_steps(run)
    rates = [group["lr"] for group in plain(found.optimizer["param_groups"])]
    assert rates == [group["lr"] for group in run.truth.meta["groups"]]
    target = replace(run.case, stage=2, sub_group_size=None)
    resumed = oracle.resume_universal(target, converted.root, tmp_path / "out", world=3, steps=0)
    assert differences(run.truth, resumed.state, without=NOT_LOADED_BY_UNIVERSAL) == []


@pytest.mark.parametrize(("transform", "name"), pairs(TOO_OLD))
def test_too_old_is_refused(transform: str, name: str, reshaped: Reshape, tmp_path: Path) -> None:
    run = reshaped(name, transform)
    error = raised(SourceError, convert, run.dir, tmp_path / "out", "safetensors")
    assert error.code == "source.unsupported_version"
    assert error.fix
    assert not (tmp_path / "out").exists()


def test_groups_that_their_sizes_do_not_tell_apart_are_refused(reshaped: Reshape, tmp_path: Path) -> None:
    # BF16_Optimizer keeps its padding, so that sizes say nothing; it is younger than the one mapping anyhow.
    run = reshaped("bf16opt_two_groups", "before_0_5_4_one_mapping_of_shapes")
    assert raised(SourceError, convert, run.dir, tmp_path / "out", "universal").code == "source.unsupported_version"


def test_inspection_says_what_an_old_file_is(reshaped: Reshape) -> None:
    run = reshaped("z2_two_groups", *VERSION_0_5_3, "no_ds_version")
    found = load_engine().inspect(SourceSpec(url=str(run.dir)))
    assert (found.zero_stage, found.framework_version, found.world["dp"]) == (2, None, 2)
    assert found.param_groups == 2
