"""The application: `uvicorn reshard_service.app:create_app --factory`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import Depends, FastAPI

from reshard_jobs.database import Database
from reshard_jobs.idempotency import IdempotencyKeys
from reshard_jobs.store import JobStore
from reshard_service import dashboard, engine_api, events_api, health_api, jobs_api
from reshard_service.context import ServiceContext, require_token
from reshard_service.doorbell import make_doorbell
from reshard_service.metrics import Metrics
from reshard_service.middleware import RequestEnvelope
from reshard_service.plain_text import require_plain_text
from reshard_service.probing import Prober
from reshard_service.problems import install_handlers
from reshard_service.settings import ServiceSettings


def create_app(settings: ServiceSettings | None = None) -> FastAPI:
    """The API over one job database.

    Args:
        settings: How to serve; read from the environment if None.

    Raises:
        ReshardError: The settings or the job database are not usable.
    """
    settings = settings or ServiceSettings.from_env()
    database = Database(settings.jobs.database_url)
    store = JobStore(database)
    context = ServiceContext(
        settings=settings,
        database=database,
        store=store,
        keys=IdempotencyKeys(database),
        prober=Prober(settings),
        doorbell=make_doorbell(settings.jobs.broker_url),
        metrics=Metrics(store),
    )

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncGenerator[None]:
        yield
        database.close()

    # No documentation pages: they would fetch scripts from elsewhere. /openapi.json is there.
    app = FastAPI(title="Reshard", version=version("reshard"), docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.context = context
    app.include_router(health_api.probes)
    for module in (jobs_api, events_api, engine_api, health_api, dashboard):
        app.include_router(module.router, dependencies=[Depends(require_token), Depends(require_plain_text)])
    install_handlers(app)
    app.add_middleware(RequestEnvelope, metrics=context.metrics, max_body_bytes=settings.max_body_bytes)
    return app
