"""Tables of the job database, and the database's own clock.

All times are seconds since the epoch as the *database* tells them: clocks of workers and API hosts
are never compared. Room for later: tenants are a column and a part of two keys, webhooks and
fan-out units are tables of their own; each raises `SCHEMA`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Float, ForeignKey, Index, Integer, String, Text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.sql.functions import FunctionElement

SCHEMA = 1
MAX_SEQ = (1 << 31) - 1
"""Largest sequence number of an event: what the column holds in every database."""


class db_now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function that it is
    """Seconds since the epoch by the database's clock, evaluated when the statement runs."""

    type = Float()
    inherit_cache = True


@compiles(db_now, "sqlite")
def _sqlite_now(_element: db_now, _compiler: object, **_kwargs: Any) -> str:
    # Not unixepoch('subsec'): that needs SQLite 3.42, and Debian 12 has 3.40.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(db_now, "postgresql")
def _postgres_now(_element: db_now, _compiler: object, **_kwargs: Any) -> str:
    # Not now(): that is the start of the transaction.
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


class Base(DeclarativeBase):
    """Base of the job tables."""


class MetaRow(Base):
    """One fact about the database itself: its schema version, the host it is bound to."""

    __tablename__ = "reshard_meta"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(Text)


class JobRow(Base):
    """One job. `owner` and `attempt` together are the fence of everything that a worker writes."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    request: Mapped[str] = mapped_column(Text)
    # What the job writes, in one spelling; empty for a job that writes nothing. One writer at a time.
    target: Mapped[str] = mapped_column(Text, default="")
    attempt: Mapped[int] = mapped_column(Integer, default=0)
    max_attempts: Mapped[int] = mapped_column(Integer)
    # Attempts that ended by a graceful stop: they do not count against `max_attempts`.
    releases: Mapped[int] = mapped_column(Integer, default=0)
    owner: Mapped[str | None] = mapped_column(String(64), default=None)
    worker: Mapped[str | None] = mapped_column(String(200), default=None)
    lease_until: Mapped[float | None] = mapped_column(Float(53), default=None)
    not_before: Mapped[float] = mapped_column(Float(53), default=0.0)
    # Unused: here until the next SCHEMA, because a database of release 0.1.0 wants a value.
    rung_at: Mapped[float] = mapped_column(Float(53), default=0.0)
    cancel_requested: Mapped[int] = mapped_column(Integer, default=0)
    progress: Mapped[str | None] = mapped_column(Text, default=None)
    plan_digest: Mapped[str | None] = mapped_column(String(128), default=None)
    error: Mapped[str | None] = mapped_column(Text, default=None)
    result: Mapped[str | None] = mapped_column(Text, default=None)
    last_seq: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[float] = mapped_column(Float(53))
    started_at: Mapped[float | None] = mapped_column(Float(53), default=None)
    finished_at: Mapped[float | None] = mapped_column(Float(53), default=None)

    __table_args__ = (
        Index("jobs_by_age", "created_at", "id"),
        Index("jobs_by_state", "state", "created_at"),
        Index("jobs_by_target", "target"),
    )


class LabelRow(Base):
    """One label of a job."""

    __tablename__ = "job_labels"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    value: Mapped[str] = mapped_column(String(512))

    __table_args__ = (Index("job_labels_by_value", "name", "value"),)


class EventRow(Base):
    """One entry of a job's event log; `seq` grows by one within a job, without holes."""

    __tablename__ = "job_events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[float] = mapped_column(Float(53))
    kind: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    progress: Mapped[str | None] = mapped_column(Text, default=None)


class IdempotencyRow(Base):
    """One idempotency key: in flight while `job_id` is null, then the name of its job."""

    __tablename__ = "idempotency_keys"

    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    holder: Mapped[str] = mapped_column(String(64))
    held_until: Mapped[float] = mapped_column(Float(53))
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), default=None)
