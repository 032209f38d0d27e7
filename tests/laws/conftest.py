"""Fixtures of the laws."""

from __future__ import annotations

from oracle.fixtures import oracle, trained, worlds
from servers.fixtures import s3

__all__ = ["oracle", "s3", "trained", "worlds"]
