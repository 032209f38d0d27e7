"""verl's files of FSDP1 for other worlds: each rank's optimizer holds what FSDP1 of torch cuts on that many ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import reshard
from laws.fsdp1_files import Model, save_fsdp1
from laws.item_files import folder_differences
from reshard.errors import ReshardError

BF16, TIED = torch.bfloat16, partial(Model, tied=True)
FIVE, LATE = ("layers.1.proj", "layers.1.norm", "layers.1.scale"), ("layers.0.norm", "head.weight")


def convert(place: Path, out: Path, dp: int, **options: Any) -> Any:
    return reshard.convert(place, out, to="fsdp_ranks", dp=dp, progress=False, **options)


@pytest.mark.parametrize(
    ("source", "target", "how"),
    [
        (2, 3, {"orig": False}),
        (3, 2, {"orig": False, "compute": BF16}),
        (4, 9, {"orig": False}),  # a unit of five elements: four ranks hold padding alone
        (4, 3, {"orig": False, "make": TIED}),
        (4, 3, {"orig": True}),
        (4, 3, {"orig": True, "compute": BF16}),
        (3, 9, {"orig": True}),
        (4, 26, {"orig": True}),  # the last ranks hold no state at all
        (4, 3, {"orig": True, "make": TIED, "compute": BF16}),
        (4, 3, {"orig": True, "without": LATE}),
        (4, 3, {"orig": True, "without": FIVE}),
    ],
    ids=str,
)
def test_each_rank_holds_what_torch_cuts(source: int, target: int, how: dict[str, Any], tmp_path: Path) -> None:
    save_fsdp1(tmp_path / "in", source, **how)
    save_fsdp1(tmp_path / "wanted", target, **how)
    convert(tmp_path / "in", tmp_path / "out", target)
    assert folder_differences(tmp_path / "out", tmp_path / "wanted") == []
    said = torch.load(tmp_path / "out" / f"model_world_size_{target}_rank_0.pt", weights_only=True)
    assert "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module" in said._metadata
    convert(tmp_path / "out", tmp_path / "back", source)
    assert folder_differences(tmp_path / "back", tmp_path / "in") == []


def test_a_rank_without_states_lists_all_numbers(tmp_path: Path) -> None:
    save_fsdp1(tmp_path / "in", 4, orig=True)
    convert(tmp_path / "in", tmp_path / "out", 26)
    last = torch.load(tmp_path / "out" / "optim_world_size_26_rank_25.pt", weights_only=True)
    assert (last["state"], last["param_groups"][0]["params"]) == ({}, list(range(12)))


def test_flat_states_with_padding_go_on_with_fsdp2(tmp_path: Path) -> None:
    save_fsdp1(tmp_path / "in", 4, orig=False)
    result = convert(tmp_path / "in", tmp_path / "out", 3, fsdp_version=2)
    assert any("cut as FSDP1 flattens" in w for w in result.warnings)
    assert not any("cut as FSDP1" in w for w in convert(tmp_path / "in", tmp_path / "same", 3).warnings)
    differences = reshard.diff(tmp_path / "out", tmp_path / "same", progress=False).differences
    assert list(differences) == []


def _changed(folder: Path, item: str, change: Callable[[Any], None]) -> None:
    for file in sorted(folder.glob(f"{item}_world_size_*")):
        value = torch.load(file, weights_only=True)
        change(value)
        torch.save(value, file)


def test_lengths_alone_say_the_units_with_a_warning(tmp_path: Path) -> None:
    for name, world in (("in", 4), ("wanted", 3)):
        _changed(save_fsdp1(tmp_path / name, world, orig=False), "model", _without_wrappers)
    result = convert(tmp_path / "in", tmp_path / "out", 3)
    assert folder_differences(tmp_path / "out", tmp_path / "wanted") == []
    assert any("cut as FSDP1 flattens" in w for w in result.warnings)


def _without_wrappers(model: Any) -> None:
    model._metadata = None


def _other_modules(model: Any) -> None:
    for name in [n for n in model._metadata if n.startswith("_fsdp_wrapped_module.layers.0")]:
        del model._metadata[name]


@pytest.mark.parametrize(
    ("orig", "options", "change", "says"),
    [
        (False, {"dp": 1}, None, "whole parameters on one rank"),
        (False, {"fsdp_size": 2, "dp": 4}, None, "HYBRID_SHARD"),
        (False, {"rank_framework": "skyrl"}, None, "skyrl loads none"),
        (False, {"rank_framework": "accelerate"}, None, "accelerate loads none"),
        (False, {}, _other_modules, "names 3 modules that FSDP1 wrapped, and they are others"),
        (True, {}, _without_wrappers, "which modules FSDP1 wrapped"),
        (True, {}, _other_modules, "are not cut as FSDP1 cuts the 3 modules"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_proven_is_refused(
    orig: bool, options: dict[str, Any], change: Callable[[Any], None] | None, says: str, tmp_path: Path
) -> None:
    place = save_fsdp1(tmp_path / "in", 4, orig=orig)
    if change is not None:
        _changed(place, "model", change)
    with pytest.raises(ReshardError, match=says) as caught:
        convert(place, tmp_path / "out", **{"dp": 3, **options})
    assert caught.value.code == "request.unsatisfiable"
    assert "--fsdp-version 2" in caught.value.fix


def test_two_paddings_that_both_fit_are_refused_where_they_differ(tmp_path: Path) -> None:
    """Two ranks of a layer of 9, 3 and 1 elements: the second one begins behind 12 or behind 16, and both cut alike."""
    make = partial(Model, (3,))
    place = save_fsdp1(tmp_path / "in", 2, make, orig=True)
    with pytest.raises(ReshardError, match="several paddings") as caught:
        convert(place, tmp_path / "out", 3)
    assert (caught.value.code, "--fsdp-version 2" in caught.value.fix) == ("request.unsatisfiable", True)
    convert(place, tmp_path / "same", 2)  # where they cut alike nothing is open
    assert folder_differences(tmp_path / "same", place) == []


def test_one_rank_saves_whole_states_which_show_no_cuts(tmp_path: Path) -> None:
    place = save_fsdp1(tmp_path / "in", 1, orig=True)
    with pytest.raises(ReshardError, match="one rank saved them whole") as caught:
        convert(place, tmp_path / "out", 3)
    assert (caught.value.code, "--fsdp-version 2" in caught.value.fix) == ("request.unsatisfiable", True)


def test_an_optimizer_before_its_first_step_has_nothing_to_cut(tmp_path: Path) -> None:
    for name, world in (("in", 4), ("wanted", 3)):
        save_fsdp1(tmp_path / name, world, orig=True)
        _changed(tmp_path / name, "optim", lambda value: value["state"].clear())
    convert(tmp_path / "in", tmp_path / "out", 3)
    assert folder_differences(tmp_path / "out", tmp_path / "wanted") == []


def test_models_without_an_optimizer_are_of_the_version_that_is_said(tmp_path: Path) -> None:
    for name, world in (("in", 4), ("wanted", 3)):
        for file in save_fsdp1(tmp_path / name, world, orig=False).glob("optim_*"):
            file.unlink()
    (tmp_path / "in" / "fsdp_config.json").unlink()
    with pytest.raises(ReshardError, match="FSDP1 or FSDP2") as caught:
        convert(tmp_path / "in", tmp_path / "out", 3)
    assert "for verl with FSDP1: --fsdp-version 1" in caught.value.fix
    convert(tmp_path / "in", tmp_path / "out", 3, fsdp_version=1)
    assert folder_differences(tmp_path / "out", tmp_path / "wanted") == []
