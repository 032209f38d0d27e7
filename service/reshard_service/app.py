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

from reshard_jobs.audit import AuditLog
from reshard_jobs.database import Database
from reshard_jobs.deliveries import Deliveries
from reshard_jobs.event_log import EventLog
from reshard_jobs.logs import as_json, configure_logs
from reshard_jobs.nodes import Nodes
from reshard_jobs.statistics import JobStatistics
from reshard_jobs.tenants import Tenants
from reshard_jobs.tokens import Tokens
from reshard_jobs.tracing import start_tracing, stop_tracing
from reshard_service import (
    audit_api,
    engine_api,
    events_api,
    health_api,
    jobs_api,
    tenants_api,
    tokens_api,
    webhooks_api,
    workers_api,
)
from reshard_service.access import AccessControl, WrongTokens
from reshard_service.activity_metrics import ActivityCollector
from reshard_service.context import ServiceContext
from reshard_service.documented import OF_ALL, OF_MEMBERS, document_exactly
from reshard_service.doorbell import make_doorbell
from reshard_service.event_feed import EventFeed
from reshard_service.identity import Identity
from reshard_service.inspection_pool import Prober
from reshard_service.metrics import Metrics
from reshard_service.middleware import CountRequests, ReadBody
from reshard_service.oidc import OidcTokens
from reshard_service.pages import (
    job_page,
    jobs_page,
    layout_page,
    reference_page,
    session,
    static_files,
    submit_page,
    workers_page,
)
from reshard_service.pages.route import page_for_browser
from reshard_service.plain_text import require_plain_text
from reshard_service.problems import install_handlers
from reshard_service.settings import ServiceSettings
from reshard_service.traced_requests import TraceRequests
from reshard_service.webhook_deliverer import WebhookDeliverer
from reshard_service.webhook_secrets import sealer_for
from reshard_service.webhook_sender import WebhookSender


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
        database.close()
        await run_in_threadpool(stop_tracing)

    # FastAPI's own pages load scripts from other hosts; `pages.reference_page` has ours.
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
    app.include_router(health_api.probes, responses=OF_ALL)
    identity_api = (tokens_api, tenants_api, audit_api)
    members = (jobs_api, events_api, workers_api, engine_api, webhooks_api, *identity_api, health_api)
    shown = (jobs_page, layout_page, job_page, submit_page, workers_page, reference_page)
    pages = (*(module.router for module in shown), session.logout_router)
    for module in members:
        app.include_router(module.router, dependencies=[Depends(require_plain_text)], responses=OF_MEMBERS)
    for router in pages:
        app.include_router(router, dependencies=[Depends(require_plain_text)])
    app.include_router(session.router)
    app.include_router(static_files.router)
    routers = (health_api.probes, *(module.router for module in members), *pages, session.router, static_files.router)
    document_exactly(app)
    all_routes = [*app.routes, *(route for router in routers for route in router.routes)]
    install_handlers(app, audit_api.note_refusal, all_routes, as_page=page_for_browser)
    # The last one that is added sees a request first: it is counted, then let in, and only then read.
    app.add_middleware(ReadBody, max_bytes=settings.max_body_bytes, limit_s=settings.body_s)
    app.add_middleware(AccessControl, settings=settings, identity=identity, wrong=wrong_tokens)
    app.add_middleware(CountRequests, metrics=context.metrics)
    if start_tracing("reshard-api"):
        app.add_middleware(TraceRequests)
    return app
