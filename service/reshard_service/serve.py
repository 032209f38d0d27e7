"""`reshard serve`: the API and, unless a broker is configured, an embedded executor. It needs no other service."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType

import uvicorn

from reshard.api.service_token import is_loopback
from reshard.errors import JobError, RequestError, printable
from reshard_jobs.logs import LEVEL_VARIABLE, as_json, configure_logs
from reshard_service.app import create_app
from reshard_service.auth import local_token
from reshard_service.middleware import impatient
from reshard_service.settings import ServiceSettings

# The embedded executor: one child process beside the API, restarted when it dies.

logger = logging.getLogger(__name__)

_RESTART_S = 2.0
_STOP_S = 10.0


class ExecutorProcess:
    """Keeps `python -m reshard_worker.embedded` running until stopped.

    The child asks the kernel to end it with its parent thread, so that `kill -9` of the API leaves
    nothing behind. Therefore the thread that starts the child lives as long as this object is in use.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_running, name="executor", daemon=True)

    def start(self) -> None:
        """Start the child."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the child, which requeues its job first."""
        self._stop.set()
        self._thread.join()

    def _keep_running(self) -> None:
        while not self._stop.is_set():
            process = subprocess.Popen([sys.executable, "-m", "reshard_worker.embedded"], stdin=subprocess.DEVNULL)
            while process.poll() is None and not self._stop.wait(0.2):
                continue
            if self._stop.is_set():
                _end(process)
                return
            logger.warning("the executor ended with status %d and is started again", process.returncode)
            self._stop.wait(_RESTART_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_LEVELS = ("critical", "error", "warning", "info", "debug")


def serve(*, host: str, port: int, data_dir: Path, log_level: str = "info") -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        host: Address to listen on; other than a loopback address it needs roots and a token that nobody guesses. On a
            loopback address without a token, one is made and written to a file that only this user can read.
        port: Port to listen on; 0 chooses a free one.
        data_dir: Directory of the job database, unless `RESHARD_DATABASE_URL` names another database.
        log_level: Log level of the service and of uvicorn.

    Raises:
        ReshardError: The settings or the job database are not usable.
    """
    if log_level.lower() not in _LEVELS:
        levels = ", ".join(_LEVELS)
        raise RequestError(
            "request.invalid", f"--log-level {printable(log_level)} is not a log level", fix=f"one of {levels}"
        )
    try:
        _make_data_dir(data_dir)
    except OSError as error:
        text = f"--data-dir {printable(str(data_dir))}: {error.strerror}"
        raise RequestError("request.invalid", text, fix="name a directory that you may write to") from None
    # Settings are passed in the environment, so that the executor's process reads the same ones.
    os.environ.setdefault("RESHARD_DATABASE_URL", f"sqlite:///{data_dir.absolute() / 'jobs.db'}")
    settings = ServiceSettings.from_env()
    if not is_loopback(host):
        settings.require_protection(
            f"other machines can reach {printable(host)}", otherwise="or: reshard serve --host 127.0.0.1"
        )
    os.environ[LEVEL_VARIABLE] = log_level
    configure_logs(log_level)
    # The port is bound first, so that a refused start has not opened a database.
    with closing(listening(host, port)) as listener, ExitStack() as stack:
        bound = int(listener.getsockname()[1])
        token_file = None
        if not (settings.token or settings.anonymous):
            token, token_file = stack.enter_context(local_token(bound))
            settings = settings.model_copy(update={"token": token})
        if is_loopback(host) and not settings.allowed_hosts:
            settings = settings.model_copy(update={"allowed_hosts": (*_LOOPBACK_NAMES, host)})
        _serve(settings, listener, host, token_file, log_level)


def _make_data_dir(path: Path) -> None:
    """Make the directory of the job database, for this user alone.

    One that exists is made private, too, if it is this user's and has nothing but the database in it: releases before
    made it so that others could read it. Any other is not the service's own, and only the files in it are private.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    mine = found.st_uid == os.getuid() and not found.st_mode & stat.S_ISVTX
    if mine and found.st_mode & 0o077 and all(inside.name.startswith("jobs.db") for inside in path.iterdir()):
        path.chmod(0o700)


def _serve(
    settings: ServiceSettings, listener: socket.socket, host: str, token_file: Path | None, log_level: str
) -> None:
    port = int(listener.getsockname()[1])
    config = uvicorn.Config(
        create_app(settings),
        host=host,
        port=port,
        http=impatient(settings.head_s),
        # It would believe the headers of whoever calls from a loopback address. `trusted_proxies` says whom we believe.
        proxy_headers=False,
        log_level=log_level,
        log_config=None,
        # Event streams and long polls end with the service and do not delay its stop.
        timeout_graceful_shutdown=3,
        server_header=False,
        lifespan="on",
    )
    executor = None if settings.jobs.broker_url else ExecutorProcess()
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn handles both signals while it serves, and raises them again afterwards.
        signal.signal(number, _leave)
    try:
        if executor is not None:
            executor.start()
        _announce(settings, host, port, token_file)
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        if executor is not None:
            executor.stop()


def listening(host: str, port: int) -> socket.socket:
    """Bind a socket to an address. uvicorn could bind it, too, but would end the process if that failed.

    Raises:
        JobError: `service.port_in_use`.
        RequestError: `request.invalid` for an address of another machine, or a port that this user may not have.
    """
    # With the number of the protocol: asyncio (3.11, `base_events._set_nodelay`) switches Nagle's algorithm off only
    # where a socket has it, and connections have that of the socket that took them. Otherwise each answer waits 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


def _announce(settings: ServiceSettings, host: str, port: int, token_file: Path | None) -> None:
    where = f"[{host}]" if ":" in host else host
    roots = ", ".join(settings.jobs.roots.urls) or "everything this user can reach (set RESHARD_ROOTS to limit it)"
    executor = "Celery workers" if settings.jobs.broker_url else "one embedded executor"
    if as_json():
        logger.info("reshard serves on http://%s:%d, jobs run in %s, jobs may name %s", where, port, executor, roots)
        return
    sys.stderr.write(
        f"reshard serves on http://{where}:{port}\n  jobs run in: {executor}\n  jobs may name: {roots}\n"
        f"  use it: export RESHARD_URL=http://{where}:{port}\n"
    )
    if token_file is not None:
        sys.stderr.write(
            "  your own reshard commands find the token by themselves; for others, and for a browser, it is in\n"
            f"  {token_file}\n"
        )
    elif not settings.token:
        sys.stderr.write("  everybody who can connect may use it: RESHARD_ANONYMOUS is set\n")
    sys.stderr.flush()


def _leave(number: int, _frame: FrameType | None) -> None:
    # Stop only once: a second Ctrl-C must not interrupt the executor's clean end.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)
