"""A source without a scheduler's state becomes a checkpoint that DeepSpeed loads, and schedulers go on where they were.

The sources are plain `dcp.save` of model and optimizer; each run has another scheduler, of DeepSpeed or of torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from house.tiers import rest_full
from oracle.dcp_reading import dcp_convert
from oracle.fixtures import SavedFactory
from oracle.launcher import Worlds

DEEPSPEED = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
TORCH = (
    "LambdaLR",
    "MultiplicativeLR",
    "StepLR",
    "MultiStepLR",
    "ConstantLR",
    "LinearLR",
    "ExponentialLR",
    "PolynomialLR",
    "CosineAnnealingLR",
    "CyclicLR",
    "OneCycleLR",
)
BEGIN_ANEW = ("CosineAnnealingWarmRestarts", "ReduceLROnPlateau", "GreedyLR")
REFUSE = ("SequentialLR", "ChainedScheduler")
WARNING = (
    "the source holds no state of this optimizer's learning-rate scheduler: the run's scheduler goes on as after 4 "
    "steps, one for each update; CosineAnnealingWarmRestarts, ReduceLROnPlateau and GreedyLR remember more than a "
    "count and begin anew; SequentialLR and ChainedScheduler do not load it (load_lr_scheduler_states=False)"
)


@pytest.mark.parametrize("stage", rest_full((0, 1, 2, 3), 2))
def test_schedulers_go_on_without_a_state_of_theirs(stage: int, worlds: Worlds, tmp_path: Path) -> None:
    kinds = [*DEEPSPEED, *TORCH, *BEGIN_ANEW, *REFUSE]
    through = worlds.run("oracle.schedulers:save_all", world=1, folder=str(tmp_path), kinds=kinds)[0]
    for kind in kinds:
        result = dcp_convert(tmp_path / kind, tmp_path / "zero" / kind / "step4", "zero", dp=1, zero_stage=stage)
        assert (result.warnings, result.not_carried) == ((WARNING,), ())

    folders = {kind: str(tmp_path / "zero" / kind) for kind in kinds}
    resumed = worlds.run("oracle.schedulers:load_all", world=1, folders=folders, stage=stage)[0]

    other = {kind for kind in (*DEEPSPEED, *TORCH) if not same(resumed[kind], through[kind])}
    assert other == set()
    # What the warning says of the rest is true.
    assert {kind for kind in BEGIN_ANEW if same(resumed[kind], through[kind])} == set()
    assert [resumed[kind] for kind in REFUSE] == ["KeyError: '_schedulers'"] * 2


def test_schedulers_go_on_from_a_universal_directory_and_by_way_of_it(worlds: Worlds, tmp_path: Path) -> None:
    kinds = ["WarmupDecayLR", "CosineAnnealingLR"]
    through = worlds.run("oracle.schedulers:save_all", world=1, folder=str(tmp_path), kinds=kinds)[0]
    for kind in kinds:
        assert WARNING in dcp_convert(tmp_path / kind, tmp_path / "any" / kind / "step4", "universal").warnings
        dcp_convert(tmp_path / "any" / kind, tmp_path / "zero" / kind / "step4", "zero", dp=1, zero_stage=1)
        # It is not a state of the run: a target that needs none gets none.
        dcp_convert(tmp_path / "zero" / kind, tmp_path / "dcp" / kind, "dcp", framework="state-dict")
        assert "lr_scheduler" not in (tmp_path / "dcp" / kind / ".metadata").read_bytes().decode("latin-1")
    for place in ("any", "zero"):
        folders = {kind: str(tmp_path / place / kind) for kind in kinds}
        options = {"stage": 1, "universal": place == "any"}
        resumed = worlds.run("oracle.schedulers:load_all", world=1, folders=folders, **options)[0]
        assert all(same(resumed[kind], through[kind]) for kind in kinds)


def test_a_source_that_counts_nothing_says_so(saved: SavedFactory, tmp_path: Path) -> None:
    source = saved("fsdp2_sgd")
    result = dcp_convert(
        source.path("raw"), tmp_path / "zero" / "step3", "zero", dp=2, zero_stage=1, param_order="groups"
    )
    assert result.warnings[0] == "nothing in the source counts steps: global_steps is 0"
    assert "the run's scheduler begins anew" in result.warnings[1]


def same(resumed: Any, through: Any) -> bool:
    """Whether the next rates are the uninterrupted run's, and the losses to six digits."""
    if isinstance(resumed, str):
        return False
    (rates, losses), (wanted, after) = resumed, through
    return rates == wanted and losses == pytest.approx(after, rel=1e-6)
