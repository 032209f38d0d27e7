"""The protocol of readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from reshard.errors import RequestError, listed
from reshard.models import SourceChoices
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing

NO_CHOICES = SourceChoices()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of reading one checkpoint."""

    ledger: OpaqueLedger
    """The policy for objects of classes that are not on the allow-list."""
    tag: str | None = None
    """The tag that names the directory; None if the directory has no tag."""
    rules: Mapping[str, Any] | None = None
    """How tensor parallelism cut parameters, in place of what the checkpoint says."""
    choices: SourceChoices = NO_CHOICES
    """The user's choices where the files leave several ways to read them."""


class Reader(Protocol):
    """Reads one family of checkpoints. It never unpickles, and reads no tensor data except scalars."""

    family: str

    def recognises(self, listing: Listing) -> bool:
        """True if a directory with these children is a checkpoint of this family."""
        ...

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the checkpoint in this directory.

        Raises:
            SourceError: A part of the checkpoint is not understood; the error has the reason and a fix.
        """
        ...


def refuse_choices(choices: SourceChoices, why: str) -> None:
    """Refuse choices for a source that leaves none of them.

    Args:
        choices: The user's choices.
        why: A statement about the source that says why there is nothing to choose.

    Raises:
        RequestError: `request.invalid`.
    """
    if given := choices.given():
        flags = [f"--{name.replace('_', '-')}" for name in given]
        target = [f"--target-{name.replace('_', '-')}" for name in given if name in ("model_key", "optimizer_key")]
        more = f"; {' and '.join(target)} for --to dcp: the place in the target" if target else ""
        raise RequestError("request.invalid", f"{why}, and {listed(flags)} chooses", fix=f"leave it out{more}")
