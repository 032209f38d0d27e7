"""What a launch loads in place of a checkpoint: the formats say it, and results of earlier releases are known by it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from house.repository import DATA
from house.saves import wanted
from reshard.choices import OpaquePolicy, ZeroStage
from reshard.ensuring.world import Loader
from reshard.errors import RequestError
from reshard.models.resume import ResumeLayout, RunLaunch
from reshard.options import RunLayout
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.deepspeed.facts import DeepSpeedFacts
from reshard_engine.formats.registry import formats
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.operations.resume import resume_layout
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import open_location

OF_ZERO = (
    '{"zero_stage":%s,"dp":%d,"tp":%d,"pp":%d,"ep":%d,"partition_method":null,"pipeline_layers":null,'
    '"vocab_divisor":null,"round_robin_gradients":null,"parameter_alignment":null,"sub_group_size":null,"rng":"keep"}'
)


def checkpoint(*, facts: dict[str, Any] | None = None, **fields: Any) -> Checkpoint:
    """Two ranks at stage 2 in bf16, with other facts."""
    found = read_checkpoint(open_location(str(DATA / "zero2_tiny")), None, OpaqueLedger(OpaquePolicy.KEEP))
    assert isinstance(found.facts, DeepSpeedFacts)
    return replace(found, facts=replace(found.facts, **facts or {}), **fields)


def test_stage_0_does_not_load_with_ranks_that_the_experts_do_not_divide() -> None:
    """Without ZeRO the number of data-parallel ranks is free, but for its groups of experts."""
    moe = checkpoint(facts={"zero_stage": 0}, world={"dp": 2, "tp": 1, "pp": 1, "ep": 2})
    assert [resumed(moe, dp=dp).fits for dp in (1, 2, 3, 4)] == [False, True, False, True]


@pytest.mark.parametrize("axis", ["tp", "pp", "ep"])
def test_a_launch_has_the_bounds_of_a_layout(axis: str) -> None:
    assert RunLaunch(**{axis: 4096}).sizes({})[axis] == 4096  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        RunLaunch(**{axis: 4097})  # type: ignore[arg-type]


def resumed(found: Checkpoint, loader: Loader | None = None, **given: Any) -> ResumeLayout:
    """What `ensure` finds for its arguments."""
    return resume_layout(found, wanted(loader=loader or Loader(), **{"environ": {}} | given).launch())


# As the release before `Format.layout_for` wrote them: results that it made are found again.
@pytest.mark.parametrize(
    ("given", "loader", "identity", "label", "fits"),
    [
        ({"dp": 2}, {}, OF_ZERO % ("null", 2, 1, 1, 1), "dp2", True),
        ({"dp": 2}, {"to": "zero"}, OF_ZERO % ("null", 2, 1, 1, 1), "dp2", True),
        ({"dp": 2, "zero_stage": 2}, {}, OF_ZERO % ("null", 2, 1, 1, 1), "dp2", True),
        ({"dp": 2, "zero_stage": 1}, {}, OF_ZERO % ('"1"', 2, 1, 1, 1), "dp2-zero1", False),
        ({"dp": 2, "zero_stage": "bf16"}, {}, OF_ZERO % ('"bf16"', 2, 1, 1, 1), "dp2-zerobf16", False),
        ({"dp": 4, "tp": 2}, {}, OF_ZERO % ("null", 4, 2, 1, 1), "dp4-tp2", False),
        ({"dp": 2, "tp": 2, "pp": 2}, {}, OF_ZERO % ("null", 2, 2, 2, 1), "dp2-tp2-pp2", False),
        ({"dp": 4, "ep": 2}, {}, OF_ZERO % ("null", 4, 1, 1, 2), "dp4-ep2", False),
        ({"dp": 2, "dtype": "bf16"}, {}, OF_ZERO % ("null", 2, 1, 1, 1), "dp2-bf16", True),
        ({"dp": 3, "dtype": "bf16"}, {}, OF_ZERO % ("null", 3, 1, 1, 1), "dp3-bf16", False),
        ({"environ": {"WORLD_SIZE": "6"}}, {}, OF_ZERO % ("null", 6, 1, 1, 1), "dp6", False),
        ({}, {"to": "dcp"}, '{"grammar":null}', "dcp", False),
        ({}, {"framework": "trainer"}, '{"grammar":"trainer"}', "dcp-trainer", False),
        ({}, {"to": "dcp", "framework": "torchtitan"}, '{"grammar":"torchtitan"}', "dcp-torchtitan", False),
    ],
    ids=str,
)
def test_results_of_earlier_releases_are_known(
    given: dict[str, Any], loader: dict[str, Any], identity: str, label: str, fits: bool
) -> None:
    found = resumed(checkpoint(), Loader(**loader), **given)
    assert (found.identity, found.label, found.fits) == (identity, label, fits)


def test_the_layout_is_what_the_processes_leave() -> None:
    found = checkpoint(world={"dp": 2, "tp": 2, "pp": 1})
    world: dict[str, Any] = {"environ": {"WORLD_SIZE": "12"}}
    assert resumed(found, **world).layout == RunLayout(dp=6, tp=2)
    assert resumed(found, tp=1, pp=3, **world).layout == RunLayout(dp=4, pp=3)
    assert resumed(found, dp=5, zero_stage=2, **world).options == {}
    assert resumed(found, dp=5, zero_stage="3").options == {"deepspeed": {"zero_stage": ZeroStage.STAGE_3}}
    with pytest.raises(RequestError, match="12 processes cannot be shared out over tp=5 x pp=1"):
        resumed(found, tp=5, **world)
    with pytest.raises(RequestError, match="no launcher says how many processes there are"):
        resume_layout(found, RunLaunch())


@pytest.mark.parametrize(
    ("fields", "facts", "given", "expected"),
    [
        ({}, {}, {"dp": 2}, True),
        ({}, {}, {"dp": 2, "zero_stage": "2"}, True),
        ({}, {}, {"dp": 2, "zero_stage": "1"}, False),
        ({}, {}, {"dp": 3}, False),
        ({}, {}, {"dp": 2, "tp": 2}, False),
        ({}, {}, {"dp": 2, "ep": 2}, False),
        ({}, {}, {"dp": 2, "dtype": "bf16"}, True),
        ({}, {}, {"dp": 2, "dtype": "fp16"}, False),
        ({"world": {"dp": 2, "tp": 2, "pp": 2}}, {}, {"dp": 2}, True),
        ({}, {"zero_stage": 3}, {"dp": 2}, True),
        ({}, {"zero_stage": 3}, {"dp": 2, "dtype": "bf16"}, False),  # masters do not say what the model's type is
        ({}, {"zero_stage": 0}, {"dp": 7}, True),  # every rank loads the one file
        ({"world": {}}, {"zero_stage": None}, {"dp": 1}, False),  # the universal form needs an option
        ({}, {"zero_stage": 1, "bf16_optimizer": True}, {"dp": 2, "zero_stage": "bf16"}, True),
        ({}, {"zero_stage": 1, "bf16_optimizer": True}, {"dp": 2, "zero_stage": "1"}, False),
    ],
    ids=str,
)
def test_what_deepspeed_loads_as_it_is(
    fields: dict[str, Any], facts: dict[str, Any], given: dict[str, Any], expected: bool
) -> None:
    assert resumed(checkpoint(facts=facts, **fields), **given).fits is expected


def test_arguments_of_megatron_are_for_its_runs() -> None:
    with pytest.raises(RequestError, match="--megatron-args is for runs of Megatron-core"):
        resumed(checkpoint(), dp=2, megatron_args="{}")


@pytest.mark.parametrize("to", ["universal", "safetensors", "slim", "nobody_writes_it"])
def test_a_launch_names_a_target_that_a_run_loads(to: str) -> None:
    with pytest.raises(RequestError, match=f"launch.to is '{to}', and no run resumes from that"):
        resume_layout(checkpoint(), RunLaunch(to=to, dp=2))


def test_every_format_that_lays_out_a_launch_writes_the_target() -> None:
    """And says what it is by JSON, as its results are known by that text."""
    launch = RunLaunch(dp=2)
    laid = {known.name: known.layout_for(checkpoint(), launch) for known in formats()}
    assert {name for name, found in laid.items() if found is not None} == {
        "dcp", "deepspeed", "fsdp_ranks", "megatron", "torch_checkpointing",
    }  # fmt: skip
    for known in formats():
        if (found := laid[known.name]) is not None:
            assert found.to in known.targets
            assert isinstance(json.loads(found.identity), dict)
            assert RunLayout.model_validate(found.asked.model_dump()) == found.asked
