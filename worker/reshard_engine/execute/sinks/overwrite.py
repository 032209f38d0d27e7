"""Errors for targets that are not empty. Nothing is replaced without `--overwrite`; it replaces only checkpoints."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import RequestError, printable
from reshard_engine.tensors.layout import KnownFiles


def target_exists(target: str, known: KnownFiles, names: Iterable[str] | None = None) -> RequestError:
    """The error for a target that is not empty. `names` are its entries, if they are known."""
    text = f"{printable(target)} already exists"
    if names is not None and not known.holds_checkpoint(names):
        return RequestError(
            "request.target_exists",
            f"{text}, and it is neither a checkpoint nor an output of reshard",
            fix="choose another target, or remove it yourself: --overwrite replaces checkpoints and outputs only",
        )
    fix = "choose another target, or add --overwrite (the old data will be gone)"
    return RequestError("request.target_exists", text, fix=fix)


def not_to_overwrite(target: str) -> RequestError:
    """The error for a target that `--overwrite` leaves alone."""
    return RequestError(
        "request.target_exists",
        f"{printable(target)} is neither a checkpoint nor an output of reshard; --overwrite removes nothing else",
        fix="choose another target, or remove it yourself",
    )
