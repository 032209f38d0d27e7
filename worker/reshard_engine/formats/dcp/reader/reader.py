"""Readers of distributed checkpoints: one directory of shards, or a trainer's directory that holds two of them."""

from __future__ import annotations

from reshard.dcp_options import Grammar
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
from reshard_engine.formats.reader import ReadOptions
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing


def saved_state_in(location: Location, listing: Listing) -> SavedState | None:
    """The state dict of a directory, or those of a trainer's models and optimizers; None for others.

    Those of one model and its optimizer are one state dict. Those of several lie below the names of their directories.

    Raises:
        SourceError: All errors of the metadata.
    """
    if not any(MODEL_DIRECTORY.fullmatch(d) for d in listing.directories):
        return read_state(location, listing) if is_distributed(listing) else None
    folders = _folders(listing)
    several = sum(MODEL_DIRECTORY.fullmatch(d) is not None for d in folders) > 1
    state = SavedState()
    for folder in folders:
        child = location.child(folder)
        read = read_state(child, child.store.list_directory(child.path), folder=folder)
        state = state.joined(read, below=(folder,) if several else ())
    return state


def _folders(listing: Listing) -> list[str]:
    """A trainer's directories of models and of their optimizers, by number."""
    models = [d for d in listing.directories if MODEL_DIRECTORY.fullmatch(d)]
    numbers = {d.rpartition("_")[2] for d in models}
    optimizers = [
        d for d in listing.directories if OPTIMIZER_DIRECTORY.fullmatch(d) and d.rpartition("_")[2] in numbers
    ]
    return sorted((*models, *optimizers), key=lambda d: int(d.rpartition("_")[2]))


class DcpReader:
    """Reads a directory that `torch.distributed.checkpoint.save` wrote."""

    family = "dcp"

    def recognises(self, listing: Listing) -> bool:
        """True if the directory holds `.metadata`, that of a rank, or files of shards."""
        return is_distributed(listing)

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the state dict of a directory, with Lightning's `meta.pt` beside it.

        Raises:
            SourceError: `checkpoint.*`, `pickle.*`, `zip.*`, `tensor.*`, `source.unsupported`, `name.invalid`.
        """
        lightning = META in names_of(listing)
        companions = read_companions(location, listing, options.ledger) if lightning else Companions()
        companions.not_carried += beside_shards(listing, companions=lightning)
        grammar = Grammar.LIGHTNING if lightning else None
        return Assembly(read_state(location, listing), companions, options).checkpoint(Origin(location.url, grammar))


class TrainerReader:
    """Reads a directory of Accelerate or of the Trainer: shards of the model, of the optimizer, and other files."""

    family = "dcp"

    def recognises(self, listing: Listing) -> bool:
        """True if there is a directory of FSDP's shards of a model."""
        return any(MODEL_DIRECTORY.fullmatch(d) for d in listing.directories)

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """Read the model's and the optimizer's state dicts, and the files beside them.

        Raises:
            SourceError: As `DcpReader.read`.
        """
        state = saved_state_in(location, listing) or SavedState()
        companions = read_companions(location, listing, options.ledger)
        companions.not_carried += beside_shards(listing, companions=True, folders=_folders(listing))
        grammar = Grammar.TRAINER if TRAINER_STATE in names_of(listing) else Grammar.ACCELERATE
        return Assembly(state, companions, options).checkpoint(Origin(location.url, grammar))
