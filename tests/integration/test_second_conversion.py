"""Two command lines into one target with other options: the second ends at its start and writes nothing.

The first one is a process that is stopped (SIGSTOP) in the middle of its work, and goes on afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import gpt_parameters, write_zero_checkpoint

from house.promises import command
from reshard.errors import ExitCode
from servers.s3 import S3Server

RESHARD = (sys.executable, "-m", "reshard.cli.main")
SLOW = ("--part-size", "5MiB", "--threads", "1", "-q")
Files = Callable[[], dict[str, int]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ZeRO-3 checkpoint of 2 ranks and about 200 MB: a conversion takes long enough to be stopped in its middle."""
    save = tmp_path_factory.mktemp("second") / "save"
    write_zero_checkpoint(save, gpt_parameters(256, 2, 48_000), stage=3, ranks=2)
    return str(save)


def place_of(kind: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Files]:
    """A place for targets, and the function that lists all files and uploads in it with their sizes."""
    if kind == "local":
        parent = tmp_path / "out"
        return str(parent), lambda: {str(p): p.stat().st_size for p in parent.rglob("*") if p.is_file()}
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    bucket = f"second-{os.urandom(6).hex()}"
    s3.make_bucket(bucket)

    def files() -> dict[str, int]:
        client: Any = s3.client()
        found = {o["Key"]: o["Size"] for o in client.list_objects_v2(Bucket=bucket).get("Contents", ())}
        uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads") or ()
        for u in uploads:
            parts = client.list_parts(Bucket=bucket, Key=u["Key"], UploadId=u["UploadId"]).get("Parts", ())
            found[f"upload {u['Key']} {u['UploadId']}"] = sum(p["Size"] for p in parts)
        return found

    return f"s3://{bucket}", files


def stopped_in_its_middle(process: subprocess.Popen[bytes], files: Files) -> dict[str, int]:
    """Stop the process when it has written 6 MiB, and return all files and uploads.

    The process is stopped whenever the files are listed: a busy store may take longer for that than the process takes
    for the rest of its work.
    """
    deadline = time.monotonic() + 60
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


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_the_second_ends_at_its_start_and_writes_nothing(
    kind: str, s3: S3Server, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, files = place_of(kind, s3, tmp_path, monkeypatch)
    target = f"{place}/weights"
    first = subprocess.Popen([*RESHARD, "convert", source, target, "--to", "safetensors", *SLOW])
    try:
        before = stopped_in_its_middle(first, files)
        for options in (("--to", "safetensors", "--dtype", "bf16"), ("--to", "torch"), ("--to", "universal")):
            code, told, said = command("convert", source, target, *options, *SLOW)
            assert (code, told) == (ExitCode.CONFLICT, ""), said
            assert "error: request.target_busy: " in said
            assert files() == before
        first.send_signal(signal.SIGCONT)
        assert first.wait(timeout=180) == 0
    finally:
        first.kill()
        first.wait()
    assert command("verify", target)[0] == 0
    code, _, said = command("convert", source, target, "--to", "torch", *SLOW)
    assert (code, "request.target_exists" in said) == (ExitCode.CONFLICT, True)
