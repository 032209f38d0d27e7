"""Jobs on the screen: what they are, how far they are, how they ended."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from reshard.choices import JobKind, JobState, TargetFormat
from reshard.cli.job_tables import facts, outcome, table
from reshard.errors import SourceError
from reshard.models.jobs import ConvertRequest, ConvertResult, FileEntry, Job, Problem, Progress
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
    assert outcome(job(JobState.SUCCEEDED, result=result())) == "wrote 3 MiB in 2 files, verified"
    assert outcome(job(JobState.RUNNING)) == ""


def test_a_failed_job_says_why_and_what_to_do() -> None:
    lines = list(facts(job(JobState.FAILED, error=Problem.model_validate(PROBLEM))))
    assert any(line.startswith("error     checkpoint.incomplete: rank 3 is\\nmissing") for line in lines)
    assert "fix       copy rank 3" in lines
