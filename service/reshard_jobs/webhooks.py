"""Webhooks in the job database: endpoints, the outbox of events, and their deliveries."""

from __future__ import annotations

import base64
import json
import random
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, Subquery, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session, aliased

from reshard.choices import JobState
from reshard.errors import RequestError, printable
from reshard.models.access import Delivery, DeliveryState, Webhook
from reshard_jobs.database import Database
from reshard_jobs.queue.leased_rows import RELEASED, change_row, claim_first, is_free, is_held, lease_of, new_owner
from reshard_jobs.records import time_of
from reshard_jobs.tables import DeliveryRow, JobRow, WebhookRow, db_now

# The outbox of webhooks: events are written with the change of the job that they tell, or not at all.

_ENDINGS = {
    JobState.SUCCEEDED.value: "job.succeeded",
    JobState.FAILED.value: "job.failed",
    JobState.CANCELLED.value: "job.cancelled",
}


def announce(session: Session, row: JobRow) -> None:
    """Write an event for each endpoint that wants it, if the job has begun or ended."""
    event = _ENDINGS.get(row.state)
    if event is None and row.state == JobState.PLANNING.value and row.attempt == 1:
        event = "job.started"
    if event is None:
        return
    wanted = select(WebhookRow.id, WebhookRow.events).where(
        WebhookRow.tenant == row.tenant, WebhookRow.disabled_at.is_(None)
    )
    endpoints = [found for found, events in session.execute(wanted).all() if event in events.split()]
    if not endpoints:
        return
    at = session.execute(select(db_now())).scalar_one()
    payload = json.dumps(_payload(row, event, at), separators=(",", ":"))
    facts = {"job_id": row.id, "event": event, "payload": payload, "state": DeliveryState.PENDING.value, "tries": 0}
    facts |= {"created_at": at, "next_at": at}
    session.execute(
        insert(DeliveryRow), [{"id": new_id("msg"), "webhook_id": endpoint, **facts} for endpoint in endpoints]
    )


def new_id(kind: str) -> str:
    """A new id of an endpoint or of a delivery."""
    return f"{kind}_{base64.b32encode(secrets.token_bytes(15)).decode().lower()}"


def _payload(row: JobRow, event: str, at: float) -> dict[str, Any]:
    # Small, without texts of errors: they may quote names of files. Whoever wants more asks the service.
    return {
        "type": event,
        "timestamp": _time(at),
        "data": {
            "id": row.public_id,
            "kind": row.kind,
            "state": row.state,
            "target": row.target,
            "attempt": row.attempt,
            "created_at": _time(row.created_at),
            "started_at": _time(row.started_at),
            "finished_at": _time(row.finished_at),
            "error": json.loads(row.error)["code"] if row.error and event == "job.failed" else None,
        },
    }


def _time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, tz=UTC).isoformat(timespec="milliseconds")


# The endpoints of tenants.

MOST_WEBHOOKS = 20
"""Number of endpoints of a tenant: each end of a job writes a delivery for each of them."""
MOST_PREVIOUS = 3
"""Number of secrets before the last rotations that still sign."""


