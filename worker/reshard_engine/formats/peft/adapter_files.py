"""Finds the `adapter_config.json` of a run: in the named directory, beside the source, or one directory above."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard.errors import SourceError, printable
from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.peft.adapter_config import CONFIG
from reshard_engine.storage.confinement import is_allowed
from reshard_engine.storage.links import refuse_hub_link_elsewhere
from reshard_engine.storage.locations import Location, open_location
from reshard_engine.storage.protocol import parent_and_name, read_bytes

_MAX_BYTES = 1 << 20


def adapter_files(checkpoint: Checkpoint, request: ConvertRequest) -> Mapping[str, bytes]:
    """`adapter_config.json` by its name; empty if the request gives the scale, or if no directory has the file.

    Raises:
        SourceError: `source.not_found` if the directory that the user names has none, `checkpoint.too_large`.
    """
    if request.options.peft.lora_alpha is not None:
        return {}
    # Trainers write the file into their own directory, above that of the tag.
    named = [] if request.model_files is None else [request.model_files]
    # A service may not read above its roots.
    above = [place for place in (parent_and_name(checkpoint.url)[0],) if is_allowed(place)]
    places = dict.fromkeys((*named, request.source.url, *above))
    return _first_config([open_location(url, request.source.profile) for url in places], required=bool(named))


def _first_config(locations: Sequence[Location], *, required: bool) -> Mapping[str, bytes]:
    """`adapter_config.json` of the first directory that has one; empty if none has.

    Raises:
        SourceError: `source.not_found` if it is required and missing, `checkpoint.too_large`.
    """
    for location in locations:
        for info in location.store.list_directory(location.path).files:
            if info.path.rpartition("/")[2] != CONFIG:
                continue
            refuse_hub_link_elsewhere(location, info.path)
            if info.size_bytes > _MAX_BYTES:
                raise SourceError("checkpoint.too_large", f"{CONFIG} has {info.size_bytes} bytes")
            return {CONFIG: read_bytes(location.store, info)}
    if required:
        raise SourceError(
            "source.not_found",
            f"{printable(locations[0].url)} has no {CONFIG}",
            fix="name the directory that PEFT's save_pretrained wrote, or give --lora-alpha instead",
        )
    return {}
