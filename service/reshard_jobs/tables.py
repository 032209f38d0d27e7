"""Tables of the job database, and the database's own clock.

All times are seconds since the epoch by the clock of the *database*: clocks of workers and API hosts are never
compared. A change needs a revision of `reshard_jobs.migrations`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Float,
    ForeignKey,
    Index,
    Integer,
    SQLColumnExpression,
    String,
    Text,
    func,
    literal_column,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.sql.functions import FunctionElement

ANY_PLAN = "*"
"""The recorded plan of attempts whose plan is not known: whatever is unfinished in the target is theirs."""
DEFAULT_TENANT = "default"
"""The operator's tenant. It has all jobs of a service without other tenants."""
MAX_TENANT_CHARS = 64
MAX_ID_CHARS = 40
"""Longest id of a job: PostgreSQL refuses longer ones."""
JOB_ID = f"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ID_CHARS - 1}}}"
"""The pattern of job ids: those of the service, and those that callers choose."""
MAX_SEQ = (1 << 31) - 1
"""Largest sequence number of an event: the largest value of the column in every database."""


class db_now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function that it is
    """Seconds since the epoch by the database's clock, evaluated when the statement runs."""

    type = Float()
    inherit_cache = True


@compiles(db_now, "sqlite")
def _sqlite_now(_element: db_now, _compiler: object, **_kwargs: Any) -> str:
    # unixepoch('subsec') needs SQLite 3.42, and Debian 12 has 3.40.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(db_now, "postgresql")
def _postgres_now(_element: db_now, _compiler: object, **_kwargs: Any) -> str:
    # now() would be the start of the transaction.
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"


class Base(DeclarativeBase):
    """Base of the job tables."""


class MetaRow(Base):
    """One fact about the database: the oldest revision whose programs may run, or the host that it is bound to."""

    __tablename__ = "reshard_meta"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(Text)


class JobRow(Base):
    """One job. `owner` and `attempt` together are the fence of every write of a worker."""

    __tablename__ = "jobs"

    # Unique in the whole database. Workers, leases and other tables know a job by it.
    id: Mapped[str] = mapped_column(String(MAX_ID_CHARS), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(MAX_TENANT_CHARS), default=DEFAULT_TENANT, server_default=DEFAULT_TENANT)
    # The id that the caller chose, unique within the tenant; null if the caller knows the job by `id`.
    given_id: Mapped[str | None] = mapped_column(String(MAX_ID_CHARS), default=None)
    # Bytes that the conversion writes, as it was planned; 0 if nobody has planned it yet.
    planned_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    # 1 if it was planned: at its submission, or by a worker.
    checked: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    kind: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    request: Mapped[str] = mapped_column(Text)
    # The normalised URL of the target; empty for a job that writes nothing. A target has one writer at a time.
    target: Mapped[str] = mapped_column(Text, default="")
    # The normalised URL of the source.
    source: Mapped[str | None] = mapped_column(Text, default=None)
    attempt: Mapped[int] = mapped_column(Integer, default=0)
    max_attempts: Mapped[int] = mapped_column(Integer)
    priority: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    # Number of workers that may run the job at once; 0 is the operator's default.
    max_workers: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    # 1 while the owner's engine has work for helpers.
    takes_workers: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    # Number of attempts that do not count against `max_attempts`: they ended by a graceful stop, by a fault of their
    # worker's host, or before a retry.
    releases: Mapped[int] = mapped_column(Integer, default=0)
    # How often a user has sent the FAILED job back to the queue.
    retries: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    # When the files that attempts of the ended job left are to be discarded; null if there is nothing to discard.
    discard_at: Mapped[float | None] = mapped_column(Float(53), default=None)
    # 1 if they are to go even if they look as if a conversion still used them.
    discard_asked: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    discard_tries: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    owner: Mapped[str | None] = mapped_column(String(64), default=None)
    worker: Mapped[str | None] = mapped_column(String(200), default=None)
    lease_until: Mapped[float | None] = mapped_column(Float(53), default=None)
    not_before: Mapped[float] = mapped_column(Float(53), default=0.0)
    # Unused.
    rung_at: Mapped[float] = mapped_column(Float(53), default=0.0)
    cancel_requested: Mapped[int] = mapped_column(Integer, default=0)
    progress: Mapped[str | None] = mapped_column(Text, default=None)
    plan_digest: Mapped[str | None] = mapped_column(String(128), default=None)
    error: Mapped[str | None] = mapped_column(Text, default=None)
    result: Mapped[str | None] = mapped_column(Text, default=None)
    # The result without its long lists, for lists of jobs.
    brief: Mapped[str | None] = mapped_column(Text, default=None)
    last_seq: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[float] = mapped_column(Float(53))
    started_at: Mapped[float | None] = mapped_column(Float(53), default=None)
    finished_at: Mapped[float | None] = mapped_column(Float(53), default=None)
    # The span of the request that made the job (W3C Trace Context); null without traces.
    traceparent: Mapped[str | None] = mapped_column(String(55), default=None)

    __table_args__ = (
        Index("jobs_by_age", "created_at", "id"),
        Index("jobs_by_state", "state", "created_at"),
        Index("jobs_by_target", "target"),
        Index("jobs_by_discard", "discard_at"),
        Index("jobs_of_tenant", "tenant", "created_at", "id"),
        Index("jobs_of_tenant_by_state", "state", "tenant", "created_at"),
    )

    @property
    def public_id(self) -> str:
        """The id by which the job's tenant knows it."""
        return self.given_id or self.id


