"""Weights of shape [0] in place of parameters, as a model under ZeRO-3 has them between its steps.

Who saves such a model without gathering its parameters saves the placeholders, and no value of theirs.

Source: DeepSpeed 0.19.8 `runtime/zero/partition_parameters.py` (`free_param`: `torch.empty(0)` takes the place of a
parameter's data; parameters of at most `stage3_param_persistence_threshold` elements stay whole, such as biases).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace

from reshard.choices import EmptyWeights
from reshard.errors import SourceError, listed, printable
from reshard_engine.checkpoint import Checkpoint

_FEW = 10
"""Fewer than one of so many parameters are no placeholders: in a run's own model a few may be empty."""


def with_placeholders_named(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a warning that names its parameters of shape [0]."""
    names = _empty(checkpoint)
    return replace(checkpoint, warnings=(*checkpoint.warnings, _text(checkpoint, names))) if names else checkpoint


def refuse_placeholders(checkpoint: Checkpoint, policy: EmptyWeights, training_state: Callable[[], str]) -> None:
    """Refuse weights of which several, and at least a tenth, are of shape [0].

    Args:
        checkpoint: The weights.
        policy: `keep` takes them as they are.
        training_state: Looks for a training state that has the values, and returns its place; empty if it sees none.

    Raises:
        SourceError: `checkpoint.incomplete`, with the names.
    """
    names = _empty(checkpoint)
    if policy is EmptyWeights.KEEP or len(names) < 2 or len(names) * _FEW < len(checkpoint.parameters):
        return
    if place := training_state():
        values = f"convert the run's training state: reshard inspect {shlex.quote(printable(place, max_chars=1_024))}"
    else:
        values = "convert the global_step* directory that the run saved, which has the values"
    raise SourceError(
        "checkpoint.incomplete",
        _text(checkpoint, names),
        fix=f"{values}; or, if the model has such parameters, --empty-weights keep",
        details={"parameters": [printable(n) for n in names[:256]]},
    )


def _empty(checkpoint: Checkpoint) -> list[str]:
    """The parameters of shape [0], if the shape is that of a tensor of weights alone."""
    if checkpoint.optimizer is not None or checkpoint.facts.lists_shapes:
        return []
    return [p.fqn for p in checkpoint.parameters if p.shape == (0,)]


def _text(checkpoint: Checkpoint, names: list[str]) -> str:
    return (
        f"{len(names)} of {len(checkpoint.parameters)} parameters have the shape [0] and no elements, as a model under "
        f"ZeRO-3 that was saved without gathering its parameters: {listed(names)}"
    )
