"""Tenants: their settings, their tokens, the audit log, and the tenant of each job and idempotency key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from reshard_jobs.tables import db_now

revision = "0006"
down_revision = "0005"
# They do not know of tenants: none is made before the last of them has ended.
oldest_program = "0003"


def upgrade() -> None:
    """Add tables and columns. All that there is belongs to the operator's tenant."""
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
    op.add_column("jobs", sa.Column("tenant", sa.String(64), nullable=False, server_default="default"))
    op.add_column("jobs", sa.Column("given_id", sa.String(40)))
    op.add_column("jobs", sa.Column("planned_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_index("jobs_by_public_id", "jobs", ["tenant", sa.text("coalesce(given_id, id)")], unique=True)
    op.create_index("jobs_of_tenant", "jobs", ["tenant", "created_at", "id"])
    op.create_index("jobs_of_tenant_by_state", "jobs", ["state", "tenant", "created_at"])
    present = sa.text("left_at IS NULL")
    op.create_index("job_workers_present", "job_workers", ["job_id"], sqlite_where=present, postgresql_where=present)
    if op.get_context().dialect.name == "sqlite":
        _make_keys_anew()
    else:
        op.add_column("idempotency_keys", sa.Column("tenant", sa.String(64), nullable=False, server_default="default"))
        op.drop_constraint("idempotency_keys_pkey", "idempotency_keys", type_="primary")
        op.create_primary_key("idempotency_keys_pkey", "idempotency_keys", ["tenant", "key"])


def _make_keys_anew() -> None:
    """Give the keys another primary key. SQLite cannot change the one of a table."""
    op.drop_index("idempotency_keys_by_job", "idempotency_keys")
    op.rename_table("idempotency_keys", "old_idempotency_keys")
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant", sa.String(64), primary_key=True, server_default="default"),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("held_until", sa.Float(53), nullable=False),
        sa.Column("job_id", sa.String(40), sa.ForeignKey("jobs.id", ondelete="CASCADE")),
    )
    columns = "key, fingerprint, holder, held_until, job_id"
    op.execute(f"INSERT INTO idempotency_keys ({columns}) SELECT {columns} FROM old_idempotency_keys")  # noqa: S608
    op.drop_table("old_idempotency_keys")
    op.create_index("idempotency_keys_by_job", "idempotency_keys", ["job_id"])
