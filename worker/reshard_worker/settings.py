"""Settings of a worker, beside those that it shares with the API."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.cli.sizes import parse_size
from reshard.errors import RequestError, printable
from reshard.models import VerifyLevel
from reshard_jobs.settings import JobSettings, read_seconds

_RUNNER = (sys.executable, "-m", "reshard_worker.runner")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How a worker runs jobs.

    Attributes:
        jobs: What is shared with the API.
        runner_command: Command line of the engine process; operators wrap it (`nice`, `systemd-run`).
        cancel_poll_s: How often a running job's cancel flag is read.
        term_grace_s: How long an engine may take to stop by itself.
        discard_limit_s: How long a clean-up may take.
        planning_limit_s: How long an engine may look at a source before it moves the first byte.
        engine_memory_bytes: Memory that an engine process may take; 0 is no limit, None depends on the request.
        verify: Least level of checking of every conversion, whatever its request says.
        progress_s: Least time between two recorded progress entries; a new phase is recorded at once.
        retry_delay_s: Pause before the second attempt after a passing failure; doubles with each.
    """

    jobs: JobSettings = field(default_factory=JobSettings)
    runner_command: tuple[str, ...] = _RUNNER
    cancel_poll_s: float = 0.5
    term_grace_s: float = 2.0
    discard_limit_s: float = 60.0
    planning_limit_s: float = 900.0
    engine_memory_bytes: int | None = None
    verify: VerifyLevel = VerifyLevel.DEFAULT
    progress_s: float = 0.5
    retry_delay_s: float = 5.0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> WorkerSettings:
        """Settings from `RESHARD_*` variables.

        Raises:
            RequestError: A variable is not what it should be.
        """
        values = os.environ if env is None else env
        command = values.get("RESHARD_RUNNER_COMMAND", "")
        memory = values.get("RESHARD_ENGINE_MEMORY", "")
        return cls(
            jobs=JobSettings.from_env(values),
            runner_command=tuple(shlex.split(command)) if command else _RUNNER,
            planning_limit_s=read_seconds(values, "RESHARD_PLANNING_LIMIT_S", 900.0),
            engine_memory_bytes=parse_size(memory) if memory else None,
            verify=_level(values.get("RESHARD_VERIFY", "")),
            retry_delay_s=read_seconds(values, "RESHARD_RETRY_DELAY_S", 5.0),
        )


def _level(text: str) -> VerifyLevel:
    try:
        return VerifyLevel(text or VerifyLevel.DEFAULT)
    except ValueError:
        levels = " or ".join(VerifyLevel)
        raise RequestError(
            "request.invalid", f"RESHARD_VERIFY is {printable(text)!r}", fix=f"set RESHARD_VERIFY to {levels}"
        ) from None


def worker_name(kind: str) -> str:
    """How a worker process is shown: what it is, where it runs."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = f"/gpu{gpu}" if gpu else ""
    return f"{kind}@{platform.node()}/{os.getpid()}{device}"
