"""Tables of tenants, their tokens, and the audit log."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from reshard_jobs.tables import MAX_TENANT_CHARS, Base


class TenantRow(Base):
    """One tenant. A setting that is null is the service's own."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(MAX_TENANT_CHARS), primary_key=True)
    created_at: Mapped[float] = mapped_column(Float(53))
    # URL prefixes and names of profiles, as JSON lists.
    read_roots: Mapped[str | None] = mapped_column(Text, default=None)
    write_roots: Mapped[str | None] = mapped_column(Text, default=None)
    profiles: Mapped[str | None] = mapped_column(Text, default=None)
    max_queued: Mapped[int | None] = mapped_column(Integer, default=None)
    max_running: Mapped[int | None] = mapped_column(Integer, default=None)
    max_workers: Mapped[int | None] = mapped_column(Integer, default=None)
    max_priority: Mapped[int | None] = mapped_column(Integer, default=None)
    bytes_per_day: Mapped[int | None] = mapped_column(BigInteger, default=None)
    # The tenant's share of the workers, relative to the weights of others.
    weight: Mapped[int] = mapped_column(Integer, default=1, server_default="1")


class TokenRow(Base):
    """One token of a tenant. The secret itself is stored nowhere."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(200))
    # Separated by blanks.
    scopes: Mapped[str] = mapped_column(String(200))
    # SHA-256 of the token, and of the cookie that a browser gets for it, as hexadecimal digits.
    token_hash: Mapped[str] = mapped_column(String(64))
    session_hash: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float] = mapped_column(Float(53))
    created_by: Mapped[str] = mapped_column(String(200), default="")
    expires_at: Mapped[float | None] = mapped_column(Float(53), default=None)
    revoked_at: Mapped[float | None] = mapped_column(Float(53), default=None)
    # At most a minute too early.
    last_used_at: Mapped[float | None] = mapped_column(Float(53), default=None)

    __table_args__ = (Index("tokens_of_tenant", "tenant", "created_at", "id"),)


class AuditRow(Base):
    """One entry of the audit log: who did, or tried to do, what."""

    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    at: Mapped[float] = mapped_column(Float(53))
    tenant: Mapped[str] = mapped_column(String(MAX_TENANT_CHARS))
    # The token's id or the subject of an OIDC token; `operator` for the service's own token.
    actor: Mapped[str] = mapped_column(String(200))
    address: Mapped[str] = mapped_column(String(64))
    action: Mapped[str] = mapped_column(String(64))
    object: Mapped[str] = mapped_column(String(200))
    # `ok`, or the code of the error.
    outcome: Mapped[str] = mapped_column(String(64))

    __table_args__ = (Index("audit_log_of_tenant", "tenant", "id"), Index("audit_log_by_age", "at"))