class Webhooks:
    """The endpoints of one tenant. Secrets come and go sealed.

    Args:
        database: The job database.
        tenant: The tenant.
    """

    def __init__(self, database: Database, tenant: str = "default") -> None:
        self._database = database
        self._tenant = tenant

    def create(self, url: str, *, events: Sequence[str], description: str, secret: str) -> Webhook:
        """Add an endpoint.

        Raises:
            RequestError: `request.above_maximum`: there are too many.
        """
        with self._database.write() as session:
            count = select(func.count()).where(WebhookRow.tenant == self._tenant)
            if session.execute(count).scalar_one() >= MOST_WEBHOOKS:
                raise RequestError(
                    "request.above_maximum",
                    f"there are {MOST_WEBHOOKS} webhooks already",
                    fix="remove one first: reshard webhooks list, reshard webhooks remove ID",
                )
            values = {"id": new_id("wh"), "tenant": self._tenant, "url": url, "events": " ".join(events)}
            statement = insert(WebhookRow).values(**values, description=description, secret=secret, created_at=db_now())
            return _shown(session.scalars(statement.returning(WebhookRow)).one())

    def get(self, webhook_id: str) -> Webhook:
        """Get an endpoint.

        Raises:
            RequestError: `request.not_found`.
        """
        with self._database.read() as session:
            return _shown(self._require(session, webhook_id))

    def list(self) -> list[Webhook]:
        """List the endpoints, the oldest first."""
        query = select(WebhookRow).where(WebhookRow.tenant == self._tenant).order_by(WebhookRow.created_at)
        with self._database.read() as session:
            return [_shown(row) for row in session.scalars(query)]

    def remove(self, webhook_id: str) -> None:
        """Remove an endpoint and its deliveries.

        Raises:
            RequestError: `request.not_found`.
        """
        with self._database.write() as session:
            self._require(session, webhook_id)
            session.execute(delete(DeliveryRow).where(DeliveryRow.webhook_id == webhook_id))
            session.execute(delete(WebhookRow).where(WebhookRow.id == webhook_id))

    def rotate(self, webhook_id: str, secret: str, *, keep_s: float) -> Webhook:
        """Give an endpoint a new secret; the one before signs, too, for `keep_s` seconds.

        Raises:
            RequestError: `request.not_found`.
        """
        with self._database.write() as session:
            row = self._require(session, webhook_id)
            now = session.execute(select(db_now())).scalar_one()
            # A rotation whose answer was lost must not take the secret away that the receiver has.
            valid = (row.previous_secret or "").split() if (row.previous_until or 0.0) > now else []
            row.previous_secret = " ".join([row.secret, *valid][:MOST_PREVIOUS])
            row.secret, row.previous_until = secret, now + keep_s
            return _shown(row)

    def enable(self, webhook_id: str) -> Webhook:
        """Send to an endpoint again that has answered 410.

        Raises:
            RequestError: `request.not_found`.
        """
        return self._change(webhook_id, disabled_at=None)

    def _change(self, webhook_id: str, **values: object) -> Webhook:
        with self._database.write() as session:
            self._require(session, webhook_id)
            statement = update(WebhookRow).where(WebhookRow.id == webhook_id).values(**values).returning(WebhookRow)
            return _shown(session.scalars(statement.execution_options(populate_existing=True)).one())

    def _require(self, session: Session, webhook_id: str) -> WebhookRow:
        query = select(WebhookRow).where(WebhookRow.id == webhook_id, WebhookRow.tenant == self._tenant)
        row = session.scalars(query).one_or_none()
        if row is None:
            raise RequestError(
                "request.not_found",
                f"there is no webhook {printable(webhook_id, max_chars=64)!r}",
                fix="reshard webhooks list",
            )
        return row


def _shown(row: WebhookRow) -> Webhook:
    return Webhook.model_validate(
        {
            "id": row.id,
            "url": row.url,
            "events": tuple(row.events.split()),
            "description": row.description,
            "created_at": time_of(row.created_at),
            "disabled_at": None if row.disabled_at is None else time_of(row.disabled_at),
            "previous_secret_until": None if row.previous_until is None else time_of(row.previous_until),
        }
    )


# Deliveries of webhooks: claimed with a lease, tried for about a day, kept for a while after their end.

PAUSES_S = (5.0, 60.0, 300.0, 1200.0, 3600.0, 7200.0, 14_400.0, 21_600.0, 28_800.0)
"""Pauses after the tries: 21 hours together. A delivery is dead when the try after the last of them has failed, or at
once if the endpoint is gone or forbidden."""
_JITTER = 0.2
_CANDIDATES = 16
_BATCH = 500
_PENDING = DeliveryState.PENDING.value


