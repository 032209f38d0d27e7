"""Checks of this machine for `reshard doctor`: what each found, and what to do about it."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from reshard.errors import ReshardError, format_size, printable

LEAST_FREE_BYTES = 1 << 30
_LEAST_OPEN_FILES = 1024
SETTINGS = tuple(f"RESHARD_{name}" for name in (
    "ADMISSION_QUEUE_S", "ADMISSION_S", "ALIVE", "ALLOWED_HOSTS", "ANONYMOUS", "BODY_S", "BROKER_URL", "DATABASE_URL",
    "DEVICE", "DEVICE_MEMORY", "DISABLE_PROGRESS_BARS", "ENGINE_MEMORY", "HEAD_S", "HEARTBEAT_S", "HOST_ID",
    "INSPECTION_S", "KEEP_AUDIT_S", "KEEP_DELIVERIES_S", "KEEP_EVENTS_S", "KEEP_FAILED_S", "KEEP_JOBS_S",
    "KEEP_KEYS_S", "KEEP_LAYOUTS_S", "KEY_PASSPHRASE", "LAYOUT_ENGINES", "LAYOUT_IDLE_S", "LAYOUT_PLAN_S",
    "LAYOUT_RANKS", "LAYOUT_READS", "LEASE_S", "LOG_FORMAT", "LOG_LEVEL", "MAX_MEMORY_BYTES", "MAX_THREADS",
    "MAX_WORKERS", "OIDC_AUDIENCE", "OIDC_ISSUER", "OIDC_JWKS_URL", "OIDC_SCOPE_CLAIM", "OIDC_TENANT_CLAIM",
    "PICKLE_NODE_BYTES", "PICKLE_OPCODES", "PICKLE_STREAM_BYTES", "PLANNING_LIMIT_S", "PROFILES", "QUARANTINE_S",
    "REAPER_S", "RETRY_DELAY_S", "ROOTS", "ROOT_PATH", "RUNNER_COMMAND", "RUNNER_STAYS", "SHARE_BYTES",
    "SHUTDOWN_GRACE_S", "SIGNING_KEY", "SIGNING_PUBLIC_KEY", "TOKEN", "TRACEBACK", "TRUSTED_PROXIES", "URL", "VERIFY",
    "WARM_ENGINE", "WEBHOOK_HTTP", "WEBHOOK_KEYS", "WEBHOOK_NETWORKS",
))  # fmt: skip
"""Every variable of the environment that some part of reshard reads."""


class Health(StrEnum):
    """The outcomes of a check."""

    OK = "ok"
    WARN = "warn"
    """Works, but not as well as it could, or something looks like a mistake."""
    FAIL = "fail"
    """Commands that need this will fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    subject: str
    health: Health
    text: str
    fix: str = ""
    code: str = ""
    """The code of the error that a command would end with."""

    @classmethod
    def of_error(cls, subject: str, error: ReshardError) -> Finding:
        """The finding of a check that ended with an error."""
        return cls(subject, Health.FAIL, f"{error.code}: {error.message}", error.fix, error.code)


def machine() -> Iterator[Finding]:
    """Check interpreter, processor, open files and free space."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    system = f"{platform.system()} {platform.machine()}, {cores} {'core' if cores == 1 else 'cores'}"
    yield Finding("python", Health.OK, f"{platform.python_version()} at {printable(sys.executable)}, {system}")
    yield from _open_files()
    places = dict.fromkeys((os.getcwd(), tempfile.gettempdir()))
    yield from (_space(place) for place in places)


def environment(environ: Mapping[str, str]) -> Finding:
    """Check the names of settings: a name that nothing reads is ignored without a word everywhere else."""
    given = sorted(name for name in environ if name.startswith("RESHARD_"))
    unknown = [name for name in given if name not in SETTINGS]
    if unknown:
        close = get_close_matches(unknown[0], SETTINGS, n=1)
        fix = f"rename it: export {close[0]}=..." if close else f"unset {unknown[0]}"
        return Finding("settings", Health.WARN, f"nothing reads {printable(unknown[0])}", fix)
    return Finding("settings", Health.OK, ", ".join(given) or "no RESHARD_ variable is set: the defaults hold")


def service(environ: Mapping[str, str]) -> Finding:
    """Check that the service of RESHARD_URL answers and takes the token."""
    url = environ.get("RESHARD_URL", "")
    if not url:
        return Finding("service", Health.OK, "RESHARD_URL is not set: commands work on this machine, without a service")
    from reshard.api.client import Client  # its httpx takes a third of the time of `--help`

    try:
        with Client(timeout_s=5.0, retries=0) as client:
            workers = client.workers()
    except ReshardError as error:
        return Finding.of_error("service", error)
    count = len(workers)
    if not count:
        fix = "start one: reshard worker"
        return Finding("service", Health.WARN, f"{printable(url)} answers and takes the token, but has no worker", fix)
    noun = "worker" if count == 1 else "workers"
    return Finding("service", Health.OK, f"{printable(url)} answers and takes the token; {count} {noun}")


def _space(place: str) -> Finding:
    try:
        free_bytes, total_bytes = disk_room(place)
    except OSError as error:
        return Finding("space", Health.WARN, f"{printable(place)}: {error.strerror}")
    text = f"{format_size(free_bytes)} of {format_size(total_bytes)} free in {printable(place)}"
    if free_bytes < LEAST_FREE_BYTES:
        return Finding("space", Health.WARN, text, "free space there; `reshard plan` says what a target needs")
    return Finding("space", Health.OK, text)


def disk_room(place: str) -> tuple[int, int]:
    """Bytes that this user may still write at a place, and all bytes of its file system."""
    found = os.statvfs(place)
    # Root may write the blocks that are reserved for it.
    blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return blocks * found.f_frsize, found.f_blocks * found.f_frsize


def _open_files() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _LEAST_OPEN_FILES:
        most = min(hard, 65_536) if hard > 0 else 65_536
        yield Finding("open files", Health.WARN, f"at most {soft}; a wide checkpoint needs more", f"ulimit -n {most}")
