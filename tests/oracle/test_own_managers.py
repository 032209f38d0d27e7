"""The managers of verl and SkyRL themselves save on four ranks, and go on on three, two and four with our files.

What they loaded is compared with what was saved, bit for bit; the losses of the next steps with those of the run that
saved.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import reshard
from laws.item_files import folder_differences
from oracle.dcp_cases import is_here
from oracle.dcp_driver import TIMEOUT_S, FsdpOracle, problems
from oracle.truth import Truth
from oracle.whole_tensors import named, whole

VERL: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp": 2, "tied": True, "buffers": True},
    "fsdp1_flat": {"fsdp": 1, "flat": True, "tied": True, "buffers": True},
    "fsdp1_orig": {"fsdp": 1, "flat": False, "tied": True, "buffers": True},
    "lora": {"fsdp": 2, "lora": True, "tied": True},
    "adapter_alone": {"fsdp": 2, "lora": True, "adapter_alone": True},
}
SKYRL: dict[str, dict[str, Any]] = {"whole": {"tied": True, "buffers": True}, "lora": {"lora": True}}


@dataclass(frozen=True)
class Stage:
    """A run of a manager: where its state was dumped, the checkpoint that it saved, and what each rank returned."""

    out: Path
    save: Path
    ranks: list[dict[str, Any]]

    def truth(self, stem: str) -> Truth:
        """The state as it was loaded or saved."""
        return Truth(self.out / f"{stem}.safetensors", self.out / f"{stem}.json")


def _run(fsdp: FsdpOracle, function: str, world: int, place: Path, **jobs: Any) -> Stage:
    out, save = place / "out", place / "save"
    ranks = fsdp.worlds.run(function, world=world, timeout_s=TIMEOUT_S, out=str(out), save=str(save), **jobs)
    return Stage(out, save, ranks)


def _check_losses(before: Stage, after: Stage) -> None:
    wanted = pytest.approx(before.ranks[0]["losses_after"], abs=2e-6)
    assert [found["losses"] for found in after.ranks] == [wanted] * len(after.ranks)


def _go_on_everywhere(fsdp: FsdpOracle, function: str, case: dict[str, Any], place: Path) -> Stage:
    last = _run(fsdp, function, 4, place / "begun", case=case)
    for number, world in enumerate((3, 2, 4)):
        load = place / f"for_{world}"
        reshard.convert(last.save, load, to="fsdp_ranks", dp=world, progress=False)
        now = _run(fsdp, function, world, place / f"stage{number}", case=case, load=str(load))
        assert problems(last.truth("saved"), now.truth("loaded")) == []
        _check_losses(last, now)
        # Rank r has the random states of source rank r mod N.
        random = [last.ranks[rank % len(last.ranks)]["random_saved"] for rank in range(world)]
        assert [found["random_loaded"] for found in now.ranks] == random
        last = now
    reshard.convert(last.save, place / "again", to="fsdp_ranks", dp=4, progress=False)
    shutil.rmtree(last.save / "lora_adapter", ignore_errors=True)  # SkyRL's copy, which nothing resumes from
    # With `save_lora_only` verl saves a plain dict, and torch loads both alike.
    kinds = "<class 'dict'>, <class 'collections.OrderedDict'>"
    assert [d for d in folder_differences(last.save, place / "again") if not d.endswith(kinds)] == []
    return last


@pytest.mark.parametrize("tied", [False, True])
def test_a_lora_run_whose_optimizer_has_the_trained_parameters_alone(
    tied: bool, tmp_path: Path, fsdp: FsdpOracle
) -> None:
    last = _go_on_everywhere(fsdp, "oracle.lora_ranks:run", {"tied": tied}, tmp_path)
    assert last.ranks[0]["trained"] < last.ranks[0]["parameters"]
    # DCP of the same state, which torch loads on another number of ranks.
    reshard.convert(last.save, tmp_path / "dcp", to="dcp", grammar="state-dict", progress=False)
    found = named(whole(tmp_path / "dcp"))
    wanted = load_file(last.out / "saved.safetensors")
    kinds = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32": "model"}
    trained = {key: kinds[key.partition("/")[0]] for key in wanted if key.partition("/")[0] in kinds}
    assert len(trained) == 3 * last.ranks[0]["trained"]
    for key, kind in trained.items():
        assert torch.equal(found[f"{key.partition('/')[2]}/{kind}"], wanted[key]), key


verl_is_needed = pytest.mark.skipif(
    not is_here("verl"), reason="verl is not here: `make setup` puts it beside the environment"
)


@verl_is_needed
@pytest.mark.parametrize("name", VERL)
def test_verl_goes_on_on_other_numbers_of_ranks(name: str, tmp_path: Path, fsdp: FsdpOracle) -> None:
    _go_on_everywhere(fsdp, "oracle.verl_manager:run", VERL[name], tmp_path)


@verl_is_needed
@pytest.mark.parametrize("source", ["zero_run", "dcp_run"])
def test_verl_goes_on_with_a_run_of_another_framework(source: str, tmp_path: Path, fsdp: FsdpOracle) -> None:
    case = {"fsdp": 2, "tied": True, "buffers": True}
    begun = _run(fsdp, f"oracle.rank_sources:{source}", 4, tmp_path / "begun", case=case)
    options: dict[str, Any] = {"rank_framework": "verl", "device_type": "cpu"}
    reshard.convert(begun.save, tmp_path / "ranks", to="fsdp_ranks", dp=3, progress=False, **options)
    now = _run(fsdp, "oracle.verl_manager:run", 3, tmp_path / "verl", case=case, load=str(tmp_path / "ranks"))
    found = problems(begun.truth("saved"), now.truth("loaded"), across=True)
    assert [text for text in found if not text.startswith("lr_scheduler")] == []
    # What a schedule is differs: a function of verl's (None), or a `functools.partial` without attributes ({}).
    saved, loaded = (t.meta["lr_scheduler"] | {"lr_lambdas": 1} for t in (begun.truth("saved"), now.truth("loaded")))
    assert saved == loaded
    _check_losses(begun, now)


@pytest.mark.skipif(not is_here("skyrl"), reason="SkyRL is not here: `make setup` puts it beside the environment")
@pytest.mark.parametrize("name", SKYRL)
def test_skyrl_goes_on_on_other_numbers_of_ranks(name: str, tmp_path: Path, fsdp: FsdpOracle) -> None:
    _go_on_everywhere(fsdp, "oracle.skyrl_manager:run", SKYRL[name], tmp_path)
