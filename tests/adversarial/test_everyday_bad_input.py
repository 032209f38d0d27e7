"""Everyday bad input: each has its typed error, its stable code and a `fix:`, and nothing is half written."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from house.conversions import convert
from house.expected import raised
from house.sources import copied_source
from reshard.choices import OpaquePolicy, TargetFormat
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec

OPTIM_1 = "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL_0 = "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt"


source = copied_source("zero3_tiny")
"""A copy of the real ZeRO-3 checkpoint that a test may damage."""


def _refused(source: Path | str, target: Path, **options: Any) -> ReshardError:
    """The error of a conversion, after checking that it left nothing behind."""
    before = sorted(p.name for p in target.parent.iterdir()) if target.parent.exists() else []
    error = raised(ReshardError, convert, source, target, **options)
    after = sorted(p.name for p in target.parent.iterdir()) if target.parent.exists() else []
    assert after == before, "a refused conversion left files"
    assert error.fix, f"{error.code} says no fix"
    return error


def test_missing_rank(source: Path, tmp_path: Path) -> None:
    (source / OPTIM_1).unlink()
    error = _refused(source, tmp_path / "out")
    assert error.code == "checkpoint.incomplete"
    assert error.details == {"missing_ranks": [1], "world_size": 2}
    assert "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt" in error.fix


def test_missing_first_rank(source: Path, tmp_path: Path) -> None:
    (source / OPTIM_1.replace("pp_rank_1", "pp_rank_0")).unlink()
    assert _refused(source, tmp_path / "out").code == "checkpoint.incomplete"


def test_missing_model_states_of_a_rank(source: Path, tmp_path: Path) -> None:
    (source / MODEL_0.replace("pp_rank_0", "pp_rank_1")).unlink()
    error = _refused(source, tmp_path / "out")
    assert error.code == "checkpoint.incomplete"
    assert "zero_pp_rank_1_mp_rank_00_model_states.pt" in error.fix


def test_missing_model_states(source: Path, tmp_path: Path) -> None:
    (source / MODEL_0).unlink()
    assert _refused(source, tmp_path / "out").code == "checkpoint.incomplete"


def test_latest_points_nowhere(source: Path, tmp_path: Path) -> None:
    (source / "latest").write_text("global_step99")
    error = _refused(source, tmp_path / "out")
    assert error.code == "checkpoint.bad_latest"
    assert "--tag global_step3" in error.fix


@pytest.mark.parametrize("text", ["../../etc", "/etc", "a/../b", "", "global_step3\nglobal_step4", "x\0y"])
def test_latest_is_no_name(source: Path, tmp_path: Path, text: str) -> None:
    (source / "latest").write_text(text)
    assert raised(ReshardError, convert, source, tmp_path / "out").code == "checkpoint.bad_latest"


def test_latest_is_huge(source: Path, tmp_path: Path) -> None:
    (source / "latest").write_bytes(b"a" * 100_000)
    assert raised(ReshardError, convert, source, tmp_path / "out").code == "checkpoint.bad_latest"


def test_unknown_tag(source: Path, tmp_path: Path) -> None:
    error = _refused(source, tmp_path / "out", tag="global_step4")
    assert error.code == "source.not_found"
    assert "global_step3" in error.fix


def test_nothing_there(tmp_path: Path) -> None:
    assert _refused(tmp_path / "absent", tmp_path / "out").code == "source.not_found"


@pytest.mark.parametrize("content", [b"\x7fELF" + bytes(100), b"7z\xbc\xaf\x27\x1c" + bytes(100), b"GGUF" + bytes(100)])
def test_unknown_file_kind(source: Path, tmp_path: Path, content: bytes) -> None:
    (source / OPTIM_1).write_bytes(content)
    assert _refused(source, tmp_path / "out").code == "source.unknown_kind"


def test_directory_without_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere" / "notes.txt").write_text("hello")
    assert _refused(tmp_path / "somewhere", tmp_path / "out").code == "source.unknown_kind"


def test_source_is_a_file(source: Path, tmp_path: Path) -> None:
    assert _refused(source / OPTIM_1, tmp_path / "out").code == "source.unknown_kind"


@pytest.mark.parametrize("name", ["mp_rank_01_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"])
def test_a_stray_model_parallel_rank(source: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(source / MODEL_0, source / "global_step3" / name)
    assert _refused(source, tmp_path / "out").code == "checkpoint.incomplete"


def test_target_exists(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "precious.txt").write_text("mine")
    error = _refused(source, target)
    assert error.code == "request.target_exists"
    assert "--overwrite" in error.fix
    assert (target / "precious.txt").read_text() == "mine"
    assert _refused(source, target, overwrite=True).code == "request.target_exists"
    assert (target / "precious.txt").read_text() == "mine", "--overwrite removes checkpoints and our outputs only"
    (target / "precious.txt").unlink()
    convert(source, target)
    convert(source, target, to=TargetFormat.SAFETENSORS, overwrite=True)
    assert sorted(p.name for p in target.iterdir()) == ["model.safetensors", "reshard.json"]
    assert not (tmp_path / "latest_universal").exists(), "it would name a target of another kind"
    assert load_engine().verify(str(target)).ok


def test_target_inside_source(source: Path, tmp_path: Path) -> None:
    assert raised(ReshardError, convert, source, source / "global_step3" / "out").code == "request.overlap"
    assert raised(ReshardError, convert, source, source).code == "request.overlap"


def test_target_that_cannot_be_written(source: Path) -> None:
    assert raised(ReshardError, convert, source, "memory://bucket/out").code == "request.unknown_scheme"
    assert raised(ReshardError, convert, "nosuchscheme://x/y", "/nowhere/out").code == "request.unknown_scheme"


def test_budget_too_small(source: Path, tmp_path: Path) -> None:
    error = _refused(source, tmp_path / "out", memory_limit_bytes=2_000)
    assert error.code == "request.budget_too_small"
    assert "--memory-limit" in error.fix


class _Evil:
    """Pickles as a call of `os.system`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value: dict[str, Any] = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def test_pickle_that_names_os_system(source: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    # The positive control: Python's own unpickler does run it.
    pickle.loads(pickle.dumps(_Evil(marker)))
    assert marker.exists()
    marker.unlink()
    _edit(source / MODEL_0, lambda v: v.update(extra=_Evil(marker)))
    error = _refused(source, tmp_path / "out")
    assert error.code == "pickle.forbidden_call"
    assert error.details == {"global": "posix.system"}
    assert "--opaque drop" in error.fix
    assert "--opaque keep" in error.fix
    found = load_engine().inspect(SourceSpec(url=str(source)))
    assert found.foreign_globals == ("posix.system",)
    assert not marker.exists()


def test_opaque_objects_are_dropped_or_kept_as_asked(source: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    _edit(source / MODEL_0, lambda v: v.update(extra=_Evil(marker), other=3))
    convert(source, tmp_path / "dropped", opaque=OpaquePolicy.DROP)
    dropped = torch.load(tmp_path / "dropped" / "mp_rank_00_model_states.pt", weights_only=True)
    assert dropped["extra"] is None
    assert dropped["other"] == 3
    convert(source, tmp_path / "kept", opaque=OpaquePolicy.KEEP)
    assert b"posix" in (tmp_path / "kept" / "mp_rank_00_model_states.pt").read_bytes()
    assert "posix.system" in (tmp_path / "kept" / "reshard.json").read_text()
    assert not marker.exists()


class _Mentioned:
    """Stands for a class of the user's own code."""


def test_a_class_that_is_only_mentioned(source: Path, tmp_path: Path) -> None:
    _edit(source / MODEL_0, lambda v: v.update(kind=_Mentioned))
    assert _refused(source, tmp_path / "out").code == "pickle.forbidden_global"


@pytest.mark.parametrize("kept_share", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("name", [OPTIM_1, MODEL_0])
def test_truncated_file(source: Path, tmp_path: Path, name: str, kept_share: float) -> None:
    data = (source / name).read_bytes()
    (source / name).write_bytes(data[: int(len(data) * kept_share)])
    error = _refused(source, tmp_path / "out")
    assert error.code in {"zip.bad_directory", "checkpoint.incomplete"}


def test_truncated_legacy_file(source: Path, tmp_path: Path) -> None:
    value = torch.load(source / OPTIM_1, weights_only=False)
    torch.save(value, source / OPTIM_1, _use_new_zipfile_serialization=False)
    data = (source / OPTIM_1).read_bytes()
    for length in (1, 50, 400, len(data) // 2, len(data) - 1):
        (source / OPTIM_1).write_bytes(data[:length])
        error = raised(ReshardError, convert, source, tmp_path / "out")
        assert error.code in {"pickle.truncated", "checkpoint.incomplete", "source.unknown_kind"}, length


def test_files_of_two_steps(source: Path, tmp_path: Path) -> None:
    def later(value: dict[str, Any]) -> None:
        value["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["step"] += 1

    _edit(source / OPTIM_1, later)
    assert _refused(source, tmp_path / "out").code == "checkpoint.mixed"


def test_files_of_another_model(source: Path, tmp_path: Path) -> None:
    def longer(value: dict[str, Any]) -> None:
        state = value["optimizer_state_dict"]
        state["fp32_flat_groups"] = [torch.cat([t, torch.zeros(5)]) for t in state["fp32_flat_groups"]]

    _edit(source / OPTIM_1, longer)
    assert _refused(source, tmp_path / "out").code == "checkpoint.coverage"


def test_parameter_name_that_would_leave_the_target(source: Path, tmp_path: Path) -> None:
    def rename(value: dict[str, Any]) -> None:
        shapes = value["param_shapes"][0]
        value["param_shapes"] = [type(shapes)(("../../escape" if k == "unused" else k, v) for k, v in shapes.items())]

    _edit(source / MODEL_0, rename)
    assert _refused(source, tmp_path / "out").code == "name.invalid"


def test_source_that_changes_during_the_run(source: Path, tmp_path: Path) -> None:
    touched = False

    def overwrite(_progress: object) -> None:
        nonlocal touched
        if not touched and _progress is not None and getattr(_progress, "phase", "") == "running":
            touched = True
            path = source / OPTIM_1
            data = bytearray(path.read_bytes())
            path.write_bytes(bytes(data))
            os.utime(path, ns=(1, 1))

    request = ConvertRequest(
        source=SourceSpec(url=str(source)), target=str(tmp_path / "out"), to=TargetFormat.UNIVERSAL
    )
    assert raised(ReshardError, load_engine().convert, request, on_progress=overwrite).code == "source.changed"
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "latest_universal").exists()


def test_damaged_output_is_found(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    engine = load_engine()
    assert engine.verify(str(tmp_path / "out")).ok
    path = tmp_path / "out" / "zero" / "embed.weight" / "exp_avg.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    (tmp_path / "out" / "zero" / "gain" / "fp32.pt").unlink()
    (tmp_path / "out" / "stray.bin").write_bytes(b"?")
    report = engine.verify(str(tmp_path / "out"))
    assert not report.ok
    assert {p.path for p in report.problems} == {"zero/embed.weight/exp_avg.pt", "zero/gain/fp32.pt", "stray.bin"}
    assert raised(ReshardError, engine.verify, str(source)).code == "integrity.no_manifest"
