"""Parts of the service alone: probes that end with their request, connections with timeouts, a scope for each route."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from house.waiting import PATIENCE_S
from reshard.choices import TokenScope
from reshard.options import SourceSpec
from reshard_jobs.database import POSTGRES_TIMEOUTS, engine_of
from reshard_jobs.limits import Roots
from reshard_jobs.settings import JobSettings
from reshard_service.app import create_app
from reshard_service.probes.prober import FairTurns, Prober
from reshard_service.settings import ServiceSettings

NEVER_READY = "import os, signal, sys; open(sys.argv[1], 'w').write(str(os.getpid())); signal.pause()"


def test_a_probe_that_is_still_importing_ends_with_its_request(tmp_path: Path) -> None:
    place = tmp_path / "started"
    os.mkfifo(place)
    prober = Prober(ServiceSettings(probe_command=(sys.executable, "-c", NEVER_READY, str(place))))

    async def ask() -> int:
        source = SourceSpec(url=str(tmp_path))
        asked = asyncio.create_task(prober.inspect(source, tenant="", roots=Roots.parse(str(tmp_path)), limit_s=3600))
        pid = int(await asyncio.to_thread(place.read_text))
        asked.cancel()  # as its deadline does
        with pytest.raises(asyncio.CancelledError):
            await asked
        return pid

    pid = asyncio.run(ask())
    try:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# Tenants share the probes.


def test_a_free_probe_goes_to_the_waiting_tenant_that_uses_the_fewest() -> None:
    started: list[str] = []

    async def use(turns: FairTurns, tenant: str, end: asyncio.Event) -> None:
        async with turns.turn(tenant, math.inf, TimeoutError()):
            started.append(tenant)
            await end.wait()

    async def share() -> None:
        turns, ends = FairTurns(2), [asyncio.Event() for _ in range(6)]
        tasks = [asyncio.create_task(use(turns, "many", end)) for end in ends[:4]]
        tasks += [asyncio.create_task(use(turns, "few", end)) for end in ends[4:]]
        await _settled()
        assert started == ["many", "many"]
        tasks[2].cancel()  # a caller that leaves the queue
        ends[0].set()
        await _settled()
        assert started == ["many", "many", "few"]
        ends[1].set()
        await _settled()
        assert started == ["many", "many", "few", "many"]
        for end in ends:
            end.set()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end).__name__ for end in ended if end is not None] == ["CancelledError"]
        assert started.count("few") == 2

    asyncio.run(share())


@pytest.mark.parametrize("how", ["cancelled", "too late"])
def test_a_caller_that_leaves_gives_its_probe_back(how: str) -> None:
    async def share() -> None:
        turns = FairTurns(1)
        async with turns.turn("a", math.inf, TimeoutError()):
            if how == "cancelled":
                waiting = asyncio.create_task(_enter(turns, math.inf))
                await _settled()
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            else:
                with pytest.raises(ConnectionRefusedError):
                    await _enter(turns, 0.01)
        await asyncio.wait_for(_enter(turns, math.inf), PATIENCE_S)

    asyncio.run(share())


async def _enter(turns: FairTurns, queue_s: float) -> None:
    async with turns.turn("b", queue_s, ConnectionRefusedError()):
        pass


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# Connections to PostgreSQL have timeouts, which the URL may change.


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        engine = engine_of(f"postgresql://user@127.0.0.1:{port}/jobs?connect_timeout=2&gssencmode=disable")
        asked: list[dict[str, Any]] = []
        event.listen(engine, "do_connect", lambda _dialect, _record, _arguments, named: asked.append(named))
        began = time.monotonic()
        with pytest.raises(OperationalError, match="timeout"):
            engine.connect()
    # libpq may round two seconds up.
    assert 1 < time.monotonic() - began < 60
    (named,) = asked
    assert {name: named[name] for name in POSTGRES_TIMEOUTS} == {**POSTGRES_TIMEOUTS, "connect_timeout": "2"}


# Every operation of the API needs a scope and says so in the schema; only the probes of load balancers need none.


# FastAPI puts its alias of a body beside the model, for which pydantic warns; the application is built without it.
OPEN = {"/healthz", "/readyz"}


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    directory = tmp_path_factory.mktemp("schema")
    settings = ServiceSettings(token="t", jobs=JobSettings(database_url=f"sqlite:///{directory}/jobs.db"))
    paths = create_app(settings).openapi()["paths"]
    return {(path, verb): operation for path, verbs in paths.items() for verb, operation in verbs.items()}


def test_every_operation_needs_one_scope(operations: dict[tuple[str, str], Any]) -> None:
    assert len(operations) > 15
    for (path, verb), operation in operations.items():
        if path in OPEN:
            assert "security" not in operation
            continue
        scopes = [scope for entry in operation["security"] for found in entry.values() for scope in found]
        assert len(scopes) == 1, (path, verb, scopes)
        assert scopes[0] in set(TokenScope)
        assert "403" in operation["responses"], (path, verb)


def test_reading_and_changing_need_different_scopes(operations: dict[tuple[str, str], Any]) -> None:
    for (path, verb), operation in operations.items():
        if path in OPEN:
            continue
        (scope,) = operation["security"][0]["HTTPBearer"]
        admin = path.startswith(("/v1/tokens", "/v1/tenants", "/v1/audit"))
        admin = admin or (path.startswith("/v1/webhooks") and verb != "get")
        assert (scope == "admin") == admin, (path, verb)
        assert (scope == "read") == (verb in ("get", "head") and not admin), (path, verb)
        assert (scope == "cancel") == path.endswith("/cancel")
