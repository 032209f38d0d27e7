"""An event stream ends when its token was revoked, also when its job has no events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy.exc import OperationalError

from reshard.models.jobs import JobEvent, JobEventPage
from reshard_jobs.queue.states import EventLog
from reshard_jobs.tenants.principals import OPERATOR
from reshard_service.api.context import EventFeed, ServiceContext
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


# The feed of events outlives errors of the job database, and errors that nobody expected.


class FailingLog:
    """An event log whose first polls fail."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def news(self, known: dict[str, int]) -> dict[str, list[JobEvent] | None]:
        if self._errors:
            raise self._errors.pop(0)
        event = {"job_id": "job", "seq": 1, "at": "2026-01-01T00:00:00Z", "kind": "state", "state": "QUEUED"}
        return {key: [JobEvent.model_validate(event)] for key in known}


@pytest.mark.parametrize(
    "error", [OperationalError("SELECT", {}, Exception()), ValueError("a row that no program wrote")]
)
def test_watchers_outlive_polls_that_fail(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    feed = EventFeed(cast("EventLog", FailingLog(error, error)), poll_s=0.01)

    async def watched() -> Any:
        try:
            with feed.watch("job", 0) as watch:
                return await asyncio.wait_for(watch.after(0), 20)
        finally:
            await feed.close()

    with caplog.at_level(logging.WARNING):
        page = asyncio.run(watched())
    assert [event.seq for event in page.events] == [1]
    assert caplog.text.count("could not be read") == 2
