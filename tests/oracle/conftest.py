"""Fixtures of the oracle's own tests."""

from oracle.conversions import bf16_spread, universal
from oracle.fixtures import oracle, trained, worlds
from oracle.parallel_fixtures import parallel, trained_3d

__all__ = ["bf16_spread", "oracle", "parallel", "trained", "trained_3d", "universal", "worlds"]
