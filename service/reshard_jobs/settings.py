"""Settings that the API and the workers share, read from the environment once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.errors import RequestError
from reshard_jobs.roots import Roots

DEFAULT_DATABASE_URL = "sqlite:///reshard-jobs.db"


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Where jobs live and how their ownership is timed.

    Attributes:
        database_url: The job database.
        broker_url: The doorbell (Redis); empty for the embedded executor, which polls.
        roots: Storage that jobs may name.
        lease_s: How long a silent worker keeps its job.
        heartbeat_s: How often a worker renews its lease.
        reaper_s: How often lost leases and work that nobody heard of are looked for.
    """

    database_url: str = DEFAULT_DATABASE_URL
    broker_url: str = ""
    roots: Roots = field(default_factory=Roots)
    lease_s: float = 60.0
    heartbeat_s: float = 10.0
    reaper_s: float = 15.0

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> JobSettings:
        """Settings from `RESHARD_*` variables.

        Raises:
            RequestError: A variable is not what it should be.
        """
        values = os.environ if env is None else env
        settings = cls(
            database_url=values.get("RESHARD_DATABASE_URL") or DEFAULT_DATABASE_URL,
            broker_url=values.get("RESHARD_BROKER_URL", ""),
            roots=Roots.parse(values.get("RESHARD_ROOTS", "")),
            lease_s=read_seconds(values, "RESHARD_LEASE_S", 60.0),
            heartbeat_s=read_seconds(values, "RESHARD_HEARTBEAT_S", 10.0),
            reaper_s=read_seconds(values, "RESHARD_REAPER_S", 15.0),
        )
        if settings.heartbeat_s * 2 > settings.lease_s:
            raise RequestError(
                "request.invalid",
                f"a heartbeat every {settings.heartbeat_s:g} s is too slow for a lease of {settings.lease_s:g} s",
                fix="set RESHARD_LEASE_S to at least twice RESHARD_HEARTBEAT_S",
            )
        return settings


def read_seconds(values: Mapping[str, str], name: str, default: float) -> float:
    """A positive number of seconds from the environment.

    Raises:
        RequestError: It is not one.
    """
    text = values.get(name, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise RequestError("request.invalid", f"{name} is {text!r}", fix=f"set {name} to a number of seconds above 0")
    return seconds
