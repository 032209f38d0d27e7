"""The life of what jobs leave: retries, discards, plans of attempts; live workers and what they refused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
oldest_program = "0003"


def upgrade() -> None:
    """Add the columns and tables. Plans of attempts that began before are recorded as unknown."""
    op.add_column("jobs", sa.Column("retries", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("discard_at", sa.Float(53)))
    op.add_column("jobs", sa.Column("discard_asked", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("discard_tries", sa.Integer(), nullable=False, server_default="0"))
    op.create_index("jobs_by_discard", "jobs", ["discard_at"])
    op.create_index("idempotency_keys_by_job", "idempotency_keys", ["job_id"])
    op.create_table(
        "job_plans",
        sa.Column("job_id", sa.String(40), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("digest", sa.String(128), primary_key=True),
    )
    op.create_table(
        "job_refusals",
        sa.Column("job_id", sa.String(40), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("worker", sa.String(200), primary_key=True),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
    )
    op.create_index("job_refusals_by_worker", "job_refusals", ["worker", "at"])
    op.create_table(
        "workers",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("started_at", sa.Float(53), nullable=False),
        sa.Column("seen_at", sa.Float(53), nullable=False),
        sa.Column("good_at", sa.Float(53), nullable=False),
        sa.Column("quarantined_until", sa.Float(53), nullable=False),
        sa.Column("quarantines", sa.Integer(), nullable=False),
        sa.Column("problem", sa.Text()),
    )
    op.create_index("workers_by_seen", "workers", ["seen_at"])
    op.execute(
        "INSERT INTO job_plans (job_id, digest) SELECT id, '*' FROM jobs "
        "WHERE attempt > 0 AND kind = 'convert' AND state NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')"
    )
