"""The Celery driver: `celery -A reshard_worker.app worker ...`, one worker process per GPU.

The broker is a doorbell. A message carries a job's id and nothing else; who owns the job, whether it
still runs and how it ended is in the job database. A lost message is rung again by the reaper, a
duplicate finds nothing to claim.
"""
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

from celery import Celery
from celery.signals import worker_process_init, worker_ready, worker_shutdown
from kombu.exceptions import OperationalError

from reshard_jobs.database import Database
from reshard_jobs.leases import Leases
from reshard_jobs.reaper import Reaper
from reshard_jobs.settings import DOORBELL_QUEUE, DOORBELL_TASK, read_seconds
from reshard_worker.lifetime import die_with_parent
from reshard_worker.reaping import ReaperThread
from reshard_worker.settings import WorkerSettings, worker_name
from reshard_worker.supervisor import Supervisor

_settings = WorkerSettings.from_env()

app = Celery("reshard", broker=_settings.jobs.broker_url or None)
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
    worker_max_tasks_per_child=50,
    worker_send_task_events=True,
    # Engine work survives a stop (the journal), so a worker need not wait for the end of a job.
    worker_soft_shutdown_timeout=read_seconds(os.environ, "RESHARD_SHUTDOWN_GRACE_S", 10.0),
    worker_enable_soft_shutdown_on_idle=False,
    worker_hijack_root_logger=True,
    broker_transport_options={"visibility_timeout": 86400, "health_check_interval": 25, "socket_keepalive": True},
)


@cache
def _supervisor() -> Supervisor:
    """The supervisor of this pool process; its database connections are its own."""
    database = Database(_settings.jobs.database_url)
    leases = Leases(database, lease_s=_settings.jobs.lease_s)
    return Supervisor(leases, _settings, name=worker_name("celery"))


@app.task(name=DOORBELL_TASK)
def run_job(job_id: str) -> str:
    """Claim the job and see it to its end, unless someone else does already."""
    return _supervisor().run_job(job_id) or "skipped"


def ring(job_id: str) -> None:
    """Ring the doorbell of a job.

    Raises:
        ConnectionError: The broker does not answer; the reaper rings again later.
    """
    try:
        app.send_task(DOORBELL_TASK, args=[job_id], queue=DOORBELL_QUEUE, ignore_result=True, retry=False)
    except OperationalError as error:
        raise ConnectionError(str(error)) from error


_reapers: list[ReaperThread] = []


@worker_ready.connect
def _start_reaper(**_kwargs: Any) -> None:
    reaper = Reaper(Database(_settings.jobs.database_url), lease_s=_settings.jobs.lease_s)
    thread = ReaperThread(reaper, interval_s=_settings.jobs.reaper_s, ring=ring)
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
