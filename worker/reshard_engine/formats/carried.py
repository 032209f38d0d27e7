"""Names what a conversion does not carry: keys of files that no reader uses, and parts that a target leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from reshard.errors import counted, listed, printable
from reshard.models.jobs import NotCarried
from reshard_engine.checkpoint import Checkpoint

UNKNOWN = "reshard does not know this key"


class NotCarriedKeys:
    """Keys by path and reason, each with the files that hold it."""

    def __init__(self) -> None:
        """Start without keys."""
        self._files: dict[tuple[str, str], list[str]] = {}

    def add(self, path: str, reason: str, *, file: str = "") -> None:
        """Note one key of one file."""
        self._files.setdefault((printable(path), reason), []).append(printable(file))

    def add_all(self, paths: Iterable[str], reason: str, *, file: str = "") -> None:
        """Note several keys of one file."""
        for path in paths:
            self.add(path, reason, file=file)

    def found(self) -> tuple[NotCarried, ...]:
        """The noted keys, in the order in which they were met."""
        return tuple(
            NotCarried(path=path, reason=reason, file=files[0], files=len(files))
            for (path, reason), files in self._files.items()
        )


# States that the hyper-parameters of a param group require and no file has.

_REQUIRED = (
    ("amsgrad", "amsgrad", "max_exp_avg_sq"),
    ("centered", "centered", "grad_avg"),
    ("centered", "momentum", "momentum_buffer"),
)
"""A key that shows which optimizer a group has, the hyper-parameter that makes it keep a state, and the state.

SGD is not among them: without its momentum it begins a new one.
"""


def missing_states(checkpoint: Checkpoint) -> list[str]:
    """Warnings about parameters that have states, but not all those without which their optimizer ends at a step.

    DeepSpeed's `ds_to_universal` writes masters and both moments of Adam, and nothing else.

    Source: torch 2.13.0 `optim/adam.py`, `optim/rmsprop.py` (`_init_group`), deepspeed 0.19.8
    `checkpoint/ds_to_universal.py`; verified by running.
    """
    found: list[str] = []
    for number, (values, begun) in enumerate(checkpoint.facts.group_states(checkpoint)):
        for known, switch, state in _REQUIRED:
            value = values.get(switch)
            if known not in values or not isinstance(value, bool | int | float) or not value:
                continue
            if lost := [name for name, states in begun.items() if state not in states]:
                many = counted(len(lost), "parameter has", "parameters have")
                found.append(
                    f"param group {number} has {switch}={value}, and {many} no {state} ({listed(lost)}): the first "
                    f"optimizer step of a run that loads them ends with KeyError: {state!r}. Convert the checkpoint "
                    f"that the run itself saved (DeepSpeed's ds_to_universal leaves this state out), or set {switch} "
                    f"to {type(value)(0)} in the param group after loading"
                )
    return found


# Names the parts of a checkpoint that a target leaves out, for `not_carried` of the conversion's result.

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
    optimizer = ["optimizer"] if checkpoint.optimizer is not None or checkpoint.no_optimizer else []
    state = [key for key in map(str, checkpoint.facts.run_state(checkpoint)) if key not in others]
    return (*named([*optimizer, *state], NO_TRAINING_STATE), *named(others, OF_ANOTHER))


def of_the_format(checkpoint: Checkpoint, reason: str) -> tuple[NotCarried, ...]:
    """The parts of the run's state that only the source's own format has, for targets of other formats."""
    return named(map(str, checkpoint.facts.own_state()), reason)


def extra_states(checkpoint: Checkpoint, kept: Collection[str] = ()) -> tuple[NotCarried, ...]:
    """The entries of the state dict that are not tensors, for targets with tensors and with `kept` alone."""
    return named((f"module.{name}" for name in checkpoint.extra_states if name not in kept), NO_TENSORS)


def frozen_parameters(checkpoint: Checkpoint) -> tuple[NotCarried, ...]:
    """The frozen parameters, for targets that were asked to leave them out."""
    return named((f"module.{p.fqn}" for p in checkpoint.frozen), AS_ASKED)


def padding_left_out(checkpoint: Checkpoint) -> str:
    """A note about the padding rows of the vocabulary, for targets that leave them out."""
    return f"{checkpoint.padding_rows} rows of padding behind the vocabulary are left out"
