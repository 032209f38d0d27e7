"""Fixtures of the laws."""

from __future__ import annotations

from oracle.fixtures import oracle, trained, worlds
from servers.fixtures import s3, server_directory

__all__ = ["oracle", "s3", "server_directory", "trained", "worlds"]