@dataclass(frozen=True, slots=True)
class DeliveryClaim:
    """A delivery that this process sends now."""

    id: str
    owner: str
    webhook_id: str
    url: str
    payload: str
    secrets: tuple[str, ...]
    """The sealed secrets that sign it, the newest first."""
    tries: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one try."""

    status: int | None = None
    error: str | None = None
    """None if the endpoint has taken it."""
    gone: bool = False
    """True if the endpoint wants no more."""
    forbidden: bool = False
    """True if nothing may be sent to the endpoint: other tries would end in the same way."""
    retry_after_s: float = 0.0


class Deliveries:
    """The outbox of a job database.

    Args:
        database: The job database.
        lease_s: Seconds after which a delivery whose sender is silent is sent by another one.
    """

    def __init__(self, database: Database, *, lease_s: float = 60.0) -> None:
        self._database = database
        self._lease_s = lease_s

    def claim_next(self, *, without: Collection[str] = ()) -> DeliveryClaim | None:
        """Claim a due delivery; None if none is due.

        The tenant with the fewest deliveries on their way comes first, so that slow endpoints of one tenant do not
        delay those of another; among such tenants, the delivery that has been due for longest.
        An endpoint gets one delivery at a time, so that one that hangs keeps one sender at most.

        Args:
            without: Tenants that get no further sender now.
        """
        on_way = _on_way_by_tenant()
        query = (
            select(DeliveryRow.id)
            .join(WebhookRow, WebhookRow.id == DeliveryRow.webhook_id)
            .outerjoin(on_way, on_way.c.tenant == WebhookRow.tenant)
            .where(*_due(), WebhookRow.tenant.not_in(without))
            .order_by(func.coalesce(on_way.c.deliveries, 0), DeliveryRow.next_at, DeliveryRow.id)
        )
        return claim_first(self._database, query, self._claim, most=_CANDIDATES)[0]

    def _claim(self, delivery_id: str) -> DeliveryClaim | None:
        owner = new_owner()
        with self._database.write() as session:
            wanted = (DeliveryRow.id == delivery_id, *_due())
            row = change_row(session, DeliveryRow, *wanted, owner=owner, **lease_of(self._lease_s))
            if row is None:
                return None
            now = session.execute(select(db_now())).scalar_one()
            hook = session.get_one(WebhookRow, row.webhook_id)
            signing = [hook.secret]
            if (hook.previous_until or 0.0) > now:
                signing += (hook.previous_secret or "").split()
            return DeliveryClaim(row.id, owner, hook.id, hook.url, row.payload, tuple(signing), row.tries, hook.tenant)

    def record(self, claim: DeliveryClaim, outcome: Outcome) -> bool:
        """Record the end of a try. False if the lease was lost, and another one sends it."""
        values: dict[str, object] = {**RELEASED, "tries": claim.tries + 1}
        values |= {"last_status": outcome.status, "last_error": outcome.error}
        if outcome.error is None:
            values |= {"state": DeliveryState.DELIVERED.value, "ended_at": db_now()}
        elif outcome.gone or outcome.forbidden or claim.tries >= len(PAUSES_S):
            values |= {"state": DeliveryState.DEAD.value, "ended_at": db_now()}
        else:
            pause_s = PAUSES_S[claim.tries] * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - not a secret
            values["next_at"] = db_now() + max(pause_s, min(outcome.retry_after_s, PAUSES_S[-1]))
        with self._database.write() as session:
            if outcome.gone:
                session.execute(
                    update(WebhookRow)
                    .where(WebhookRow.id == claim.webhook_id, WebhookRow.disabled_at.is_(None))
                    .values(disabled_at=db_now())
                )
            fence = (DeliveryRow.id == claim.id, DeliveryRow.owner == claim.owner, DeliveryRow.state == _PENDING)
            return change_row(session, DeliveryRow, *fence, **values) is not None

    def list(self, webhook_id: str, *, state: DeliveryState | None = None, limit: int = 50) -> list[Delivery]:
        """List the deliveries of an endpoint, the newest first."""
        query = select(DeliveryRow).where(DeliveryRow.webhook_id == webhook_id)
        if state is not None:
            query = query.where(DeliveryRow.state == state.value)
        with self._database.read() as session:
            rows = session.scalars(query.order_by(DeliveryRow.created_at.desc(), DeliveryRow.id).limit(limit))
            return [_shown_delivery(row) for row in rows]

    def redeliver(self, webhook_id: str, delivery_id: str | None = None) -> int:
        """Send a delivery again, or all dead ones of an endpoint, with their ids; returns their number.

        Raises:
            RequestError: `request.not_found`: the endpoint has no such delivery.
        """
        mine = [DeliveryRow.webhook_id == webhook_id]
        if delivery_id is None:
            mine.append(DeliveryRow.state == DeliveryState.DEAD.value)
        else:
            mine.append(DeliveryRow.id == delivery_id)
        again = {"state": _PENDING, "next_at": db_now(), "tries": 0, "ended_at": None, **RELEASED}
        with self._database.write() as session:
            statement = update(DeliveryRow).where(*mine).values(**again).returning(DeliveryRow.id)
            count = len(session.scalars(statement).all())
        if delivery_id is not None and not count:
            raise RequestError(
                "request.not_found",
                f"there is no delivery {printable(delivery_id, max_chars=64)!r}",
                fix="reshard webhooks deliveries ID",
            )
        return count

    def forget(self, *, keep_s: float) -> None:
        """Remove a batch of deliveries that ended more than `keep_s` seconds ago, or whose endpoint is gone."""
        endpoint = select(WebhookRow.id).where(WebhookRow.id == DeliveryRow.webhook_id).exists()
        old = or_(DeliveryRow.ended_at < db_now() - keep_s, ~endpoint)
        with self._database.write() as session:
            chosen = select(DeliveryRow.id).where(old).limit(_BATCH)
            statement = delete(DeliveryRow).where(DeliveryRow.id.in_(chosen))
            session.execute(statement.execution_options(synchronize_session=False))


def _on_way_by_tenant() -> Subquery:
    """The number of deliveries that are being sent now, by tenant, whichever process sends them."""
    sent, hook = aliased(DeliveryRow), aliased(WebhookRow)
    return (
        select(hook.tenant, func.count().label("deliveries"))
        .join(sent, sent.webhook_id == hook.id)
        .where(sent.state == _PENDING, is_held(sent))
        .group_by(hook.tenant)
        .subquery()
    )


def _due() -> tuple[ColumnElement[bool], ...]:
    other = aliased(DeliveryRow)
    sent_now = select(other.id).where(other.webhook_id == DeliveryRow.webhook_id, other.state == _PENDING)
    sent_now = sent_now.where(is_held(other))
    enabled = select(WebhookRow.id).where(WebhookRow.id == DeliveryRow.webhook_id, WebhookRow.disabled_at.is_(None))
    return (
        DeliveryRow.state == _PENDING,
        DeliveryRow.next_at <= db_now(),
        # A claim that waited for another one sees the row anew, and what it selects from other rows as before.
        is_free(DeliveryRow),
        enabled.correlate(DeliveryRow).exists(),
        ~sent_now.correlate(DeliveryRow).exists(),
    )


def _shown_delivery(row: DeliveryRow) -> Delivery:
    pending = row.state == _PENDING
    return Delivery.model_validate(
        {
            "id": row.id,
            "webhook_id": row.webhook_id,
            # The record of the job may be gone, and its key is not the id that its tenant knows.
            "job_id": json.loads(row.payload)["data"]["id"],
            "event": row.event,
            "state": row.state,
            "tries": row.tries,
            "created_at": time_of(row.created_at),
            "next_at": time_of(row.next_at) if pending else None,
            "ended_at": None if row.ended_at is None else time_of(row.ended_at),
            "last_status": row.last_status,
            "last_error": row.last_error,
        }
    )