PUBLIC_ID: SQLColumnExpression[str] = func.coalesce(JobRow.given_id, JobRow.id)
"""The id by which the job's tenant knows it, as an expression of SQL."""
Index("jobs_by_public_id", JobRow.tenant, PUBLIC_ID, unique=True)
SOURCE_CHARS = 250
SOURCE_BEGIN: SQLColumnExpression[str] = func.substr(JobRow.source, literal_column("1"), literal_column("250"))
"""The first `SOURCE_CHARS` characters of the source: PostgreSQL's index holds no long values, and a URL may be one."""
Index("jobs_by_source", JobRow.tenant, SOURCE_BEGIN)


class TotalRow(Base):
    """A number that only grows, by name and label. It outlives the jobs that it counts."""

    __tablename__ = "totals"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    label: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger)


class PlanRow(Base):
    """A plan that an attempt of a job may have begun to write, as long as it may have left files."""

    __tablename__ = "job_plans"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    digest: Mapped[str] = mapped_column(String(128), primary_key=True)


class RefusalRow(Base):
    """A job that failed on a worker in a way that may be the fault of the worker's host. It does not try it again."""

    __tablename__ = "job_refusals"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    worker: Mapped[str] = mapped_column(String(200), primary_key=True)
    code: Mapped[str] = mapped_column(String(64))
    at: Mapped[float] = mapped_column(Float(53))

    __table_args__ = (Index("job_refusals_by_worker", "worker", "at"),)


class NodeRow(Base):
    """A live worker process, with or without a job. It renews `seen_at`."""

    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    started_at: Mapped[float] = mapped_column(Float(53))
    seen_at: Mapped[float] = mapped_column(Float(53))
    # When it last ended a job in a way that speaks for its host; 0 is never.
    good_at: Mapped[float] = mapped_column(Float(53), default=0.0)
    quarantined_until: Mapped[float] = mapped_column(Float(53), default=0.0)
    # Number of quarantines since `good_at`.
    quarantines: Mapped[int] = mapped_column(Integer, default=0)
    # The problem of the job that led to the last quarantine, as JSON.
    problem: Mapped[str | None] = mapped_column(Text, default=None)
    # The most memory that its last engine process took; 0 if it is not known.
    engine_peak_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")

    __table_args__ = (Index("workers_by_seen", "seen_at"),)


class WorkerRow(Base):
    """One worker of one job, as long as the job is kept. A helper has a lease of its own; an owner has the job's."""

    __tablename__ = "job_workers"
    __table_args__ = (
        # Few of many rows: those of workers that have not left.
        Index(
            "job_workers_present",
            "job_id",
            sqlite_where=text("left_at IS NULL"),
            postgresql_where=text("left_at IS NULL"),
        ),
    )

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    # The owner's fence, or a random text.
    token: Mapped[str] = mapped_column(String(64), primary_key=True)
    worker: Mapped[str] = mapped_column(String(200))
    role: Mapped[str] = mapped_column(String(16))
    attempt: Mapped[int] = mapped_column(Integer)
    joined_at: Mapped[float] = mapped_column(Float(53))
    lease_until: Mapped[float | None] = mapped_column(Float(53), default=None)
    left_at: Mapped[float | None] = mapped_column(Float(53), default=None)
    # 1 if its engine ended with an error of its own.
    failed: Mapped[int] = mapped_column(Integer, default=0)
    # The report at its end (see `WorkShare`); null if there is none.
    runs: Mapped[int | None] = mapped_column(Integer, default=None)
    takeovers: Mapped[int | None] = mapped_column(Integer, default=None)
    splits: Mapped[int | None] = mapped_column(Integer, default=None)
    epochs_lost: Mapped[int | None] = mapped_column(Integer, default=None)
    units: Mapped[int | None] = mapped_column(Integer, default=None)
    write_bytes: Mapped[int | None] = mapped_column(BigInteger, default=None)


class LabelRow(Base):
    """One label of a job."""

    __tablename__ = "job_labels"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    value: Mapped[str] = mapped_column(String(512))

    __table_args__ = (Index("job_labels_by_value", "name", "value"),)


