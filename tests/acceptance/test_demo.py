"""`make demo`: DeepSpeed trains, our service rewrites the checkpoint for other ranks, and the losses stay the same."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from house.repository import ROOT
from house.waiting import PATIENCE_S

DEMO = ROOT / "deploy" / "demo"
STAYS = "; reshard jobs list\n"
ENDS = "Both servers are stopped"


@dataclass(frozen=True)
class Running:
    """A demo with `--stay` that has done everything and waits."""

    process: subprocess.Popen[bytes]
    directory: Path
    text: str
    log: Path

    def word(self, before: str) -> str:
        found = re.findall(rf"^  {before} +(\S+)$", self.text, re.MULTILINE)
        assert found, self.text
        return str(found[-1])

    def next_commands(self) -> list[str]:
        commands = self.text.partition("Try next:\n")[2].partition("\n\n")[0].splitlines()
        assert len(commands) == 3
        return commands


@contextmanager
def running(directory: Path, until: str, *arguments: str) -> Generator[Running]:
    """A demo that has said this, and is stopped at the end of the block if it has not ended."""
    log = directory.with_suffix(".out")
    command = [sys.executable, str(DEMO / "run.py"), "--directory", str(directory), *arguments]
    # What this shell is set up for is none of the demo's business.
    env = {**os.environ, "RESHARD_URL": "http://127.0.0.1:1", "AWS_PROFILE": "none", "RESHARD_DATABASE_URL": "x://"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=directory.parent, env=env)
    try:
        deadline = time.monotonic() + 3 * PATIENCE_S
        while until not in log.read_text():
            assert process.poll() is None or until in log.read_text(), log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield Running(process, directory, log.read_text(), log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def shell(command: str, cwd: Path) -> str:
    done = subprocess.run(["bash", "-ec", command], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ends_with_130(demo: Running, number: signal.Signals, *, processes: int) -> None:
    """The signal stops the demo and every process that it started."""
    family = psutil.Process(demo.process.pid).children(recursive=True)
    assert len(family) >= processes
    demo.process.send_signal(number)
    assert demo.process.wait(60) == 130
    assert "everything is stopped" in demo.log.read_text()
    _, alive = psutil.wait_procs(family, timeout=5)  # a killed process takes a moment
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert not {"servers", "env.sh"} & {path.name for path in demo.directory.iterdir()}


def test_the_losses_stay_and_the_servers_serve_until_they_are_stopped(tmp_path: Path) -> None:
    buffers = set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
    with running(tmp_path / "demo", STAYS, "--stay") as demo:
        assert "DP world size of 2 but the current world size is 3" in demo.text
        assert re.search(r"^  equal$", demo.text, re.MULTILINE)
        rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +\de[+-]\d+$", demo.text, re.MULTILINE)
        assert [step for step, *_ in rows] == ["6", "7", "8"]
        assert all(float(a) == pytest.approx(float(b), rel=1e-6) for _, a, b in rows)
        # The dashboard takes the token that is named.
        with httpx.Client(base_url=demo.word("dashboard"), headers={"Origin": demo.word("dashboard")}) as browser:
            token = re.findall(r"with the token (\S+)", demo.text)[-1]
            assert browser.post("/login", data={"token": token}).status_code == 303
            assert "dp3" in browser.get("/").text
        jobs = shell(f"source {demo.directory / 'env.sh'}; reshard jobs list", tmp_path)
        assert jobs.count("SUCCEEDED") == 2
        # Another demo does not take the directory from under this one.
        second = [sys.executable, str(DEMO / "run.py"), "--directory", str(demo.directory)]
        refused = subprocess.run(second, capture_output=True, text=True, timeout=180)
        assert refused.returncode == 1
        assert f"process {demo.process.pid}" in refused.stdout
        ends_with_130(demo, signal.SIGINT, processes=3)  # the S3 server, the service, its executor
        assert {"run1", "dp3", "weights", "logs"} <= {path.name for path in demo.directory.iterdir()}
    assert set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")) == buffers


@pytest.mark.parametrize(
    "what", [["--recorded"], pytest.param([], marks=pytest.mark.full)], ids=["recorded", "trained"]
)
def test_what_is_left_can_be_played_with(tmp_path: Path, what: list[str]) -> None:
    with running(tmp_path / "demo", ENDS, *what) as demo:
        assert demo.process.wait(60) == 0
        assert re.search(r"^  equal$", demo.text, re.MULTILINE)
        assert ("loss" in demo.text) == (not what)
    *_, last = [shell(command, tmp_path) for command in demo.next_commands()]
    if what:
        assert last.startswith("equal")
    else:
        assert re.findall(r"step (\d) loss", last) == ["6", "7", "8"]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_training(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path / "demo", "step 1 loss") as demo:
        ends_with_130(demo, number, processes=3)  # the script and its ranks


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Generator[dict[str, Any]]:
    """Modules of the demo, which are not a package."""
    names = [path.stem for path in DEMO.glob("*.py") if path.stem != "train"]
    monkeypatch.syspath_prepend(str(DEMO))
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


@pytest.mark.parametrize("value", [4.00001, 3.9999, float("nan")])
def test_other_losses_fail_the_demo(parts: dict[str, Any], value: float, capsys: pytest.CaptureFixture[str]) -> None:
    before = {5: 5.0, 6: 4.0, 7: 3.0}
    parts["headline"].compare(before, {6: 4.000001, 7: 3.0})
    with pytest.raises(RuntimeError, match="losses differ"):
        parts["headline"].compare(before, {6: value, 7: 3.0})
    assert "2 ranks, uninterrupted" in capsys.readouterr().out


def test_a_missing_deepspeed_is_said(
    parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parts["headline"], "has_deepspeed", lambda: False)
    with parts["playground"].playground(tmp_path / "demo") as place:
        assert parts["run"].make_checkpoint(place, recorded=False) is None
        assert parts["jobs"].tag_of(place) == "global_step3"
    assert capsys.readouterr().out.splitlines()[0].startswith("DeepSpeed is not installed here")


def test_only_a_directory_of_a_demo_is_replaced(parts: dict[str, Any], tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter").write_text("1")
    playground, refused = parts["playground"].playground, parts["playground"].PlaygroundError
    with pytest.raises(refused, match="was not made by a demo"), playground(mine):
        pass
    assert (mine / "chapter").read_text() == "1"
    with playground(tmp_path / "demo") as place:
        (place.root / "old").mkdir()
        place.write_settings({"RESHARD_TOKEN": "it's"})
        assert place.settings.stat().st_mode & 0o777 == 0o600
        assert shell(f"source {place.settings}; echo -n $RESHARD_TOKEN", tmp_path) == "it's"
    with playground(tmp_path / "demo") as place:
        assert sorted(path.name for path in place.root.iterdir()) == [".reshard-demo", "logs", "servers"]


def test_a_narrow_terminal_gets_lines_that_fit(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = parts["screen"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    line = "  ok: 6 files, 84 tensors, 887 KiB match their checksums"
    assert screen.fitting(line) == ["  ok: 6 files, 84 tensors, 887 KiB match", "      their checksums"]
    command = "  $ reshard inspect s3://demo/run1 --beside s3://demo/dp3"
    assert screen.fitting(command) == [command]  # it stays one line, to be copied
