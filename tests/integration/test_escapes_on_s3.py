"""A `%` in a URL is a character of the name, in the API, on the command line and in the store: no escape leads out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from house.promises import command
from house.saves import DATA
from house.waiting import PATIENCE_S
from servers.s3 import S3Server
from servers.stack import Stack

PLACES = ("%2e%2e/other", "%2e%2e%2fother", "x%2f..%2f..%2fother", "50%25 done")


@pytest.mark.parametrize("place", PLACES)
def test_the_command_line_writes_and_reads_the_very_name(s3: S3Server, bucket: str, place: str) -> None:
    target = f"s3://{bucket}/some/{place}/out"
    code, _, said = command("convert", str(DATA / "zero2_tiny"), target, "--to", "universal", "-q")
    assert code == 0, said
    keys = set(s3.read_all(bucket, ""))
    assert keys
    assert all(key.startswith(f"some/{place}/") for key in keys), keys
    assert command("verify", target)[0] == 0
    assert command("inspect", target)[0] == 0
    assert command("inspect", f"s3://{bucket}/other/out")[0] == 3, "nothing is there"


def test_the_service_judges_and_writes_the_very_name(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    s3.upload(DATA / "zero2_tiny", bucket, "some/run")
    extra = {**s3.env(), "RESHARD_ROOTS": f"s3://{bucket}/some"}
    stack = Stack(tmp_path / "logs", f"sqlite:///{tmp_path}/jobs.db", scripted=False, extra=extra)
    with stack.api() as url, stack.worker():
        for number, place in enumerate(PLACES):
            target = f"s3://{bucket}/some/{place}/out"
            body = {"source": {"url": f"s3://{bucket}/some/run"}, "target": target, "to": "universal"}
            made = httpx.put(f"{url}/v1/jobs/escape-{number}", json=body, timeout=PATIENCE_S)
            assert made.status_code == 202, made.text
            ended = httpx.get(f"{url}/v1/jobs/escape-{number}?wait=60", timeout=PATIENCE_S).json()
            assert (ended["state"], ended["request"]["target"]) == ("SUCCEEDED", target)
            outside = {**body, "target": f"s3://{bucket}/{place}/out"}
            assert httpx.post(f"{url}/v1/jobs", json=outside).json()["code"] == "request.root_forbidden"
    keys = set(s3.read_all(bucket, ""))
    assert {key.partition("/")[0] for key in keys} == {"some"}
    for place in PLACES:
        assert any(key.startswith(f"some/{place}/out/") for key in keys)


# A target beside a newer checkpoint in an object store: `latest` moves there with a warning, never back unasked.


SOURCE = str(DATA / "zero2_tiny")


def test_latest_in_an_object_store_does_not_move_back_unasked(s3: S3Server, bucket: str) -> None:
    client: Any = s3.client()

    def latest() -> str:
        return client.get_object(Bucket=bucket, Key="run/latest")["Body"].read().decode()

    def to(name: str, *more: str) -> tuple[int, str, str]:
        return command("convert", SOURCE, f"s3://{bucket}/run/{name}", "--to", "zero", "--dp", "3", "-q", *more)

    code, _, said = to("global_step9")
    assert (code, "warning: latest" in said) == (0, False)
    before = {o["Key"] for o in client.list_objects_v2(Bucket=bucket)["Contents"]}
    code, _, said = to("global_step3_dp3")
    assert (code, "request.target_exists" in said, latest()) == (5, True, "global_step9")
    assert {o["Key"] for o in client.list_objects_v2(Bucket=bucket)["Contents"]} == before
    code, _, said = to("global_step3_dp3", "--overwrite")
    assert (code, latest()) == (0, "global_step3_dp3")
    assert "warning: latest: global_step9 -> global_step3_dp3, an earlier step (" in said
    code, _, said = to("global_step3")
    assert (code, "warning: latest: global_step3_dp3 -> global_step3 (" in said) == (0, True)
