"""An event stream ends when its token was revoked, also when its job has no events."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy.exc import OperationalError

from reshard.models.jobs import JobEventPage
from reshard_jobs.tenants.principals import OPERATOR
from reshard_service.api.context import ServiceContext
from reshard_service.api.job_events import _stream

EMPTY = JobEventPage(events=(), done=False)


class SilentFeed:
    """A feed of a job to which nothing happens."""

    @contextmanager
    def watch(self, key: str, seq: int) -> Generator[SilentFeed]:
        del key, seq
        yield self

    async def after(self, seq: int) -> JobEventPage:
        del seq
        await asyncio.Event().wait()
        raise AssertionError


class Answers:
    """Says if a token is valid, as it was told to; an answer may be an error."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.left = list(answers)

    async def still_valid(self, _principal: object) -> bool:
        answer = self.left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    "answers", [(False,), (True, True, False), (True, OperationalError("SELECT", {}, Exception("away")), False)]
)
def test_a_stream_without_events_ends_with_its_token(answers: tuple[Any, ...]) -> None:
    identity = Answers(*answers)
    parts = SimpleNamespace(settings=SimpleNamespace(recheck_s=0.01), feed=SilentFeed(), identity=identity)

    async def read() -> list[Any]:
        return [event async for event in _stream(cast("ServiceContext", parts), OPERATOR, "job", 0, EMPTY)]

    assert asyncio.run(asyncio.wait_for(read(), 20)) == []
    assert identity.left == []
