"""`reshard serve`: the API and, unless a broker is configured, an embedded executor. One command, no services."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
from contextlib import closing
from pathlib import Path
from types import FrameType

import uvicorn

from reshard.errors import JobError, RequestError, printable
from reshard_service.app import create_app
from reshard_service.executor import ExecutorProcess
from reshard_service.settings import ServiceSettings

logger = logging.getLogger(__name__)
_LEVELS = ("critical", "error", "warning", "info", "debug")


def serve(*, host: str, port: int, data_dir: Path, log_level: str = "info") -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        host: Address to listen on; other than a loopback address it needs a token and roots.
        port: Port to listen on; 0 chooses a free one.
        data_dir: Where the job database lives unless `RESHARD_DATABASE_URL` names another.
        log_level: Of the service and of uvicorn.

    Raises:
        ReshardError: The settings or the job database are not usable.
    """
    if log_level.lower() not in _LEVELS:
        levels = ", ".join(_LEVELS)
        raise RequestError("request.invalid", f"--log-level {printable(log_level)} is none", fix=f"one of {levels}")
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"--data-dir {printable(str(data_dir))}: {error.strerror}"
        raise RequestError("request.invalid", text, fix="name a directory that you may write to") from None
    # In the environment, so that the executor's process reads the same settings.
    os.environ.setdefault("RESHARD_DATABASE_URL", f"sqlite:///{data_dir.absolute() / 'jobs.db'}")
    settings = ServiceSettings.from_env()
    require_safe(host, settings)
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The port first: what is refused for that has opened no database.
    with closing(listening(host, port)) as listener:
        _serve(settings, listener, host, port, log_level)


def _serve(settings: ServiceSettings, listener: socket.socket, host: str, port: int, log_level: str) -> None:
    config = uvicorn.Config(
        create_app(settings),
        host=host,
        port=port,
        log_level=log_level,
        # Event streams and long polls end with the service, they do not keep it.
        timeout_graceful_shutdown=3,
        server_header=False,
        lifespan="on",
    )
    executor = None if settings.jobs.broker_url else ExecutorProcess()
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn handles both while it serves, and raises them again when it is done.
        signal.signal(number, _leave)
    try:
        if executor is not None:
            executor.start()
        _announce(settings, host, int(listener.getsockname()[1]))
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        if executor is not None:
            executor.stop()


def listening(host: str, port: int) -> socket.socket:
    """A socket on an address, which uvicorn would bind too, but end the process where it cannot.

    Raises:
        JobError: `service.port_in_use`.
        RequestError: `request.invalid` for an address of another machine, or a port that this user may not have.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise JobError(
                "service.port_in_use",
                f"another process listens on port {port} of {host}",
                fix=f"--port 0 takes a free one, or find it with: ss -ltnp sport = :{port}",
            ) from None
        text = f"{printable(host)} port {port}: {error.strerror}"
        raise RequestError(
            "request.invalid", text, fix="--host 127.0.0.1, or an address of this machine; --port 1024 or above"
        ) from None
    listener.set_inheritable(True)
    return listener


def require_safe(host: str, settings: ServiceSettings) -> None:
    """Do nothing if this address may be served with these settings.

    Raises:
        RequestError: `request.invalid`: strangers could reach a service without a token or roots.
    """
    if is_loopback(host):
        return
    missing = [
        name
        for name, value in (("RESHARD_TOKEN", settings.token), ("RESHARD_ROOTS", settings.jobs.roots.urls))
        if not value
    ]
    if missing:
        raise RequestError(
            "request.invalid",
            f"serving on {host} lets others in, and {' and '.join(missing)} is not set",
            fix="export RESHARD_TOKEN=$(openssl rand -hex 32) RESHARD_ROOTS=s3://bucket/prefix,/data "
            "first, or: reshard serve --host 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _announce(settings: ServiceSettings, host: str, port: int) -> None:
    where = f"[{host}]" if ":" in host else host
    roots = ", ".join(settings.jobs.roots.urls) or "everything this user can reach (set RESHARD_ROOTS to limit it)"
    executor = "Celery workers" if settings.jobs.broker_url else "one embedded executor"
    sys.stderr.write(
        f"reshard serves on http://{where}:{port}\n  jobs run in: {executor}\n  jobs may name: {roots}\n"
        f"  use it: export RESHARD_URL=http://{where}:{port}\n"
    )
    sys.stderr.flush()


def _leave(number: int, _frame: FrameType | None) -> None:
    # Once: the executor's last moments must not be cut short by an impatient second Ctrl-C.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)
