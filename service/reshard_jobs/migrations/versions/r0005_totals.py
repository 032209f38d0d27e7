"""Numbers for operators: totals that outlive jobs, and the memory of engines."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
oldest_program = "0003"


def upgrade() -> None:
    """Add the table and the column."""
    op.create_table(
        "totals",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("label", sa.String(64), primary_key=True),
        sa.Column("value", sa.BigInteger(), nullable=False),
    )
    op.add_column("workers", sa.Column("engine_peak_bytes", sa.BigInteger(), nullable=False, server_default="0"))
