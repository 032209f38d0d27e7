"""Wire models of tokens, tenants, the audit log and webhooks."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from reshard.choices import TokenScope
from reshard.wire_model import MOST_BYTES, SCHEMA_VERSION, RequestModel, WireModel

TENANT_PATTERN = r"^[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?$"
DEFAULT_TOKEN_S = 90 * 86_400
MOST_TOKEN_S = 10 * 366 * 86_400
MOST_COUNT = (1 << 31) - 1

TenantName = Annotated[str, Field(pattern=TENANT_PATTERN, max_length=64)]
_Url = Annotated[str, Field(min_length=1, max_length=2_000)]
_Profile = Annotated[str, Field(min_length=1, max_length=200)]
_Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]


class NewToken(RequestModel):
    """Body of `POST /v1/tokens`."""

    name: str = Field(min_length=1, max_length=200)
    """A name for people, such as that of the program that uses the token."""
    scopes: tuple[TokenScope, ...] = Field(min_length=1, max_length=len(TokenScope))
    tenant: TenantName | None = None
    """The tenant; None for that of the caller. Only the operator may name another one."""
    expires_in_s: int | None = Field(default=DEFAULT_TOKEN_S, ge=1, le=MOST_TOKEN_S)
    """Seconds until it expires; null for never."""


class Token(WireModel):
    """One token, without its secret."""

    id: str
    tenant: str
    name: str
    scopes: tuple[TokenScope, ...]
    created_at: datetime
    created_by: str = ""
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None
    """Exact to a minute."""


class CreatedToken(WireModel):
    """A new token with its secret, which is shown only here."""

    token: Token
    secret: str = Field(repr=False)
    """The text to send as `Authorization: Bearer ...`."""


class TokenList(WireModel):
    """The tokens of a tenant, newest first."""

    tokens: tuple[Token, ...]


class TenantSettings(RequestModel):
    """The settings of a tenant. One that is null is the service's own: its roots, all profiles, no limit."""

    read_roots: tuple[_Url, ...] | None = Field(default=None, max_length=64)
    """URL prefixes that jobs may read. They lie below roots of the service, if it has any."""
    write_roots: tuple[_Url, ...] | None = Field(default=None, max_length=64)
    """URL prefixes below which jobs may write."""
    profiles: tuple[_Profile, ...] | None = Field(default=None, max_length=64)
    """The storage profiles that jobs may name. With a list, each URL of an object store must name one."""
    max_queued: _Count | None = None
    """The most jobs that may wait."""
    max_running: _Count | None = None
    """The most jobs that run at once. Others wait."""
    max_workers: _Count | None = None
    """The most workers that run the tenant's jobs at once, helpers included."""
    max_priority: int | None = Field(default=None, ge=-100, le=100)
    """The highest priority that a job may have."""
    bytes_per_day: int | None = Field(default=None, ge=0, le=MOST_BYTES)
    """The most bytes that the conversions submitted within 24 hours may write."""
    weight: int = Field(default=1, ge=1, le=1000)
    """The tenant's share of the workers, relative to the weights of other tenants."""


class NewTenant(TenantSettings):
    """Body of `POST /v1/tenants`."""

    name: TenantName


class Tenant(TenantSettings):
    """One tenant."""

    name: str
    created_at: datetime


class TenantList(WireModel):
    """The tenants of a service, by name."""

    tenants: tuple[Tenant, ...]


class AuditEntry(WireModel):
    """One entry of the audit log."""

    id: int
    at: datetime
    tenant: str
    actor: str
    """The id of a token, the subject of an OIDC token, or `operator` for the service's own token."""
    address: str
    action: str
    object: str
    outcome: str
    """`ok`, or the code of the error with which it was refused."""


class AuditPage(WireModel):
    """One page of the audit log, newest first."""

    entries: tuple[AuditEntry, ...]
    next_before: int | None = None
    """The `before` of the next page; None if this is the last one."""


# Webhooks on the wire: endpoints that a service calls when jobs begin or end, and its calls.

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
