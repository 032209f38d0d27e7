"""Jobs of a service that run a saved plan, and plans of checkpoints in an object store."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator
from pathlib import Path

import httpx
import pytest

import reshard
from house.expected import raised
from house.saves import DATA
from house.waiting import PATIENCE_S
from reshard.api.client import Client
from reshard.api.plan_files import read_plan
from reshard.choices import JobState
from reshard.errors import RequestError
from servers.s3 import S3Server
from servers.stack import Stack

OTHER = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """A service with the real engine and one worker."""
    place = tmp_path_factory.mktemp("plans")
    # A busy machine may take long to plan, and what is not planned in time is accepted unseen.
    patient = {"RESHARD_ADMISSION_S": "60", "RESHARD_ADMISSION_QUEUE_S": "60"}
    stack = Stack(place / "logs", f"sqlite:///{place}/jobs.db", scripted=False, extra=patient)
    with stack.api() as url, stack.worker():
        yield url


@pytest.fixture
def client(service: str) -> Generator[Client]:
    with Client(service, timeout_s=PATIENCE_S) as found:
        yield found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A plan of a checkpoint of its own."""
    shutil.copytree(DATA / "zero2_tiny", tmp_path / "run1")
    reshard.plan(tmp_path / "run1", tmp_path / "out", to="zero", dp=3, out=tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_job_runs_a_saved_plan(client: Client, file: Path, tmp_path: Path) -> None:
    request = read_plan(file)
    job = client.wait(client.submit_request(request).id, timeout_s=PATIENCE_S)
    assert job.state is JobState.SUCCEEDED, job.error
    assert request.plan is not None
    assert job.request.plan == request.plan
    assert job.plan_digest == request.plan.digest
    reshard.convert(tmp_path / "run1", tmp_path / "plain", to="zero", dp=3)
    for path in (tmp_path / "plain").glob("*.pt"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    page = httpx.get(f"{client.url}/jobs/{job.id}", headers={"Accept": "text/html"}, timeout=PATIENCE_S).text
    assert "runs a saved plan" in page
    assert request.plan.digest in page.partition('id="saved-plan"')[2]
    listed = next(found for found in client.list().jobs if found.id == job.id)
    assert listed.request.plan == request.plan.without_files()


def test_the_file_itself_is_the_body_of_a_submission(client: Client, file: Path) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{client.url}/v1/jobs", content=file.read_bytes(), headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 202, answer.text
    assert client.wait(answer.json()["id"], timeout_s=PATIENCE_S).state is JobState.SUCCEEDED


def test_a_submission_of_a_plan_that_has_changed_is_refused(client: Client, file: Path, tmp_path: Path) -> None:
    os.utime(tmp_path / "run1" / "global_step3" / OTHER, ns=(1, 1))
    submit = lambda: client.submit_request(read_plan(file))  # noqa: E731
    convert = lambda: reshard.convert(plan=file, url=client.url)  # noqa: E731
    for error in (raised(RequestError, submit), raised(RequestError, convert)):
        assert (error.code, error.details["changed"]) == ("request.plan_changed", [OTHER])


def test_a_plan_of_a_service_is_saved(service: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "zero2_tiny", tmp_path / "run1")
    there, here = tmp_path / "there.json", tmp_path / "here.json"
    reshard.plan(tmp_path / "run1", tmp_path / "out", to="zero", dp=3, out=there, url=service)
    reshard.plan(tmp_path / "run1", tmp_path / "out", to="zero", dp=3, out=here)
    assert json.loads(there.read_text()) == json.loads(here.read_text())
    assert reshard.convert(plan=there, url=service).plan_digest == reshard.convert(plan=here).plan_digest


def test_a_plan_pins_objects_by_their_etags(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    root, file = f"s3://{bucket}", tmp_path / "plan.json"
    tag = DATA / "zero2_tiny" / "global_step3"
    s3.upload(tag, bucket, "run1/global_step3")
    reshard.plan(f"{root}/run1/global_step3", f"{root}/out/a", to="universal", out=file)
    planned = read_plan(file).plan
    assert planned is not None
    assert all(found.pin.startswith("etag:") for found in planned.files)
    reshard.convert(plan=file)
    reshard.convert(f"{root}/run1/global_step3", f"{root}/plain/a", to="universal")
    first, plain = s3.read_all(bucket, "out/a"), s3.read_all(bucket, "plain/a")
    assert {n: d for n, d in first.items() if n != "reshard.json"} == {
        n: d for n, d in plain.items() if n != "reshard.json"
    }
    body = (tag / OTHER).read_bytes()
    s3.client().put_object(Bucket=bucket, Key=f"run1/global_step3/{OTHER}", Body=body[:-1] + b"\x01")
    error = raised(RequestError, lambda: reshard.convert(plan=file))
    assert (error.code, error.details["changed"]) == ("request.plan_changed", [OTHER])
