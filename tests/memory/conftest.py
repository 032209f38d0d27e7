"""Fixtures of the memory tests."""

from oracle.fixtures import worlds

__all__ = ["worlds"]
