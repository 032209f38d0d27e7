"""Jobs on the screen: what they are, how far they are, how they ended."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest

from house.expected import raised
from reshard.api.client import Client
from reshard.choices import JobKind, JobState, TargetFormat
from reshard.cli.job_tables import facts, outcome, table, whole_id
from reshard.errors import RequestError, SourceError
from reshard.models.jobs import ConvertRequest, ConvertResult, FileEntry, Job, JobList, Problem, Progress
from reshard.options import SourceSpec

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
REQUEST = ConvertRequest(source=SourceSpec(url="s3://b/run"), target="s3://b/out", to=TargetFormat.UNIVERSAL)
PROBLEM = SourceError("checkpoint.incomplete", "rank 3 is\nmissing " + "x" * 500, fix="copy rank 3").to_problem()


def job(state: JobState, **facts: Any) -> Job:
    whole = {"id": "job_1", "attempt": 1, "max_attempts": 3, "request": REQUEST, "created_at": AT, **facts}
    return Job(state=state, done=state.terminal, **whole)


def result(**more: Any) -> ConvertResult:
    files = (FileEntry(path="a", size_bytes=1), FileEntry(path="b", size_bytes=2))
    numbers = {"read_bytes": 0, "write_bytes": 3 << 20, "seconds": {}, "plan_digest": "d", **more}
    return ConvertResult(target="s3://b/out", to=TargetFormat.UNIVERSAL, files=files, **numbers)


def test_columns_line_up_and_a_name_stays_on_its_line() -> None:
    running = Progress(phase="running", bytes_done=30, bytes_total=120, units_done=1, units_total=4)
    lines = list(
        table(
            [
                job(JobState.QUEUED),
                job(JobState.RUNNING, progress=running),
                job(JobState.SUCCEEDED, kind=JobKind.PLAN),
                job(JobState.FAILED, error=Problem.model_validate(PROBLEM), progress=running),
            ]
        )
    )
    assert len(lines) == 5
    assert lines[0].split() == ["ID", "STATE", "DONE", "CREATED", "WHAT"]
    column = lines[0].index("WHAT")
    assert [line[column:].split("  ")[0] for line in lines[1:]] == [
        "s3://b/run -> s3://b/out (universal)",
        "s3://b/run -> s3://b/out (universal)",
        "plan only: s3://b/run -> s3://b/out (universal)",
        "s3://b/run -> s3://b/out (universal)",
    ]
    done = lines[0].index("DONE")
    assert [line[done:].split()[0] for line in lines[1:]] == ["-", "25%", "100%", "25%"]
    assert "  checkpoint.incomplete: rank 3 is\\nmissing xxx" in lines[4]
    assert len(lines[4]) < 300
    assert list(table([])) == ["ID  STATE  DONE  CREATED  WHAT"]


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        (Progress(phase="planning"), "planning"),
        (
            Progress(phase="running", bytes_done=1 << 20, bytes_total=4 << 20, units_done=2, units_total=8),
            "running, 25%: 1 MiB of 4 MiB, 2 of 8 units",
        ),
        (Progress(phase="running", bytes_done=1 << 20, bytes_total=4 << 20), "running, 25%: 1 MiB of 4 MiB"),
    ],
)
def test_progress_names_no_numbers_that_are_not_known(progress: Progress, shown: str) -> None:
    lines = list(facts(job(JobState.RUNNING, progress=progress)))
    assert f"progress  {shown}" in lines
    assert not any("0 of 0" in line for line in lines)


def test_a_target_that_was_already_done_is_said_to_be() -> None:
    progress = Progress(phase="done")
    ended = job(JobState.SUCCEEDED, result=result(already_done=True), progress=progress, finished_at=AT)
    lines = list(facts(ended))
    assert any(line.startswith("result    already done: the target (2 files)") for line in lines)
    assert not any("0 of 0" in line or line.startswith("progress") for line in lines)
    assert any(line.startswith("finished  2026-01-0") for line in lines)
    assert outcome(job(JobState.SUCCEEDED, result=result())) == "wrote 3 MiB in 2 files, target verified"
    assert outcome(job(JobState.RUNNING)) == ""


def test_a_failed_job_says_why_and_what_to_do() -> None:
    lines = list(facts(job(JobState.FAILED, error=Problem.model_validate(PROBLEM))))
    assert any(line.startswith("error     checkpoint.incomplete: rank 3 is\\nmissing") for line in lines)
    assert "fix       copy rank 3" in lines


# Short ids: a beginning names a job only if no other job's id begins so, for `cancel` takes short ids, too.


A, B, C = (f"job_{head}{'a' * 20}" for head in ("3kq7", "3kzz", "7777"))
OWN_REQUEST = ConvertRequest(source=SourceSpec(url="/s"), target="/t", to=TargetFormat.UNIVERSAL)


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
        facts: dict[str, Any] = {"attempt": 1, "max_attempts": 3, "request": OWN_REQUEST, "created_at": at}
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
    assert raised(RequestError, found, service, text).code in ("request.invalid", "request.not_found")


def test_ambiguity_names_the_jobs() -> None:
    with pytest.raises(RequestError, match="2 jobs have an id that begins with 3kq") as caught:
        found(Service(A, A.replace("3kq7", "3kq8")), "3kq")
    assert A in caught.value.message


@pytest.mark.parametrize("text", ["zzzz", "3", "", "job_"])
def test_none(text: str) -> None:
    assert raised(RequestError, found, Service(A, B, C), text).code == "request.not_found"
