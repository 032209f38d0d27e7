"""The Celery driver: `celery -A reshard_worker.app worker ...`, one worker process per GPU.

The broker is a doorbell. A message says that there is work; which jobs there are, who owns them and how they ended is
in the job database. Whoever takes a message claims the next job. A lost message is rung again by the reaper, one too
many finds nothing to claim.
"""
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

# Each pool process imports this module before it may say that it runs: what only jobs need is imported by the first.
from __future__ import annotations

import logging
import os
import signal
from functools import cache
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery.signals import worker_init, worker_process_init, worker_ready, worker_shutdown

from reshard_jobs.doorbell import DOORBELL_QUEUE, DOORBELL_TASK, ring
from reshard_worker.lifetime import die_with_parent

if TYPE_CHECKING:
    from reshard_jobs.leases import Leases
    from reshard_worker.reaping import ReaperThread
    from reshard_worker.supervisor import Supervisor

logger = logging.getLogger(__name__)

_PROCESS_START_S = 300.0
"""How long a pool process that follows another one may take to start. Celery allows 4 s, then kills it and starts the
next: on a slow host no process ever gets to work."""
_PROCESS_KIB = 512 << 10
"""A pool process that has grown beyond this is replaced after its job. Not after a number of messages: a message may
find nothing to do, and a process that only supervises engine processes needs no replacement for that."""

app = Celery("reshard", broker=os.environ.get("RESHARD_BROKER_URL") or None)
app.conf.update(
    # Early acknowledgement: the lease, not the broker, knows that a job was lost.
    task_acks_late=False,
    worker_prefetch_multiplier=1,
    worker_disable_prefetch=True,
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    task_default_queue=DOORBELL_QUEUE,
    broker_connection_retry_on_startup=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    # A forked child cannot use CUDA; and SQL connections must not be shared over a fork.
    worker_pool_start_method="spawn",
    worker_proc_alive_timeout=_PROCESS_START_S,
    worker_max_memory_per_child=_PROCESS_KIB,
    worker_send_task_events=True,
    worker_enable_soft_shutdown_on_idle=False,
    worker_hijack_root_logger=True,
    broker_transport_options={"visibility_timeout": 86400, "health_check_interval": 25, "socket_keepalive": True},
)


@worker_init.connect
def _read_settings(**_kwargs: Any) -> None:
    """Stop a worker whose settings are wrong; Celery would only log an exception."""
    from reshard.errors import ReshardError
    from reshard_jobs.settings import read_seconds
    from reshard_worker.settings import WorkerSettings

    try:
        WorkerSettings.from_env()
        # Engine work survives a stop (the journal), so a worker need not wait for the end of a job.
        app.conf.worker_soft_shutdown_timeout = read_seconds(os.environ, "RESHARD_SHUTDOWN_GRACE_S", 10.0)
    except ReshardError as error:
        raise SystemExit(f"{error}\nfix: {error.fix}") from error


@cache
def _tools() -> tuple[Supervisor, Leases]:
    """What this pool process runs jobs with; its database connections are its own."""
    from reshard_jobs.database import Database
    from reshard_jobs.leases import Leases
    from reshard_worker.settings import WorkerSettings, worker_name
    from reshard_worker.supervisor import Supervisor

    settings = WorkerSettings.from_env()
    leases = Leases(Database(settings.jobs.database_url), lease_s=settings.jobs.lease_s)
    return Supervisor(leases, settings, name=worker_name("celery"), on_claim=_pass_on), leases


@app.task(name=DOORBELL_TASK)
def work() -> str:
    """Claim the next job and see it to its end, if there is one."""
    supervisor, _ = _tools()
    try:
        return supervisor.run_next() or "nothing to do"
    finally:
        # Also when this worker is told to stop: the job that it gives back is somebody's work.
        _pass_on()


def _pass_on() -> None:
    """Ring for the next worker if there is more to do: at the claim of a job for one that is idle, at its end for all.

    One job per message: a worker that is told to stop stops between two jobs, and Celery counts jobs.
    """
    from sqlalchemy.exc import DBAPIError

    try:
        if _tools()[1].work_waits():
            ring(app)
    except (ConnectionError, DBAPIError) as error:
        logger.warning("the doorbell could not be rung: %s", error)


_reapers: list[ReaperThread] = []


@worker_ready.connect
def _start_reaper(**_kwargs: Any) -> None:
    from reshard_jobs.database import Database
    from reshard_jobs.reaper import Reaper
    from reshard_worker.reaping import ReaperThread
    from reshard_worker.settings import WorkerSettings

    jobs = WorkerSettings.from_env().jobs
    reaper = Reaper(Database(jobs.database_url), lease_s=jobs.lease_s)
    thread = ReaperThread(reaper, interval_s=jobs.reaper_s, ring=lambda: ring(app))
    thread.start()
    _reapers.append(thread)


@worker_shutdown.connect
def _stop_reaper(**_kwargs: Any) -> None:
    for thread in _reapers:
        thread.stop()


@worker_process_init.connect
def _die_with_worker(**_kwargs: Any) -> None:
    # A pool process whose worker was killed with -9 would go on unseen, and unreachable by a stop.
    die_with_parent(signal.SIGKILL)
