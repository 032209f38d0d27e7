"""Recognises a target that an earlier run of the same conversion has finished."""

from __future__ import annotations

from reshard.errors import IntegrityError
from reshard_engine.integrity.manifest import MANIFEST_NAME, Manifest, read_manifest
from reshard_engine.operations.verification import verify_target
from reshard_engine.plan.model import Plan
from reshard_engine.storage.locations import Location


def finished_manifest(target: Location, plan: Plan) -> Manifest | None:
    """The manifest of the target if it is this plan's result, unchanged since its commit."""
    try:
        manifest = read_manifest(target)
    except IntegrityError:
        return None  # the target is not an output of reshard, or is damaged: `--overwrite` decides
    if manifest is None or manifest.content_digest != plan.content_digest:
        return None
    listing = target.files()
    listing.pop(MANIFEST_NAME, None)
    sizes = {path: info.size_bytes for path, info in listing.items()}
    if sizes != {f.path: f.size_bytes for f in manifest.files}:
        return None
    if all(listing[f.path].pin == f.pin for f in manifest.files):
        return manifest
    # A worker that was paused and lost its run may have written the same bytes once more, after the commit.
    return manifest if verify_target(target).ok else None
