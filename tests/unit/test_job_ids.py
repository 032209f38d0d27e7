"""Short ids: a beginning names a job only if no other job's id begins so, for `cancel` takes short ids, too."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest

from reshard.api.client import Client
from reshard.choices import JobState, TargetFormat
from reshard.cli.job_tables import whole_id
from reshard.errors import RequestError
from reshard.models.jobs import ConvertRequest, Job, JobList
from reshard.options import SourceSpec

A, B, C = (f"job_{head}{'a' * 20}" for head in ("3kq7", "3kzz", "7777"))
REQUEST = ConvertRequest(source=SourceSpec(url="/s"), target="/t", to=TargetFormat.UNIVERSAL)


class Service:
    """A service with these jobs, one on each page."""

    def __init__(self, *ids: str) -> None:
        self.ids = ids
        self.asked: list[str] = []

    def get(self, job_id: str) -> Job:
        self.asked.append(job_id)
        if job_id not in self.ids:
            raise RequestError("request.not_found", "there is no such job")
        return self._job(job_id)

    def list(self, *, page_size: int, page_token: str, **_: Any) -> JobList:
        assert page_size > 0
        number = int(page_token or 0)
        following = str(number + 1) if number + 1 < len(self.ids) else ""
        return JobList(jobs=tuple(map(self._job, self.ids[number : number + 1])), next_page_token=following)

    @staticmethod
    def _job(job_id: str) -> Job:
        at = datetime(2026, 1, 2, tzinfo=UTC)
        facts: dict[str, Any] = {"attempt": 1, "max_attempts": 3, "request": REQUEST, "created_at": at}
        return Job(id=job_id, state=JobState.RUNNING, done=False, **facts)


def found(service: Service, text: str) -> str:
    return whole_id(cast("Client", service), text)


@pytest.mark.parametrize("text", ["7777", "job_7777", "777", C])
def test_a_beginning_that_one_job_has(text: str) -> None:
    assert found(Service(A, B, C), text) == C


def test_a_whole_id_is_not_looked_for() -> None:
    service = Service(A)
    assert found(service, B) == B
    assert service.asked == []


def test_an_id_that_a_caller_chose_goes_before_beginnings() -> None:
    assert found(Service("step-1", "step-12", "step-13"), "step-1") == "step-1"
    assert found(Service("step-12", "other"), "step-1") == "step-12"


@pytest.mark.parametrize("text", ["3kq", "job_3k", "job"])
def test_several_jobs_are_never_guessed_between(text: str) -> None:
    service = Service(A, B, A.replace("3kq7", "3kq8"))
    with pytest.raises(RequestError) as caught:
        found(service, text)
    assert caught.value.code in ("request.invalid", "request.not_found")


def test_ambiguity_names_the_jobs() -> None:
    with pytest.raises(RequestError, match="2 jobs have an id that begins with 3kq") as caught:
        found(Service(A, A.replace("3kq7", "3kq8")), "3kq")
    assert A in caught.value.message


@pytest.mark.parametrize("text", ["zzzz", "3", "", "job_"])
def test_none(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        found(Service(A, B, C), text)
    assert caught.value.code == "request.not_found"
