"""The seed of everything that the tests of a run draw."""

from __future__ import annotations

import os
import random
import zlib
from functools import cache

from house.repository import head_commit


@cache
def run_seed() -> int:
    """The seed of this run: `RESHARD_SEED`, or a new one for each process of tests."""
    return int(os.environ.get("RESHARD_SEED") or random.SystemRandom().randrange(1, 1 << 32))


def commit_seed() -> int:
    """The seed of a commit: whoever runs the tests of a commit draws what CI draws. Without git, one number."""
    return zlib.crc32(head_commit().encode()) or 1
