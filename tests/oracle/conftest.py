"""Fixtures of the oracle's own tests."""

from oracle.conversions import bf16_spread, universal
from oracle.fixtures import oracle, trained, worlds

__all__ = ["bf16_spread", "oracle", "trained", "universal", "worlds"]
