"""The registry of formats: the only table that names them, and functions that ask all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from reshard.declared import refuse_options_of_others
from reshard.errors import RequestError, SourceError, printable
from reshard.installed_formats import InstalledFormat, installed_formats, refused_format
from reshard.models.jobs import ConvertRequest
from reshard.options import Options
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.carried import missing_states
from reshard_engine.formats.deepspeed.format import DeepSpeed
from reshard_engine.formats.format import Format, Writer
from reshard_engine.formats.fsdp_ranks.format import FsdpRanks
from reshard_engine.formats.full_state_dict.format import FullStateDict
from reshard_engine.formats.megatron.format import Megatron
from reshard_engine.formats.model_weights import unloadable
from reshard_engine.formats.peft.format import Peft
from reshard_engine.formats.torch_checkpointing.format import TorchCheckpointing
from reshard_engine.formats.torch_files import TorchFiles
from reshard_engine.formats.weights.format import Weights
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.storage.locations import Location
from reshard_engine.tensors.layout import KnownFiles, PlannedStore, TargetLayout

_BUILT_IN: tuple[Format, ...] = (
    DeepSpeed(),
    FsdpRanks(),
    FullStateDict(),
    Megatron(),
    TorchCheckpointing(),
    Weights(),
    Peft(),
    TorchFiles(),
)
_OURS = KnownFiles(entries=(MANIFEST_NAME,), needed=(MANIFEST_NAME,))
_UNKNOWN = Format()


@cache
def formats() -> tuple[Format, ...]:
    """The formats of reshard, followed by those of other packages.

    Raises:
        RequestError: `request.bad_format` if a format of another package cannot be loaded.
    """
    return (*_BUILT_IN, *map(_loaded, installed_formats()))


def _loaded(installed: InstalledFormat) -> Format:
    """Load the implementation of a format of another package."""
    module, _, name = installed.implementation.partition(":")
    try:
        found: Any = getattr(import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise refused_format(installed.name, module, printable(str(error))) from error
    if not isinstance(found, Format) or found.name != installed.name or {*found.targets} != {*installed.targets}:
        text = f"{installed.implementation} is not a Format with its name and its targets"
        raise refused_format(installed.name, module, text)
    return found


def format_writing(target: str) -> Format:
    """The format whose writers write a target.

    Raises:
        LookupError: No format writes it.
    """
    for known in formats():
        if target in known.targets:
            return known
    raise LookupError(target)


def writer_of(target: str) -> Writer:
    """The writer of a target.

    Raises:
        LookupError: No format writes it.
    """
    return format_writing(target).writer(target)


def laid_out(checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
    """The files of a target, whose names have been read again as the target's loaders read them.

    Raises:
        SourceError, RequestError: As the writer of the target.
        JobError: `internal.error` for names that no loader of the target takes, and for files that cannot be read.
        LookupError: No format writes the target.
    """
    known = format_writing(request.to)
    layout = known.writer(request.to).lay_out(checkpoint, request, name=name)
    try:
        known.check_names(Location(PlannedStore("/", layout), "/", request.target), checkpoint, request)
    except SourceError as error:
        raise unloadable(f"the planned target cannot be read ({error.code}: {error.message})") from error
    return layout


def format_of(checkpoint: Checkpoint) -> Format:
    """The format that a checkpoint was read from; a plain `Format` for a checkpoint that was not read."""
    return next((known for known in formats() if known.name == checkpoint.family), _UNKNOWN)


def known_files() -> KnownFiles:
    """The file names by which outputs of reshard and checkpoints of any format are recognised."""
    return KnownFiles.of_all((_OURS, *(known.discovery.files for known in formats())))


def refuse_keys(location: Location, keys: Iterable[str]) -> None:
    """Refuse a distributed checkpoint whose keys say that it is an unfinished save, or one that is not read.

    Raises:
        SourceError: `checkpoint.incomplete`, `source.unsupported`.
    """
    listed = tuple(keys)
    for known in formats():
        known.discovery.refuse_keys(location, listed)


def check_request(request: ConvertRequest) -> None:
    """Refuse a target or options that no installed format has, and options that do not go together.

    Raises:
        RequestError: `request.invalid`.
    """
    names = [name for known in formats() for name in known.targets]
    if request.to not in names:
        raise RequestError(
            "request.invalid",
            f"no format that is installed here writes {printable(request.to)!r}; there are {', '.join(names)}",
            fix="install the package of that format on the machine of the engine, or name another target",
        )
    if unknown := request.options.unknown():
        raise RequestError(
            "request.invalid",
            f"options.{printable(unknown[0])} is of a format that is not installed here",
            fix="install the package of that format on the machine of the engine, or leave the options out",
        )
    for known in formats():
        known.check_request(request)
    refuse_options_of_others(request)


def rules_of(options: Options) -> Mapping[str, Any] | None:
    """The rules among the options, in the terms of the one format that has any; None if there are none.

    Raises:
        RequestError: `request.invalid`.
    """
    return next((rules for known in formats() if (rules := known.completion.read_rules(options)) is not None), None)


def relabelled(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint under the names, and with the rules, that the request gives.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    own = format_of(checkpoint)
    # The format that it was read from comes first: it alone knows what its own names become.
    for known in sorted(formats(), key=lambda known: known is not own):
        checkpoint = known.completion.relabelled(checkpoint, request)
    return checkpoint


def left_out(checkpoint: Checkpoint) -> str | None:
    """A note about parameters that the checkpoint was saved without; None if there are none."""
    # A missing base model explains more than a list of frozen parameters.
    return next(
        (text for known in reversed(formats()) if (text := known.presentation.left_out(checkpoint)) is not None), None
    )


def cautions(checkpoint: Checkpoint) -> list[str]:
    """Warnings that `inspect` adds to those of the reader."""
    lost = left_out(checkpoint)
    said = [text for known in formats() for text in known.presentation.cautions(checkpoint)]
    return [*said, *missing_states(checkpoint), *([] if lost is None else [lost])]
