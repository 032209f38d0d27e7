"""Names the parts of a checkpoint that a target leaves out, for `not_carried` of the conversion's result."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import printable
from reshard.models import NotCarried
from reshard_engine.checkpoint import Checkpoint

NO_TRAINING_STATE = "weights hold no training state"
OF_ANOTHER = "it is not of the model that was read: --model-key and --optimizer-key choose another one"
NO_TENSORS = "the format holds tensors only, and this entry of the state dict is not a tensor"
AS_ASKED = "left out, as asked"


def named(paths: Iterable[str], reason: str) -> tuple[NotCarried, ...]:
    """Entries with one reason."""
    return tuple(NotCarried(path=printable(path), reason=reason) for path in paths)


def training_state(checkpoint: Checkpoint) -> tuple[NotCarried, ...]:
    """The optimizer and each entry of the run's state, for targets that hold no training state."""
    others = checkpoint.facts.of_others(checkpoint)
    optimizer = ["optimizer"] if checkpoint.optimizer is not None else []
    state = [key for key in map(str, checkpoint.facts.run_state(checkpoint)) if key not in others]
    return (*named([*optimizer, *state], NO_TRAINING_STATE), *named(others, OF_ANOTHER))


def of_the_format(checkpoint: Checkpoint, reason: str) -> tuple[NotCarried, ...]:
    """The parts of the run's state that only the source's own format has, for targets of other formats."""
    return named(map(str, checkpoint.facts.own_state()), reason)


def extra_states(checkpoint: Checkpoint) -> tuple[NotCarried, ...]:
    """The entries of the state dict that are not tensors, for targets that hold tensors only."""
    return named((f"module.{name}" for name in checkpoint.extra_states), NO_TENSORS)


def frozen_parameters(checkpoint: Checkpoint) -> tuple[NotCarried, ...]:
    """The frozen parameters, for targets that were asked to leave them out."""
    return named((f"module.{p.fqn}" for p in checkpoint.frozen), AS_ASKED)


def padding_left_out(checkpoint: Checkpoint) -> str:
    """A note about the padding rows of the vocabulary, for targets that leave them out."""
    return f"{checkpoint.padding_rows} rows of padding behind the vocabulary are left out"
