"""The commands that use a service (`submit`, `jobs`) and those that start or upgrade one (`serve`, `worker`, `db`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reshard.choices import JobKind, JobState
from reshard.cli import job_tables
from reshard.cli.flags import ConversionFlags, PlannedCommand, choice, takes_conversion
from reshard.cli.help_pages import GENERAL, JOB, OPERATION, REMOTE, Commands, hint, say, say_all
from reshard.cli.job_tables import follow, log_line, whole_id
from reshard.cli.local import JsonFlag, PlanFlag, QuietFlag, asked, planning_again, show_plan
from reshard.cli.output import next_steps
from reshard.engine import load_client
from reshard.errors import RequestError, printable
from reshard.extras import install_line

if TYPE_CHECKING:
    from reshard.api.client import Client
    from reshard.models.jobs import Job, JobEvent


ENTRY_POINT_GROUP = "reshard.commands"

jobs = Commands(help="Jobs of a service (RESHARD_URL, RESHARD_TOKEN).", no_args_is_help=True)

WaitTimeout = Annotated[
    float | None,
    typer.Option(
        "--wait-timeout",
        metavar="SECONDS",
        min=0,
        help="Seconds to wait; then exit code 124.",
        rich_help_panel=JOB,
    ),
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Wait until the job ends; the exit code is the job's.", rich_help_panel=JOB)
]
JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id, or a beginning that no other job has.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the app."""
    app.command(cls=PlannedCommand, rich_help_panel=REMOTE)(submit)
    app.add_typer(jobs, name="jobs", rich_help_panel=REMOTE)
    app.command(rich_help_panel=OPERATION)(serve)
    app.command(rich_help_panel=OPERATION)(worker)
    app.command(rich_help_panel=OPERATION)(gc)


def _client() -> Client:
    return load_client()()


@takes_conversion
def submit(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint to read.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Target to create.")],
    *,
    flags: ConversionFlags,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A label; may be repeated.", rich_help_panel=JOB),
    ] = None,
    max_attempts: Annotated[
        int, typer.Option(min=1, max=20, help="Attempts before the job fails.", rich_help_panel=JOB)
    ] = 3,
    max_workers: Annotated[
        int,
        typer.Option(
            min=0,
            max=1024,
            help="Workers that may run it at once; 0 is the service's default.",
            rich_help_panel=JOB,
        ),
    ] = 0,
    priority: Annotated[
        int, typer.Option(min=-100, max=100, help="Jobs with a higher one begin first.", rich_help_panel=JOB)
    ] = 0,
    idempotency_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Submitting with the same key again finds the same job.", rich_help_panel=JOB),
    ] = None,
    job_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="Id of the job; submitting with the same id again finds the same job.",
            rich_help_panel=JOB,
        ),
    ] = None,
    wait: Wait = False,
    wait_timeout: WaitTimeout = None,
    plan: PlanFlag = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --dry-run: save the plan, for `submit --plan`.", rich_help_panel=GENERAL
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only show the service's plan; submit nothing.", rich_help_panel=GENERAL),
    ] = False,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Submit a conversion to a service. Prints the id of the job or, with --wait, the target."""
    if out is not None and not dry_run:
        raise RequestError("request.invalid", "--out saves a plan, and this submits it", fix="add --dry-run")
    request = asked(flags, context, plan, _absolute(source), _absolute(target), quiet=quiet)
    with planning_again(plan), _client() as client:
        if dry_run:
            show_plan(client.plan_request(request), as_json=as_json, saved=(request, out))
            return
        job = client.submit_request(
            request,
            labels=parse_labels(label or []),
            max_attempts=max_attempts,
            max_workers=max_workers,
            priority=priority,
            idempotency_key=idempotency_key,
            job_id=job_id,
        )
        if not wait and wait_timeout is None:
            say(job.model_dump_json() if as_json else job.id)
            hint(f"watch it: reshard jobs watch {job.id}", quiet=quiet)
            return
        hint(f"job {job.id}", quiet=quiet)
        job = _follow(client, job.id, timeout_s=wait_timeout, quiet=quiet)
    _say_end(job, as_json=as_json, quiet=quiet)


@jobs.command("list")
def list_jobs(
    *,
    state: Annotated[list[JobState] | None, choice(JobState, help="Only jobs in this state; may be repeated.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only jobs with the label; may be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most this many jobs, newest first.")] = 50,
    as_json: JsonFlag = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Ids only.", rich_help_panel=GENERAL)] = False,
) -> None:
    """List jobs, newest first."""
    found: list[Job] = []
    token = ""
    with _client() as client:
        while len(found) < limit:
            size = min(200, limit - len(found))
            labels = parse_labels(label or [])
            page = client.list(states=tuple(state or ()), labels=labels, page_size=size, page_token=token)
            found.extend(page.jobs)
            token = page.next_page_token
            if not token:
                break
    if as_json:
        say_all("jobs", found)
        return
    say(*((job.id for job in found) if quiet else job_tables.table(found)))


@jobs.command()
def show(job_id: JobId, *, as_json: JsonFlag = False) -> None:
    """Show one job."""
    with _client() as client:
        job = client.get(whole_id(client, job_id))
    say(*([job.model_dump_json()] if as_json else job_tables.facts(job)))


@jobs.command()
def watch(
    job_id: JobId, *, wait_timeout: WaitTimeout = None, as_json: JsonFlag = False, quiet: QuietFlag = False
) -> None:
    """Follow a job until it ends; the exit code is the job's. Ctrl-C leaves the job running."""
    with _client() as client:
        job = _follow(client, whole_id(client, job_id), timeout_s=wait_timeout, quiet=quiet, as_json=as_json)
    if as_json:
        return
    if job.kind is JobKind.CONVERT:
        _say_end(job, as_json=False, quiet=quiet)
    else:
        hint(job_tables.outcome(job), quiet=quiet)


