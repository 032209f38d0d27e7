"""The FSDP oracle itself: what a consumer loads on another mesh is what was saved, and the losses go on.

No converter takes part; the last tests show what goes wrong without one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from house.tiers import rest_full
from oracle.conversions import agree
from oracle.dcp_cases import GRAMMARS, RUNS, VARIANTS, FsdpRun, Mesh
from oracle.dcp_driver import Framework, FsdpOracle, Job, Saved, problems, zero_run
from oracle.fixtures import SavedFactory
from oracle.launcher import WorldError
from oracle.truth import Resumed

LOADABLE = tuple(kind for kind in (*GRAMMARS, *VARIANTS) if kind != "no_collectives")
TWO_BY_ONE = Mesh(1, tensor=2)


def assert_goes_on(source: Saved, resumed: Resumed | str) -> None:
    """The state is the source's, bit for bit, and the next losses are the uninterrupted run's."""
    assert isinstance(resumed, Resumed), resumed
    assert problems(source.truth, resumed.state) == []
    assert agree(resumed.losses, source.losses_after, significant=6)
    assert len(set(source.losses_after)) == 3


def all_losses(source: Saved) -> tuple[float, ...]:
    """Those before the save and after it."""
    return (*source.truth.meta["losses_before"], *source.losses_after)


def jobs(source: Saved, target: FsdpRun, kinds: tuple[str, ...], out: Path, **options: Any) -> list[Job]:
    """One resume of each kind."""
    scheduler = source.truth.meta["lr_scheduler"]
    return [
        Job(
            target,
            kind,
            source.path(kind),
            out / kind,
            scheduler=None if kind in GRAMMARS[1:4] else scheduler,
            **options,
        )
        for kind in kinds
    ]


@pytest.mark.parametrize(
    ("name", "mesh", "parallel", "kinds"),
    rest_full(
        [
            ("fsdp2", Mesh(2), "fsdp2", ("app", "flat", "raw", "v2_3")),
            ("fsdp2", Mesh(3), "fsdp2", LOADABLE),
            ("fsdp2", Mesh(1), "fsdp2", GRAMMARS),
            ("fsdp2", Mesh(3), "fsdp1", ("app", "flat")),
            ("hsdp", Mesh(3), "fsdp2", GRAMMARS),
            ("hsdp", TWO_BY_ONE, "fsdp2", ("app", "flat")),
            ("fsdp2_tp", Mesh(3), "fsdp2", GRAMMARS),
            ("fsdp2_tp", Mesh(2, replicate=2), "fsdp2", ("app",)),
            ("fsdp2_tp", Mesh(1, tensor=3), "fsdp2", ("app", "flat")),
            ("fsdp1", Mesh(3), "fsdp2", ("app", "nested", "flat", "v2_3")),
            ("fsdp1", Mesh(3), "fsdp1", ("app", "nested", "flat", "v2_3")),
            ("fsdp1_flat", Mesh(3), "fsdp2", ("app", "flat")),
            ("fsdp1_flat", Mesh(3), "fsdp1_flat", ("app",)),
            ("fsdp2_sgd", Mesh(3), "fsdp2", GRAMMARS),
            ("fsdp2_amsgrad", Mesh(3), "fsdp2", GRAMMARS),
        ],
        ("fsdp2", Mesh(2), "fsdp2", ("app", "flat", "raw", "v2_3")),
    ),
    ids=str,
)
def test_torch_alone_resumes_on_another_mesh(
    name: str, mesh: Mesh, parallel: Any, kinds: tuple[str, ...], saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    source = saved(name)
    target = RUNS[name].on(mesh, parallel)
    for resumed in fsdp.resume_all(jobs(source, target, kinds, tmp_path)):
        assert_goes_on(source, resumed)


@pytest.mark.parametrize(
    ("framework", "name", "mesh"),
    rest_full(
        [
            ("accelerate", "fsdp2", Mesh(3)),
            ("titan", "fsdp2", Mesh(3)),
            ("titan", "fsdp2_tp", TWO_BY_ONE),
            ("lightning", "fsdp2", Mesh(3)),
            ("lightning", "fsdp2_tp", TWO_BY_ONE),
            ("lightning", "fsdp1", Mesh(3)),
            ("trainer", "llama", Mesh(3)),
            ("trainer", "gpt2", Mesh(2)),
        ],
        ("lightning", "fsdp1", Mesh(3)),
    ),
    ids=str,
)
def test_frameworks_resume_on_another_mesh(
    framework: Framework, name: str, mesh: Mesh, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    run = RUNS.get(name) or FsdpRun(name)
    source = saved(run, framework)
    assert_goes_on(source, fsdp.resume(framework, run.on(mesh), source.path(), tmp_path))


@pytest.mark.parametrize("stage", rest_full((1, 2, 3), 2))
def test_deepspeed_trains_the_same_and_resumes(
    stage: Any, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    source = saved(zero_run(stage, RUNS["fsdp2"], 4), "zero")
    twin = saved("fsdp2")
    assert agree(all_losses(source), all_losses(twin), significant=6)
    assert_goes_on(source, fsdp.resume("zero", source.run, source.path(), tmp_path))


def test_a_parameter_without_gradient_has_no_state(saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    """Under FSDP2 a strict load then fails on the run's own checkpoint; a partial one goes on."""
    source = saved("fsdp2_unused")
    assert "exp_avg/unused" not in source.truth.tensors
    target = RUNS["fsdp2_unused"].on(Mesh(2))
    (refused,) = fsdp.resume_all(jobs(source, target, ("app",), tmp_path / "strict"))
    assert isinstance(refused, str)
    assert "Missing key in checkpoint state_dict" in refused
    (resumed,) = fsdp.resume_all(jobs(source, target, ("app",), tmp_path / "partial", partial=True))
    assert isinstance(resumed, Resumed)
    assert {text.partition(":")[0] for text in problems(source.truth, resumed.state)} == {
        "exp_avg/unused",
        "exp_avg_sq/unused",
        "scalar step",
    }
    assert agree(resumed.losses, source.losses_after, significant=6)


