"""The seam that a source format implements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing


class Reader(Protocol):
    """Understands one format family. Never reads tensor bytes but scalars, never unpickles."""

    family: str

    def recognises(self, listing: Listing) -> bool:
        """Whether a directory with these children is a checkpoint of this family."""
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
        """The checkpoint in this directory.

        Raises:
            SourceError: With the reason and what the user can do, for everything that is not understood.
        """
        ...
