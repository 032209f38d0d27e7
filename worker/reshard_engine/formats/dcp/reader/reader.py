"""Readers of distributed checkpoints: one directory of shards, or a trainer's directory that holds two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.dcp_options import Grammar
from reshard.errors import SourceError, listed, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.dcp.names import (
    META,
    MODEL_DIRECTORY,
    OPTIMIZER_DIRECTORY,
    TRAINER_STATE,
    is_distributed,
    names_of,
)
from reshard_engine.formats.dcp.reader.assembly import Assembly, Origin
from reshard_engine.formats.dcp.reader.companions import (
    Companions,
    beside_shards,
    read_companions,
)
from reshard_engine.formats.dcp.reader.saved_state import SavedState, read_state
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing


def saved_state_in(location: Location, listing: Listing) -> SavedState | None:
    """The state dict of a directory, or those of the model and of the optimizer of a trainer; None for others.

    Raises:
        SourceError: `source.unsupported` for several models, and all errors of the metadata.
    """
    if not any(MODEL_DIRECTORY.fullmatch(d) for d in listing.directories):
        return read_state(location, listing) if is_distributed(listing) else None
    models = [d for d in listing.directories if MODEL_DIRECTORY.fullmatch(d)]
    if len(models) > 1:
        raise SourceError(
            "source.unsupported",
            f"it holds {len(models)} models: {listed(models)}",
            fix=f"name the directory of one of them, such as {printable(models[0])}: its weights are read",
        )
    number = models[0].rpartition("_")[2]
    optimizers = [d for d in listing.directories if OPTIMIZER_DIRECTORY.fullmatch(d) and d.endswith(f"_{number}")]
    state = SavedState()
    for folder in (*models, *optimizers):
        child = location.child(folder)
        state = state.joined(read_state(child, child.store.list_directory(child.path), folder=folder))
    return state


class DcpReader:
    """Reads a directory that `torch.distributed.checkpoint.save` wrote."""

    family = "dcp"

    def recognises(self, listing: Listing) -> bool:
        """True if the directory holds `.metadata`, that of a rank, or files of shards."""
        return is_distributed(listing)

    def read(
        self,
        location: Location,
        listing: Listing,
        *,
        tag: str | None,
        ledger: OpaqueLedger,
        rules: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Read the state dict of a directory, with Lightning's `meta.pt` beside it.

        Raises:
            SourceError: `checkpoint.*`, `pickle.*`, `zip.*`, `tensor.*`, `source.unsupported`, `name.invalid`.
        """
        lightning = META in names_of(listing)
        companions = read_companions(location, listing, ledger) if lightning else Companions()
        grammar = Grammar.LIGHTNING if lightning else None
        assembly = Assembly(read_state(location, listing), companions, ledger)
        return assembly.checkpoint(Origin(location.url, tag, grammar))


class TrainerReader:
    """Reads a directory of Accelerate or of the Trainer: shards of the model, of the optimizer, and other files."""

    family = "dcp"

    def recognises(self, listing: Listing) -> bool:
        """True if there is a directory of FSDP's shards of a model."""
        return any(MODEL_DIRECTORY.fullmatch(d) for d in listing.directories)

    def read(
        self,
        location: Location,
        listing: Listing,
        *,
        tag: str | None,
        ledger: OpaqueLedger,
        rules: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Read the model's and the optimizer's state dicts, and the files beside them.

        Raises:
            SourceError: As `DcpReader.read`, and `source.unsupported` for several models.
        """
        state = saved_state_in(location, listing) or SavedState()
        companions = read_companions(location, listing, ledger)
        companions.not_carried += beside_shards(listing, frozenset())
        grammar = Grammar.TRAINER if TRAINER_STATE in names_of(listing) else Grammar.ACCELERATE
        return Assembly(state, companions, ledger).checkpoint(Origin(location.url, tag, grammar))
