"""Links inside a checkpoint's directory whose content would be written out, or shown, as it is."""

from __future__ import annotations

import os
from collections.abc import Sequence

from reshard.errors import SourceError, printable
from reshard_engine.storage.locations import Location
from reshard_engine.storage.urls import canonical_url, is_within


def refuse_link_elsewhere(location: Location, path: str, *, also: Sequence[str] = ()) -> None:
    """Refuse a file below a location that is a link to a file elsewhere: it must not carry that file's content out.

    Args:
        location: The directory.
        path: The file's, in its store.
        also: Directories that the file may be in too.

    Raises:
        SourceError: `name.invalid`.
    """
    if location.store.scheme != "file":
        return
    if not any(is_within(canonical_url(path), place) for place in (location.url, *also)):
        raise SourceError(
            "name.invalid", f"{printable(path)} is a link to a file elsewhere", fix="copy the file itself there"
        )


def refuse_hub_link_elsewhere(location: Location, path: str) -> None:
    """Like `refuse_link_elsewhere`, but takes links into the cache of huggingface_hub that the location is part of.

    Such links are what that cache is made of: `snapshots/REVISION` beside `blobs`.

    Raises:
        SourceError: `name.invalid`.
    """
    snapshots = os.path.dirname(location.url)
    cached = os.path.basename(snapshots) == "snapshots"
    blobs = [os.path.join(os.path.dirname(snapshots), "blobs")] if cached else []
    refuse_link_elsewhere(location, path, also=blobs)
