"""Tenants: their settings, their quotas, and their removal with all their records."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, Subquery, and_, delete, func, insert, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, aliased

from reshard.choices import JobState
from reshard.errors import RequestError, format_size
from reshard.models.access import NewTenant, Tenant, TenantSettings
from reshard_jobs.database import Database
from reshard_jobs.limits import TenantLimits, limits_of, normalized_url
from reshard_jobs.queue.states import ACTIVE, TERMINAL
from reshard_jobs.records import time_of
from reshard_jobs.tables import (
    DEFAULT_TENANT,
    DeliveryRow,
    IdempotencyRow,
    JobRow,
    LayoutRow,
    TenantRow,
    WebhookRow,
    WorkerRow,
    db_now,
)
from reshard_jobs.tenants.principals import Principal, record
from reshard_jobs.tenants.tokens import require_tenant

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
            for table in (JobRow, IdempotencyRow, WebhookRow, LayoutRow):
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


# Quotas of tenants: how many jobs wait and run, how many workers run them, how many bytes they write in a day.
#
# A submission above a quota is refused. Jobs above the quotas of running jobs and of workers wait.

DAY_S = 86_400.0
_QUEUE_AGAIN_S = 10
_ACTIVE = [state.value for state in ACTIVE]


def refuse_above_quota(session: Session, tenant: str, planned_bytes: int) -> None:
    """Refuse one more waiting job of a tenant. Its row is locked, so that submissions at once count one another.

    Raises:
        RequestError: `request.quota_jobs`, `request.quota_bytes`.
    """
    limited = or_(TenantRow.max_queued.is_not(None), TenantRow.bytes_per_day.is_not(None))
    row = session.scalars(select(TenantRow).where(TenantRow.name == tenant, limited).with_for_update()).one_or_none()
    if row is None:
        return
    if row.max_queued is not None:
        _refuse_queue(session, tenant, row.max_queued)
    if row.bytes_per_day is not None:
        _refuse_bytes(session, tenant, row.bytes_per_day, planned_bytes)


def refuse_bytes_above_quota(session: Session, tenant: str, planned_bytes: int) -> None:
    """Refuse bytes that are not counted yet: those of a layout, or of a job that is in the queue already.

    Raises:
        RequestError: `request.quota_bytes`.
    """
    query = select(TenantRow).where(TenantRow.name == tenant, TenantRow.bytes_per_day.is_not(None)).with_for_update()
    row = session.scalars(query).one_or_none()
    if row is not None and row.bytes_per_day is not None:
        _refuse_bytes(session, tenant, row.bytes_per_day, planned_bytes)


def _refuse_queue(session: Session, tenant: str, most: int) -> None:
    waiting = (JobRow.tenant == tenant, JobRow.state == JobState.QUEUED.value)
    count = session.execute(select(func.count()).select_from(JobRow).where(*waiting)).scalar_one()
    if count >= most:
        raise RequestError(
            "request.quota_jobs",
            f"{count} jobs of this tenant wait, and its quota is {most}",
            fix="wait until some have begun, or cancel some: reshard jobs list --state QUEUED",
            details={"waiting": count, "quota": most, "retry_after_s": _QUEUE_AGAIN_S},
        )


def _refuse_bytes(session: Session, tenant: str, most: int, planned: int) -> None:
    jobs = select(JobRow.planned_bytes.label("size_bytes"), JobRow.created_at.label("at")).where(
        JobRow.tenant == tenant,
        JobRow.created_at > db_now() - DAY_S,
        JobRow.planned_bytes > 0,
        # A job that was cancelled before it began has written nothing.
        or_(JobRow.attempt > 0, JobRow.state != JobState.CANCELLED.value),
    )
    # A virtual layout counts as the conversion that it stands for.
    layouts = select(LayoutRow.total_bytes, LayoutRow.created_at)
    layouts = layouts.where(LayoutRow.tenant == tenant, LayoutRow.created_at > db_now() - DAY_S)
    recent = jobs.union_all(layouts).subquery().c
    used = int(session.execute(select(func.coalesce(func.sum(recent.size_bytes), 0))).scalar_one())
    if used + planned <= most and used < most:
        return
    details: dict[str, Any] = {"used": used, "planned": planned, "quota": most}
    if planned <= most:
        # The oldest jobs leave the window first.
        rest = used
        query = select(recent.size_bytes, recent.at - db_now() + DAY_S)
        for size, left_s in session.execute(query.order_by(recent.at)):
            rest -= size
            if rest + planned <= most and rest < most:
                details["retry_after_s"] = max(1, math.ceil(left_s))
                break
    raise RequestError(
        "request.quota_bytes",
        f"the conversions of this tenant that were submitted within 24 hours write {format_size(used)}, this one "
        f"{format_size(planned)}, and the quota is {format_size(most)}",
        fix="submit it again when `details.retry_after_s` has passed, or ask the operator to raise the quota",
        details=details,
    )


def has_room(job: type[JobRow]) -> ColumnElement[bool]:
    """The condition that the tenant of a job may have one more running job, and one more worker."""
    running, other = aliased(JobRow), aliased(JobRow)
    active = select(func.count()).select_from(running)
    active = active.where(running.state.in_(_ACTIVE), running.tenant == TenantRow.name).correlate(TenantRow)
    full = or_(
        and_(
            TenantRow.max_running.is_not(None), active.correlate(TenantRow).scalar_subquery() >= TenantRow.max_running
        ),
        _workers_full(other),
    )
    return job.tenant.not_in(select(TenantRow.name).where(full))


def has_room_for_helpers(job: type[JobRow]) -> ColumnElement[bool]:
    """The condition that the tenant of a job may have one more worker."""
    return job.tenant.not_in(select(TenantRow.name).where(_workers_full(aliased(JobRow))))


def _workers_full(other: type[JobRow]) -> ColumnElement[bool]:
    present = (
        select(func.count())
        .select_from(WorkerRow)
        .join(other, other.id == WorkerRow.job_id)
        .where(WorkerRow.left_at.is_(None), other.tenant == TenantRow.name)
        .correlate(TenantRow)
        .scalar_subquery()
    )
    return and_(TenantRow.max_workers.is_not(None), present >= TenantRow.max_workers)


def limited_tenant_of(job_id: str) -> Select[str]:
    """The tenant of a job if its running jobs or workers are limited."""
    limited = or_(TenantRow.max_running.is_not(None), TenantRow.max_workers.is_not(None))
    query = select(TenantRow.name).join(JobRow, JobRow.tenant == TenantRow.name)
    return query.where(JobRow.id == job_id, limited)


@dataclass(frozen=True, slots=True)
class Turn:
    """The order in which tenants get workers, for a query of jobs.

    Attributes:
        load: A subquery with the number of workers that work for each tenant.
        share: The number of the tenant's workers by its weight. The tenant with the least comes first.
    """

    load: Subquery
    share: ColumnElement[float]


def turns() -> Turn:
    """The turns of tenants. The query of jobs joins them with `with_turns`."""
    other = aliased(JobRow)
    count = func.count().label("workers")
    present = select(other.tenant.label("tenant"), count).select_from(WorkerRow)
    present = present.join(other, other.id == WorkerRow.job_id).where(WorkerRow.left_at.is_(None))
    load = present.group_by(other.tenant).subquery()
    share = func.coalesce(load.c.workers, 0) * 1.0 / func.coalesce(TenantRow.weight, 1)
    return Turn(load, share)


def with_turns(query: Select[str], turn: Turn) -> Select[str]:
    """A query of jobs, joined with the turns of their tenants."""
    joined = query.outerjoin(turn.load, turn.load.c.tenant == JobRow.tenant)
    return joined.outerjoin(TenantRow, TenantRow.name == JobRow.tenant)
