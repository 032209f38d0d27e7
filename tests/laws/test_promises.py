"""What `inspect` says that a checkpoint can become: of generated checkpoints of every kind and of hand-made ones."""

from __future__ import annotations

import shutil
import tempfile
from decimal import Decimal
from pathlib import Path

import fsspec
import pytest
import torch
from hypothesis import given, seed, settings, strategies as st

from house.promises import broken_promises, command
from house.saves import DATA, make_save
from laws.drawing import SOURCES
from laws.pipeline_source import Model, seeded_model
from laws.profiles import laws_profile, laws_seed
from laws.small_models import PLAIN, model_with_experts, piped_model, write_source
from reshard_engine.testing.logical import SourceFormat

MODELS: dict[str, tuple[Model, dict[str, int]]] = {
    "told": (seeded_model(PLAIN, piped=False, layers=2, heads=6), {}),
    "told-tp2": (seeded_model(PLAIN, piped=False, layers=2, heads=6), {"tp": 2}),
    "bare": (seeded_model(PLAIN, piped=False, layers=2, told=False), {}),
    "unexplained": (seeded_model(PLAIN, piped=False, layers=2, told=False), {"tp": 2}),
    "pipeline": (piped_model(), {}),
    "experts": (model_with_experts(4), {}),
}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@seed(laws_seed())
@settings(laws_profile(), max_examples=2)
@given(data=st.data())
def test_of_generated_checkpoints(source: SourceFormat, data: st.DataObject) -> None:
    case = data.draw(source.cases())
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "source"
        place.mkdir()
        source.write(case, place)
        assert broken_promises(place, Path(scratch)) == []


@pytest.mark.parametrize("name", MODELS)
def test_of_model_parallel_runs(name: str, tmp_path: Path) -> None:
    model, ranks = MODELS[name]
    assert broken_promises(write_source(tmp_path / "source", model, **ranks), tmp_path) == []


@pytest.mark.parametrize("name", ["zero2_tiny", "zero3_tiny"])
def test_of_frozen_checkpoints(name: str, tmp_path: Path) -> None:
    assert broken_promises(DATA / name, tmp_path) == []


@pytest.mark.parametrize("name", ["zero2_tiny", "zero3_tiny", "experts"])
def test_of_checkpoints_in_a_bucket(name: str, bucket: str, tmp_path: Path) -> None:
    """The commands are run as printed: from the bucket, into the bucket."""
    source = DATA / name if name not in MODELS else write_source(tmp_path / "source", MODELS[name][0])
    fsspec.filesystem("s3").put(f"{source}/", f"s3://{bucket}/the run/", recursive=True)
    assert broken_promises(f"s3://{bucket}/the run", f"s3://{bucket}/made") == []


@pytest.mark.parametrize("to", ["universal", "safetensors", "zero --dp 3"])
def test_of_what_conversions_write(to: str, tmp_path: Path) -> None:
    source = tmp_path / "made" / "global_step3"
    code, _, err = command("convert", str(DATA / "zero3_tiny"), str(source), "--to", *to.split(), "-q")
    assert code == 0, err
    assert broken_promises(source, tmp_path) == []


def test_of_objects_that_nobody_knows(tmp_path: Path) -> None:
    source = make_save(tmp_path / "a save with spaces")
    path = source / "global_step3" / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=False)  # what DeepSpeed wrote for the tests
    torch.save({**states, "budget": Decimal("1.5")}, path)
    assert broken_promises(source, tmp_path) == []
    _, told, _ = command("inspect", str(source))
    assert "--opaque drop" in told


def test_the_next_command_names_what_inspect_was_given(tmp_path: Path) -> None:
    """Without the tag it would convert another checkpoint, or none."""
    source = make_save(tmp_path / "save")
    shutil.copytree(source / "global_step3", source / "global_step4")
    (source / "latest").write_text("gone")
    assert broken_promises(source, tmp_path, tag="global_step4") == []
    _, told, _ = command("inspect", str(source), "--tag", "global_step4")
    assert "reshard ensure" in told
    assert all(line.endswith("--tag global_step4") for line in told.splitlines() if ": reshard " in line)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_of_factors_that_are_no_matrices(shape: tuple[int, ...], tmp_path: Path) -> None:
    state = {f"a.b.lora_{half}.default.weight": torch.ones(shape) for half in "AB"}
    (tmp_path / "source").mkdir()
    torch.save(state, tmp_path / "source" / "pytorch_model.bin")
    assert broken_promises(tmp_path / "source", tmp_path) == []
    for options in (["--to", "peft"], ["--to", "safetensors", "--merge-adapter"]):
        words = ["convert", str(tmp_path / "source"), str(tmp_path / "out"), *options, "--lora-alpha", "2", "-q"]
        code, _, said = command(*words)
        assert (code, "checkpoint.malformed" in said) == (3, True), said


def test_what_nothing_explains_is_no_next_command(tmp_path: Path) -> None:
    model, ranks = MODELS["unexplained"]
    code, out, _ = command("inspect", str(write_source(tmp_path / "source", model, **ranks)))
    assert code == 0
    assert ": reshard " not in out
    assert "can become" not in out
    assert "--family" in out
