"""Settings of the API, beside those that it shares with the workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard_jobs.settings import JobSettings, read_seconds


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How the API serves.

    Attributes:
        jobs: What is shared with the workers.
        token: Bearer token that every call must carry; empty for none (a loopback address only).
        probe_command: Command line of the limited process that looks at checkpoints.
        admission_s: How long a submission may look at its source before it is accepted unseen.
        inspection_s: How long `POST /v1/inspections` may take.
        probe_memory_bytes: Address space of a probe.
        probes: How many probes may run at once.
        poll_s: How often a waiting request looks at its job.
        ping_s: Pause between two pings of an event stream.
        max_body_bytes: Largest request body.
    """

    jobs: JobSettings = field(default_factory=JobSettings)
    token: str = field(default="", repr=False)
    probe_command: tuple[str, ...] = (sys.executable, "-m", "reshard_service.probe")
    admission_s: float = 5.0
    inspection_s: float = 30.0
    probe_memory_bytes: int = 2 << 30
    probes: int = 2
    poll_s: float = 0.25
    ping_s: int = 15
    max_body_bytes: int = 1 << 20

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ServiceSettings:
        """Settings from `RESHARD_*` variables."""
        values = os.environ if env is None else env
        return cls(
            jobs=JobSettings.from_env(values),
            token=values.get("RESHARD_TOKEN", ""),
            admission_s=read_seconds(values, "RESHARD_ADMISSION_S", 5.0),
            inspection_s=read_seconds(values, "RESHARD_INSPECTION_S", 30.0),
            probes=max(2, os.cpu_count() or 2),
        )
