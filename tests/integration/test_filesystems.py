"""Sources on file systems of fsspec that the caller made: s3fs on a real S3 server, and sshfs on a real SFTP server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import s3fs
import sshfs
from upath import UPath

import reshard
from house.expected import raised
from house.repository import DATA
from reshard.errors import RequestError, SourceError
from servers.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from servers.sftp import SftpServer, sftp_server

SAMPLE = DATA / "zero3_tiny"
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL")


@pytest.fixture
def credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What s3fs needs; the environment has no credentials and no server."""
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return {"key": ACCESS_KEY, "secret": SECRET_KEY, "client_kwargs": {"endpoint_url": s3.endpoint}}


@pytest.fixture
def uploaded(s3: S3Server) -> str:
    """The path of a save directory in a bucket of its own."""
    bucket = s3.new_bucket()
    s3.upload(SAMPLE, bucket, "run")
    return f"{bucket}/run"


@pytest.fixture
def sftp(tmp_path: Path) -> Generator[SftpServer]:
    """An SFTP server with a save directory `run`."""
    shutil.copytree(SAMPLE, tmp_path / "shown" / "run")
    with sftp_server(tmp_path / "shown", tmp_path / "sftp.log") as server:
        yield server


def files_of(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file() and not p.name.startswith("reshard")}


def test_a_upath_is_converted_with_its_own_credentials(
    credentials: dict[str, Any], uploaded: str, tmp_path: Path
) -> None:
    reshard.convert(SAMPLE, tmp_path / "local", to="zero", dp=3)
    done = reshard.convert(UPath(f"s3://{uploaded}", **credentials), tmp_path / "made", to="zero", dp=3)
    assert files_of(tmp_path / "made") == files_of(tmp_path / "local")
    assert reshard.verify(tmp_path / "made").ok
    assert [w for w in done.warnings if not w.startswith("latest")] == []
    assert SECRET_KEY not in (tmp_path / "made" / "reshard.json").read_text()


