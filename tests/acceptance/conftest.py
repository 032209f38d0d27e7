"""Real servers for the tests of this folder, and DeepSpeed."""

from oracle.fixtures import worlds
from servers.fixtures import database_url, make_stack, postgres, redis, s3, sqlite_url, stack, store, store_bucket

__all__ = [
    "database_url",
    "make_stack",
    "postgres",
    "redis",
    "s3",
    "sqlite_url",
    "stack",
    "store",
    "store_bucket",
    "worlds",
]
