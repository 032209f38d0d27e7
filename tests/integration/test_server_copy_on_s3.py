"""Server-side copies on a real S3 server: its ETags, its part limits, its conditions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest

from house.expected import raised
from house.requests import asked
from house.sources import zero_source
from reshard.choices import ServerCopyPolicy, TargetFormat
from reshard.engine import load_engine
from reshard.errors import JobError, ReshardError, SourceError
from reshard.models.jobs import ConvertRequest, ConvertResult
from reshard.options import RunLayout, SourceSpec
from reshard_engine.integrity.manifest import parse_manifest
from reshard_engine.operations.conversion import Conversion
from reshard_engine.storage.protocol import ObjectInfo, PartInfo
from reshard_engine.storage.s3 import S3Profile, S3Store
from servers.s3 import S3Server

ENGINE = load_engine()
PARAMETERS = [("embed.weight", (5_000, 1_024)), ("bias", (7,)), ("head.weight", (1_024, 7_000))]
"""A rank of four holds 12 MiB of each state: more than two least parts."""


save = zero_source(PARAMETERS, stage=2, ranks=4)


@pytest.fixture
def bucket(bucket: str, s3: S3Server, save: Path) -> str:
    s3.upload(save, bucket, "run")
    return bucket


def _request(bucket: str, target: str, **options: Any) -> ConvertRequest:
    return asked(
        source=SourceSpec(url=f"s3://{bucket}/run"),
        target=f"s3://{bucket}/{target}/tag",
        to=TargetFormat.ZERO,
        layout=RunLayout(dp=2),
        part_bytes=16 << 20,
        **options,
    )


def _convert(bucket: str, target: str, **options: Any) -> ConvertResult:
    return ENGINE.convert(_request(bucket, target, **options))


def _files(s3: S3Server, bucket: str, target: str) -> dict[str, bytes]:
    found = s3.read_all(bucket, target)
    del found["tag/reshard.json"]
    return found


def test_data_parallel_ranks_change_within_the_store(s3: S3Server, bucket: str) -> None:
    plain = _convert(bucket, "plain", server_copy=ServerCopyPolicy.NEVER)
    result = _convert(bucket, "with")
    assert plain.server_copied_bytes == 0
    assert result.server_copied_bytes > result.write_bytes / 2
    assert result.read_bytes < plain.read_bytes / 2
    expected = _files(s3, bucket, "plain")
    assert _files(s3, bucket, "with") == expected
    assert ENGINE.verify(f"s3://{bucket}/with/tag").ok

    # A byte of a copied range flips in the store.
    manifest = parse_manifest(s3.read_all(bucket, "with")["tag/reshard.json"])
    part = manifest.server_copied[0]
    name = manifest.files[part.file].path
    data = bytearray(expected[f"tag/{name}"])
    data[part.offset + part.length // 2] ^= 1
    s3.client().put_object(Bucket=bucket, Key=f"with/tag/{name}", Body=bytes(data))
    report = ENGINE.verify(f"s3://{bucket}/with/tag")
    assert [(p.path, p.offset) for p in report.problems] == [(name, part.offset)]


def test_interrupted_between_copies_it_resumes(s3: S3Server, bucket: str) -> None:
    expected = _convert(bucket, "plain", server_copy=ServerCopyPolicy.NEVER)
    with pytest.raises(JobError):
        Conversion.prepare(_request(bucket, "t", threads=1)).run(on_progress=None, should_stop=_after(4))
    result = _convert(bucket, "t")
    assert 0 < result.resumed_bytes < expected.write_bytes
    assert result.server_copied_bytes
    assert _files(s3, bucket, "t") == _files(s3, bucket, "plain")


def test_source_that_changed_since_it_was_planned_is_not_copied(s3: S3Server, bucket: str, save: Path) -> None:
    conversion = Conversion.prepare(_request(bucket, "t", threads=1))
    name = "global_step7/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = bytearray((save / name).read_bytes())
    data[len(data) // 2] ^= 1
    s3.client().put_object(Bucket=bucket, Key=f"run/{name}", Body=bytes(data))
    assert raised(SourceError, conversion.run, on_progress=None, should_stop=None).code == "source.changed"
    assert "tag/reshard.json" not in s3.read_all(bucket, "t")


def _after(count: int) -> Callable[[], bool]:
    asked = iter(range(1 << 30))
    return lambda: next(asked) >= count


# -- what a store may answer -------------------------------------------------------------------------------


def _answering(code: str, status: int) -> S3Store:
    """A store whose `UploadPartCopy` fails."""
    store = S3Store(S3Profile("http://127.0.0.1:1", "key", "secret", region="us-east-1"))

    def fail(**_: Any) -> Any:
        answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        raise botocore.exceptions.ClientError(answer, "UploadPartCopy")

    store._client.upload_part_copy = fail
    return store


def _copy(store: S3Store) -> PartInfo | None:
    return store.copy_part("b/t", "id", 1, ObjectInfo("b/s", 10, "etag:x"), offset=0, length=10)


@pytest.mark.parametrize(
    ("code", "status"),
    [("NotImplemented", 501), ("AccessDenied", 403), ("InvalidRequest", 400), ("MethodNotAllowed", 405)],
)
def test_refusal_is_no_error(code: str, status: int) -> None:
    assert _copy(_answering(code, status)) is None


@pytest.mark.parametrize(
    ("code", "status", "typed"),
    [
        ("PreconditionFailed", 412, "source.changed"),
        ("NoSuchKey", 404, "source.changed"),
        ("NoSuchUpload", 404, "storage.conflict"),
        ("SlowDown", 503, "storage.unavailable"),
    ],
)
def test_failures_are_typed(code: str, status: int, typed: str) -> None:
    assert raised(ReshardError, _copy, _answering(code, status)).code == typed


def test_only_one_service_under_one_profile_is_within_reach() -> None:
    def store(**options: Any) -> S3Store:
        return S3Store(
            S3Profile(
                **{"endpoint_url": "http://127.0.0.1:1", "access_key_id": "a", "secret_access_key": "s", **options}
            )
        )

    assert store().reaches(store())
    assert not store().reaches(store(access_key_id="b"))
    assert not store().reaches(store(endpoint_url="http://127.0.0.1:2"))