def test_accelerate_with_fsdp1_loses_its_moments(saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    """Accelerate 1.15: a fresh optimizer is asked which states to load, has none, and none come; nothing is said.

    The files are complete: read by FSDP2 they give everything back.
    """
    source = saved("fsdp1", "accelerate")
    lost = fsdp.resume("accelerate", RUNS["fsdp1"].on(Mesh(3)), source.path(), tmp_path / "1")
    assert {text.partition("/")[0] for text in problems(source.truth, lost.state) if "/" in text} == {
        "exp_avg",
        "exp_avg_sq",
    }
    assert lost.state.kind("exp_avg") == {}
    assert not agree(lost.losses[1:], source.losses_after[1:], significant=4)
    assert_goes_on(source, fsdp.resume("accelerate", RUNS["fsdp1"].on(Mesh(3), "fsdp2"), source.path(), tmp_path / "2"))


def test_torch_loads_saves_without_collectives_wrongly(saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    """Each rank reads the metadata of its own number only: without an error, and with pieces that never come."""
    source = saved("fsdp2")
    (right,) = fsdp.resume_all(jobs(source, RUNS["fsdp2"], ("no_collectives",), tmp_path / "4"))
    assert_goes_on(source, right)
    (wrong,) = fsdp.resume_all(jobs(source, RUNS["fsdp2"].on(Mesh(3)), ("no_collectives",), tmp_path / "3"))
    assert isinstance(wrong, Resumed)
    assert {"fp32/embed.weight: bits differ", "exp_avg/embed.weight: bits differ"} <= set(
        problems(source.truth, wrong.state)
    )
    assert not agree(wrong.losses, source.losses_after, significant=2)


@pytest.mark.parametrize("framework", rest_full(("accelerate", "lightning"), "accelerate"))
def test_frameworks_refuse_their_own_checkpoint_of_an_unused_parameter(
    framework: Framework, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    source = saved("fsdp2_unused", framework)
    with pytest.raises(WorldError, match="Missing key in checkpoint state_dict"):
        fsdp.resume(framework, RUNS["fsdp2_unused"].on(Mesh(3)), source.path(), tmp_path)
