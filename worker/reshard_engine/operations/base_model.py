"""The base model of a LoRA run: a directory of weights, or a model's directory in the hub's cache.

Source: huggingface_hub 2.4.0 `file_download.py` (`models--ORG--NAME` with `refs/REVISION` and `snapshots/COMMIT`).
"""

from __future__ import annotations

import re

from reshard.errors import SourceError, listed, printable
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.sources import read_weights
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.links import refuse_link_elsewhere
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, read_bytes

_COMMIT = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_MAX_REF_BYTES = 1_024
_FIX = "--base names the directory with model.safetensors or pytorch_model.bin, one file or shards with their index"


def read_base_model(location: Location, ledger: OpaqueLedger) -> Checkpoint:
    """Read the weights of a base model.

    Raises:
        SourceError: `source.not_found`, `source.unknown_kind` if there are no weights, and all errors of their reader.
    """
    location, listing = _snapshot(location)
    if (weights := read_weights(location, listing, ledger)) is not None:
        return weights
    models = [d for d in listing.directories if d.startswith("models--")]
    raise SourceError(
        "source.unknown_kind",
        f"the base model {printable(location.url)} holds no weights: {len(listing.files)} files, "
        f"directories: {listed(listing.directories) or 'none'}",
        fix=f"--base {printable(location.child(models[0]).url)}" if models else _FIX,
    )


def _snapshot(location: Location) -> tuple[Location, Listing]:
    """The directory itself, or the current snapshot of a model's directory in the hub's cache."""
    listing = location.store.list_directory(location.path)
    if not listing.files and not listing.directories:
        raise SourceError("source.not_found", f"no base model exists at {printable(location.url)}", fix=_FIX)
    if "snapshots" not in listing.directories:
        return location, listing
    snapshots = location.child("snapshots")
    snapshot_names = snapshots.store.list_directory(snapshots.path).directories
    commit = _main(location) or (snapshot_names[0] if len(snapshot_names) == 1 else "")
    if commit not in snapshot_names or _COMMIT.fullmatch(commit) is None:
        raise SourceError(
            "checkpoint.ambiguous" if snapshot_names else "source.not_found",
            f"{printable(location.url)} has {len(snapshot_names)} snapshots, and refs/main names none of them",
            fix=f"--base {printable(snapshots.child(snapshot_names[0]).url)}" if snapshot_names else _FIX,
        )
    chosen = snapshots.child(commit)
    return chosen, chosen.store.list_directory(chosen.path)


def _main(location: Location) -> str:
    """The commit that the cache's `refs/main` names; empty if there is none."""
    refs = location.child("refs")
    for info in refs.store.list_directory(refs.path).files:
        if info.path.rpartition("/")[2] == "main" and info.size_bytes <= _MAX_REF_BYTES:
            refuse_link_elsewhere(location, info.path)
            return read_bytes(location.store, info).decode("utf-8", "replace").strip()
    return ""
