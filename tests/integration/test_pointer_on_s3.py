"""A target beside a newer checkpoint in an object store: `latest` moves there with a warning, never back unasked."""

from __future__ import annotations

import os
from typing import Any

import pytest

from house.promises import command
from house.saves import DATA
from servers.s3 import S3Server

SOURCE = str(DATA / "zero2_tiny")


def test_latest_in_an_object_store_does_not_move_back_unasked(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.env().items():
        monkeypatch.setenv(name, value)
    bucket = f"pointer-{os.urandom(6).hex()}"
    s3.make_bucket(bucket)
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
