"""What operators see: totals that outlive jobs, the memory of engines, and the trace to which a job belongs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
oldest_program = "0003"


def upgrade() -> None:
    """Add the table and the columns."""
    op.create_table(
        "totals",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("label", sa.String(64), primary_key=True),
        sa.Column("value", sa.BigInteger(), nullable=False),
    )
    op.add_column("jobs", sa.Column("traceparent", sa.String(64)))
    op.add_column("workers", sa.Column("engine_peak_bytes", sa.BigInteger(), nullable=False, server_default="0"))
