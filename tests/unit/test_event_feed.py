"""The feed of events outlives errors of the job database, and errors that nobody expected."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest
from sqlalchemy.exc import OperationalError

from reshard.models.jobs import JobEvent
from reshard_jobs.queue.states import EventLog
from reshard_service.api.context import EventFeed


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
