"""Errors for targets that hold something: nothing is replaced without `--overwrite`, and checkpoints only with it."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import RequestError, printable
from reshard_engine.tensors.layout import KnownFiles


def target_exists(target: str, known: KnownFiles, names: Iterable[str] | None = None) -> RequestError:
    """The error for a target that holds something else: these entries, where they are known."""
    text = f"{printable(target)} exists already"
    if names is not None and not known.holds_checkpoint(names):
        return RequestError(
            "request.target_exists",
            f"{text}, and is no checkpoint and no output of reshard",
            fix="choose another target, or remove it yourself: --overwrite replaces checkpoints and outputs only",
        )
    fix = "choose another target, or add --overwrite (the old data will be gone)"
    return RequestError("request.target_exists", text, fix=fix)


def not_to_overwrite(target: str) -> RequestError:
    """The error for a target that `--overwrite` leaves alone."""
    return RequestError(
        "request.target_exists",
        f"{printable(target)} is no checkpoint and no output of reshard; --overwrite removes nothing else",
        fix="choose another target, or remove it yourself",
    )
