"""Logs of the service's processes: lines of text or of JSON, with the job to which a line belongs.

The standard library does this: a library for structured logs would write whatever a record carries, and what reaches an
operator's log store must be a list that can be read here.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType
from typing import Any, TextIO

from reshard.errors import without_secrets

FORMAT_VARIABLE = "RESHARD_LOG_FORMAT"
LEVEL_VARIABLE = "RESHARD_LOG_LEVEL"
"""The level of the processes that a service or a worker starts; set by them."""
FIELDS = ("job", "attempt", "run", "tenant", "trace_id")
"""The fields of a line that say to which work it belongs."""

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TALKATIVE = (
    # At DEBUG, these write signed headers, bodies of requests or SQL parameters, and at INFO whole URLs.
    *("aiobotocore", "amqp", "asyncio", "azure", "boto3", "botocore", "fsspec", "google", "hpack", "httpcore", "httpx"),
    *("kombu", "multipart", "opentelemetry", "psycopg", "python_multipart", "requests", "s3fs", "s3transfer"),
    *("sqlalchemy", "sse_starlette", "urllib3"),
)

_NONE: Mapping[str, str | int] = MappingProxyType({})
_context: ContextVar[Mapping[str, str | int]] = ContextVar("log_context", default=_NONE)
_of_process: dict[str, str | int] = {}


@contextmanager
def log_as(**fields: str | int) -> Generator[None]:
    """Let all lines that the block logs carry these fields (see `FIELDS`)."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def log_process_as(fields: Mapping[str, str | int]) -> None:
    """Let all lines of this process carry these fields, whichever thread logs them."""
    _of_process.update(fields)


def log_context() -> dict[str, str | int]:
    """The fields that a line would carry now."""
    return {**_of_process, **_context.get()}


def configure_logs(level: str | int | None = None, *, stream: TextIO | None = None) -> None:
    """Send all logs of this process to stderr, in the format that `RESHARD_LOG_FORMAT` names.

    Args:
        level: The least level; by default that of `RESHARD_LOG_LEVEL`, or INFO.
        stream: Another stream.
    """
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if as_json() else TextLines(_TEXT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_level(level))
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    # These come with handlers of their own.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "celery", "celery.task", "celery.redirected"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught


def as_json() -> bool:
    """True if this process writes its logs as JSON."""
    return os.environ.get(FORMAT_VARIABLE) == "json"


def _level(level: str | int | None) -> int | str:
    if isinstance(level, int):
        return level
    name = (level or os.environ.get(LEVEL_VARIABLE) or "INFO").upper()
    return name if name in logging.getLevelNamesMapping() else "INFO"


def _fields_of(record: logging.LogRecord) -> dict[str, str | int]:
    own = {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
    found = {**log_context(), **own}
    return {name: found[name] for name in FIELDS if name in found}


class JsonLines(logging.Formatter):
    """One JSON object for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
            "pid": record.process,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextLines(logging.Formatter):
    """The record as text, with the fields behind its message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of the method that it replaces
        """The line without a traceback."""
        fields = " ".join(f"{name}={value}" for name, value in _fields_of(record).items())
        return super().formatMessage(record) + (f" [{fields}]" if fields else "")


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines without the secrets of this process: no code logs them, and libraries may."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the end of this process as a line."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger("reshard").critical("this process ends with an error", exc_info=(kind, error, trace))
