"""The endpoints of webhooks in the job database."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from reshard.errors import RequestError, printable
from reshard.webhook_models import Webhook
from reshard_jobs.database import Database
from reshard_jobs.outbox import new_id
from reshard_jobs.records import time_of
from reshard_jobs.tables import db_now
from reshard_jobs.webhook_tables import DeliveryRow, WebhookRow

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
