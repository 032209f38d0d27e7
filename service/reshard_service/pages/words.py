"""Names for people: of formats, targets, states and options, and errors in the words of the form instead of flags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from reshard.choices import JobState
from reshard.declared import declared_options
from reshard.errors import counted, format_size
from reshard.installed_formats import known_targets
from reshard.models.jobs import ConvertRequest
from reshard.option import parse_size

_FORMATS = {
    "deepspeed": "DeepSpeed", "dcp": "DCP", "torch": "PyTorch", "peft": "PEFT", "zero": "ZeRO", "fsdp": "FSDP",
    "torch_checkpointing": "torch_checkpointing", "skyrl": "SkyRL", "accelerate": "Accelerate",
}  # fmt: skip
_STATES = {
    JobState.VERIFYING: "Checking",
    JobState.CANCELLING: "Cancelling",
}
_OPTIONS = {option.place: option for option in declared_options().values()}
LABELS: Mapping[str, str] = {
    "source.url": "Checkpoint",
    "target": "Target",
    "to": "Format of the target",
    **{place: option.label for place, option in _OPTIONS.items()},
    "max_attempts": "Attempts at most",
    "max_workers": "Workers at most",
    "priority": "Priority",
    "labels": "Labels",
}
"""The name of each field of a request, by its place in the body of `POST /v1/jobs`."""
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])(?: ([a-z][a-z0-9_-]*\|[a-z0-9_|-]+|[A-Z]+(?![a-z])))?")
_TARGET = re.compile(r"(?<![\w-])--to ([a-z][a-z0-9_]*)")
_COMMAND = re.compile(r"\b(?:reshard [a-z]|export [A-Z]|pip install)")
_SIZED = {option.field for option in _OPTIONS.values() if option.option.parse is parse_size}


def target_name(to: str) -> str:
    """The name of a target for people; that of a target that nobody knows here is its name in requests."""
    target = known_targets().get(to)
    return to if target is None else target.label


def target_of(request: ConvertRequest) -> str:
    """The target of a request in words, with the number of GPUs that it is for."""
    name = target_name(request.to)
    if request.layout.dp is None:
        return name
    return f"{name.partition(', for ')[0]}, for {counted(request.layout.world_size, 'GPU')}"


def format_name(name: str) -> str:
    """The format of a source in words: `DeepSpeed ZeRO-2` for `deepspeed-zero2`."""
    whole = name.replace("torch-checkpointing", "torch_checkpointing")
    words = re.sub(r"(?<=[a-z])(?=\d+$)", "-", whole).split("-")
    text = " ".join(_FORMATS.get(word, word) for word in words if not word.isdigit())
    return f"{text}-{words[-1]}" if words[-1].isdigit() else text


def target_part(name: str) -> str:
    """The kind of parallelism of one of a format's targets, such as `zero --tp`."""
    return worded(name.partition(" ")[2]).strip("“”") or target_name(name)


def state_name(state: JobState | str) -> str:
    """The state of a job in words."""
    found = JobState(state)
    return _STATES.get(found, found.value.capitalize())


def label_of(place: str) -> str:
    """The name of a field of a request; of one that another package brings, that of the field itself."""
    return LABELS.get(place) or place.rpartition(".")[2].replace("_", " ")


def value_of(place: str, value: Any) -> str:
    """The value of a field in words, with its unit."""
    if place.rpartition(".")[2] in _SIZED and isinstance(value, int):
        return format_size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, cast("list[Any]", value)))
    return str(value)


def flag_of(place: str) -> str:
    """The flag of the command line for a field of a request, without its dashes."""
    if place == "labels":
        return "label"
    option = _OPTIONS.get(place)
    return place.rpartition(".")[2].replace("_", "-") if option is None else option.flag.removeprefix("--")


_BY_FLAG = {flag_of(place): place for place in reversed(LABELS)}


def places_in(text: str) -> list[str]:
    """The fields whose flags a text names, in its order; the format of the target is in most of them, so it is last."""
    found = [place for match in _FLAG.finditer(text) if (place := _BY_FLAG.get(match[1])) is not None]
    return sorted(found, key=lambda place: place == "to")


def worded(text: str) -> str:
    """A text for the command line in the words of the pages: labels for flags. Commands of a shell stay as they are."""
    begin = found.start() if (found := _COMMAND.search(text)) else len(text)
    named = _TARGET.sub(lambda match: f"“{target_name(match[1])}”", text[:begin])
    return _FLAG.sub(_label_for, named) + text[begin:]


def is_command(text: str) -> bool:
    """True if a text holds a command for a shell."""
    return _COMMAND.search(text) is not None


def _label_for(match: re.Match[str]) -> str:
    place = _BY_FLAG.get(match[1])
    name = label_of(place) if place else match[1].replace("-", " ")
    label = f"“{name.partition(' (')[0]}”"
    values = match[2]
    # FILE, DIR and their like stand for a value that the reader knows.
    return f"{label} ({values.replace('|', ', ')})" if values and "|" in values else label
