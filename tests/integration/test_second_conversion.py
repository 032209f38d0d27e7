"""Two command lines into one target with other options: the second ends at its start and writes nothing.

The first one is a process that is stopped (SIGSTOP) in the middle of its work, and goes on afterwards.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import gpt_parameters

from house.promises import command
from house.sources import zero_source
from house.tiers import STORES, rest_full
from house.waiting import PATIENCE_S
from reshard.errors import ExitCode
from reshard_engine.storage.locations import open_location
from reshard_engine.storage.protocol import ObjectStore
from servers.fixtures import started

RESHARD = (sys.executable, "-m", "reshard.cli.main")
SLOW = ("--part-size", "5MiB", "--threads", "1", "-q")
Files = Callable[[], dict[str, int]]


source = zero_source(gpt_parameters(256, 2, 48_000), stage=3)
"""A ZeRO-3 checkpoint of 2 ranks and about 200 MB: a conversion takes long enough to be stopped in its middle."""


def place_of(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Files]:
    """A place for targets, and the function that lists all files and uploads in it with their sizes."""
    if kind == "local":
        parent = tmp_path / "out"
        return str(parent), lambda: {str(p): p.stat().st_size for p in parent.rglob("*") if p.is_file()}
    server = started(request, kind)
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    bucket = server.new_bucket()
    ours = open_location(f"{kind}://{bucket}").store
    assert isinstance(ours, ObjectStore)

    def files() -> dict[str, int]:
        found = {name: len(data) for name, data in server.read_all(bucket, "").items()}
        for path, upload in ours.list_uploads(f"{bucket}/"):
            found[f"upload {path} {upload}"] = sum(p.size_bytes for p in ours.list_parts(path, upload) or ())
        return found

    return f"{kind}://{bucket}", files


def stopped_in_its_middle(process: subprocess.Popen[bytes], files: Files) -> dict[str, int]:
    """Stop the process when it has written 6 MiB, and return all files and uploads.

    The process is stopped whenever the files are listed: a busy store may take longer for that than the process takes
    for the rest of its work.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        time.sleep(0.03)
        assert process.poll() is None, "it ended before it could be stopped"
        process.send_signal(signal.SIGSTOP)
        if sum(files().values()) >= (6 << 20):
            break
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGCONT)
    # The store may still be at work on the last request.
    time.sleep(0.1)
    return files()


@pytest.mark.parametrize("kind", rest_full(["local", *STORES], "local", "s3"))
def test_the_second_ends_at_its_start_and_writes_nothing(
    kind: str, request: pytest.FixtureRequest, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, files = place_of(kind, request, tmp_path, monkeypatch)
    target = f"{place}/weights"
    first = subprocess.Popen([*RESHARD, "convert", str(source), target, "--to", "safetensors", *SLOW])
    try:
        before = stopped_in_its_middle(first, files)
        for options in (("--to", "safetensors", "--dtype", "bf16"), ("--to", "torch"), ("--to", "universal")):
            code, told, said = command("convert", str(source), target, *options, *SLOW)
            assert (code, told) == (ExitCode.CONFLICT, ""), said
            assert "error: request.target_busy: " in said
            assert files() == before
        first.send_signal(signal.SIGCONT)
        assert first.wait(timeout=180) == 0
    finally:
        first.kill()
        first.wait()
    assert command("verify", target)[0] == 0
    code, _, said = command("convert", str(source), target, "--to", "torch", *SLOW)
    assert (code, "request.target_exists" in said) == (ExitCode.CONFLICT, True)
