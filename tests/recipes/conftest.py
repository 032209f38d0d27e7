"""Fixtures of the recipes' tests."""

from __future__ import annotations

from oracle.fixtures import oracle, trained, worlds
from servers.fixtures import make_stack

__all__ = ["make_stack", "oracle", "trained", "worlds"]
