"""Fixtures of the recipes' tests."""

from __future__ import annotations

from oracle.fixtures import oracle, trained, worlds

__all__ = ["oracle", "trained", "worlds"]
