"""Real servers for the tests of this folder."""

from servers.fixtures import (
    bucket,
    database_url,
    make_stack,
    postgres,
    redis,
    s3,
    server_directory,
    sqlite_url,
    stack,
    store,
    store_bucket,
)

__all__ = [
    "bucket",
    "database_url",
    "make_stack",
    "postgres",
    "redis",
    "s3",
    "server_directory",
    "sqlite_url",
    "stack",
    "store",
    "store_bucket",
]
