"""The Celery driver: `celery -A reshard_worker.app worker ...`, one worker process per GPU.

The broker is only a doorbell: a message says that a job is waiting. The jobs, their owners and their outcomes are in
the job database. The worker that takes a message claims the next job. The reaper replaces a lost message by a new one,
and a superfluous message finds no job to claim.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from functools import cache
from queue import Empty
from typing import Any, cast
from uuid import uuid4

from celery import Celery, bootsteps
from celery.signals import (
    setup_logging,
    worker_before_create_process,
    worker_init,
    worker_process_init,
    worker_process_shutdown,
    worker_ready,
    worker_shutdown,
)
from celery.worker import state
from kombu.transport import TRANSPORT_ALIASES, redis
from redis.exceptions import DataError
from sqlalchemy.exc import DBAPIError

from reshard.errors import ReshardError, printable
from reshard_engine.warm_process import die_with_parent
from reshard_jobs.database import Database
from reshard_jobs.logs import as_json, configure_logs
from reshard_jobs.queue.discards import Discards
from reshard_jobs.queue.doorbell import DOORBELL_QUEUE, DOORBELL_TASK, ring
from reshard_jobs.queue.helpers import Helpers
from reshard_jobs.queue.leases import Leases
from reshard_jobs.queue.nodes import Nodes
from reshard_jobs.queue.reaper import Reaper, Retention
from reshard_jobs.settings import JobSettings
from reshard_jobs.tracing import stop_tracing
from reshard_worker.alive import JOB, LOOP, LOOP_S, hears
from reshard_worker.child import Runners
from reshard_worker.embedded import ReaperThread
from reshard_worker.host_faults import HostWatch, Presence
from reshard_worker.settings import WorkerSettings, worker_name
from reshard_worker.supervisor import Supervisor, Tally

# The Redis transport of a worker: of an entry of the queue it takes the doorbell's name and nothing else.
#
# kombu 5.7 and Celery 5.7 expect that whoever writes to the queue is Celery. Another entry raises in the event loop of
# the worker, and the worker ends. Headers such as `eta`, `expires` and `timelimit` would put a message off, drop it, or
# kill the process of the running job. The doorbell's messages carry nothing that is needed, so nothing is lost with
# them.


# ruff: noqa: SLF001 - kombu has no public place between the entry and its consumer
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false, reportUntypedBaseClass=false
# pyright: reportUntypedFunctionDecorator=false


logger = logging.getLogger(__name__)

_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, RecursionError, DataError)
"""Errors that an entry causes where it is not what Celery writes. Those of a connection are none of these."""


class Channel(redis.Channel):
    """A channel that outlives any entry of its queues."""

    def basic_consume(self, queue: str, *arguments: Any, **options: Any) -> None:
        """Consume from a queue; messages at which the consumer fails are dropped."""
        super().basic_consume(queue, *arguments, **options)
        deliver = self.connection._callbacks[queue]

        def deliver_or_drop(raw: Any) -> None:
            held = set(self.qos._delivered or ())
            try:
                deliver(_bell_of(raw) if queue == DOORBELL_QUEUE else raw)
            except _DAMAGE as error:
                _dropped(queue, error)
                # A message that is not acknowledged would keep the worker from taking another one.
                for tag in set(self.qos._delivered or ()) - held:
                    self.basic_ack(tag)

        self.connection._callbacks[queue] = deliver_or_drop

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except _DAMAGE as error:
            _dropped("the broker", error)
            raise Empty from None


class Transport(redis.Transport):
    """The Redis transport with such channels."""

    Channel = Channel


def install() -> None:
    """Use this transport for all Redis connections of this process."""
    for scheme in ("redis", "rediss"):
        TRANSPORT_ALIASES[scheme] = f"{__name__}:Transport"


def _bell_of(raw: Any) -> dict[str, Any]:
    """The message that Celery writes for the doorbell's task, in the place of one that somebody wrote.

    Raises:
        LookupError: It is not for this task. Entries that are not messages raise other errors of `_DAMAGE`.
    """
    if raw["headers"]["task"] != DOORBELL_TASK:
        raise LookupError(DOORBELL_TASK)
    name = str(uuid4())
    return {
        "body": "[[], {}, {}]",
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"lang": "py", "task": DOORBELL_TASK, "id": name, "root_id": name, "retries": 0},
        "properties": {
            "delivery_tag": name,
            "delivery_info": {"exchange": "", "routing_key": DOORBELL_QUEUE},
            "priority": 0,
        },
    }


def _dropped(queue: str, error: Exception) -> None:
    logger.warning("an entry of %s was dropped, it is not a message: %s", queue, printable(f"{error!r}"))


# The driver: Celery's application, its tasks, and the threads beside them.

_PROCESS_START_S = 300.0
"""Seconds that a pool process which replaces another one may take to start. Celery's default is 4 s, after which it
kills the process and starts the next; on a slow host no process would ever start working."""
_NOT_FOR_ME_S = 1.0
"""Seconds for which a worker takes no message after one with which it could do nothing, though work waits."""
_PROCESS_KIB = 512 << 10
"""A pool process that has grown beyond this size is replaced after its job. A limit on messages would not do: a message
may find no job, and a process that only supervises engine processes needs no replacement for that."""

install()
if as_json():
    # Celery warns before it sends `setup_logging`.
    configure_logs()
app = Celery("reshard", broker=os.environ.get("RESHARD_BROKER_URL") or None)
app.conf.update(
    # Messages are acknowledged early: the lease, not the broker, detects that a job was lost.
    task_acks_late=False,
    worker_prefetch_multiplier=1,
    worker_disable_prefetch=True,
    task_ignore_result=True,
    task_serializer="json",
    accept_content=["json"],
    task_default_queue=DOORBELL_QUEUE,
    broker_connection_retry_on_startup=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    # A forked child cannot use CUDA, and SQL connections must not be shared across a fork.
    worker_pool_start_method="spawn",
    worker_proc_alive_timeout=_PROCESS_START_S,
    worker_max_memory_per_child=_PROCESS_KIB,
    worker_send_task_events=True,
    # Whoever reaches the broker could stop workers, or end their consumption, without a trace in the job database.
    worker_enable_remote_control=False,
    worker_enable_soft_shutdown_on_idle=False,
    worker_hijack_root_logger=True,
    broker_transport_options={"visibility_timeout": 86400, "health_check_interval": 25, "socket_keepalive": True},
)


class SignOfLife(bootsteps.StartStopStep):
    """The part of Celery's consumer that shows that its loop runs; it stops and starts with the broker's connection."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        """Begin to give signs. Celery forgets the timers of a loop that ends."""
        LOOP.give("runs")
        deaf = False

        def give() -> None:
            nonlocal deaf
            was_deaf, deaf = deaf, not _takes_messages(parent)
            if not deaf:
                LOOP.give("runs")
            elif not was_deaf:
                LOOP.give("deaf")
                logger.error("this worker takes no messages from the broker, though it is connected to it")

        parent.timer.call_repeatedly(LOOP_S, give)

    def stop(self, parent: Any) -> None:
        """Say that the loop waits for the broker, or that the worker stops: both take their time."""
        LOOP.give("away")


cast("Any", app.steps)["consumer"].add(SignOfLife)


def _takes_messages(consumer: Any) -> bool:
    """True if Celery's consumer waits for the next message, or for the end of the work for the last one."""
    tasks = consumer.task_consumer
    if tasks is None or not tasks.consuming_from(DOORBELL_QUEUE):
        return False
    return bool(state.reserved_requests) or tasks.channel.qos.can_consume()


