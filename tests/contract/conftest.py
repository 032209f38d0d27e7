"""Real servers for the tests of this folder."""

from servers.fixtures import make_stack, postgres, redis

__all__ = ["make_stack", "postgres", "redis"]
