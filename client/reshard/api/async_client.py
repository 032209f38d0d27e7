"""The client of a reshard service for programs with an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

import httpx

from reshard.api import wire
from reshard.api.admin import AdminClient, Layouts, Webhooks
from reshard.api.client import Client, sent, service_at
from reshard.api.exchange import Exchange, Flow, Listen, NextLine, Pause, Talk
from reshard.api.wire import Answer
from reshard.models.jobs import JobEvent

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class _AsyncRun(Protocol):
    """Takes the steps of an exchange, and returns its value."""

    async def __call__(self, flow: Flow[T], /) -> T: ...


class _Asynchronous(Generic[S]):
    """An object whose methods are those of another one, but wait in an event loop.

    The methods of `Client` only make an exchange and have it run. Here they make one too, and the event loop runs it.
    """

    def __init__(self, exchanges: S, run: _AsyncRun) -> None:
        self._exchanges, self._run = exchanges, run


def _awaited(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[_Asynchronous[S], P], Coroutine[Any, Any, T]]:
    """The method as a coroutine."""

    @wraps(method)
    async def call(self: _Asynchronous[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        flow = method(self._exchanges, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]
        return await self._run(cast("Flow[T]", flow))  # pyright: ignore[reportPrivateUsage]

    return call


def _told(
    method: Callable[Concatenate[Client, P], Generator[JobEvent]],
) -> Callable[Concatenate[AsyncClient, P], AsyncGenerator[JobEvent]]:
    """The method as an async iterator of the events of a job."""

    @wraps(method)
    def call(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[JobEvent]:
        flow = method(self._exchanges, *args, **kwargs)  # pyright: ignore[reportPrivateUsage]
        return self._steps(Talk(cast("Flow[None]", flow)))  # pyright: ignore[reportPrivateUsage]

    return call


def _itself(flow: Flow[T]) -> T:
    """The exchange in place of its value: what `Client` and its parts are given to run it with."""
    return cast("T", flow)


class _Exchanges(Client):
    """A client whose methods return exchanges that nobody has run."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def _run(self, flow: Flow[T]) -> T:
        return _itself(flow)

    def _told(self, flow: Flow[None]) -> Generator[JobEvent]:
        return cast("Generator[JobEvent]", flow)


class AsyncWebhooks(_Asynchronous[Webhooks]):
    """The webhooks of a service, as `AsyncClient.webhooks`."""

    create = _awaited(Webhooks.create)
    list = _awaited(Webhooks.list)
    get = _awaited(Webhooks.get)
    remove = _awaited(Webhooks.remove)
    rotate = _awaited(Webhooks.rotate)
    enable = _awaited(Webhooks.enable)
    deliveries = _awaited(Webhooks.deliveries)
    redeliver = _awaited(Webhooks.redeliver)


class AsyncLayouts(_Asynchronous[Layouts]):
    """The layouts of a service, as `AsyncClient.layouts`."""

    create = _awaited(Layouts.create)
    list = _awaited(Layouts.list)
    get = _awaited(Layouts.get)
    remove = _awaited(Layouts.remove)


class AsyncAdminClient(_Asynchronous[AdminClient]):
    """The calls of administrators, as `AsyncClient.admin`."""

    create_token = _awaited(AdminClient.create_token)
    tokens = _awaited(AdminClient.tokens)
    revoke_token = _awaited(AdminClient.revoke_token)
    tenants = _awaited(AdminClient.tenants)
    create_tenant = _awaited(AdminClient.create_tenant)
    set_tenant = _awaited(AdminClient.set_tenant)
    remove_tenant = _awaited(AdminClient.remove_tenant)
    audit = _awaited(AdminClient.audit)


class AsyncClient(_Asynchronous[Client]):
    """A client of one service for programs with an event loop: the methods of `Client`, to be awaited.

    `watch` and `events` are async iterators. A task that is cancelled drops its own connection and nobody else's; the
    job goes on. Use one client within one event loop.

    Args:
        url: As for `Client`, and so are all other arguments.
        token: Its token.
        timeout_s: Seconds that one request may take.
        retries: How often a request is repeated after a transient failure.

    Raises:
        RequestError: `request.invalid`: no URL is known.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, timeout_s: float = 30.0, retries: int = 5
    ) -> None:
        self.url, auth = service_at(url, token)
        self._exchange = Exchange(self.url, retries)
        # Each wait for a job holds a connection: there may be as many as the program has tasks.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        named = {"User-Agent": wire.USER_AGENT}
        self._http = httpx.AsyncClient(base_url=self.url, auth=auth, timeout=timeout_s, limits=limits, headers=named)
        super().__init__(_Exchanges(self._exchange), self._run_exchange)

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client's connections."""
        await self.close()

    async def close(self) -> None:
        """Close the connection pool. The client cannot be used after that; `async with AsyncClient()` does it."""
        await self._http.aclose()

    inspect = _awaited(Client.inspect)
    plan = _awaited(Client.plan)
    plan_request = _awaited(Client.plan_request)
    submit = _awaited(Client.submit)
    submit_request = _awaited(Client.submit_request)
    get = _awaited(Client.get)
    list = _awaited(Client.list)
    wait = _awaited(Client.wait)
    cancel = _awaited(Client.cancel)
    retry = _awaited(Client.retry)
    result = _awaited(Client.result)
    workers = _awaited(Client.workers)

    @property
    def admin(self) -> AsyncAdminClient:
        """The calls of administrators, as `Client.admin`.

        Returns:
            An object with a coroutine for each call.
        """
        return AsyncAdminClient(AdminClient(_itself, self._exchange), self._run_exchange)

    @property
    def webhooks(self) -> AsyncWebhooks:
        """The endpoints that the service calls when jobs end, as `Client.webhooks`.

        Returns:
            An object with a coroutine for each call.
        """
        return AsyncWebhooks(Webhooks(_itself, self._exchange), self._run_exchange)

    @property
    def layouts(self) -> AsyncLayouts:
        """Targets that the service serves and that nobody writes, as `Client.layouts`.

        Returns:
            An object with a coroutine for each call.
        """
        return AsyncLayouts(Layouts(_itself, self._exchange), self._run_exchange)

    watch = _told(Client.watch)
    events = _told(Client.events)

    async def _run_exchange(self, flow: Flow[T], /) -> T:
        talk = Talk(flow)
        async for _ in self._steps(talk):
            raise AssertionError("an event of an exchange that has none")
        return talk.value

    async def _steps(self, talk: Talk[Any]) -> AsyncGenerator[JobEvent]:
        """Take the steps of an exchange, as `Client` does; yields its events."""
        async with AsyncExitStack() as opened:
            lines: AsyncIterator[str] | None = None
            while (step := talk.step) is not None:
                result: object = None
                try:
                    if isinstance(step, JobEvent):
                        yield step
                    elif isinstance(step, NextLine):
                        result = None if lines is None else await anext(lines, None)
                    elif isinstance(step, Pause):
                        await opened.aclose()
                        await asyncio.sleep(step.seconds)
                    else:
                        await opened.aclose()
                        response = await opened.enter_async_context(self._http.stream(**sent(step, self._http.timeout)))
                        result = answer = Answer(response.status_code, response.headers, b"")
                        if isinstance(step, Listen) and answer.is_stream:
                            lines = response.aiter_lines()
                        else:
                            result = replace(answer, body=await response.aread())
                except httpx.TransportError as error:
                    talk.fail(error)
                else:
                    talk.take(result)
