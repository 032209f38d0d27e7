"""One job on many workers: priorities, helpers and their reports."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
oldest_program = "0002"


def upgrade() -> None:
    """Add the columns and the table of a job's workers."""
    op.add_column("jobs", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("max_workers", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("takes_workers", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("job_events", sa.Column("worker", sa.Text()))
    op.create_table(
        "job_workers",
        sa.Column("job_id", sa.String(40), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
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
