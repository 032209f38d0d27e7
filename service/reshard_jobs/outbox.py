"""The outbox of webhooks: events are written with the change of the job that they tell, or not at all."""

from __future__ import annotations

import base64
import json
import secrets
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from reshard.models import JobState
from reshard.webhook_models import DeliveryState
from reshard_jobs.tables import JobRow, db_now
from reshard_jobs.webhook_tables import DeliveryRow, WebhookRow

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
