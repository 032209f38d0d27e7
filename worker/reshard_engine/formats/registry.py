"""The formats that there are: the one table that names them, and what all of them answer together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.diffs import DiffOptions
from reshard.models import ConvertRequest, TargetFormat
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.deepspeed.format import DeepSpeed
from reshard_engine.formats.format import Format
from reshard_engine.formats.peft.format import Peft
from reshard_engine.formats.torch_files.format import TorchFiles
from reshard_engine.formats.weights.format import Weights
from reshard_engine.formats.writer import Writer
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.tensors.layout import KnownFiles

FORMATS: tuple[Format, ...] = (DeepSpeed(), Weights(), Peft(), TorchFiles())
_OURS = KnownFiles(entries=(MANIFEST_NAME,), needed=(MANIFEST_NAME,))
_UNKNOWN = Format()


def format_writing(target: TargetFormat) -> Format:
    """The format whose writers write a target.

    Raises:
        LookupError: No format writes it.
    """
    for known in FORMATS:
        if target in known.targets:
            return known
    raise LookupError(target)


def writer_of(target: TargetFormat) -> Writer:
    """The writer of a target.

    Raises:
        LookupError: No format writes it.
    """
    return format_writing(target).writer(target)


def format_of(checkpoint: Checkpoint) -> Format:
    """The format that a checkpoint was read from; one that knows nothing for a checkpoint that was not read."""
    return next((known for known in FORMATS if known.name == checkpoint.family), _UNKNOWN)


def known_files() -> KnownFiles:
    """The names by which outputs of ours and checkpoints of any format are known."""
    return KnownFiles.of_all((_OURS, *(known.files for known in FORMATS)))


def rules_of(request: ConvertRequest | DiffOptions) -> Mapping[str, Any] | None:
    """The rules of a request, in the terms of the one format that has any; None if it gives none.

    Raises:
        RequestError: `request.invalid`.
    """
    return next((rules for known in FORMATS if (rules := known.read_rules(request)) is not None), None)


def relabelled(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint under the names, and with the rules, that the request gives.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    for known in FORMATS:
        checkpoint = known.relabelled(checkpoint, request)
    return checkpoint


def left_out(checkpoint: Checkpoint) -> str | None:
    """A note about parameters that the checkpoint was saved without; None if there is nothing to say."""
    # An adapter's base model is the better reason than any frozen parameters.
    return next((text for known in reversed(FORMATS) if (text := known.left_out(checkpoint)) is not None), None)


def cautions(checkpoint: Checkpoint) -> list[str]:
    """Warnings that `inspect` adds to those of the reader."""
    lost = left_out(checkpoint)
    return [text for known in FORMATS for text in known.cautions(checkpoint)] + ([] if lost is None else [lost])
