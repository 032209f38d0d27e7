"""Distributed checkpoints that Reshard writes are resumed by the real programs, on meshes of all kinds.

The state is the source's, bit for bit, and the next three losses are those of the uninterrupted run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from house.tiers import rest_full
from oracle.conversions import agree
from oracle.dcp_cases import RUNS, FsdpRun, Mesh
from oracle.dcp_driver import Framework, FsdpOracle, Job, Saved, problems
from oracle.dcp_reading import dcp_convert
from oracle.fixtures import SavedFactory, need
from oracle.outputs import contents
from oracle.truth import Resumed
from reshard.errors import RequestError

TWO_BY_ONE = Mesh(1, tensor=2)
CONSUMERS = {"state-dict": "nested", "torchtitan": "flat"}
"""The grammars of keys that torch alone loads, and the loads of ``oracle.dcp_grammars`` that do it."""
OWN_KEYS = ("app", "async", "no_collectives", "threads", "items", "v2_3")
"""Sources whose model and optimizer lie below a key of the script's own, which the output keeps."""
WITHOUT_SCHEDULER = ("raw", *OWN_KEYS)


def assert_goes_on(source: Saved, resumed: Resumed | str, *, more: frozenset[str] = frozenset()) -> None:
    """The state is the source's but for ``more`` states, which are zeros; the next losses are its losses.

    Of a scheduler torchtitan keeps the step only.
    """
    assert isinstance(resumed, Resumed), resumed
    if list(resumed.state.meta["lr_scheduler"] or ()) == ["last_epoch"]:
        resumed.state.meta["lr_scheduler"] |= source.truth.meta["lr_scheduler"] | resumed.state.meta["lr_scheduler"]
    wrong = problems(source.truth, resumed.state)
    assert {text for text in wrong if not text.startswith("scalar step")} == {
        f"{key}: only on the right" for key in more
    }
    assert all(not any(resumed.state.tensors[key].data) for key in more)
    ours = {fqn: step for fqn, step in resumed.state.step.items() if fqn in source.truth.step}
    assert ours == source.truth.step
    assert agree(resumed.losses, source.losses_after, significant=6)
    assert len(set(source.losses_after)) == 3


def converted(source: Saved, kind: str, grammar: str, folder: Path, target: FsdpRun, **options: Any) -> Job:
    """The resume of one conversion."""
    path = folder / f"{kind}-{grammar}"
    order = {"param_order": "groups"} if kind == "raw" else {}
    dcp_convert(source.path(kind), path, "dcp", framework=grammar, **order, **options)
    consumer = "app" if grammar == "state-dict" and kind in OWN_KEYS else CONSUMERS[grammar]
    scheduler = source.truth.meta["lr_scheduler"] if kind in WITHOUT_SCHEDULER else None
    return Job(target, consumer, path, folder / f"{kind}-{grammar}-{target.mesh}", scheduler=scheduler)


def each(*kinds: str) -> tuple[tuple[str, str], ...]:
    """Each kind of source, in each grammar."""
    return tuple((kind, grammar) for kind in kinds for grammar in CONSUMERS)


CROSSED = (("nested", "torchtitan"), ("titan", "state-dict"))
ODD = (("raw", "state-dict"), ("v2_3", "torchtitan"))
THREE_AND_TWO = (Mesh(3), Mesh(2))
_ALWAYS = [
    ("fsdp2", ODD, (Mesh(3), Mesh(1))),
    ("fsdp2_tp", CROSSED, (Mesh(3), TWO_BY_ONE)),
    ("fsdp1", CROSSED, THREE_AND_TWO),
]


@pytest.mark.parametrize(
    ("name", "pairs", "meshes"),
    rest_full(
        [
            *_ALWAYS,
            ("fsdp2", each("nested", "raw", "v2_3"), (Mesh(3), Mesh(1))),
            ("fsdp2", each("app", "titan", "async", "no_collectives", "threads", "items"), THREE_AND_TWO),
            ("fsdp2_unused", each("nested", "titan"), THREE_AND_TWO),
            ("hsdp", each("nested", "titan"), (Mesh(3), TWO_BY_ONE)),
            ("fsdp2_tp", each("nested", "titan"), (Mesh(3), TWO_BY_ONE)),
            ("fsdp2_tp", each("app", "raw"), (Mesh(2, replicate=2), Mesh(1, tensor=3))),
            ("fsdp1", each("nested", "titan"), THREE_AND_TWO),
            ("fsdp1_flat", each("nested", "titan"), THREE_AND_TWO),
            ("fsdp2_sgd", each("nested", "titan"), THREE_AND_TWO),
            ("fsdp2_amsgrad", each("nested", "titan"), THREE_AND_TWO),
            ("fsdp2_plain", each("nested", "titan"), THREE_AND_TWO),
        ],
        *_ALWAYS,
    ),
    ids=str,
)
def test_torch_alone_resumes(
    name: str,
    pairs: tuple[tuple[str, str], ...],
    meshes: tuple[Mesh, ...],
    saved: SavedFactory,
    fsdp: FsdpOracle,
    tmp_path: Path,
) -> None:
    source = saved(name)
    unused = frozenset({"exp_avg/unused", "exp_avg_sq/unused"} if name == "fsdp2_unused" else ())
    for mesh in meshes:
        target, folder = RUNS[name].on(mesh, "fsdp2"), tmp_path / str(mesh)
        jobs = [converted(source, *pair, folder, target, files=number + 1) for number, pair in enumerate(pairs)]
        for resumed in fsdp.resume_all(jobs):
            assert_goes_on(source, resumed, more=unused)


