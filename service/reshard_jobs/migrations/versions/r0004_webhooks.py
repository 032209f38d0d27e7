"""Webhooks: endpoints and an outbox. Workers of the release before write nothing into it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
oldest_program = "0003"


def upgrade() -> None:
    """Add the tables."""
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
