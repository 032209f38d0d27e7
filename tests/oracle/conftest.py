"""Fixtures of the oracle's own tests."""

from oracle.fixtures import oracle, trained, worlds

__all__ = ["oracle", "trained", "worlds"]
