"""`reshard worker`: replaces this process by a Celery worker with tested options."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec
from typing import NoReturn

from reshard.errors import RequestError
from reshard.extras import install_line
from reshard_jobs.logs import LEVEL_VARIABLE, as_json
from reshard_jobs.queue.doorbell import DOORBELL_QUEUE
from reshard_worker.alive import VARIABLE as ALIVE_VARIABLE, prepare
from reshard_worker.settings import WorkerSettings


def worker(*, gpu: str | None = None, name: str | None = None, log_level: str = "INFO") -> NoReturn:
    """Become a Celery worker that runs one job at a time.

    Args:
        gpu: Value of CUDA_VISIBLE_DEVICES for this worker; None leaves the environment as it is.
        name: Node name before the `@`; must differ between the workers of one host.
        log_level: Celery's log level.

    Raises:
        RequestError: `RESHARD_BROKER_URL` is not set, or another setting is wrong;
            `request.engine_missing` without celery.
    """
    if not os.environ.get("RESHARD_BROKER_URL"):
        raise RequestError(
            "request.invalid",
            "a worker needs a broker, and RESHARD_BROKER_URL is not set",
            fix="export RESHARD_BROKER_URL=redis://host:6379/0, or use `reshard serve`, which needs no broker",
        )
    if find_spec("celery") is None:
        raise RequestError(
            "request.engine_missing",
            "a worker needs 'celery', which is not installed",
            fix=install_line("worker"),
        )
    # Report a wrong setting here once, not in each process that reads it.
    WorkerSettings.from_env()
    environment = dict(os.environ)
    # At SIGTERM the worker must requeue its job after a grace time. Celery's default waits for the end of the job.
    environment["REMAP_SIGTERM"] = "SIGQUIT"
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    environment[LEVEL_VARIABLE] = log_level
    node = name or (f"gpu{gpu}" if gpu is not None else f"worker{os.getpid()}")
    environment[ALIVE_VARIABLE] = prepare(node)
    argv = [
        *(sys.executable, "-m", "celery", *(["--quiet"] if as_json() else []), "-A", "reshard_worker.app", "worker"),
        *("--pool", "prefork", "--concurrency", "1", "--queues", DOORBELL_QUEUE),
        *("--hostname", f"{node}@{platform.node()}", "--without-gossip", "--without-mingle"),
        *("--disable-prefetch", "--loglevel", log_level),
    ]
    os.execve(sys.executable, argv, environment)  # noqa: S606 - no shell is wanted
