"""Tenants: their settings, and their removal with all their records."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import delete, insert, or_, select
from sqlalchemy.exc import IntegrityError

from reshard.errors import RequestError
from reshard.identity_models import NewTenant, Tenant, TenantSettings
from reshard_jobs.audit import record
from reshard_jobs.database import Database
from reshard_jobs.identity_tables import TenantRow
from reshard_jobs.limits import TenantLimits, limits_of
from reshard_jobs.principals import Principal
from reshard_jobs.records import time_of
from reshard_jobs.roots import normalized_url
from reshard_jobs.states import TERMINAL
from reshard_jobs.tables import DEFAULT_TENANT, IdempotencyRow, JobRow, db_now
from reshard_jobs.tokens import require_tenant
from reshard_jobs.webhook_tables import DeliveryRow, WebhookRow

_LISTS = ("read_roots", "write_roots", "profiles")


class Tenants:
    """The tenants of a job database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def limits(self, name: str) -> TenantLimits:
        """The limits of a tenant as they are now."""
        with self._database.read() as session:
            return limits_of(session, name)

    def exists(self, name: str) -> bool:
        """True if there is a tenant with this name."""
        with self._database.read() as session:
            return session.get(TenantRow, name) is not None

    def list(self) -> list[Tenant]:
        """All tenants, by name."""
        with self._database.read() as session:
            return [_tenant_of(row) for row in session.scalars(select(TenantRow).order_by(TenantRow.name))]

    def create(self, asked: NewTenant, *, by: Principal) -> Tenant:
        """Make a tenant.

        Raises:
            RequestError: `request.tenant_exists`; `request.invalid`: a root is ambiguous.
        """
        values = _columns(asked)
        with self._database.write() as session:
            try:
                with session.begin_nested():
                    new = insert(TenantRow).values(name=asked.name, created_at=db_now(), **values)
                    made = _tenant_of(session.scalars(new.returning(TenantRow)).one())
            except IntegrityError:
                raise RequestError(
                    "request.tenant_exists",
                    f"there is a tenant {asked.name!r}",
                    fix=f"reshard tenants set {asked.name}",
                ) from None
            record(session, by, "tenant.create", made.name, tenant=made.name)
            return made

    def set(self, name: str, settings: TenantSettings, *, by: Principal) -> Tenant:
        """Replace all settings of a tenant. Jobs that run go on; workers judge the others by the new settings.

        Raises:
            RequestError: `request.not_found`; `request.invalid`: a root is ambiguous.
        """
        values = _columns(settings)
        with self._database.write() as session:
            row = require_tenant(session, name)
            for column, value in values.items():
                setattr(row, column, value)
            record(session, by, "tenant.set", name, tenant=name)
            return _tenant_of(row)

    def remove(self, name: str, *, by: Principal) -> Tenant:
        """Remove a tenant with its tokens and the records of its jobs.

        Raises:
            RequestError: `request.not_found`; `request.tenant_busy`: a job has not ended, or a worker has still to
                remove files of one; `request.invalid`: it is the operator's own.
        """
        if name == DEFAULT_TENANT:
            raise RequestError("request.invalid", f"the tenant {name!r} is the operator's own", fix="keep it")
        with self._database.write() as session:
            row = require_tenant(session, name)
            found = _tenant_of(row)
            ended = JobRow.state.in_([state.value for state in TERMINAL])
            open_jobs = (JobRow.tenant == name, or_(~ended, JobRow.discard_at.is_not(None)))
            left = list(session.scalars(select(JobRow.id).where(*open_jobs).limit(1)))
            if left:
                raise RequestError(
                    "request.tenant_busy",
                    f"jobs of the tenant {name!r} have not ended, or have files that a worker must remove first",
                    fix="cancel its jobs with a token of the tenant, and wait until a worker has removed their files",
                )
            hooks = select(WebhookRow.id).where(WebhookRow.tenant == name)
            deliveries = delete(DeliveryRow).where(DeliveryRow.webhook_id.in_(hooks))
            session.execute(deliveries.execution_options(synchronize_session=False))
            for table in (JobRow, IdempotencyRow, WebhookRow):
                session.execute(delete(table).where(table.tenant == name).execution_options(synchronize_session=False))
            session.delete(row)
            record(session, by, "tenant.remove", name, tenant=name)
            return found


def _columns(settings: TenantSettings) -> dict[str, Any]:
    for root in (*(settings.read_roots or ()), *(settings.write_roots or ())):
        normalized_url(root)
    values = settings.model_dump(exclude={"name"})
    return values | {name: None if values[name] is None else json.dumps(values[name]) for name in _LISTS}


def _tenant_of(row: TenantRow) -> Tenant:
    values: dict[str, Any] = {name: getattr(row, name) for name in TenantSettings.model_fields}
    values |= {name: None if values[name] is None else tuple(json.loads(values[name])) for name in _LISTS}
    return Tenant(name=row.name, created_at=time_of(row.created_at), **values)
