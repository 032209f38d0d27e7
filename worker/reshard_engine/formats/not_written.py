"""Names for what a target leaves out of a checkpoint: `not_carried` of the conversion's result."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import printable
from reshard.models import NotCarried
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.pickles.nodes import is_mapping, mapping_items

NO_TRAINING_STATE = "weights hold no training state"
NO_TENSORS = "the format holds tensors only, and this entry of the state dict is none"
AS_ASKED = "left out, as asked"


def named(paths: Iterable[str], reason: str) -> tuple[NotCarried, ...]:
    """Entries with one reason."""
    return tuple(NotCarried(path=printable(path), reason=reason) for path in paths)


def training_state(checkpoint: Checkpoint) -> tuple[NotCarried, ...]:
    """The optimizer, and each entry of the model states: what a target without training state leaves out."""
    state = checkpoint.model_state
    entries = mapping_items(state, what="model states") if is_mapping(state) else {}
    optimizer = ["optimizer"] if checkpoint.optimizer is not None else []
    keys = [str(k) for k in entries if k not in checkpoint.described]
    return named([*optimizer, *keys], NO_TRAINING_STATE)


def extra_states(checkpoint: Checkpoint) -> tuple[NotCarried, ...]:
    """The entries of the state dict that are no tensors, for targets that hold nothing else."""
    return named((f"module.{name}" for name in checkpoint.extra_states), NO_TENSORS)


def frozen_parameters(checkpoint: Checkpoint) -> tuple[NotCarried, ...]:
    """The frozen parameters, for targets that were asked to leave them out."""
    return named((f"module.{p.fqn}" for p in checkpoint.frozen), AS_ASKED)


def padding_left_out(checkpoint: Checkpoint) -> str:
    """A note about the rows of padding behind a vocabulary, for targets that hold the vocabulary alone."""
    return f"{checkpoint.padding_rows} rows of padding behind the vocabulary are left out"
