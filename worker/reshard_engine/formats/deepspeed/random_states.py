"""Random states of ranks that a target does not take."""

from __future__ import annotations

from reshard.models import NotCarried
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.deepspeed.names import RNG_KEYS
from reshard_engine.formats.not_written import named


def random_states(checkpoint: Checkpoint, ranks: int) -> tuple[NotCarried, ...]:
    """Random states of source ranks beyond the first `ranks`, which no rank of the target takes."""
    held = checkpoint.rng
    if len(held) <= ranks:
        return ()
    reason = f"the target holds the states of {ranks} ranks, the source those of {len(held)}"
    return named((k for k in RNG_KEYS if any(r.get(k) is not None for r in held[ranks:])), reason)
