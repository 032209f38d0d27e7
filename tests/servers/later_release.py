"""A made-up next release: the service that this process imports, with one more revision of the job database."""

from __future__ import annotations

import shutil
from pathlib import Path

from reshard_jobs.database import HEAD, MIGRATIONS

LATER = f"{int(HEAD) + 1:04}"
"""The revision of the next release."""
ADDED = ["jobs_by_later", "later", "later_still", "later_things"]
"""What this revision adds, by name."""
_REVISION = f'''"""What a revision may add: columns, a column that is filled, an index, a table."""

import sqlalchemy as sa
from alembic import op

revision = "{LATER}"
down_revision = "{HEAD}"
oldest_program = "{HEAD}"


def upgrade() -> None:
    """Add them."""
    op.add_column("jobs", sa.Column("later", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("later_still", sa.Text()))
    op.execute("UPDATE jobs SET later_still = target")
    op.create_index("jobs_by_later", "jobs", ["later"])
    op.create_table(
        "later_things",
        sa.Column("job_id", sa.String(40), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    )
'''


def later_service(directory: Path) -> Path:
    """Write the next release's `service` folder below a directory; returns the folder.

    It goes into the `PYTHONPATH` of processes of the next release; client and worker stay those of this checkout.
    """
    made = directory / "service"
    shutil.copytree(MIGRATIONS.parent.parent, made, ignore=shutil.ignore_patterns("__pycache__"))
    jobs = made / "reshard_jobs"
    (jobs / "migrations" / "versions" / f"r{LATER}_later.py").write_text(_REVISION)
    schema = jobs / "database.py"
    before, after = f'HEAD = "{HEAD}"', f'HEAD = "{LATER}"'
    text = schema.read_text()
    assert text.count(before) == 1
    schema.write_text(text.replace(before, after))
    return made
