"""The environment in which Alembic runs revisions: within the transaction of `reshard_jobs.database`, or as SQL text.

`alembic revision --autogenerate` of a contributor has no such transaction: it opens `RESHARD_DATABASE_URL`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from alembic import context
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, delete, insert

from reshard_jobs.database import OLDEST_FACT, VERSION_TABLE, engine_of
from reshard_jobs.settings import JobSettings
from reshard_jobs.tables import MetaRow, TenantRow

# Modules whose tables are a part of the metadata.
for _tables in ("reshard_jobs.tables",):
    import_module(_tables)


def _is_ours(_item: object, name: str | None, kind: str, *_more: object) -> bool:
    """True for tables of ours: others may share the database."""
    return kind != "table" or name in TenantRow.metadata.tables


def _run(**target: Any) -> None:
    context.configure(
        target_metadata=TenantRow.metadata,
        version_table=VERSION_TABLE,
        include_object=_is_ours,
        compare_server_default=True,
        **target,
    )
    with context.begin_transaction():
        context.run_migrations()
        if context.config.attributes.get("upgrades"):
            _record_oldest_program()


def _record_oldest_program() -> None:
    """Record the oldest revision whose programs may run."""
    script = ScriptDirectory.from_config(context.config)
    oldest = max(int(found.module.oldest_program) for found in script.walk_revisions())
    context.execute(delete(MetaRow).where(MetaRow.name == OLDEST_FACT))
    context.execute(insert(MetaRow).values(name=OLDEST_FACT, value=str(oldest)))


def _main() -> None:
    connection: Connection | None = context.config.attributes.get("connection")
    if context.is_offline_mode():
        _run(dialect_name=context.config.attributes["dialect"], literal_binds=True)
    elif connection is not None:
        _run(connection=connection)
    else:
        engine = engine_of(JobSettings.from_env().database_url)
        with engine.begin() as opened:
            _run(connection=opened)


_main()
