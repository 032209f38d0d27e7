"""Settings of the API, beside those that it shares with the workers."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from reshard.errors import RequestError
from reshard_jobs.limits import Maxima
from reshard_jobs.settings import EnvironmentSettings, JobSettings, Seconds, size
from reshard_service.webhooks.address import Network
from reshard_service.webhooks.secrets import Sealer


def _networks(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(ipaddress.ip_network(text) for text in _listed(value))


def _keys(value: object) -> object:
    if not isinstance(value, str):
        return value
    keys = _listed(value)
    Sealer(keys)
    return keys


_SAFE_URL = r"^$|^https://\S+$|^http://(?:localhost|127\.0\.0\.1|\[::1\])[:/]\S*$"
"""Whoever changes an answer of the issuer on its way makes tokens."""
_HTTPS = "a URL with https"
_COUNT = "a number from 1 to 1024"


NEW_TOKEN = "RESHARD_TOKEN=$(python3 -c 'import secrets; print(secrets.token_urlsafe(32))')"  # noqa: S105 - words that make one
"""Shell words that make a token which nobody guesses."""
_LEAST_TOKEN_CHARS, _LEAST_DISTINCT_CHARS = 16, 6
_PLACEHOLDER = re.compile(r"change-?_?me|replace-?_?me|your-?_?token|\$\(|\$\{|<.*>|\.\.\.", re.IGNORECASE)
"""Stands for a token in examples. Files of settings run no command, so that one in them is the token itself."""


def _weakness(token: str) -> str:
    """The reason for which a token can be guessed, as an end of a sentence; empty if it cannot.

    A token of 16 random hexadecimal digits has fewer than 6 different ones once in 4,000.
    """
    if len(token) < _LEAST_TOKEN_CHARS:
        return f"has {len(token)} characters; {_LEAST_TOKEN_CHARS} are the least"
    if len(set(token)) < _LEAST_DISTINCT_CHARS:
        return f"has {len(set(token))} different characters; {_LEAST_DISTINCT_CHARS} are the least"
    if token in (token + token)[1:-1]:
        return "repeats a shorter text"
    return "is a placeholder" if _PLACEHOLDER.search(token) else ""


def _hosts(value: object) -> object:
    return _listed(value) if isinstance(value, str) else value


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


class ServiceSettings(EnvironmentSettings):
    """The settings of the API.

    Attributes:
        jobs: What is shared with the workers.
        token: The operator's bearer token. It needs 16 characters or more to serve on more than a loopback
            address; on one, `reshard serve` makes a new one without it.
        allowed_hosts: Names and addresses that requests may name in `Host`, separated by commas. Not set: loopback
            names on a loopback address, and any name elsewhere.
        trusted_proxies: Proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed, as addresses and
            networks: `10.0.0.7,fd00::/8`.
        root_path: The path below which a proxy shows the service, such as `/reshard`.
        anonymous: `true`: no token is needed, and none is made.
        oidc_issuer: URL of an OIDC issuer whose tokens are taken; `https`, or `http` on loopback.
        oidc_audience: The audience that they must name; needed with the issuer.
        oidc_jwks_url: Where the issuer's keys are. Not set: where the issuer says.
        oidc_tenant_claim: The claim that names the tenant.
        oidc_scope_claim: The claim that names the scopes.
        probe_command: Command line of the limited process that looks at checkpoints.
        admission_s: How long a submission may be planned before it is accepted unseen.
        admission_queue_s: How long it may wait for a process to plan it, while all are busy, before it is accepted
            unseen.
        inspection_s: How long an inspection may take.
        probe_memory_bytes: Address space of a probe.
        probes: How many probes may run at once.
        layout_command: Command line of the process that makes the bytes of a virtual layout.
        layout_engines: How many such processes an API process may have. A quarter of them, and at least one of several,
            is kept free of any one tenant, whose downloads may take hours. The one that was not used for longest makes
            room for the next. While any is used, one more waits for the next layout.
        layout_plan_s: How long a virtual layout may be planned, and its source compared, before `POST /v1/layouts` is
            given up.
        layout_idle_s: How long such a process stays after its last use. The next use begins another one.
        layout_queue_s: How long a request may wait for such a process, while all are in use.
        layout_stall_s: How long a client may take none of the bytes that wait for it, before its response is cut.
        layout_reads: How many responses may read from one such process at once. Others wait.
        layout_ranks: Most ranks of a virtual layout: planning one takes some milliseconds and 100 KiB for each of them.
        keep_layouts_s: How long a virtual layout is kept after its last use.
        engine_memory_bytes: Memory that the process of a virtual layout may take, as an engine process of a worker.
        poll_s: Seconds between two looks at all jobs that requests wait for.
        ping_s: Pause between two pings of an event stream.
        recheck_s: Seconds after which an event stream, or a response with a file, ends whose token was revoked.
        max_body_bytes: Largest request body.
        head_s: How long a client of `reshard serve` may take to send the head of a request.
        body_s: How long a client may take to send the body of a request.
        webhook_networks: Networks to which webhooks are sent though they are not public: `10.0.0.0/8,fd00::/8`.
        webhook_http: `true`: webhooks may be sent without TLS.
        webhook_keys: Keys that encrypt the secrets of webhooks in the job database, the newest first, separated by
            commas: `openssl rand -base64 32 | tr +/ -_`. Not set: a SQLite database has a key beside it, and in
            PostgreSQL nothing is encrypted.
        keep_deliveries_s: How long an ended delivery of a webhook is kept.
    """

    jobs: JobSettings = JobSettings()
    token: str = Field(default="", repr=False, validation_alias="RESHARD_TOKEN")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_hosts)] = Field(
        default=(), validation_alias="RESHARD_ALLOWED_HOSTS"
    )
    trusted_proxies: Annotated[tuple[Network, ...], NoDecode, BeforeValidator(_networks)] = Field(
        default=(), validation_alias="RESHARD_TRUSTED_PROXIES", title="addresses and networks such as 10.0.0.7,fd00::/8"
    )
    root_path: str = Field(
        default="",
        validation_alias="RESHARD_ROOT_PATH",
        pattern=r"^(?:/[A-Za-z0-9._~-]+)*$",
        title="a path such as /reshard, without a slash at its end",
    )
    anonymous: bool = Field(default=False, validation_alias="RESHARD_ANONYMOUS", title="true or false")
    oidc_issuer: str = Field(default="", validation_alias="RESHARD_OIDC_ISSUER", pattern=_SAFE_URL, title=_HTTPS)
    oidc_audience: str = Field(default="", validation_alias="RESHARD_OIDC_AUDIENCE")
    oidc_jwks_url: str = Field(default="", validation_alias="RESHARD_OIDC_JWKS_URL", pattern=_SAFE_URL, title=_HTTPS)
    oidc_tenant_claim: str = Field(default="tenant", validation_alias="RESHARD_OIDC_TENANT_CLAIM")
    oidc_scope_claim: str = Field(default="scope", validation_alias="RESHARD_OIDC_SCOPE_CLAIM")
    probe_command: tuple[str, ...] = (sys.executable, "-m", "reshard_service.probes.process")
    admission_s: Seconds = Field(default=5.0, validation_alias="RESHARD_ADMISSION_S")
    admission_queue_s: Seconds = Field(default=0.1, validation_alias="RESHARD_ADMISSION_QUEUE_S")
    inspection_s: Seconds = Field(default=30.0, validation_alias="RESHARD_INSPECTION_S")
    probe_memory_bytes: int = 2 << 30
    probes: int = 2
    layout_command: tuple[str, ...] = (sys.executable, "-m", "reshard_service.probes.process", "layout")
    layout_engines: int = Field(default=4, ge=1, le=1024, validation_alias="RESHARD_LAYOUT_ENGINES", title=_COUNT)
    layout_plan_s: Seconds = Field(default=300.0, validation_alias="RESHARD_LAYOUT_PLAN_S")
    layout_idle_s: Seconds = Field(default=60.0, validation_alias="RESHARD_LAYOUT_IDLE_S")
    layout_queue_s: Seconds = 10.0
    layout_stall_s: Seconds = 60.0
    layout_reads: int = Field(default=8, ge=1, le=1024, validation_alias="RESHARD_LAYOUT_READS", title=_COUNT)
    layout_ranks: int = Field(default=4096, ge=1, le=1 << 20, validation_alias="RESHARD_LAYOUT_RANKS", title=_COUNT)
    keep_layouts_s: Seconds = Field(default=3600.0, validation_alias="RESHARD_KEEP_LAYOUTS_S")
    engine_memory_bytes: Annotated[int | None, BeforeValidator(size)] = Field(
        default=None, validation_alias="RESHARD_ENGINE_MEMORY"
    )
    poll_s: Seconds = 0.25
    ping_s: int = 15
    recheck_s: Seconds = 5.0
    max_body_bytes: int = 1 << 20
    head_s: Seconds = Field(default=10.0, validation_alias="RESHARD_HEAD_S")
    body_s: Seconds = Field(default=30.0, validation_alias="RESHARD_BODY_S")
    webhook_networks: Annotated[tuple[Network, ...], NoDecode, BeforeValidator(_networks)] = Field(
        default=(), validation_alias="RESHARD_WEBHOOK_NETWORKS", title="networks such as 10.0.0.0/8,fd00::/8"
    )
    webhook_http: bool = Field(default=False, validation_alias="RESHARD_WEBHOOK_HTTP", title="true or false")
    webhook_keys: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_keys)] = Field(
        default=(),
        repr=False,
        validation_alias="RESHARD_WEBHOOK_KEYS",
        title="keys of 32 bytes in base64, separated by commas: openssl rand -base64 32 | tr +/ -_",
    )
    keep_deliveries_s: Seconds = Field(default=14 * 86_400.0, validation_alias="RESHARD_KEEP_DELIVERIES_S")

    @property
    def layout_engines_of_tenant(self) -> int:
        """How many processes of virtual layouts one tenant may have in an API process."""
        return max(1, self.layout_engines - max(1, self.layout_engines // 4))

    @property
    def maxima(self) -> Maxima:
        """The memory and threads that a request may ask for. Without a broker, jobs run on this machine."""
        return self.jobs.maxima(runs_jobs=not self.jobs.broker_url)

    def require_protection(self, reached: str, *, otherwise: str) -> None:
        """Refuse to serve where strangers can reach the service, unless it has roots and a token or an OIDC issuer.

        Args:
            reached: Says that strangers can reach it, for the error.
            otherwise: What else the operator of a service without these settings may do, for the fix.

        Raises:
            RequestError: `request.invalid`: a variable is not set, or the token can be guessed.
        """
        needed = (("RESHARD_TOKEN", self.token or self.oidc_issuer), ("RESHARD_ROOTS", self.jobs.roots.urls))
        if missing := [name for name, value in needed if not value]:
            raise RequestError(
                "request.invalid",
                f"{reached}, and {' and '.join(missing)} is not set",
                fix=f"export {NEW_TOKEN} RESHARD_ROOTS=s3://bucket/prefix,/data; {otherwise}",
            )
        if self.token and (weakness := _weakness(self.token)):
            raise RequestError("request.invalid", f"{reached}, and RESHARD_TOKEN {weakness}", fix=f"export {NEW_TOKEN}")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> ServiceSettings:
        """Settings from `RESHARD_*` variables.

        Raises:
            RequestError: A variable is not what it should be.
        """
        found = cls.from_variables(env, jobs=JobSettings.from_env(env), probes=max(2, os.cpu_count() or 2))
        if found.oidc_issuer and not found.oidc_audience:
            raise RequestError(
                "request.invalid",
                "RESHARD_OIDC_ISSUER is set, and RESHARD_OIDC_AUDIENCE is not",
                fix="set RESHARD_OIDC_AUDIENCE to the issuer's name for this service: without it, tokens for "
                "other services would be taken",
            )
        return found
