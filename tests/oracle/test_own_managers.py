"""The managers of verl and SkyRL themselves save on four ranks, and go on on three, two and four with our files.

What they loaded is compared with what was saved, bit for bit; the losses of the next steps with those of the run that
saved.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import reshard
from laws.item_files import folder_differences
from oracle.dcp_cases import is_here
from oracle.dcp_driver import TIMEOUT_S, FsdpOracle, problems
from oracle.truth import Truth

VERL: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp": 2, "tied": True, "buffers": True},
    "fsdp1_flat": {"fsdp": 1, "flat": True, "tied": True, "buffers": True},
    "fsdp1_orig": {"fsdp": 1, "flat": False, "tied": True, "buffers": True},
    "lora": {"fsdp": 2, "lora": True, "tied": True},
    "adapter_alone": {"fsdp": 2, "lora": True, "adapter_alone": True},
}
SKYRL: dict[str, dict[str, Any]] = {"whole": {"tied": True, "buffers": True}, "lora": {"lora": True}}


def _go_on_everywhere(fsdp: FsdpOracle, function: str, case: dict[str, Any], place: Path) -> None:
    found: list[dict[str, Any]] = []
    load: Path | None = None
    for stage, world in enumerate((4, 3, 2, 4)):
        out, save = place / f"out{stage}", place / f"ranks{stage}"
        if stage:
            load = place / f"for{world}_{stage}"
            reshard.convert(place / f"ranks{stage - 1}", load, to="fsdp_ranks", dp=world, progress=False)
        jobs = {"case": case, "out": str(out), "save": str(save), "load": load and str(load)}
        before, found = found, fsdp.worlds.run(function, world=world, timeout_s=TIMEOUT_S, **jobs)
        if stage:
            wanted = place / f"out{stage - 1}"
            saved = Truth(wanted / "saved.safetensors", wanted / "saved.json")
            loaded = Truth(out / "loaded.safetensors", out / "loaded.json")
            assert problems(saved, loaded) == []
            assert [f["losses"] for f in found] == [pytest.approx(before[0]["losses_after"], abs=2e-6)] * world
            # Rank r has the random states of source rank r mod N.
            random = [before[rank % len(before)]["random_saved"] for rank in range(world)]
            assert [f["random_loaded"] for f in found] == random
    reshard.convert(save, place / "again", to="fsdp_ranks", dp=world, progress=False)
    shutil.rmtree(save / "lora_adapter", ignore_errors=True)  # SkyRL's copy of the adapter, which nothing resumes from
    # With `save_lora_only` verl saves a plain dict, and torch loads both alike.
    kinds = "<class 'dict'>, <class 'collections.OrderedDict'>"
    assert [d for d in folder_differences(save, place / "again") if not d.endswith(kinds)] == []


@pytest.mark.skipif(not is_here("verl"), reason="verl is not here: `make setup` puts it beside the environment")
@pytest.mark.parametrize("name", VERL)
def test_verl_goes_on_on_other_numbers_of_ranks(name: str, tmp_path: Path, fsdp: FsdpOracle) -> None:
    _go_on_everywhere(fsdp, "oracle.verl_manager:run", VERL[name], tmp_path)


@pytest.mark.skipif(not is_here("skyrl"), reason="SkyRL is not here: `make setup` puts it beside the environment")
@pytest.mark.parametrize("name", SKYRL)
def test_skyrl_goes_on_on_other_numbers_of_ranks(name: str, tmp_path: Path, fsdp: FsdpOracle) -> None:
    _go_on_everywhere(fsdp, "oracle.skyrl_manager:run", SKYRL[name], tmp_path)
