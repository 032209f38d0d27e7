"""More than ten ranks: file names sort as text in another order than their ranks."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from checkpoints import many_small_parameters, write_zero_checkpoint
from safetensors.torch import load_file

from house.conversions import convert

RANKS = 12
PARAMETERS = many_small_parameters(7, size=9)


def partition(tag: Path, rank: int, stage: int) -> torch.Tensor:
    """The flat fp32 partition of one rank."""
    file = torch.load(tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", weights_only=False)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    return file["optimizer_state_dict"][key][0]


def gathered(tag: Path, stage: int) -> dict[str, torch.Tensor]:
    """The parameters, put together in rank order."""
    flats = [partition(tag, rank, stage) for rank in range(RANKS)]
    found: dict[str, torch.Tensor] = {}
    at = 0
    for name, shape in PARAMETERS:
        numel = prod(shape)
        share = -(-numel // RANKS)
        if stage == 3:
            whole = torch.cat([flat[at : at + share] for flat in flats])[:numel]
            at += share
        else:
            whole = torch.cat(flats)[at : at + numel]
            at += numel
        found[name] = whole.view(shape)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_are_numbers(stage: int, tmp_path: Path) -> None:
    tag = write_zero_checkpoint(tmp_path / "save", PARAMETERS, stage=stage, ranks=RANKS)
    target = tmp_path / "out"
    convert(tag, target, "safetensors")
    ours, expected = load_file(target / "model.safetensors"), gathered(tag, stage)
    assert set(ours) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(ours[name].view(torch.int32), tensor.view(torch.int32)), name
