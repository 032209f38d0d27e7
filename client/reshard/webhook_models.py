"""Webhooks on the wire: endpoints that a service calls when jobs begin or end, and its calls."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from reshard.models import SCHEMA_VERSION, WireModel
from reshard.wire_model import RequestModel

EventType = Literal["job.started", "job.succeeded", "job.failed", "job.cancelled"]
ENDINGS: tuple[EventType, ...] = ("job.succeeded", "job.failed", "job.cancelled")
"""The events of an endpoint that names none."""


class DeliveryState(StrEnum):
    """The state of one call. `dead`: it was tried for about a day."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


class WebhookRequest(RequestModel):
    """Body of `POST /v1/webhooks`."""

    url: str = Field(min_length=1, max_length=2000)
    events: Annotated[tuple[EventType, ...], Field(min_length=1, max_length=4)] = ENDINGS
    description: str = Field(default="", max_length=200)


class Webhook(WireModel):
    """One endpoint. Its secret is shown when it is made, and not again."""

    schema_version: int = SCHEMA_VERSION
    id: str
    url: str
    events: tuple[EventType, ...]
    description: str = ""
    created_at: datetime
    disabled_at: datetime | None = None
    """Nothing is sent since then, because the endpoint answered 410 (Gone)."""
    secret: str | None = None
    """`whsec_` and the key of the signatures in base64. It is shown when it is made, and not again."""
    previous_secret_until: datetime | None = None
    """Until then, each call has a second signature, with the secret before the last rotation."""


class WebhookList(WireModel):
    """All endpoints."""

    webhooks: tuple[Webhook, ...]


class RotateRequest(RequestModel):
    """Body of `POST /v1/webhooks/{id}/rotate`."""

    keep_s: float = Field(default=86_400.0, ge=0, le=30 * 86_400.0)
    """Seconds for which the secret before signs, too."""


class Delivery(WireModel):
    """One event for one endpoint. It has the same id in every try: the `webhook-id` of the call."""

    id: str
    webhook_id: str
    job_id: str
    event: EventType
    state: DeliveryState
    tries: int
    created_at: datetime
    next_at: datetime | None = None
    """When it is tried next."""
    ended_at: datetime | None = None
    last_status: int | None = None
    """The HTTP status of the last answer; null if there was none."""
    last_error: str | None = None


class DeliveryList(WireModel):
    """The newest deliveries of an endpoint."""

    deliveries: tuple[Delivery, ...]


class RedeliverRequest(RequestModel):
    """Body of `POST /v1/webhooks/{id}/redeliver`."""

    delivery: str | None = Field(default=None, max_length=40)
    """The delivery to repeat; null for all that are dead."""


class Redelivered(WireModel):
    """The number of deliveries that are sent again."""

    count: int
