"""All stores agree: a few examples on a real S3 server, against the same conversion in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import Phase, given, settings, strategies as st

from laws.drawing import SOURCES, trials
from laws.profiles import laws_profile
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.local import LocalEngine
from reshard_engine.testing.laws import SOURCE, TARGET_NAME, assert_same_files
from servers.s3 import S3Server

_PROFILE = laws_profile()
_BUCKET = "laws"
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> Iterator[S3Server]:
    """The server with a bucket, and an environment that finds it."""
    s3.make_bucket(_BUCKET)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.env().items():
            patch.setenv(name, value)
        yield s3


@settings(_PROFILE, max_examples=_PROFILE.max_examples // 13, phases=[Phase.generate])
@given(data=st.data())
def test_s3_gives_the_same_bytes(bucket: S3Server, data: st.DataObject) -> None:
    trial = data.draw(st.sampled_from(SOURCES).flatmap(trials))
    place = f"{next(_NUMBERS)}"
    client = bucket.client()
    for name, content in trial.source_files.items():
        client.put_object(Bucket=_BUCKET, Key=f"{place}/{SOURCE}/{name}", Body=content)
    source, target = f"s3://{_BUCKET}/{place}/{SOURCE}", f"s3://{_BUCKET}/{place}/out/{TARGET_NAME}"
    engine = LocalEngine()
    engine.convert(
        trial.request("s3", source={"url": source, **trial.saved.choices}, target=target, memory_limit_bytes=1 << 30)
    )
    found = bucket.read_all(_BUCKET, f"{place}/out/{TARGET_NAME}")
    assert found.pop(MANIFEST_NAME)
    assert_same_files(trial.reference.files, found)
    assert engine.verify(target).ok
