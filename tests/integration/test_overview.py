"""The list of jobs for people: search, order, totals and who submitted what, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from house.database_time import let_pass
from reshard.choices import JobState
from reshard.errors import JobError
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_jobs.database import Database
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.overview import Column, JobOverview, Wanted
from reshard_jobs.queue.store import JobFilter, JobStore
from reshard_jobs.tables import DEFAULT_TENANT
from reshard_jobs.tenants.principals import OPERATOR

MINE = {"a": ("/runs/Alpha", "/out/one"), "b": ("/runs/beta", "/out/two"), "c": ("s3://runs/50%_done", "/out/alphabet")}


class Listed:
    """Three jobs of the operator: `a` failed after 300 s, `b` after 20 s, `c` waits; and one of a team."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.overview = JobOverview(database, DEFAULT_TENANT)
        leases = Leases(database, lease_s=3600.0)
        for name, (source, target) in MINE.items():
            self.create(JobStore(database, by=OPERATOR), name, source, target)
            if name == "c":
                break
            claim = leases.claim_next(worker="w")
            assert claim is not None
            let_pass(database, {"a": 300.0, "b": 20.0}[name])
            assert leases.fail(claim, JobError("job.lost", "the engine died"))
            let_pass(database, 100.0)
        self.create(JobStore(database, "team"), "theirs", "/runs/alpha", "/out/theirs")

    @staticmethod
    def create(store: JobStore, name: str, source: str, target: str) -> None:
        request = ConvertRequest(source=SourceSpec(url=source), target=target, to="universal")
        store.create(request, job_id=name, labels={"first": name})

    def ids(self, wanted: Wanted) -> list[str]:
        return [line.id for line in self.overview.page(wanted).jobs]


@pytest.fixture
def listed(database_url: str) -> Generator[Listed]:
    database = Database(database_url)
    yield Listed(database)
    database.close()


def test_a_text_finds_jobs_by_id_source_and_target(listed: Listed) -> None:
    for text, found in {"ALPHA": "ca", "/out/t": "b", "50%_": "c", "%": "c", "universal": "", "c": "c"}.items():
        assert listed.ids(Wanted(text=text)) == list(found), text


def test_every_column_orders_the_list_in_both_directions(listed: Listed) -> None:
    orders = {Column.CREATED: "abc", Column.DURATION: "bac", Column.STATE: "cba", Column.SOURCE: "abc"}
    for column, ascending in {**orders, Column.TARGET: "cab"}.items():
        # What has no duration is last in both.
        descending = {Column.DURATION: "abc", Column.STATE: "bac"}.get(column, ascending[::-1])
        assert listed.ids(Wanted(by=column, descending=False)) == list(ascending), column
        assert listed.ids(Wanted(by=column)) == list(descending), column


def test_a_page_knows_its_totals_and_how_long_each_job_took(listed: Listed) -> None:
    first = listed.overview.page(Wanted(by=Column.DURATION, page_size=2))
    assert (first.total, first.pages, [line.id for line in first.jobs]) == (3, 2, ["a", "b"])
    assert first.by_state == {JobState.FAILED: 2, JobState.QUEUED: 1}
    seconds = [round(line.seconds or 0, -1) for line in first.jobs]
    assert seconds == [300, 20]
    failed = listed.overview.page(Wanted(JobFilter((JobState.FAILED,), {"first": "b"})))
    assert (failed.total, [line.labels for line in failed.jobs]) == (1, [{"first": "b"}])
    assert failed.by_state == {JobState.FAILED: 1}
    beyond = listed.overview.page(Wanted(page=3, page_size=2))
    assert (list(beyond.jobs), beyond.total) == ([], 3)


def test_a_job_says_who_submitted_it_and_of_another_tenant_nothing(listed: Listed) -> None:
    assert {line.submitted_by for line in listed.overview.page(Wanted()).jobs} == {"operator"}
    theirs = JobOverview(listed.database, "team")
    assert [(line.id, line.submitted_by) for line in theirs.page(Wanted()).jobs] == [("theirs", "")]
    assert listed.overview.submitted_by(JobStore(listed.database).get("a")) == "operator"
