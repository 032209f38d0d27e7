"""The protocol of readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing


class Reader(Protocol):
    """Reads one family of checkpoints. It never unpickles, and reads no tensor data except scalars."""

    family: str

    def recognises(self, listing: Listing) -> bool:
        """True if a directory with these children is a checkpoint of this family."""
        ...

    def read(
        self,
        location: Location,
        listing: Listing,
        *,
        tag: str | None,
        ledger: OpaqueLedger,
        rules: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Read the checkpoint in this directory.

        Raises:
            SourceError: A part of the checkpoint is not understood; the error has the reason and a fix.
        """
        ...
