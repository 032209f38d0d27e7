"""A service with a signing key leaves certificates beside the targets of its jobs."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

import reshard
from house.keys import key_pair
from house.saves import DATA
from house.waiting import PATIENCE_S
from reshard.api.client import Client
from reshard.choices import JobState
from servers.s3 import S3Server
from servers.stack import Stack


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `seal.key` and `seal.pub`."""
    place = tmp_path_factory.mktemp("keys")
    key_pair(place, "seal")
    return place


@pytest.fixture(scope="module")
def client(keys: Path, s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[Client]:
    """A service with two workers, which have the key in their environment."""
    place = tmp_path_factory.mktemp("signed")
    extra = {**s3.env(), "RESHARD_SIGNING_KEY": (keys / "seal.key").read_text(), "RESHARD_SHARE_BYTES": "0"}
    stack = Stack(place / "logs", f"sqlite:///{place}/jobs.db", scripted=False, extra=extra)
    with stack.api() as url, stack.worker(), stack.worker(), Client(url, timeout_s=PATIENCE_S) as found:
        yield found


def test_a_job_of_local_files_is_signed(client: Client, keys: Path, tmp_path: Path) -> None:
    shutil.copytree(DATA / "zero2_tiny", tmp_path / "run1")
    job = client.wait(client.submit(f"{tmp_path}/run1", f"{tmp_path}/out", to="zero", dp=3).id, timeout_s=PATIENCE_S)
    assert job.state is JobState.SUCCEEDED, job.error
    assert job.result is not None
    assert job.result.certificates == tuple(f"{tmp_path}/out{end}.sealed.json" for end in ("", ".source"))
    found = reshard.verify_sealed(tmp_path / "out", job.result.certificates, [keys / "seal.pub"])
    assert found.ok
    assert found.chain[0].plan_digest == job.plan_digest
    assert found.chain[0].fingerprint == found.chain[1].fingerprint
    (tmp_path / "out" / "added.txt").write_text("x")
    assert not reshard.verify_sealed(tmp_path / "out", job.result.certificates, [keys / "seal.pub"]).ok


def test_a_job_of_several_workers_in_an_object_store_is_signed_once(
    client: Client, keys: Path, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    s3.upload(DATA / "zero2_tiny", bucket, "run1")
    target = f"s3://{bucket}/out/global_step3"
    job = client.wait(
        client.submit(f"s3://{bucket}/run1", target, to="universal", max_workers=2).id, timeout_s=PATIENCE_S
    )
    assert job.state is JobState.SUCCEEDED, job.error
    # The certificate of the source is found beside that of the target.
    found = reshard.verify_sealed(target, [f"{target}.sealed.json"], [keys / "seal.pub"])
    assert found.ok, found.problems
    assert [step.changed for step in found.chain] == [(), ()]
    assert job.result is not None
    assert job.result.certificates == (f"{target}.sealed.json", f"{target}.source.sealed.json")
