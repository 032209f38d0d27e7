"""Lists of jobs: the source of each job, a short form of its result, and whether somebody has planned it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
oldest_program = "0003"

_SHORT_CHARS = 4000
"""Results up to this length are their own short form."""


def upgrade() -> None:
    """Add columns, and fill them in one pass over the rows that there are."""
    op.add_column("jobs", sa.Column("checked", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("source", sa.Text()))
    op.add_column("jobs", sa.Column("brief", sa.Text()))
    sqlite = op.get_context().dialect.name == "sqlite"
    source = "json_extract(request, '$.source.url')" if sqlite else "request::json -> 'source' ->> 'url'"
    op.execute(
        f"UPDATE jobs SET source = {source}, "  # noqa: S608 - constants
        "checked = CASE WHEN planned_bytes > 0 OR plan_digest IS NOT NULL THEN 1 ELSE 0 END, "
        f"brief = CASE WHEN length(result) <= {_SHORT_CHARS} THEN result END"
    )
    op.create_index("jobs_by_source", "jobs", ["tenant", sa.text("substr(source, 1, 250)")])
