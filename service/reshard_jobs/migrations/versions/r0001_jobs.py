"""Jobs, their labels, events and idempotency keys: the tables of release 0.1.0."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
oldest_program = "0001"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "reshard_meta",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("value", sa.Text(), nullable=False),
    )
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
    )
    op.create_index("jobs_by_age", "jobs", ["created_at", "id"])
    op.create_index("jobs_by_state", "jobs", ["state", "created_at"])
    op.create_index("jobs_by_target", "jobs", ["target"])
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(40), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("value", sa.String(512), nullable=False),
    )
    op.create_index("job_labels_by_value", "job_labels", ["name", "value"])
    op.create_table(
        "job_events",
        sa.Column("job_id", sa.String(40), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("seq", sa.Integer(), primary_key=True),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("progress", sa.Text()),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("held_until", sa.Float(53), nullable=False),
        sa.Column("job_id", sa.String(40), sa.ForeignKey("jobs.id", ondelete="CASCADE")),
    )
