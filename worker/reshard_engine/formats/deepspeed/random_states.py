"""Random states of ranks that a target does not take."""

from __future__ import annotations

from reshard.errors import counted
from reshard.models import NotCarried
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.not_written import named


def random_states(checkpoint: Checkpoint, ranks: int) -> tuple[NotCarried, ...]:
    """Random states of source ranks beyond the first `ranks`, which no rank of the target takes."""
    held = checkpoint.rng
    if len(held) <= ranks:
        return ()
    reason = f"the target holds the states of {counted(ranks, 'rank')}, the source those of {len(held)}"
    return named(dict.fromkeys(k for r in held[ranks:] for k, v in r.items() if v is not None), reason)