@jobs.command()
def wait(
    job_id: JobId, *, wait_timeout: WaitTimeout = None, as_json: JsonFlag = False, quiet: QuietFlag = False
) -> None:
    """Wait until a job ends, without its progress; the exit code is the job's. Ctrl-C leaves the job running."""
    with _client() as client:
        job = _follow(client, whole_id(client, job_id), timeout_s=wait_timeout, quiet=True)
    _say_end(job, as_json=as_json, quiet=quiet)


@jobs.command()
def logs(
    job_id: JobId,
    *,
    follow_on: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the events of a job: states, progress, and workers that joined or left. With -f it follows the job."""
    with _client() as client:
        whole = whole_id(client, job_id)
        for event in client.watch(whole) if follow_on else client.events(whole):
            say(event.model_dump_json() if as_json else log_line(event))


@jobs.command()
def cancel(job_id: JobId, *, as_json: JsonFlag = False) -> None:
    """Cancel a job and remove its unfinished output, also that of a FAILED one. Cancelling twice is harmless."""
    with _client() as client:
        job = client.cancel(whole_id(client, job_id))
    say(job.model_dump_json() if as_json else f"{job.id} {job.state.value}")


@jobs.command()
def retry(
    job_id: JobId,
    *,
    wait: Wait = False,
    wait_timeout: WaitTimeout = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Send a FAILED job back to the queue. It goes on where it stopped, unless its files are removed already."""
    with _client() as client:
        job = client.retry(whole_id(client, job_id))
        if not wait and wait_timeout is None:
            say(job.model_dump_json() if as_json else f"{job.id} {job.state.value}")
            return
        job = _follow(client, job.id, timeout_s=wait_timeout, quiet=quiet)
    _say_end(job, as_json=as_json, quiet=quiet)


@jobs.command()
def workers(*, as_json: JsonFlag = False) -> None:
    """List the live workers: what each does, and which are in quarantine because jobs fail there."""
    with _client() as client:
        found = client.workers()
    if as_json:
        say_all("workers", found)
        return
    say(*job_tables.nodes(found))


def serve(
    *,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address; one that is not loopback needs RESHARD_TOKEN and RESHARD_ROOTS."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    data_dir: Annotated[Path, typer.Option(metavar="DIR", help="Directory of the job database.")] = Path(
        "reshard-data"
    ),
    log_level: Annotated[
        str, typer.Option(metavar="LEVEL", help="Log level: critical, error, warning, info or debug.")
    ] = "info",
) -> None:
    """Serve the API and, unless RESHARD_BROKER_URL is set, run the jobs, too. Needs no other service."""
    load_command("serve", extra="service,worker")(host=host, port=port, data_dir=data_dir, log_level=log_level)


