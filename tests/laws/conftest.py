"""Fixtures of the laws."""

from __future__ import annotations

import laws.profiles  # noqa: F401 - pytest asks for the profile of the command line before it imports the tests
from oracle.fixtures import oracle, trained, worlds
from servers.fixtures import bucket, s3

__all__ = ["bucket", "oracle", "s3", "trained", "worlds"]
