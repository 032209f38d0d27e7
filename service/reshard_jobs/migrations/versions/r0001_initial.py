"""The tables of release 0.1.0: jobs, their workers, totals, webhooks, tenants, tokens and the audit log."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reshard_jobs.tables import db_now

revision = "0001"
down_revision = None
oldest_program = "0001"


def upgrade() -> None:
    """Create the tables, and the operator's own tenant."""
    op.create_table(
        "reshard_meta",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text(), nullable=False),
    )
    _create_jobs()
    _create_parts_of_jobs()
    _create_workers_of_jobs()
    _create_workers_and_totals()
    _create_webhooks()
    _create_tenants()


def _create_jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("releases", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("worker", sa.String(200)),
        sa.Column("lease_until", sa.Float(53)),
        sa.Column("not_before", sa.Float(53), nullable=False),
        sa.Column("rung_at", sa.Float(53), nullable=False),
        sa.Column("cancel_requested", sa.Integer(), nullable=False),
        sa.Column("progress", sa.Text()),
        sa.Column("plan_digest", sa.String(128)),
        sa.Column("error", sa.Text()),
        sa.Column("result", sa.Text()),
        sa.Column("last_seq", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("started_at", sa.Float(53)),
        sa.Column("finished_at", sa.Float(53)),
        sa.Column("priority", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("max_workers", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("takes_workers", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("retries", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("discard_at", sa.Float(53)),
        sa.Column("discard_asked", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("discard_tries", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("tenant", sa.String(64), nullable=False, server_default="default"),
        sa.Column("given_id", sa.String(40)),
        sa.Column("planned_bytes", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("traceparent", sa.String(55)),
        sa.Column("checked", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("source", sa.Text()),
        sa.Column("brief", sa.Text()),
    )
    op.create_index("jobs_by_age", "jobs", ["created_at", "id"])
    op.create_index("jobs_by_state", "jobs", ["state", "created_at"])
    op.create_index("jobs_by_target", "jobs", ["target"])
    op.create_index("jobs_by_discard", "jobs", ["discard_at"])
    op.create_index("jobs_by_public_id", "jobs", ["tenant", sa.text("coalesce(given_id, id)")], unique=True)
    op.create_index("jobs_of_tenant", "jobs", ["tenant", "created_at", "id"])
    op.create_index("jobs_of_tenant_by_state", "jobs", ["state", "tenant", "created_at"])
    op.create_index("jobs_by_source", "jobs", ["tenant", sa.text("substr(source, 1, 250)")])


def _job_id(*, key: bool = True) -> sa.Column[str]:
    return sa.Column("job_id", sa.String(40), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=key)


def _create_parts_of_jobs() -> None:
    op.create_table(
        "job_labels",
        _job_id(),
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("value", sa.String(512), nullable=False),
    )
    op.create_index("job_labels_by_value", "job_labels", ["name", "value"])
    op.create_table(
        "job_events",
        _job_id(),
        sa.Column("seq", sa.Integer(), primary_key=True),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("progress", sa.Text()),
        sa.Column("worker", sa.Text()),
    )
    op.create_table("job_plans", _job_id(), sa.Column("digest", sa.String(128), primary_key=True))
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant", sa.String(64), primary_key=True, server_default="default"),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("held_until", sa.Float(53), nullable=False),
        _job_id(key=False),
    )
    op.create_index("idempotency_keys_by_job", "idempotency_keys", ["job_id"])


def _create_workers_of_jobs() -> None:
    op.create_table(
        "job_workers",
        _job_id(),
        sa.Column("token", sa.String(64), primary_key=True),
        sa.Column("worker", sa.String(200), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("joined_at", sa.Float(53), nullable=False),
        sa.Column("lease_until", sa.Float(53)),
        sa.Column("left_at", sa.Float(53)),
        sa.Column("failed", sa.Integer(), nullable=False),
        sa.Column("runs", sa.Integer()),
        sa.Column("takeovers", sa.Integer()),
        sa.Column("splits", sa.Integer()),
        sa.Column("epochs_lost", sa.Integer()),
        sa.Column("units", sa.Integer()),
        sa.Column("write_bytes", sa.BigInteger()),
    )
    present = sa.text("left_at IS NULL")
    op.create_index("job_workers_present", "job_workers", ["job_id"], sqlite_where=present, postgresql_where=present)
    op.create_table(
        "job_refusals",
        _job_id(),
        sa.Column("worker", sa.String(200), primary_key=True),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
    )
    op.create_index("job_refusals_by_worker", "job_refusals", ["worker", "at"])


def _create_workers_and_totals() -> None:
    op.create_table(
        "workers",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("started_at", sa.Float(53), nullable=False),
        sa.Column("seen_at", sa.Float(53), nullable=False),
        sa.Column("good_at", sa.Float(53), nullable=False),
        sa.Column("quarantined_until", sa.Float(53), nullable=False),
        sa.Column("quarantines", sa.Integer(), nullable=False),
        sa.Column("problem", sa.Text()),
        sa.Column("engine_peak_bytes", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.create_index("workers_by_seen", "workers", ["seen_at"])
    op.create_table(
        "totals",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("label", sa.String(64), primary_key=True),
        sa.Column("value", sa.BigInteger(), nullable=False),
    )


def _create_webhooks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False, server_default="default"),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("events", sa.String(200), nullable=False),
        sa.Column("description", sa.String(200), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("previous_secret", sa.Text()),
        sa.Column("previous_until", sa.Float(53)),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("disabled_at", sa.Float(53)),
    )
    op.create_index("webhooks_of_tenant", "webhooks", ["tenant", "created_at"])
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("webhook_id", sa.String(40), nullable=False),
        sa.Column("job_id", sa.String(40), nullable=False),
        sa.Column("event", sa.String(32), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("next_at", sa.Float(53), nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("lease_until", sa.Float(53)),
        sa.Column("ended_at", sa.Float(53)),
        sa.Column("last_status", sa.Integer()),
        sa.Column("last_error", sa.Text()),
    )
    op.create_index("webhook_deliveries_due", "webhook_deliveries", ["state", "next_at"])
    op.create_index("webhook_deliveries_of_webhook", "webhook_deliveries", ["webhook_id", "created_at"])
    op.create_index("webhook_deliveries_sent_now", "webhook_deliveries", ["webhook_id", "lease_until"])


def _create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("read_roots", sa.Text()),
        sa.Column("write_roots", sa.Text()),
        sa.Column("profiles", sa.Text()),
        sa.Column("max_queued", sa.Integer()),
        sa.Column("max_running", sa.Integer()),
        sa.Column("max_workers", sa.Integer()),
        sa.Column("max_priority", sa.Integer()),
        sa.Column("bytes_per_day", sa.BigInteger()),
        sa.Column("weight", sa.Integer(), nullable=False, server_default="1"),
    )
    tenants = sa.table("tenants", sa.column("name", sa.String()), sa.column("created_at", sa.Float(53)))
    op.execute(tenants.insert().values(name="default", created_at=db_now()))
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant", sa.String(64), sa.ForeignKey("tenants.name", ondelete="CASCADE"), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("scopes", sa.String(200), nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False),
        sa.Column("session_hash", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("expires_at", sa.Float(53)),
        sa.Column("revoked_at", sa.Float(53)),
        sa.Column("last_used_at", sa.Float(53)),
    )
    op.create_index("tokens_of_tenant", "tokens", ["tenant", "created_at", "id"])
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("actor", sa.String(200), nullable=False),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("object", sa.String(200), nullable=False),
        sa.Column("outcome", sa.String(64), nullable=False),
    )
    op.create_index("audit_log_of_tenant", "audit_log", ["tenant", "id"])
    op.create_index("audit_log_by_age", "audit_log", ["at"])
