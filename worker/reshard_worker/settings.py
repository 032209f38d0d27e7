"""Settings of a worker, and the commands for engine processes that it makes of requests by them."""

from __future__ import annotations

import os
import platform
import secrets
import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from reshard.choices import VerifyLevel
from reshard.models.jobs import ConvertRequest
from reshard.shared_work import SharedWork
from reshard_engine.warm_process import engine_memory_bytes
from reshard_jobs.limits import SERVICE, TenantLimits
from reshard_jobs.settings import EnvironmentSettings, JobSettings, Seconds, size
from reshard_worker.protocol import Command

_RUNNER = (sys.executable, "-m", "reshard_worker.runner")


def _command(value: object) -> object:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


class WorkerSettings(EnvironmentSettings):
    """Settings of the supervision of engine processes by a worker.

    Attributes:
        jobs: Settings that are shared with the API.
        runner_command: Command line of the engine process, to wrap it: `nice -n 10 python -m
            reshard_worker.runner`.
        warm_engine: The engine process imports once, stays, and forks a process for each job; `0`: each job starts
            the command line anew, for a wrapper that limits time or memory of its whole life.
        cancel_poll_s: Seconds between two reads of a running job's cancel flag.
        term_grace_s: Seconds that an engine may take to stop after it is asked to.
        discard_limit_s: Seconds that a clean-up may take.
        planning_limit_s: How long a job may be planned before it fails (`source.too_slow`).
        engine_memory_bytes: Memory that an engine process may take, such as `8GiB`; 0 for no limit. Not set: the job's
            memory limit plus 3 GiB. It is not applied where a GPU may be used.
        verify: `full`: every conversion is checked as `--verify full` does, whatever its request says.
        progress_s: Least seconds between two recorded progress entries; a new phase is recorded at once.
        retry_delay_s: Pause before the second attempt; doubles with each.
        quarantine_s: How long a worker claims nothing on which three jobs in a row failed as they do on a bad host;
            doubles each time.
        shutdown_grace_s: How long a stopped Celery worker may take.
        max_workers: How many workers may run a job at once, if it names no number; 1 for no helpers.
        share_bytes: Least output of a job that several workers run.
    """

    jobs: JobSettings = JobSettings()
    runner_command: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_command)] = Field(
        default=_RUNNER, validation_alias="RESHARD_RUNNER_COMMAND"
    )
    warm_engine: bool = Field(default=True, validation_alias="RESHARD_WARM_ENGINE", title="1 or 0")
    cancel_poll_s: Seconds = 0.5
    term_grace_s: Seconds = 2.0
    discard_limit_s: Seconds = 60.0
    planning_limit_s: Seconds = Field(default=900.0, validation_alias="RESHARD_PLANNING_LIMIT_S")
    engine_memory_bytes: Annotated[int | None, BeforeValidator(size)] = Field(
        default=None, validation_alias="RESHARD_ENGINE_MEMORY"
    )
    verify: VerifyLevel = Field(
        default=VerifyLevel.DEFAULT, validation_alias="RESHARD_VERIFY", title=" or ".join(VerifyLevel)
    )
    progress_s: Seconds = 0.5
    retry_delay_s: Seconds = Field(default=5.0, validation_alias="RESHARD_RETRY_DELAY_S")
    quarantine_s: Seconds = Field(default=30.0, validation_alias="RESHARD_QUARANTINE_S")
    shutdown_grace_s: Seconds = Field(default=10.0, validation_alias="RESHARD_SHUTDOWN_GRACE_S")
    max_workers: int = Field(
        default=8, ge=1, le=1024, validation_alias="RESHARD_MAX_WORKERS", title="a number from 1 to 1024"
    )
    share_bytes: Annotated[int, BeforeValidator(size)] = Field(
        default=1 << 30, ge=0, validation_alias="RESHARD_SHARE_BYTES", title="a size such as 1GiB"
    )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> WorkerSettings:
        """Settings from `RESHARD_*` variables.

        Raises:
            RequestError: A variable is not what it should be.
        """
        return cls.from_variables(env, jobs=JobSettings.from_env(env))


def worker_name(kind: str) -> str:
    """The name under which a worker process is shown: its kind, host, process id and GPU."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = f"/gpu{gpu}" if gpu else ""
    return f"{kind}@{platform.node()}/{os.getpid()}{device}"


# Makes the commands for engine processes from requests, by this worker's own settings.


def engine_command(
    op: Literal["convert", "plan", "discard", "help"],
    request: ConvertRequest,
    settings: WorkerSettings,
    *,
    limits: TenantLimits = SERVICE,
    workers: int = 1,
    **values: Any,
) -> Command:
    """The command for the engine, with the normalised URLs that were checked against the roots.

    Args:
        op: The operation.
        request: The request of the job.
        settings: The worker's settings.
        limits: The limits of the job's tenant.
        workers: The number of workers that may run the job at once.
        values: Other fields of the command.

    Raises:
        RequestError: A URL is outside the roots of this worker or of the tenant, or the request asks for more than
            this worker's maxima. It checks both independently of the API.
    """
    judged = limits.allowed_request(request, settings.jobs.roots)
    maxima = settings.jobs.maxima(runs_jobs=True)
    # A job that was refused for its size is cleaned up nevertheless.
    judged = judged if op == "discard" else maxima.with_threads(maxima.allowed_request(judged))
    if settings.verify is VerifyLevel.FULL:
        judged = judged.model_copy(update={"verify": VerifyLevel.FULL})
    work = None
    if workers > 1:
        work = SharedWork(
            # The owner begins at the largest run; helpers spread over the others.
            number=0 if op == "convert" else 1 + secrets.randbelow(workers - 1),
            count=workers,
            lease_s=settings.jobs.lease_s,
            least_bytes=settings.share_bytes,
        )
    memory_bytes = engine_memory_bytes(judged, settings.engine_memory_bytes)
    roots = limits.roots(settings.jobs.roots)
    places = {"roots": roots.urls, "write_roots": roots.writable}
    return Command(op=op, request=judged, work=work, memory_bytes=memory_bytes, **places, **values)
