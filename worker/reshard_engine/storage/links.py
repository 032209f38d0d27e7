"""Refusal of links in a checkpoint's directory that would carry the content of other files into the output."""

from __future__ import annotations

import os
from collections.abc import Sequence

from reshard.errors import SourceError, printable
from reshard_engine.storage.locations import Location
from reshard_engine.storage.urls import canonical_url, is_within


def refuse_link_elsewhere(location: Location, path: str, *, also: Sequence[str] = ()) -> None:
    """Refuse a file of a location if it is a link to a file elsewhere, whose content must not reach the output.

    Args:
        location: The directory.
        path: Path of the file in its store.
        also: Further directories that may hold the file.

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
    """Like `refuse_link_elsewhere`, but accepts links into the huggingface_hub cache that holds the location.

    That cache consists of such links: `snapshots/REVISION` holds links to `blobs` beside `snapshots`.

    Raises:
        SourceError: `name.invalid`.
    """
    snapshots = os.path.dirname(location.url)
    cached = os.path.basename(snapshots) == "snapshots"
    blobs = [os.path.join(os.path.dirname(snapshots), "blobs")] if cached else []
    refuse_link_elsewhere(location, path, also=blobs)
