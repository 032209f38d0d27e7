"""A real S3 server."""

from __future__ import annotations

from servers.fixtures import s3

__all__ = ["s3"]