@pytest.mark.parametrize(
    ("name", "parallel"),
    rest_full([("fsdp1", "fsdp1"), ("fsdp1_flat", "fsdp1_flat"), ("fsdp2", "fsdp1")], ("fsdp2", "fsdp1")),
)
def test_fsdp1_resumes(name: str, parallel: Any, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path) -> None:
    source = saved(name)
    target = RUNS[name].on(Mesh(3), parallel)
    jobs = [converted(source, kind, "state-dict", tmp_path, target) for kind in ("nested", "v2_3")]
    for resumed in fsdp.resume_all(jobs):
        assert_goes_on(source, resumed)


@pytest.mark.parametrize(
    ("framework", "name", "origin", "meshes"),
    rest_full(
        [
            ("accelerate", "fsdp2", "accelerate", (Mesh(3),)),
            ("accelerate", "fsdp2", "torch", (Mesh(2),)),
            ("lightning", "fsdp1", "lightning", THREE_AND_TWO),
            ("lightning", "fsdp2_tp", "lightning", (Mesh(3), TWO_BY_ONE)),
            ("titan", "fsdp2_tp", "torch", (Mesh(3), TWO_BY_ONE)),
            ("titan", "fsdp2_tp", "titan", (Mesh(3), TWO_BY_ONE)),
            ("trainer", "gpt2", "trainer", THREE_AND_TWO),
            ("trainer", "llama", "trainer", (Mesh(1), Mesh(4))),
        ],
        ("accelerate", "fsdp2", "accelerate", (Mesh(3),)),
        ("accelerate", "fsdp2", "torch", (Mesh(2),)),
        ("lightning", "fsdp1", "lightning", THREE_AND_TWO),
        ("lightning", "fsdp2_tp", "lightning", (Mesh(3), TWO_BY_ONE)),
        ("titan", "fsdp2_tp", "torch", (Mesh(3), TWO_BY_ONE)),
        ("trainer", "gpt2", "trainer", THREE_AND_TWO),
    ),
    ids=str,
)
def test_frameworks_resume(
    framework: Framework,
    name: str,
    origin: Framework,
    meshes: tuple[Mesh, ...],
    saved: SavedFactory,
    fsdp: FsdpOracle,
    tmp_path: Path,
) -> None:
    """Through the grammar of another framework, and back to the one that resumes."""
    need(framework)
    run = RUNS.get(name) or FsdpRun(name)
    source = saved(run, origin)
    for mesh in meshes:
        folder = tmp_path / str(mesh)
        path = folder / "checkpoint" / "step-3"  # torchtitan's place; the others take any
        between = "accelerate" if framework in ("titan", "lightning") else "torchtitan"
        options: dict[str, Any] = {"framework": "torchtitan" if framework == "titan" else framework, "files": 3}
        if framework == "lightning" and run.parallel == "fsdp2":
            options["target_model_key"] = "state_dict"  # as ModelParallelStrategy has it
        dcp_convert(source.path("nested"), folder / "between", "dcp", framework=between)
        dcp_convert(folder / "between", path, "dcp", **options)
        assert_goes_on(source, fsdp.resume(framework, run.on(mesh), path, folder / "out"))


def test_accelerate_goes_on_where_its_own_fsdp1_lost_its_moments(
    saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    source = saved("fsdp1", "accelerate")
    dcp_convert(source.path(), tmp_path / "state", "dcp")
    target = RUNS["fsdp1"].on(Mesh(3), "fsdp2")
    assert_goes_on(source, fsdp.resume("accelerate", target, tmp_path / "state", tmp_path / "out"))


@pytest.mark.parametrize("framework", rest_full(("accelerate", "lightning"), "accelerate"))
def test_frameworks_resume_where_they_refuse_their_own_checkpoint(
    framework: Framework, saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    """A parameter that takes no part has no states, and no option of theirs does without: ours has zeros."""
    source = saved("fsdp2_unused", framework)
    dcp_convert(source.path(), tmp_path / "state", "dcp")
    resumed = fsdp.resume(framework, RUNS["fsdp2_unused"].on(Mesh(3)), tmp_path / "state", tmp_path / "out")
    prefix = "model." if framework == "lightning" else ""
    more = frozenset({f"exp_avg/{prefix}unused", f"exp_avg_sq/{prefix}unused"})
    assert_goes_on(source, resumed, more=more)


def test_missing_moments_are_left_out_or_refused_on_demand(
    saved: SavedFactory, fsdp: FsdpOracle, tmp_path: Path
) -> None:
    source = saved("fsdp2_unused")
    dcp_convert(source.path("nested"), tmp_path / "omit", "dcp", missing_moments="omit")
    target = RUNS["fsdp2_unused"].on(Mesh(2))
    strict, partial = fsdp.resume_all(
        [Job(target, "nested", tmp_path / "omit", tmp_path / f"{way}", partial=way) for way in (False, True)]
    )
    assert isinstance(strict, str)
    assert "Missing key in checkpoint state_dict" in strict
    assert_goes_on(source, partial, more=frozenset({"exp_avg/unused", "exp_avg_sq/unused"}))
    with pytest.raises(RequestError) as refused:
        dcp_convert(source.path("nested"), tmp_path / "refuse", "dcp", missing_moments="refuse")
    assert refused.value.code == "request.unsatisfiable"
    assert "unused" in str(refused.value)


def test_the_same_bytes_come_out_however_it_was_saved(saved: SavedFactory, tmp_path: Path) -> None:
    source = saved("fsdp2")
    kinds = ("app", "async", "no_collectives", "threads", "items")
    for kind in kinds:
        dcp_convert(source.path(kind), tmp_path / kind, "dcp", framework="accelerate", files=2)
    wanted = contents(tmp_path / "app")
    assert [kind for kind in kinds if contents(tmp_path / kind) != wanted] == []
