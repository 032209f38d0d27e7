"""torch_checkpointing's own manager: it loads what Reshard wrote, and Reshard reads what it saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reshard
from house.tiers import rest_full
from oracle.conversions import agree
from oracle.dcp_cases import ITEM_FORMS, RUNS, FsdpRun, Mesh
from oracle.dcp_driver import FsdpOracle, Job, Saved, problems
from oracle.fixtures import SavedFactory
from oracle.truth import Resumed

TIED = RUNS["fsdp2"]
UNTIED = replace(TIED, name="fsdp2_untied", model=replace(TIED.model, tied=False))
"""Safetensors take no tensor twice."""
CASES = rest_full(
    [(TIED, "metadata"), (UNTIED, "metadata"), (UNTIED, "safetensors")], (TIED, "metadata"), (UNTIED, "safetensors")
)
each_case = pytest.mark.parametrize(("run", "form"), CASES, ids=lambda value: getattr(value, "name", value))


def assert_goes_on(source: Saved, resumed: Resumed | str) -> None:
    """The state is the source's, bit for bit, and the next losses are the uninterrupted run's."""
    assert isinstance(resumed, Resumed), resumed
    assert problems(source.truth, resumed.state) == []
    assert agree(resumed.losses, source.losses_after, significant=6)
    assert len(set(source.losses_after)) == 3


def rates_of(source: Saved) -> list[float]:
    return [group["lr"] for group in source.truth.meta["groups"]]


def written(source: Path, target: Path, mesh: Mesh, **options: Any) -> Path:
    found = reshard.convert(source, target, to="torch_checkpointing", dp=mesh.world, progress=False, **options)
    assert any("axes have no names" in text for text in found.warnings) is not mesh.named
    return target


@each_case
def test_the_manager_loads_its_own_on_three_ranks(
    run: FsdpRun, form: str, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    """It reads tensors alone: learning rates stay those of the run that loads, until that sets them."""
    source = saved(run, "items")
    resumed, rates = fsdp.resume_items(run.on(Mesh(3)), source.path(form), form, tmp_path / "out", resharded=True)
    assert_goes_on(source, resumed)
    assert rates != rates_of(source)


@each_case
@pytest.mark.parametrize("ranks", [3, 2])
def test_the_manager_loads_ours(
    run: FsdpRun, form: str, ranks: int, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    """With the groups: the files are those of its own number of ranks."""
    source, target = saved(run, "items"), run.on(Mesh(ranks))
    path = written(source.path(form), tmp_path / "ours", target.mesh)
    resumed, rates = fsdp.resume_items(target, path, form, tmp_path / "out", resharded=False)
    assert_goes_on(source, resumed)
    assert rates == rates_of(source)


@pytest.mark.parametrize("form", rest_full(ITEM_FORMS, "safetensors"))
def test_the_manager_loads_ours_on_three_replicas(
    form: str, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    """From two of HSDP."""
    run = UNTIED.on(Mesh(2, replicate=2))
    source, target = saved(run, "items"), run.on(Mesh(2, replicate=3))
    path = written(source.path(form), tmp_path / "ours", target.mesh)
    resumed, rates = fsdp.resume_items(target, path, form, tmp_path / "out", resharded=False)
    assert_goes_on(source, resumed)
    assert rates == rates_of(source)


@pytest.mark.parametrize("run", rest_full((TIED, UNTIED), TIED), ids=lambda run: run.name)
def test_the_manager_loads_a_distributed_checkpoint(
    run: FsdpRun, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    """A save of torch says neither the device nor which whole tensors are buffers, and the user does.

    It says no names of the mesh's axes either: a run whose axes have names gets tensors alone, and a warning says so.
    """
    source, mesh = saved(run, "items"), Mesh(2, named=False)
    path = written(source.path("nested"), tmp_path / "ours", mesh, device_type="cpu", buffers="wave,seen")
    resumed, rates = fsdp.resume_items(run.on(mesh), path, "metadata", tmp_path / "out", resharded=False)
    assert_goes_on(source, resumed)
    assert rates == rates_of(source)
    resumed, rates = fsdp.resume_items(run.on(Mesh(2)), path, "metadata", tmp_path / "named", resharded=True)
    assert_goes_on(source, resumed)
    assert rates != rates_of(source)


@each_case
def test_torch_loads_the_managers_files_as_a_distributed_checkpoint(
    run: FsdpRun, form: str, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    source = saved(run, "items")
    reshard.convert(source.path(form), tmp_path / "dcp", to="dcp", framework="state-dict", progress=False)
    (resumed,) = fsdp.resume_all([Job(run.on(Mesh(3)), "nested", tmp_path / "dcp", tmp_path / "out")])
    assert_goes_on(source, resumed)
