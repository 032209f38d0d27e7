"""The environment variables of launchers, which tests of `reshard.ensure` must not inherit."""

from __future__ import annotations

import os

import pytest

LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Variables in which launchers declare the number of processes."""
_NOT_INHERITED = (*LAUNCHERS, "RESHARD_URL")


def forget_launchers(monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    """Unset the variables of launchers, `RESHARD_URL` and those named."""
    for name in (*_NOT_INHERITED, *more):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher declares a number of processes, and no service is configured."""
    forget_launchers(monkeypatch)


def without_launchers() -> dict[str, str]:
    """The environment of this process for a process that it starts, without these variables."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
