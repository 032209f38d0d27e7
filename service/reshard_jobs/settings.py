"""Settings that the API and the workers share, and the reader of settings from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from reshard.errors import RequestError, printable
from reshard.option import parse_size
from reshard_jobs.limits import MOST_THREADS, Maxima, Roots, maxima_of_this_machine
from reshard_jobs.logs import FORMAT_VARIABLE

Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False, title="a number of seconds above 0 and below 1e9")]
"""A number of seconds: less than 32 years, because it is added to the present. The title of a field describes its valid
values: the error's `fix` ends with it."""


def _roots(value: object) -> object:
    return Roots.parse(value) if isinstance(value, str) else value


def size(value: object) -> object:
    """The bytes of a size such as `8GiB`, as a validator of a setting."""
    return parse_size(value) if isinstance(value, str) else value


class EnvironmentSettings(BaseSettings):
    """Base of settings. Each field whose alias is the name of an environment variable can be set by that variable.

    The constructor takes values by the names of fields and reads no variable.
    """

    model_config = SettingsConfigDict(frozen=True, populate_by_name=True, case_sensitive=True, extra="forbid")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use the arguments as the only source. Only `from_env` reads the environment."""
        return (init_settings,)

    @classmethod
    def from_variables(cls, env: Mapping[str, str] | None, **values: Any) -> Self:
        """Settings from `RESHARD_*` variables and from values for other fields. Empty variables are ignored.

        Raises:
            RequestError: A variable is not what it should be.
        """
        source = EnvSettingsSource(cls, case_sensitive=True)
        variables = (os.environ if env is None else env).items()
        source.env_vars = {name: text for name, text in variables if name.startswith("RESHARD_") and text}
        try:
            return cls(**source(), **values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = str(first["loc"][0])
            field = next((f for f in cls.model_fields.values() if f.validation_alias == name), None)
            meant = field.title if field is not None else None
            # The value of a secret is shown to nobody.
            said = repr(printable(first["input"])) if field is None or field.repr else "not valid"
            raise RequestError("request.invalid", f"{name} is {said}", fix=f"set {name} to {meant}") from None


class JobSettings(EnvironmentSettings):
    """Settings of the job database, the broker, the storage roots, and the times of leases.

    Attributes:
        database_url: `sqlite:///path` for one host, `postgresql://...` for more. `reshard serve` without it has one
            in `--data-dir`. Parameters of libpq may follow: `?tcp_user_timeout=60000&connect_timeout=20` instead of
            30,000 ms and 10 s.
        broker_url: `redis://host:6379/0`; without it, `reshard serve` runs the jobs.
        roots: URL prefixes that jobs may name, separated by commas; a target lies below one, not at it. None:
            everything. They are needed to serve on more than a loopback address.
        lease_s: How long a silent worker keeps its job.
        heartbeat_s: How often it renews its lease; at most half of that.
        reaper_s: How often the reaper looks for lost leases and for jobs whose message was lost; at most a quarter
            of the lease, or an outage of the database that is little longer than the lease can cost an attempt.
        keep_failed_s: How long the files of a failed job are kept for a retry.
        keep_jobs_s: How long the record of an ended job is kept.
        keep_events_s: How long the progress of an ended job is kept in its event log.
        keep_keys_s: How long an idempotency key finds its job.
        keep_audit_s: How long an entry of the audit log is kept.
        max_memory_bytes: Largest `memory_limit_bytes` of a request, such as `8GiB`. Not set: the memory of the machine
            that runs the jobs. More is refused (`request.above_maximum`); a request that names none gets 1 GiB, or
            this if it is less.
        log_format: `json`: each line of a log is a JSON object, as in the images.
        max_threads: Most `threads` of a request. Not set: 4 for each core, at least 64. An API with a broker knows
            nothing of its workers' machines: without these two settings it takes any number, and the worker fails
            the job.
    """

    database_url: str = Field(default="sqlite:///reshard-jobs.db", validation_alias="RESHARD_DATABASE_URL")
    broker_url: str = Field(default="", validation_alias="RESHARD_BROKER_URL")
    roots: Annotated[Roots, NoDecode, BeforeValidator(_roots)] = Field(
        default=Roots(), validation_alias="RESHARD_ROOTS"
    )
    lease_s: Seconds = Field(default=60.0, validation_alias="RESHARD_LEASE_S")
    heartbeat_s: Seconds = Field(default=10.0, validation_alias="RESHARD_HEARTBEAT_S")
    reaper_s: Seconds = Field(default=15.0, validation_alias="RESHARD_REAPER_S")
    keep_failed_s: Seconds = Field(default=86_400.0, validation_alias="RESHARD_KEEP_FAILED_S")
    keep_jobs_s: Seconds = Field(default=30 * 86_400.0, validation_alias="RESHARD_KEEP_JOBS_S")
    keep_events_s: Seconds = Field(default=7 * 86_400.0, validation_alias="RESHARD_KEEP_EVENTS_S")
    keep_keys_s: Seconds = Field(default=7 * 86_400.0, validation_alias="RESHARD_KEEP_KEYS_S")
    keep_audit_s: Seconds = Field(default=366 * 86_400.0, validation_alias="RESHARD_KEEP_AUDIT_S")
    log_format: Literal["text", "json"] = Field(default="text", validation_alias=FORMAT_VARIABLE, title="json or text")
    max_memory_bytes: Annotated[int | None, BeforeValidator(size)] = Field(
        default=None, ge=1, validation_alias="RESHARD_MAX_MEMORY_BYTES", title="a size such as 8GiB"
    )
    max_threads: int | None = Field(
        default=None, ge=1, le=MOST_THREADS, validation_alias="RESHARD_MAX_THREADS", title="a number from 1 to 1024"
    )

    def maxima(self, *, runs_jobs: bool) -> Maxima:
        """Return the most that a request may ask for. `runs_jobs`: jobs run on this machine, so its size counts."""
        default = maxima_of_this_machine() if runs_jobs else Maxima()
        memory_bytes = default.memory_bytes if self.max_memory_bytes is None else self.max_memory_bytes
        return Maxima(memory_bytes, default.threads if self.max_threads is None else self.max_threads)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> JobSettings:
        """Settings from `RESHARD_*` variables.

        Raises:
            RequestError: A variable is not what it should be.
        """
        settings = cls.from_variables(env)
        if settings.heartbeat_s * 2 > settings.lease_s:
            raise RequestError(
                "request.invalid",
                f"a heartbeat every {settings.heartbeat_s:g} s is too slow for a lease of {settings.lease_s:g} s",
                fix="set RESHARD_LEASE_S to at least twice RESHARD_HEARTBEAT_S",
            )
        return settings