@setup_logging.connect
def _configure_logs(loglevel: int | None = None, **_kwargs: Any) -> None:
    """Write Celery's lines as all others are written, in the worker and in its pool process."""
    configure_logs(loglevel)


@worker_before_create_process.connect
def _configure_logs_of_pool_process(**_kwargs: Any) -> None:
    # By this variable a pool process would write its first lines in a format of its own.
    os.environ.pop("_MP_FORK_LOGLEVEL_", None)


@worker_init.connect
def _check_start(**_kwargs: Any) -> None:
    """Stop a worker whose settings are wrong, or that may not run on the job database; Celery would only log it."""
    LOOP.give("away")
    try:
        settings = WorkerSettings.from_env()
        # The journal keeps finished work over a stop, so a worker need not wait for the end of a job.
        app.conf.worker_soft_shutdown_timeout = settings.shutdown_grace_s
        Database(settings.jobs.database_url).close()
    except ReshardError as error:
        if error.retryable:
            logger.warning("the job database does not answer yet: %s", error)
            return
        raise SystemExit(f"{error.code}: {error.message}\nfix: {error.fix}") from error


@cache
def _tools() -> tuple[Supervisor, Leases, Helpers, Discards]:
    """The supervisor and what it works with in this pool process, with database connections of its own."""
    settings = WorkerSettings.from_env()
    jobs, nodes = settings.jobs, _nodes()
    database = _database()
    leases = Leases(database, lease_s=jobs.lease_s, keep_failed_s=jobs.keep_failed_s)
    helpers = Helpers(database, lease_s=jobs.lease_s, max_workers=settings.max_workers)
    discards = Discards(database, lease_s=jobs.lease_s)
    name = worker_name("celery")
    supervisor = Supervisor(
        leases,
        settings,
        name=name,
        on_claim=_pass_on,
        runners=_runners(),
        helpers=helpers,
        discards=discards,
        host=HostWatch(nodes, name, pause_s=settings.quarantine_s),
        tally=Tally(database, nodes, name),
    )
    return supervisor, leases, helpers, discards


