"""What a target may hold before we write it: nothing, or with `--overwrite` a checkpoint or an output of ours."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.errors import RequestError, printable
from reshard_engine.integrity.manifest import MANIFEST_NAME

_CHECKPOINT_SUFFIXES = ("_states.pt", ".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")


def target_exists(target: str, names: Iterable[str] | None = None) -> RequestError:
    """The error for a target that holds something else: these entries, where they are known."""
    text = f"{printable(target)} exists already"
    if names is not None and not holds_checkpoint(names):
        return RequestError(
            "request.target_exists",
            f"{text}, and is no checkpoint and no output of reshard",
            fix="choose another target, or remove it yourself: --overwrite replaces checkpoints and outputs only",
        )
    fix = "choose another target, or add --overwrite (the old data will be gone)"
    return RequestError("request.target_exists", text, fix=fix)


def holds_checkpoint(names: Iterable[str]) -> bool:
    """Whether a directory with these entries is a checkpoint or an output of ours: what `--overwrite` may remove."""
    return any(n in {MANIFEST_NAME, "zero"} or n.endswith(_CHECKPOINT_SUFFIXES) for n in names)


def not_to_overwrite(target: str) -> RequestError:
    """The error for a target that `--overwrite` leaves alone."""
    return RequestError(
        "request.target_exists",
        f"{printable(target)} is no checkpoint and no output of reshard; --overwrite removes nothing else",
        fix="choose another target, or remove it yourself",
    )
