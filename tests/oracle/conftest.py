"""Fixtures of the oracle's own tests."""

from pathlib import Path

import pytest

from house.printed_lines import target
from oracle.conversions import bf16_spread, universal
from oracle.fixtures import fsdp, oracle, parallel, saved, trained, trained_on, worlds
from servers.fixtures import bucket, s3

__all__ = [
    "bf16_spread",
    "bucket",
    "fsdp",
    "oracle",
    "parallel",
    "s3",
    "saved",
    "target",
    "trained",
    "trained_on",
    "universal",
    "worlds",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the tests of a module unpack real checkpoints."""
    return tmp_path_factory.mktemp("place")
