"""`reshard db`: shows the revision of the job database and upgrades it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from typing import Literal

from sqlalchemy.exc import OperationalError

from reshard.errors import JobError, RequestError
from reshard_jobs.database import (
    HEAD,
    URL_FIX,
    Database,
    Standing,
    engine_of,
    for_reading,
    revisions,
    standing_of,
    upgrade_sql,
)
from reshard_jobs.settings import JobSettings


def db(action: Literal["upgrade", "current", "history"], *, sql: bool = False, as_json: bool = False) -> None:
    """Upgrade the job database, or print its revision or all revisions.

    Args:
        action: What to do.
        sql: True to print the statements of the upgrade instead of running them.
        as_json: True for one JSON object.

    Raises:
        RequestError: `RESHARD_DATABASE_URL` is not set.
        JobError: The database does not answer, or is not usable.
    """
    if action == "history":
        _say_history(as_json=as_json)
        return
    if not os.environ.get("RESHARD_DATABASE_URL"):
        raise RequestError(
            "request.invalid",
            "RESHARD_DATABASE_URL is not set",
            fix="export RESHARD_DATABASE_URL=postgresql://..., as for the service; "
            "the SQLite file of `reshard serve` is sqlite:////path/of/data-dir/jobs.db",
        )
    url = JobSettings.from_env().database_url
    if action == "upgrade" and not sql:
        with closing(Database(url, upgrade=True)) as database:
            before = database.found
        done = "it has it already" if before.usable else f"it had {before.revision or 'no tables'}"
        _say(f"the job database has revision {max(HEAD, before.revision or '')}: {done}", before, as_json=as_json)
        return
    engine = engine_of(url)
    try:
        if sql:
            sys.stdout.write(upgrade_sql(engine))
            return
        with for_reading(engine).begin() as connection:
            found = standing_of(connection)
    except OperationalError as error:
        raise JobError("service.unavailable", "the job database cannot be opened", fix=URL_FIX) from error
    finally:
        engine.dispose()
    usable = "it may run on it" if found.usable else "it may not run on it"
    _say(
        f"the job database has {f'revision {found.revision}' if found.revision else 'no tables'}; "
        f"this program needs {HEAD}: {usable}",
        found,
        as_json=as_json,
    )


def _say(text: str, found: Standing, *, as_json: bool) -> None:
    if as_json:
        facts = {"database": found.revision, "program": HEAD, "oldest_program": found.oldest, "usable": found.usable}
        text = json.dumps({"schema_version": 1, **facts})
    sys.stdout.write(f"{text}\n")


def _say_history(*, as_json: bool) -> None:
    found = [{"revision": number, "oldest_program": oldest, "text": text} for number, oldest, text in revisions()]
    if as_json:
        sys.stdout.write(json.dumps({"schema_version": 1, "revisions": found}) + "\n")
        return
    for line in found:
        sys.stdout.write(f"{line['revision']}  (programs from {line['oldest_program']} on)  {line['text']}\n")
