"""`reshard.AsyncClient` against a real `reshard serve`: the same answers as `Client`, and tasks that are cancelled."""

from __future__ import annotations

import asyncio
import inspect
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import reshard
from house.expected import raised, some
from house.requests import asked
from house.saves import DATA
from house.waiting import PATIENCE_S
from reshard.api.admin import AdminClient, Webhooks
from reshard.api.async_client import AsyncAdminClient, AsyncClient, AsyncWebhooks
from reshard.api.client import Client
from reshard.api.service_token import ServiceAuth
from reshard.choices import JobState
from reshard.models.jobs import Job, JobEvent
from reshard_jobs.database import Database
from reshard_jobs.queue.store import JobStore
from servers.process import ServerProcess
from servers.scripted import scripted
from servers.stack import Stack, end_tree


@dataclass
class Service:
    url: str
    directory: Path

    def create(self, name: str, **script: object) -> str:
        """A job of the scripted engine, straight into the database."""
        database = Database(f"sqlite:///{self.directory}/data/jobs.db")
        fields = {"source": {"url": scripted(**script)}, "target": str(self.directory / name), "to": "universal"}
        job = JobStore(database).create(asked(**fields))
        database.close()
        return job.id


@contextmanager
def serving(directory: Path, *, scripts: bool) -> Generator[Service]:
    stack = Stack(directory / "logs", "", scripted=scripts)
    env = {name: value for name, value in stack.env().items() if name != "RESHARD_DATABASE_URL"}
    log = directory / "serve.log"
    argv = [sys.executable, "-m", "reshard.cli.main", "serve", "--port", "0", "--data-dir", str(directory / "data")]
    process = ServerProcess(argv, env=env, log=log)
    try:
        process.wait_until(lambda: "startup complete" in log.read_text())
        found = some(re.search(r"RESHARD_URL=(http://\S+)", log.read_text()))
        yield Service(found[1], directory)
    finally:
        end_tree(process)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    directory = tmp_path_factory.mktemp("real")
    shutil.copytree(DATA / "zero2_tiny", directory / "source")
    with serving(directory, scripts=False) as service:
        yield service


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    """A service whose jobs last as long as a test says."""
    with serving(tmp_path_factory.mktemp("slow"), scripts=True) as service:
        yield service


def within(service: Service, does: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    """Do as a program with one client does."""

    async def program() -> Any:
        async with AsyncClient(service.url, "") as client:
            return await asyncio.wait_for(does(client), 60)

    return asyncio.run(program())


@pytest.mark.parametrize(
    ("kind", "twin"), [(Client, AsyncClient), (Webhooks, AsyncWebhooks), (AdminClient, AsyncAdminClient)]
)
def test_it_has_the_methods_of_the_client(kind: type, twin: type) -> None:
    for name, method in vars(kind).items():
        if name.startswith("_"):
            continue
        counterpart = inspect.getattr_static(twin, name)
        if isinstance(method, property):
            assert isinstance(counterpart, property)
            continue
        assert list(inspect.signature(method).parameters) == list(inspect.signature(counterpart).parameters), name
        streams = name in ("watch", "events")
        assert streams or inspect.iscoroutinefunction(counterpart), name


def test_two_jobs_at_once(real: Service) -> None:
    source = str(real.directory / "source")

    async def converted(client: AsyncClient, name: str) -> tuple[Job, list[JobEvent], Any]:
        job = await client.submit(source, str(real.directory / name), to="zero", dp=3)
        events = [event async for event in client.watch(job.id)]
        ended = await client.wait(job.id, timeout_s=PATIENCE_S)
        return ended, events, await client.result(job.id)

    async def both(client: AsyncClient) -> list[tuple[Job, list[JobEvent], Any]]:
        return await asyncio.gather(*(converted(client, name) for name in ("a", "b")))

    for job, events, result in within(real, both):
        assert job.state is JobState.SUCCEEDED
        assert [e.seq for e in events] == sorted({e.seq for e in events})
        assert events[-1].state is JobState.SUCCEEDED
        assert reshard.verify(result.target).ok


def test_calls_without_a_job(real: Service) -> None:
    source = str(real.directory / "source")

    async def look(client: AsyncClient) -> None:
        assert await client.inspect(source) == reshard.inspect(source)
        planned = str(real.directory / "planned")
        assert (await client.plan(source, planned, to="zero", dp=3)).write_bytes > 0
        assert [w.state for w in await client.workers()]
        assert await client.webhooks.list() == ()
        with pytest.raises(reshard.RequestError, match="no scope `admin`"):
            await client.admin.tenants()
        with pytest.raises(reshard.SourceError) as caught:
            await client.inspect(str(real.directory / "gone"))
        assert caught.value.code == "source.not_found"
        with pytest.raises(reshard.RequestError, match="dp is below 1"):
            await client.submit(source, planned, to="zero", dp=0)

    within(real, look)


def test_a_text_is_a_source(real: Service) -> None:
    body = {"source": str(real.directory / "source"), "target": str(real.directory / "text"), "to": "universal"}
    with (
        httpx.Client(base_url=real.url, auth=ServiceAuth(real.url, None), timeout=PATIENCE_S) as raw,
        Client(real.url) as client,
    ):
        answer = raw.post("/v1/jobs", json=body)
        assert answer.status_code in (201, 202), answer.text
        assert answer.json()["request"]["source"]["url"] == body["source"]
        assert client.wait(answer.json()["id"], timeout_s=PATIENCE_S).state is JobState.SUCCEEDED


def test_a_job_is_cancelled(slow: Service) -> None:
    job_id = slow.create("cancelled", units=4000, unit_s=0.05)

    async def cancel(client: AsyncClient) -> None:
        async with aclosing(client.watch(job_id)) as events:
            async for event in events:
                if event.state is JobState.RUNNING:
                    break
        assert (await client.cancel(job_id)).state is JobState.CANCELLING
        assert (await client.wait(job_id)).state is JobState.CANCELLED
        seqs = [event.seq async for event in client.events(job_id)]
        assert seqs == [event.seq async for event in client.watch(job_id)]
        with pytest.raises(reshard.JobError, match=r"job\.cancelled|job\.not_finished"):
            await client.result(job_id)

    within(slow, cancel)


def test_cancelled_tasks_leave_the_client_whole_and_the_job_alone(slow: Service) -> None:
    job_id = slow.create("goes-on", units=4000, unit_s=0.05)

    async def listen(client: AsyncClient, begun: asyncio.Event) -> None:
        async for _ in client.watch(job_id):
            begun.set()

    async def cancel(client: AsyncClient) -> None:
        begun = [asyncio.Event() for _ in range(20)]
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(listen(client, event)) for event in begun]
        tasks += [asyncio.create_task(client.wait(job_id)) for _ in range(20)]
        await asyncio.gather(*(event.wait() for event in begun))
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        assert not (await client.get(job_id)).done
        with pytest.raises(reshard.JobError) as caught:
            await client.wait(job_id, timeout_s=0.5)
        assert caught.value.code == "job.wait_timeout"
        await client.cancel(job_id)
        assert (await client.wait(job_id)).state is JobState.CANCELLED

    within(slow, cancel)


def test_a_service_that_is_away_is_an_error() -> None:
    async def ask() -> None:
        async with AsyncClient("http://127.0.0.1:9", "", retries=1) as client:
            await client.get("x")

    assert raised(reshard.JobError, asyncio.run, ask()).code == "service.unavailable"