class EventRow(Base):
    """One entry of a job's event log; `seq` grows by one. Entries of progress are removed from old logs."""

    __tablename__ = "job_events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(Integer, primary_key=True)
    at: Mapped[float] = mapped_column(Float(53))
    kind: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    progress: Mapped[str | None] = mapped_column(Text, default=None)
    # The helper that joined or left, as JSON.
    worker: Mapped[str | None] = mapped_column(Text, default=None)


class IdempotencyRow(Base):
    """One idempotency key of a tenant. It is held while `job_id` is null, and then bound to that job."""

    __tablename__ = "idempotency_keys"

    tenant: Mapped[str] = mapped_column(
        String(MAX_TENANT_CHARS), primary_key=True, default=DEFAULT_TENANT, server_default=DEFAULT_TENANT
    )
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    holder: Mapped[str] = mapped_column(String(64))
    held_until: Mapped[float] = mapped_column(Float(53))
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), default=None)

    __table_args__ = (Index("idempotency_keys_by_job", "job_id"),)


# Tables of tenants, their tokens, and the audit log.


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


# Tables of webhooks: the endpoints, and the outbox of what is to be sent to them.


class WebhookRow(Base):
    """One endpoint."""

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), default="default", server_default="default")
    url: Mapped[str] = mapped_column(Text)
    # Separated by blanks.
    events: Mapped[str] = mapped_column(String(200))
    description: Mapped[str] = mapped_column(String(200), default="")
    # As `reshard_service.webhooks.secrets` seals them.
    secret: Mapped[str] = mapped_column(Text)
    # Those before the last rotations, separated by blanks.
    previous_secret: Mapped[str | None] = mapped_column(Text, default=None)
    previous_until: Mapped[float | None] = mapped_column(Float(53), default=None)
    created_at: Mapped[float] = mapped_column(Float(53))
    disabled_at: Mapped[float | None] = mapped_column(Float(53), default=None)

    __table_args__ = (Index("webhooks_of_tenant", "tenant", "created_at"),)


class DeliveryRow(Base):
    """One event for one endpoint, written with the change of the job that it tells.

    It has no foreign keys: an endpoint or a job that goes away at that moment must not undo the change.
    """

    __tablename__ = "webhook_deliveries"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    webhook_id: Mapped[str] = mapped_column(String(40))
    job_id: Mapped[str] = mapped_column(String(MAX_ID_CHARS))
    event: Mapped[str] = mapped_column(String(32))
    # The bytes that are signed and sent.
    payload: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    tries: Mapped[int] = mapped_column(Integer, default=0)
    created_at: Mapped[float] = mapped_column(Float(53))
    next_at: Mapped[float] = mapped_column(Float(53))
    # The process that sends it now, and until when nobody else does.
    owner: Mapped[str | None] = mapped_column(String(64), default=None)
    lease_until: Mapped[float | None] = mapped_column(Float(53), default=None)
    ended_at: Mapped[float | None] = mapped_column(Float(53), default=None)
    last_status: Mapped[int | None] = mapped_column(Integer, default=None)
    last_error: Mapped[str | None] = mapped_column(Text, default=None)

    __table_args__ = (
        Index("webhook_deliveries_due", "state", "next_at"),
        Index("webhook_deliveries_of_webhook", "webhook_id", "created_at"),
        Index("webhook_deliveries_sent_now", "webhook_id", "lease_until"),
    )


# Tables of virtual layouts: targets whose files the API serves, and that nobody writes.


class LayoutRow(Base):
    """One virtual layout. Any process of the API plans it again from the request, and compares the digests."""

    __tablename__ = "layouts"

    id: Mapped[str] = mapped_column(String(MAX_ID_CHARS), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(MAX_TENANT_CHARS), default=DEFAULT_TENANT, server_default=DEFAULT_TENANT)
    request: Mapped[str] = mapped_column(Text)
    # Of the bytes of all files, and of the source's files with their pins.
    content_digest: Mapped[str] = mapped_column(String(128))
    source_digest: Mapped[str] = mapped_column(String(128))
    files: Mapped[int] = mapped_column(Integer)
    total_bytes: Mapped[int] = mapped_column(BigInteger)
    # The rest of what the plan says, as JSON.
    facts: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float] = mapped_column(Float(53))
    # Each use moves it. The row stays for a day after it: the quota of bytes counts it, and callers learn that it was.
    expires_at: Mapped[float] = mapped_column(Float(53))

    __table_args__ = (
        Index("layouts_of_tenant", "tenant", "created_at", "id"),
        Index("layouts_by_expiry", "expires_at"),
    )


class LayoutFileRow(Base):
    """One file of a virtual layout."""

    __tablename__ = "layout_files"

    layout_id: Mapped[str] = mapped_column(ForeignKey("layouts.id", ondelete="CASCADE"), primary_key=True)
    # SHA-256 of the path: an index of PostgreSQL holds no long values.
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(Integer)
    path: Mapped[str] = mapped_column(Text)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
