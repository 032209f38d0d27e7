"""Connections to PostgreSQL have timeouts, which the URL may change."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from reshard_jobs.database import POSTGRES_TIMEOUTS, engine_of


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        engine = engine_of(f"postgresql://user@127.0.0.1:{port}/jobs?connect_timeout=2&gssencmode=disable")
        asked: list[dict[str, Any]] = []
        event.listen(engine, "do_connect", lambda _dialect, _record, _arguments, named: asked.append(named))
        began = time.monotonic()
        with pytest.raises(OperationalError, match="timeout"):
            engine.connect()
    # libpq may round two seconds up.
    assert 1 < time.monotonic() - began < 9
    (named,) = asked
    assert {name: named[name] for name in POSTGRES_TIMEOUTS} == {**POSTGRES_TIMEOUTS, "connect_timeout": "2"}
