"""Traces: the span of the request that made a job, under which its attempts stand."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
oldest_program = "0003"


def upgrade() -> None:
    """Add the column."""
    op.add_column("jobs", sa.Column("traceparent", sa.String(55)))
