"""`reshard db`: the job database of a service, for its operator."""

from __future__ import annotations

from typing import Annotated

import typer

from reshard.cli.help_pages import OPERATION, Commands
from reshard.cli.local import JsonFlag
from reshard.cli.remote import load_command

db = Commands(help="The job database of a service (RESHARD_DATABASE_URL), for its operator.", no_args_is_help=True)
_EXTRA = "service,postgres"


def register(app: typer.Typer) -> None:
    """Mount the group of commands."""
    app.add_typer(db, name="db", rich_help_panel=OPERATION)


@db.command()
def upgrade(
    *,
    sql: Annotated[bool, typer.Option("--sql", help="Print the statements instead of running them.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Upgrade the job database to the revision that this release needs. Workers and API go on meanwhile."""
    load_command("db", extra=_EXTRA)("upgrade", sql=sql, as_json=as_json)


@db.command()
def current(*, as_json: JsonFlag = False) -> None:
    """Print the revision of the job database, and the one that this release needs."""
    load_command("db", extra=_EXTRA)("current", as_json=as_json)


@db.command()
def history(*, as_json: JsonFlag = False) -> None:
    """List the revisions that this release knows."""
    load_command("db", extra=_EXTRA)("history", as_json=as_json)
