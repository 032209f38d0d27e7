"""A real S3 server."""

from __future__ import annotations

from servers.fixtures import s3, server_directory

__all__ = ["s3", "server_directory"]
