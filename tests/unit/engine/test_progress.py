"""Progress moves while a unit runs: a large unit takes seconds, and bytes count as they pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.choices import TargetFormat
from reshard.errors import JobError
from reshard.models.jobs import ConvertRequest, Progress
from reshard.options import SourceSpec
from reshard_engine.execute import executor
from reshard_engine.local import LocalEngine

ELEMS = 4 << 20


def _weights(folder: Path) -> Path:
    """One tensor of 16 MiB as safetensors."""
    header = json.dumps({"weight": {"dtype": "F32", "shape": [ELEMS], "data_offsets": [0, 4 * ELEMS]}}).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * ELEMS))
    return folder


def test_bytes_count_before_their_unit_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_PERIOD_S", 0.0)
    seen: list[Progress] = []
    request = ConvertRequest(
        source=SourceSpec(url=str(_weights(tmp_path / "source"))),
        target=str(tmp_path / "target"),
        to=TargetFormat.TORCH,
        threads=1,
    )
    LocalEngine().convert(request, on_progress=seen.append)
    running = [p for p in seen if p.phase in ("running", "committing") and p.units_done == 0]
    moved = sorted({p.bytes_done for p in running})
    assert len(moved) > 8
    assert moved[0] == 0
    assert moved[-1] <= running[-1].bytes_total
    done = [p.bytes_done for p in seen if p.phase != "planning"]
    assert done == sorted(done)
    assert seen[-1].bytes_done == seen[-1].bytes_total


def test_a_resumed_run_says_what_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_PERIOD_S", 0.0)
    request = ConvertRequest(
        source=SourceSpec(url=str(_weights(tmp_path / "source"))),
        target=str(tmp_path / "target"),
        to=TargetFormat.TORCH,
        threads=1,
        part_bytes=1 << 20,
    )
    stops = iter([False] * 6 + [True] * 1000)
    with pytest.raises(JobError):
        LocalEngine().convert(request, should_stop=lambda: next(stops))
    seen: list[Progress] = []
    result = LocalEngine().convert(request, on_progress=seen.append)
    assert 0 < result.resumed_bytes < result.write_bytes
    started = [p for p in seen if p.bytes_done]
    assert {p.bytes_kept for p in started} == {result.resumed_bytes}
    assert started[0].bytes_done == result.resumed_bytes
