"""Made once and used by many: trained models by all processes of a run, a server by all folders of one process."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import pytest

_Server = TypeVar("_Server")


def started_once(
    config: pytest.Config, key: pytest.StashKey[_Server], start: Callable[[], AbstractContextManager[_Server]]
) -> _Server:
    """A server of this process, which ends with it.

    A session fixture that several folders import is to pytest another one in each of them, with a server of its own.
    """
    if key not in config.stash:
        server = start()
        config.stash[key] = server.__enter__()
        config.add_cleanup(lambda: server.__exit__(None, None, None))
    return config.stash[key]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> tuple[Path, Any]:
    """A folder of this test run and what `make` returned when it filled it, as JSON; others wait meanwhile.

    A `make` that fails leaves nothing that counts: whoever comes next begins in a folder of its own.
    """
    base = factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    root.mkdir(exist_ok=True)
    record = root / f"{name}.json"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not record.exists():
            attempt = len(list(root.glob(f"{name}.[0-9]*")))
            folder = root / f"{name}.{attempt}"
            folder.mkdir()
            record.write_text(json.dumps([folder.name, make(folder)]))
        found, result = json.loads(record.read_text())
    return root / found, result
