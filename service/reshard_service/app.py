"""The application: `uvicorn reshard_service.app:create_app --factory --no-proxy-headers`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import Depends, FastAPI
from pydantic.warnings import UnsupportedFieldAttributeWarning
from starlette.concurrency import run_in_threadpool

from reshard_jobs.database import Database
from reshard_jobs.logs import as_json, configure_logs
from reshard_jobs.queue.nodes import Nodes
from reshard_jobs.queue.states import EventLog
from reshard_jobs.statistics import JobStatistics
from reshard_jobs.tenants.principals import AuditLog
from reshard_jobs.tenants.tenants import Tenants
from reshard_jobs.tenants.tokens import Tokens
from reshard_jobs.tracing import start_tracing, stop_tracing
from reshard_jobs.webhooks import Deliveries
from reshard_service.api import engine, job_events, jobs, operators, webhooks
from reshard_service.api.context import EventFeed, ServiceContext
from reshard_service.api.problems import OF_ALL, OF_MEMBERS, document_exactly, install_handlers
from reshard_service.auth import AccessControl, Identity, OidcTokens, WrongTokens
from reshard_service.doorbell import make_doorbell
from reshard_service.metrics import ActivityCollector, Metrics
from reshard_service.middleware import CountRequests, ReadBody, TraceRequests, require_plain_text
from reshard_service.pages import job, lists, rendering, route, submit
from reshard_service.pages.route import page_for_browser
from reshard_service.probes.layout_engines import LayoutEngines
from reshard_service.probes.prober import Prober
from reshard_service.settings import ServiceSettings
from reshard_service.webhooks.secrets import sealer_for
from reshard_service.webhooks.sender import WebhookDeliverer, WebhookSender


def create_app(settings: ServiceSettings | None = None) -> FastAPI:
    """Create the API for one job database.

    Args:
        settings: The settings. If None, they are read from the environment, and must have a token and roots, because
            this function does not know the address that will be served.

    Raises:
        ReshardError: The settings or the job database are not usable.
    """
    # FastAPI 0.165 gives pydantic 2.14 an alias where it has no effect. Nobody who reads the log could change that.
    warnings.filterwarnings("ignore", category=UnsupportedFieldAttributeWarning)
    if settings is None:
        settings = ServiceSettings.from_env()
        if not settings.anonymous:
            settings.require_protection(
                "others may reach this service", otherwise="RESHARD_ANONYMOUS=true serves everybody who can connect"
            )
        # `uvicorn` has configured its own lines, as text.
        if as_json():
            configure_logs()
    wrong_tokens = WrongTokens()
    database = Database(settings.jobs.database_url)
    nodes, statistics = Nodes(database, lease_s=settings.jobs.lease_s), JobStatistics(database)
    events, tokens = EventLog(database), Tokens(database)
    tenants = Tenants(database)
    identity = Identity(settings, tokens, OidcTokens(settings, tenants) if settings.oidc_issuer else None)
    context = ServiceContext(
        settings=settings,
        database=database,
        nodes=nodes,
        statistics=statistics,
        events=events,
        tokens=tokens,
        tenants=tenants,
        audit=AuditLog(database),
        identity=identity,
        prober=Prober(settings),
        engines=LayoutEngines(settings),
        doorbell=make_doorbell(settings.jobs.broker_url),
        feed=EventFeed(events, poll_s=settings.poll_s),
        metrics=Metrics(nodes, statistics, ActivityCollector(database, lease_s=settings.jobs.lease_s)),
        wrong_tokens=wrong_tokens,
        sealer=sealer_for(database, settings.webhook_keys),
    )

    sender = WebhookSender(settings, context.sealer)
    deliverer = WebhookDeliverer(Deliveries(database), sender, keep_s=settings.keep_deliveries_s)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        await context.prober.prepare()
        deliverer.start()
        # What the start has made lives as long as the process. A full garbage collection that walks it takes 50 ms on
        # an idle machine, and longer on a busy one, and no request is answered meanwhile.
        gc.collect()
        gc.freeze()
        yield
        gc.unfreeze()
        await run_in_threadpool(deliverer.stop)
        await context.feed.close()
        await context.prober.close()
        await context.engines.close()
        database.close()
        await run_in_threadpool(stop_tracing)

    # FastAPI's own pages load scripts from other hosts; `pages.lists.reference_page` has ours.
    app = FastAPI(
        title="Reshard",
        version=version("reshard"),
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        # A request may say its source as a text, and no answer does. Two schemas would have other names than the one.
        separate_input_output_schemas=False,
        root_path=settings.root_path,
    )
    app.state.context = context
    app.include_router(operators.probes, responses=OF_ALL)
    identity_api = (operators.tokens_router, operators.tenants_router, operators.audit_router)
    members = (jobs.router, job_events.router, operators.workers_router, engine.router, webhooks.router)
    members = (*members, engine.layouts_router, *identity_api, operators.health_router)
    pages = (lists.router, submit.router, job.router, route.logout_router)
    for router in members:
        app.include_router(router, dependencies=[Depends(require_plain_text)], responses=OF_MEMBERS)
    for router in pages:
        app.include_router(router, dependencies=[Depends(require_plain_text)])
    app.include_router(route.router)
    app.include_router(rendering.router)
    routers = (operators.probes, *members, *pages, route.router, rendering.router)
    document_exactly(app)
    all_routes = [*app.routes, *(route for router in routers for route in router.routes)]
    install_handlers(app, operators.note_refusal, all_routes, as_page=page_for_browser)
    # The last one that is added sees a request first: it is counted, then let in, and only then read.
    app.add_middleware(ReadBody, max_bytes=settings.max_body_bytes, limit_s=settings.body_s)
    app.add_middleware(AccessControl, settings=settings, identity=identity, wrong=wrong_tokens)
    app.add_middleware(CountRequests, metrics=context.metrics)
    if start_tracing("reshard-api"):
        app.add_middleware(TraceRequests)
    return app