@cache
def _database() -> Database:
    return Database(JobSettings.from_env().database_url)


@cache
def _nodes() -> Nodes:
    return Nodes(_database(), lease_s=JobSettings.from_env().lease_s)


@cache
def _runners() -> Runners:
    """The engine processes of this pool process."""
    settings = WorkerSettings.from_env()
    return Runners(settings.runner_command, warm=settings.warm_engine)


@app.task(name=DOORBELL_TASK)
def work() -> str:
    """Claim the next job, if there is one, and run it to its end."""
    supervisor = _tools()[0]
    outcome = None
    try:
        JOB.give("runs")
        outcome = supervisor.run_next()
        return outcome or "nothing to do"
    finally:
        JOB.end()
        # Ring also when this worker is told to stop: another worker can run the job that it requeues.
        if _pass_on() and outcome is None and not supervisor.work_waits():
            # What waits is not for this worker. It leaves the next messages to others for a moment.
            time.sleep(_NOT_FOR_ME_S)


def _pass_on() -> bool:
    """Ring the doorbell if more jobs wait, or if one takes helpers; returns whether it was rung.

    At the claim of a job this is for an idle worker; at its end, for any worker.

    A message is good for one job only, so that a worker can be stopped between two jobs and Celery's counts are right.
    """
    try:
        _, leases, helpers, discards = _tools()
        if leases.work_waits() or helpers.wanted() or discards.waits():
            ring(app)
            return True
    except (ConnectionError, DBAPIError) as error:
        logger.warning("the doorbell could not be rung: %s", error)
    return False


_reapers: list[ReaperThread] = []


@worker_ready.connect
def _start_reaper(**_kwargs: Any) -> None:
    settings = WorkerSettings.from_env()
    jobs = settings.jobs

    def make_reaper() -> Reaper:
        return Reaper(
            Database(jobs.database_url),
            lease_s=jobs.lease_s,
            interval_s=jobs.reaper_s,
            max_workers=settings.max_workers,
            retention=Retention.of(jobs),
        )

    thread = ReaperThread(make_reaper, interval_s=jobs.reaper_s, ring=lambda: ring(app))
    thread.start()
    _reapers.append(thread)


@worker_shutdown.connect
def _stop_reaper(**_kwargs: Any) -> None:
    for thread in _reapers:
        thread.stop()


@worker_process_init.connect
def _die_with_worker(**_kwargs: Any) -> None:
    # A pool process whose worker was killed with -9 would run on, and no stop would reach it.
    die_with_parent(signal.SIGKILL)
    # Of a pool process that was killed with its job.
    JOB.end()
    # The engine's process begins to import now, and the first job need not wait for it.
    _runners().prepare()
    threading.Thread(target=_show_presence, name="presence-start", daemon=True).start()


_presences: list[Presence] = []


def _show_presence() -> None:
    """Say in the job database that this worker is there, also while no job waits."""
    while not _presences:
        try:
            interval_s = JobSettings.from_env().heartbeat_s
            presence = Presence(_nodes(), worker_name("celery"), interval_s=interval_s, alive=hears)
            presence.start()
            _presences.append(presence)
        except (DBAPIError, ReshardError) as error:
            logger.warning("the job database does not answer: %s", error)
            time.sleep(_NOT_FOR_ME_S)


@worker_process_shutdown.connect
def _end_presence(**_kwargs: Any) -> None:
    for presence in _presences:
        presence.stop()
    stop_tracing()