def test_its_pins_are_those_of_our_own_client(
    s3: S3Server, credentials: dict[str, Any], uploaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = reshard.plan(UPath(f"s3://{uploaded}", **credentials), "/nowhere/made", to="zero", dp=3)
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    ours = reshard.plan(f"s3://{uploaded}", "/nowhere/made", to="zero", dp=3)
    assert theirs.digest == ours.digest


def test_every_function_takes_it(credentials: dict[str, Any], uploaded: str, tmp_path: Path) -> None:
    run, local = UPath(f"s3://{uploaded}", **credentials), SAMPLE
    assert reshard.inspect(run).format == "deepspeed-zero3"
    assert reshard.diff(run, local).equal
    assert reshard.diff(local, run).equal
    assert reshard.fingerprint(run).digest == reshard.fingerprint(local).digest
    drawn, url = reshard.picture(run, beside=run).svg(), f"s3://{uploaded}"
    assert drawn == reshard.picture(local, beside=local).svg().replace(str(local), url)
    with reshard.open_layout(run, to="safetensors") as layout:
        read = {f.path: layout.read(f.path) for f in layout.files}
    with reshard.open_layout(local, to="safetensors") as layout:
        assert read == {f.path: layout.read(f.path) for f in layout.files}
    made = Path(reshard.ensure(run, dp=3, out=tmp_path / "ensured"))
    reshard.convert(local, tmp_path / "converted", to="zero", dp=3)
    assert files_of(next(p for p in made.iterdir() if p.is_dir())) == files_of(tmp_path / "converted")
    assert reshard.ensure(run, dp=3, out=tmp_path / "ensured") == str(made)


def test_a_plan_is_run_by_the_process_that_has_the_file_system(
    credentials: dict[str, Any], uploaded: str, tmp_path: Path
) -> None:
    saved = tmp_path / "plan.json"
    reshard.plan(UPath(f"s3://{uploaded}", **credentials), tmp_path / "made", to="zero", dp=3, out=saved)
    assert SECRET_KEY not in saved.read_text()
    words = [sys.executable, "-m", "reshard.cli.main", "convert", "--plan", str(saved)]
    other = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert other.returncode == 2
    assert "request.invalid" in other.stderr
    assert "another process has neither the object nor its credentials" in " ".join(other.stderr.split())
    assert not (tmp_path / "made").exists()
    reshard.convert(plan=saved)
    assert reshard.verify(tmp_path / "made").ok


def test_what_the_file_system_remembers_is_not_taken_for_the_store(
    s3: S3Server, credentials: dict[str, Any], uploaded: str
) -> None:
    """s3fs keeps listings until it is told otherwise: a later save of the same size would be missed."""
    fs = s3fs.S3FileSystem(**credentials)
    fs.find(uploaded)
    bucket, _, prefix = uploaded.partition("/")
    place = fs.get_mapper(uploaded)
    with reshard.open_layout(place, to="safetensors") as layout:
        name = next(f.path for f in layout.files if f.path.endswith(".safetensors"))
        fs.find(uploaded)
        for key, data in s3.read_all(bucket, prefix).items():
            if key.endswith(".pt"):
                s3.put(bucket, f"{prefix}/{key}", data[:-1] + bytes([data[-1] ^ 1]))
        assert raised(SourceError, layout.read, name).code == "source.changed"
    fs.find(uploaded)
    s3.put(bucket, f"{prefix}/latest", b"nothing_of_this_name")
    assert raised(SourceError, reshard.inspect, place).code == "checkpoint.bad_latest"


def test_sftp(sftp: SftpServer, tmp_path: Path) -> None:
    """A file system that reports times and no versions, lists links as links, and reads whole files for ranges."""
    (sftp.root / "linked").symlink_to("run")
    inner = sftp.root / "run" / "global_step3"
    one = next(inner.glob("*optim_states.pt"))
    one.rename(sftp.root / one.name)
    one.symlink_to(Path("../..") / one.name)
    reshard.convert(SAMPLE, tmp_path / "local", to="zero", dp=3)
    run = UPath("ssh://127.0.0.1/run", **sftp.credentials)
    found = reshard.inspect(run)
    assert (found.url, found.warnings) == ("ssh://127.0.0.1/run/global_step3", ())
    reshard.convert(run, tmp_path / "made", to="zero", dp=3)
    assert files_of(tmp_path / "made") == files_of(tmp_path / "local")
    fs = sshfs.SSHFileSystem("127.0.0.1", **sftp.credentials)
    assert reshard.diff(fs.get_mapper("/linked"), tmp_path / "made").equal


def test_a_file_that_changes_on_an_sftp_server_is_noticed(sftp: SftpServer) -> None:
    run = UPath("ssh://127.0.0.1/run", **sftp.credentials)
    with reshard.open_layout(run, to="safetensors") as layout:
        name = next(f.path for f in layout.files if f.path.endswith(".safetensors"))
        for path in (sftp.root / "run" / "global_step3").glob("*.pt"):
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            os.utime(path, (1, 1))  # SFTP tells whole seconds, and this may be the second of the copy
        assert raised(SourceError, layout.read, name).code == "source.changed"


def test_a_service_is_told_the_reason(credentials: dict[str, Any], uploaded: str) -> None:
    run = UPath(f"s3://{uploaded}", **credentials)
    for call in (
        lambda: reshard.convert(run, "s3://other/made", to="zero", dp=3, url="http://127.0.0.1:9"),
        lambda: reshard.plan(run, "s3://other/made", to="zero", dp=3, url="http://127.0.0.1:9"),
        lambda: reshard.inspect(run, url="http://127.0.0.1:9"),
        lambda: reshard.ensure(run, out="s3://other/made", dp=3, url="http://127.0.0.1:9"),
    ):
        error = raised(RequestError, call)
        assert error.code == "request.invalid"
        assert "an object of the process that made the request" in error.message
        assert SECRET_KEY not in str(error)
