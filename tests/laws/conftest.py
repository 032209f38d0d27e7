"""Fixtures of the laws."""

from __future__ import annotations

from oracle.fixtures import oracle, trained, worlds
from servers.fixtures import bucket, s3

__all__ = ["bucket", "oracle", "s3", "trained", "worlds"]
