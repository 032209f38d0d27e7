"""Time that passes in a job database without a test that waits."""

from __future__ import annotations

from sqlalchemy import Float, select, update

from reshard_jobs.database import Database
from reshard_jobs.queue.reaper import _SWEPT_AT
from reshard_jobs.tables import Base, MetaRow


def let_pass(database: Database, seconds: float, *, swept: bool = True) -> None:
    """Make everything that a database has recorded older.

    Args:
        database: The job database.
        seconds: By how much.
        swept: True if reapers went on sweeping meanwhile. Else the last sweep becomes older too, as in an outage.
    """
    with database.write() as session:
        for table in Base.metadata.sorted_tables:
            # 0 is not a time: "never" or "at once".
            for column in (c for c in table.columns if isinstance(c.type, Float)):
                session.execute(update(table).where(column > 0).values({column.name: column - seconds}))
        row = session.scalars(select(MetaRow).where(MetaRow.name == _SWEPT_AT)).one_or_none()
        if row is not None and not swept:
            row.value = repr(float(row.value) - seconds)
