"""The layout that `reshard.ensure` makes for: from its arguments, the launcher and the source."""

from __future__ import annotations

from typing import Any

import pytest

from house.saves import DATA, wanted
from reshard.choices import WeightDtype, ZeroStage
from reshard.ensuring.world import fits, visible_processes
from reshard.errors import RequestError
from reshard.local import load_engine
from reshard.models.jobs import Inspection
from reshard.options import NativeLayout, SourceSpec


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WORLD_SIZE": "8", "SLURM_NTASKS": "2"}, 8),
        ({"SLURM_NTASKS": "16"}, 16),
        ({"SLURM_NTASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_NTASKS": "2"}, 4),
        ({"PMI_SIZE": " 6 "}, 6),
        ({"WORLD_SIZE": ""}, None),
        ({"WORLD_SIZE": "1"}, 1),
    ],
    ids=str,
)
def test_the_visible_world(environ: dict[str, str], expected: int | None) -> None:
    assert visible_processes(environ) == expected


def inspection(**facts: Any) -> Inspection:
    found = load_engine().inspect(SourceSpec(url=str(DATA / "zero2_tiny")))
    return found.model_copy(update=facts)


def test_the_layout_is_what_the_world_leaves() -> None:
    found = inspection(world={"dp": 2, "tp": 2, "pp": 1})
    world = {"environ": {"WORLD_SIZE": "12"}}
    assert wanted(**world).layout(found) == NativeLayout(dp=6, tp=2)
    assert wanted(tp=1, pp=3, **world).layout(found) == NativeLayout(dp=4, pp=3)
    assert wanted(dp=5, zero_stage=2, **world).layout(found) == NativeLayout(dp=5, tp=2)
    assert wanted(dp=5, zero_stage="3", environ={}).layout(found).zero_stage is ZeroStage.STAGE_3
    with pytest.raises(RequestError, match="12 processes cannot be shared out over tp=5 x pp=1"):
        wanted(tp=5, **world).layout(found)


@pytest.mark.parametrize(
    "options",
    [
        {"environ": {}},
        {"environ": {"WORLD_SIZE": "many"}},
        {"dp": 0, "environ": {}},
        {"dp": 2, "tp": -1, "environ": {}},
        {"dp": 2, "zero_stage": 4, "environ": {}},
        {"dp": 2, "dtype": "int8", "environ": {}},
    ],
    ids=str,
)
def test_wishes_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        wanted(**options)
    assert caught.value.code == "request.invalid"
    if options == {"environ": {}}:
        assert "--dp N" in caught.value.fix


@pytest.mark.parametrize(
    ("facts", "layout", "dtype", "expected"),
    [
        ({}, {"dp": 2}, None, True),
        ({}, {"dp": 2, "zero_stage": "2"}, None, True),
        ({}, {"dp": 2, "zero_stage": "1"}, None, False),
        ({}, {"dp": 3}, None, False),
        ({}, {"dp": 2, "tp": 2}, None, False),
        ({}, {"dp": 2, "ep": 2}, None, False),
        ({}, {"dp": 2}, "bf16", True),
        ({}, {"dp": 2}, "fp16", False),
        ({"world": {"dp": 2, "tp": 2, "pp": 2}}, {"dp": 2, "tp": 2, "pp": 2}, None, True),
        ({"zero_stage": 3}, {"dp": 2}, None, True),
        ({"zero_stage": 3}, {"dp": 2}, "bf16", False),  # masters do not say what the model's type is
        ({"zero_stage": 0}, {"dp": 7}, None, True),  # every rank loads the one file
        ({"zero_stage": None, "world": {}}, {"dp": 1}, None, False),  # the universal form needs an option
        ({"zero_stage": 1, "format": "deepspeed-bf16-optimizer"}, {"dp": 2, "zero_stage": "bf16"}, None, True),
        ({"zero_stage": 1, "format": "deepspeed-bf16-optimizer"}, {"dp": 2, "zero_stage": "1"}, None, False),
    ],
    ids=str,
)
def test_what_fits(facts: dict[str, Any], layout: dict[str, Any], dtype: str | None, expected: bool) -> None:
    asked = None if dtype is None else WeightDtype(dtype)
    assert fits(inspection(**facts), NativeLayout.model_validate(layout), asked) is expected
