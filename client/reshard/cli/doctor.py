"""`reshard doctor`: checks this machine, its credentials and its service before a conversion needs them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from reshard.cli.colours import Style, painted_on_stdout
from reshard.cli.help_pages import HERE, SOURCE
from reshard.cli.local import JsonFlag
from reshard.errors import CODES, ExitCode, ReshardError

if TYPE_CHECKING:
    from reshard.checkups import Finding


def register(app: typer.Typer) -> None:
    """Mount the command."""
    app.command(rich_help_panel=HERE)(doctor)


def doctor(
    places: Annotated[
        list[str] | None,
        typer.Argument(metavar="PLACE...", help="Directories or URLs to look at, too: can they be read, written?"),
    ] = None,
    *,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Storage profile for the places.", rich_help_panel=SOURCE)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check Python, settings, space, credentials, service and GPU; each line says ok, warn or fail, and what to do.

    The exit code is 0 if nothing fails, else the one that a command would end with. It changes nothing.
    """
    found: list[Finding] = []
    for finding in _findings(places or [], profile):
        found.append(finding)
        if not as_json:
            _show(finding)
    failed = [finding for finding in found if finding.health == "fail"]
    if as_json:
        rows = [{n: getattr(f, n) for n in ("subject", "health", "text", "fix", "code")} for f in found]
        sys.stdout.write(json.dumps({"schema_version": 1, "ok": not failed, "findings": rows}) + "\n")
    if failed:
        code = failed[0].code
        raise typer.Exit(int(CODES[code].exit_code if code in CODES else ExitCode.FAILED))


def _findings(places: list[str], profile: str | None) -> Iterator[Finding]:
    from reshard import checkups
    from reshard.local import load_engine

    yield from checkups.machine()
    yield checkups.environment(os.environ)
    yield checkups.service(os.environ)
    try:
        engine = load_engine()
    except ReshardError as error:
        yield checkups.Finding.of_error("engine", error)
        return
    yield from engine.checkup(tuple(places), profile)


_STYLES = {"ok": Style.GOOD, "warn": Style.WARNING, "fail": Style.ERROR}


def _show(finding: Finding) -> None:
    word = painted_on_stdout(f"{finding.health.value:<5}", _STYLES[finding.health.value])
    sys.stdout.write(f"{word} {finding.subject:<12} {finding.text}\n")
    if finding.fix:
        sys.stdout.write(f"{'':<18} fix: {finding.fix}\n")
    sys.stdout.flush()
