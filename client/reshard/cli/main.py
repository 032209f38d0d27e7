"""The `reshard` command. It writes data to stdout and everything else to stderr, and ends with an `ExitCode`."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Container, Sequence
from typing import Any

import typer

from reshard.cli import admin, drop_in, ensuring, local, remote, steps
from reshard.cli.help_pages import Commands, complain
from reshard.cli.job_tables import DetachedError
from reshard.errors import SEE_HELP, ExitCode, JobError, RequestError, ReshardError, exhaustion_of, printable

app = Commands(
    name="reshard",
    help="Rewrite training checkpoints for another number of GPUs or another framework, bit for bit.",
    no_args_is_help=False,
    add_completion=True,
    pretty_exceptions_enable=False,
)
local.register(app)
local.register_diff(app)
local.register_fingerprint(app)
local.register_seal(app)
ensuring.register(app)
local.register_mount(app)
drop_in.register(app)
drop_in.register_merging(app)
steps.register_slim(app)
steps.register_clean(app)
steps.register(app)
local.register_doctor(app)
remote.register(app)
admin.register_webhooks(app)
admin.register(app)
remote.register_database(app)

# Newer versions of typer contain a copy of click, older ones import click; this finds the base class in both.
_UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

_THREE_LINES = """\
reshard inspect CHECKPOINT                                   what is it?
reshard ensure CHECKPOINT --dp N                             resume on N GPUs: prints the path to load
reshard convert CHECKPOINT DST --to safetensors --dtype bf16 consolidated weights
"""


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    *,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from importlib.metadata import version as installed

        sys.stdout.write(f"reshard {installed('reshard')}\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        sys.stdout.write(_THREE_LINES)
        sys.stderr.write("all commands: reshard --help\n")


def _with_default_command(arguments: Sequence[str], names: Container[str]) -> list[str]:
    """`reshard PATH` means `inspect PATH`, `reshard help plan` means `plan --help`, `reshard version` `--version`."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in names:
        if arguments[0] == "help":
            return [*arguments[1:], "--help"]
        if arguments[0] == "version" and len(arguments) == 1:
            return ["--version"]
        looks_like_path = any(mark in arguments[0] for mark in ("/", ".", "\\"))
        if looks_like_path or not arguments[0].isidentifier() or os.path.exists(arguments[0]):
            return ["inspect", *arguments]
    return list(arguments)


def report(error: ReshardError, *, as_json: bool) -> int:
    """Print an error as text or as JSON; returns its exit code."""
    if as_json:
        sys.stdout.write(json.dumps({"schema_version": 1, "error": error.to_problem()}) + "\n")
    complain(error.code, error.message, error.fix)
    return int(error.exit_code)


_OF_JOBS = ("submit", "jobs")
"""The commands that speak of a service's jobs."""


def _interrupted(arguments: Sequence[str]) -> JobError:
    more = "; a job that was submitted goes on: reshard jobs list" if arguments[0] in _OF_JOBS else ""
    return JobError("job.cancelled", "this command was interrupted", fix=f"run the same command again{more}")


def _help_hint(arguments: Sequence[str]) -> str:
    """The fix that names the help of the command in the arguments, or of its nearest parent."""
    named: list[str] = []
    group: Any = typer.main.get_command(app)
    for word in _with_default_command(arguments, getattr(group, "commands", {})):
        group = getattr(group, "commands", {}).get(word)
        if group is None:
            break
        named.append(word)
    return " ".join(["reshard", *named, "--help"])


def _for_newest(arguments: Sequence[str], error: ReshardError) -> str:
    """The command again, with the newest complete checkpoint in the place of its run."""
    run, newest = (str(error.details[name]) for name in ("source", "newest"))
    words = [newest if _is_place(word, run) else word for word in arguments]
    return error.fix if words == list(arguments) else shlex.join(["reshard", *words])


def _is_place(word: str, url: str) -> bool:
    path = os.path.expanduser(word)
    return word.rstrip("/") == url or os.path.abspath(path) == url or os.path.realpath(path) == url


_LIBRARY_WORDS = (
    (re.compile(r"\bValue error, "), ""),
    (re.compile(r"Input should be greater than or equal to (\S+)"), r"it is at least \1"),
    (re.compile(r"Input should be less than or equal to (\S+)"), r"it is at most \1"),
    (re.compile(r"Input should be a valid integer.*"), "it is a whole number"),
    (re.compile(r"Input should be a valid number.*"), "it is a number"),
    (re.compile(r"\s+"), " "),
)


def _in_our_words(text: str) -> str:
    """A message of click, on one line and reworded for users."""
    for found, put in _LIBRARY_WORDS:
        text = found.sub(put, text)
    return text.strip()


def run(arguments: Sequence[str]) -> int:
    """Run the command line; returns an `ExitCode`, also after an unexpected exception."""
    as_json = "--json" in arguments
    try:
        return _run(arguments, as_json=as_json)
    except BrokenPipeError:
        # The reader of our output has closed its end: `reshard inspect X | head`.
        sys.stderr.close()
        return int(ExitCode.FAILED)
    except Exception as error:  # noqa: BLE001 - the outermost net: a bug too must end as an error that scripts can read
        if os.environ.get("RESHARD_TRACEBACK") == "1":
            traceback.print_exc()
        if (exhausted := exhaustion_of(error)) is not None:
            return report(exhausted, as_json=as_json)
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        fix = "run it again with RESHARD_TRACEBACK=1 and report the output"
        return report(JobError("internal.error", printable(what), fix=fix), as_json=as_json)


def _run(arguments: Sequence[str], *, as_json: bool) -> int:
    try:
        # The command is built once: calling the app builds every command again, 25 ms each time.
        command = typer.main.get_command(app)
        known = _with_default_command(arguments, getattr(command, "commands", {}))
        outcome = command(args=known, standalone_mode=False, prog_name="reshard")
    except ReshardError as error:
        if error.fix == SEE_HELP:
            error.fix = _help_hint(arguments)
        elif error.code == "request.run_directory":
            error.fix = _for_newest(arguments, error)
        return report(error, as_json=as_json)
    except DetachedError as error:
        return int(error.exit_code)
    except typer.Exit as error:
        return error.exit_code
    except _UsageProblem as error:
        text = getattr(error, "format_message", error.__str__)()
        return report(RequestError("request.invalid", _in_our_words(text), fix=_help_hint(arguments)), as_json=as_json)
    except (typer.Abort, KeyboardInterrupt):
        return report(_interrupted(arguments), as_json=as_json)
    if outcome == ExitCode.INTERRUPTED:
        # Newer versions of typer turn a KeyboardInterrupt into this status themselves.
        return report(_interrupted(arguments), as_json=as_json)
    return outcome if isinstance(outcome, int) else int(ExitCode.OK)


def main() -> None:
    """Entry point of the console script."""
    # numpy starts one BLAS thread per core, and each spins for a while. No command multiplies matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
