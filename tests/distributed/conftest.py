"""A real S3 server."""

from __future__ import annotations

from servers.fixtures import s3, store, store_bucket

__all__ = ["s3", "store", "store_bucket"]
