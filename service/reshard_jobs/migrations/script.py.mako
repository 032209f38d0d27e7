"""${message}."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
oldest_program = ${repr(down_revision)}


def upgrade() -> None:
    """Add ..."""
    ${upgrades if upgrades else "pass"}
