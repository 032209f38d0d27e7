"""Fixtures of the oracle's own tests."""

from oracle.conversions import bf16_spread, universal
from oracle.dcp_fixtures import fsdp, saved
from oracle.fixtures import oracle, trained, worlds
from oracle.parallel_fixtures import parallel, trained_on
from servers.fixtures import s3

__all__ = [
    "bf16_spread",
    "fsdp",
    "oracle",
    "parallel",
    "s3",
    "saved",
    "trained",
    "trained_on",
    "universal",
    "worlds",
]
