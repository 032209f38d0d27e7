"""Virtual layouts: targets whose files the API serves from the source."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
oldest_program = "0001"


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "layouts",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("tenant", sa.String(64), nullable=False, server_default="default"),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("content_digest", sa.String(128), nullable=False),
        sa.Column("source_digest", sa.String(128), nullable=False),
        sa.Column("files", sa.Integer(), nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
    )
    op.create_index("layouts_of_tenant", "layouts", ["tenant", "created_at", "id"])
    op.create_index("layouts_by_expiry", "layouts", ["expires_at"])
    op.create_table(
        "layout_files",
        sa.Column("layout_id", sa.String(40), sa.ForeignKey("layouts.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
    )