def worker(
    *,
    gpu: Annotated[
        str | None, typer.Option(metavar="INDEX", help="The GPU of this worker (CUDA_VISIBLE_DEVICES).")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name; must differ between the workers of one host.")
    ] = None,
    log_level: Annotated[str, typer.Option(metavar="LEVEL", help="Celery's log level.")] = "INFO",
) -> None:
    """Run one Celery worker: one job at a time, one worker per GPU. Needs RESHARD_BROKER_URL."""
    load_command("worker", extra="worker")(gpu=gpu, name=name, log_level=log_level)


def gc(
    *,
    now: Annotated[bool, typer.Option("--now", help="Also of jobs that could still be retried.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the jobs.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove what ended jobs left beside their targets, and old records. Needs the settings of a worker."""
    load_command("gc", extra="worker")(now=now, dry_run=dry_run, as_json=as_json)


def load_command(name: str, *, extra: str) -> Callable[..., None]:
    """Load a command of another package of reshard by its entry point.

    Raises:
        RequestError: `request.engine_missing`: its dependencies are not installed.
    """
    # Imported here, because reading the metadata of packages takes longer than the start of a plain command.
    from importlib.metadata import entry_points

    found = tuple(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        raise RequestError("request.engine_missing", f"`reshard {name}` is not installed", fix=install_line(extra))
    try:
        return found[0].load()
    except ModuleNotFoundError as error:
        message = f"`reshard {name}` needs {error.name!r}, which is not installed"
        raise RequestError("request.engine_missing", message, fix=install_line(extra)) from None


def parse_labels(texts: list[str]) -> dict[str, str]:
    """Parse labels of the form `name=value`.

    Raises:
        RequestError: `request.invalid`.
    """
    labels: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise RequestError(
                "request.invalid", f"the label {printable(text)!r} is not name=value", fix="--label team=x"
            )
        labels[name] = value
    return labels


def _absolute(url: str) -> str:
    """A local path as an absolute one: the service may have another working directory and home directory.

    A command with --plan has no places of its own, and gets what it gave.
    """
    return url if not url or "://" in url else os.path.abspath(os.path.expanduser(url))


def _follow(client: Client, job_id: str, *, timeout_s: float | None, quiet: bool, as_json: bool = False) -> Job:
    return follow(client, job_id, timeout_s=timeout_s, quiet=quiet, on_event=_say_event if as_json else None)


def _say_end(job: Job, *, as_json: bool, quiet: bool) -> None:
    """Print how a job has ended, the next step, and the target."""
    hint(job_tables.outcome(job), quiet=quiet)
    if job.result is not None:
        for line in next_steps(job.result.to, job.result.target, (file.path for file in job.result.files)):
            hint(f"next: {line}", quiet=quiet)
    say(job.model_dump_json() if as_json else job.request.target)


def _say_event(event: JobEvent) -> None:
    say(event.model_dump_json())


# `reshard db`: the job database of a service, for its operator.

db = Commands(help="The job database of a service (RESHARD_DATABASE_URL), for its operator.", no_args_is_help=True)
_EXTRA = "service,postgres"


def register_database(app: typer.Typer) -> None:
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
