"""Wire models of tokens, tenants and the audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from reshard.choices import TokenScope
from reshard.wire_model import MOST_BYTES, RequestModel, WireModel

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
