"""Distributed checkpoints of real runs are read bit for bit: every tensor, moment, step and hyper-parameter.

The truth is what the running engine held (``oracle.dcp_truth``); the checkpoints become universal directories, which
hold everything, and weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from house.expected import raised
from house.tiers import rest_full
from oracle.dcp_cases import GRAMMARS, HUGGING_FACE, LOST, RUNS, VARIANTS, FsdpRun
from oracle.dcp_driver import Framework
from oracle.dcp_reading import dcp_convert, universal_problems, weights_problems
from oracle.fixtures import SavedFactory
from oracle.outputs import read_safetensors
from reshard.errors import SourceError

WITH_SCHEDULER = ("nested", "flat", "titan")
"""Grammars that hold the scheduler."""

AMBIGUOUS = ("fsdp2_unused", "raw")
"""An optimizer's own state dict numbers its parameters; one of them without states has not even a shape."""


@pytest.mark.parametrize(
    ("name", "kinds"),
    rest_full(
        [(name, kinds) for name in RUNS for kinds in (GRAMMARS, VARIANTS)],
        *((name, GRAMMARS) for name in ("fsdp2", "fsdp2_tp", "fsdp2_unused", "fsdp1", "fsdp1_flat", "fsdp2_sgd")),
        ("fsdp2", VARIANTS),
    ),
    ids=str,
)
def test_torch_checkpoints_are_read(name: str, kinds: tuple[str, ...], saved: SavedFactory, tmp_path: Path) -> None:
    source = saved(name)
    kinds = tuple(kind for kind in kinds if kind in source.run.kinds and (name, kind) != AMBIGUOUS)
    found = {}
    for kind in kinds:
        dcp_convert(source.path(kind), tmp_path / kind, "universal", **order_of(kind))
        truth = source.truth
        for group in truth.meta["groups"] if kind == "v2_3" else ():
            group.pop("decoupled_weight_decay", None)  # torch 2.3 has no such key
        problems = universal_problems(tmp_path / kind, truth, scheduler=kind in WITH_SCHEDULER)
        found |= {kind: problems} if problems else {}
    assert found == {}
    dcp_convert(source.path(kinds[0]), tmp_path / "weights", "safetensors")
    assert weights_problems(read_safetensors(tmp_path / "weights"), source.truth) == []


@pytest.mark.parametrize(
    ("name", "order"), [(AMBIGUOUS[0], {"param_order": "groups"}), ("fsdp2", {}), ("fsdp2", {"param_order": "model"})]
)
def test_numbers_that_could_be_several_parameters_are_refused(
    name: str, order: dict[str, str], saved: SavedFactory, tmp_path: Path
) -> None:
    source = saved(name)
    error = raised(SourceError, dcp_convert, source.path("raw"), tmp_path / "universal", "universal", **order)
    assert error.code == "checkpoint.ambiguous"
    assert "--param-order FILE" in error.fix
    dcp_convert(source.path("raw"), tmp_path / "weights", "safetensors", **order)
    assert weights_problems(read_safetensors(tmp_path / "weights"), source.truth) == []


def order_of(kind: str) -> dict[str, str]:
    """What the user says of an optimizer without names: each of its groups has the model's order."""
    return {"param_order": "groups"} if kind == "raw" else {}


@pytest.mark.parametrize(("kind", "code"), list(zip(LOST, ("checkpoint.ambiguous", "source.unsupported"), strict=True)))
@pytest.mark.parametrize("name", rest_full(("fsdp1", "fsdp1_flat"), "fsdp1"))
def test_saves_that_lost_the_state_are_refused(
    name: str, kind: str, code: str, saved: SavedFactory, tmp_path: Path
) -> None:
    error = raised(SourceError, dcp_convert, saved(name).path(kind), tmp_path / "universal", "universal")
    assert error.code == code, error


@pytest.mark.parametrize(
    ("name", "kind"),
    rest_full(
        [(name, "hf") for name in ("fsdp2", "fsdp2_tp", "fsdp1", "hsdp")]
        + [("fsdp2_plain", kind) for kind in HUGGING_FACE],
        ("fsdp2", "hf"),
        ("fsdp2_tp", "hf"),
        ("fsdp1", "hf"),
    ),
)
def test_files_of_the_hugging_face_writer_are_read(name: str, kind: str, saved: SavedFactory, tmp_path: Path) -> None:
    source = saved(name)
    dcp_convert(source.path(kind), tmp_path / "weights", "safetensors")
    problems = weights_problems(read_safetensors(tmp_path / "weights"), source.truth)
    # Who saves a tied model in this way has to leave the second name out.
    assert problems == [f"model: {alias} is missing" for alias in source.truth.meta["aliases"]]


@pytest.mark.parametrize(
    ("framework", "name"),
    rest_full(
        [
            ("accelerate", "fsdp2"),
            ("accelerate", "fsdp2_unused"),
            ("accelerate", "fsdp1"),
            ("lightning", "fsdp2"),
            ("lightning", "fsdp2_tp"),
            ("lightning", "fsdp1"),
            ("titan", "fsdp2"),
            ("trainer", "llama"),
            ("trainer", "gpt2"),
        ],
        ("accelerate", "fsdp2"),
        ("accelerate", "fsdp1"),
        ("lightning", "fsdp2_tp"),
        ("lightning", "fsdp1"),
        ("titan", "fsdp2"),
        ("trainer", "gpt2"),
    ),
)
def test_checkpoints_of_frameworks_are_read(
    framework: Framework, name: str, saved: SavedFactory, tmp_path: Path
) -> None:
    source = saved(RUNS.get(name) or FsdpRun(name), framework)
    options: dict[str, Any] = {}
    if framework == "titan":
        # Its optimizer is flattened, and its scheduler keeps no learning rates that would tell the order of groups.
        error = raised(SourceError, dcp_convert, source.path(), tmp_path / "universal", "universal")
        assert error.code == "checkpoint.ambiguous"
        options["param_order"] = [name for group in source.truth.meta["groups"] for name in group["names"]]
    dcp_convert(source.path(), tmp_path / "universal", "universal", **options)
    assert universal_problems(tmp_path / "universal", source.truth) == []
