"""The autoscaler's query, run on a real job database: it counts the workers that have something to do."""

from __future__ import annotations

import itertools
from collections.abc import Generator

import pytest
import yaml
from sqlalchemy import text, update

from house.repository import ROOT
from reshard.choices import JobState, TargetFormat
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.store import JobStore
from reshard_jobs.tables import JobRow
from servers.postgres import PostgresServer

SCALER = ROOT / "deploy" / "kubernetes" / "autoscaling" / "scaler.yaml"
_numbers = itertools.count()
OPEN = (JobState.QUEUED, JobState.PLANNING, JobState.RUNNING, JobState.VERIFYING, JobState.CANCELLING)


@pytest.fixture
def database(postgres: PostgresServer) -> Generator[Database]:
    found = Database(postgres.new_database())
    yield found
    found.close()


def wanted(database: Database) -> int:
    """The number of workers that KEDA would ask for, without its limits."""
    documents = list(yaml.safe_load_all(SCALER.read_text()))
    trigger = next(d for d in documents if d["kind"] == "ScaledObject")["spec"]["triggers"][0]["metadata"]
    with database.read() as session:
        found = session.execute(text(trigger["query"])).scalar_one()
    assert isinstance(found, int)
    return -(-found // int(trigger["targetQueryValue"]))


def job(database: Database, state: JobState, **values: int) -> None:
    request = ConvertRequest(source=SourceSpec(url="/a"), target=f"/b{next(_numbers)}", to=TargetFormat.UNIVERSAL)
    made = JobStore(database).create(request)
    with database.write() as session:
        session.execute(update(JobRow).where(JobRow.id == made.id).values(state=state.value, **values))


def test_one_worker_for_each_job_that_has_not_ended(database: Database) -> None:
    assert wanted(database) == 0
    for state in JobState:
        job(database, state)
    assert wanted(database) == len(OPEN)


def test_as_many_workers_as_a_job_with_work_for_helpers_allows(database: Database) -> None:
    job(database, JobState.RUNNING, takes_workers=1, max_workers=4)
    job(database, JobState.RUNNING, takes_workers=0, max_workers=4)
    job(database, JobState.RUNNING, takes_workers=1, max_workers=0)
    assert wanted(database) == 4 + 1 + 1
