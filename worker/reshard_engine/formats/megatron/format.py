"""Checkpoints of Megatron-core as a format."""

from __future__ import annotations

import re
from typing import Any, ClassVar, cast

from reshard.errors import ReshardError
from reshard_engine.containers.source_file import parse_json
from reshard_engine.formats.format import Format, Reader
from reshard_engine.formats.megatron.torch_dist import COMMON, DESCRIPTION, TorchDistReader
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, read_bytes
from reshard_engine.tensors.layout import KnownFiles

_MOST_BYTES = 1 << 16
_TRACKER = "latest_checkpointed_iteration.txt"
_STEP = "iter_{:07d}"


class Megatron(Format):
    """`torch_dist`."""

    name = "megatron"
    readers: ClassVar[tuple[Reader, ...]] = (TorchDistReader(),)
    of_training = True
    files = KnownFiles(entries=(COMMON,))

    def owns(self, location: Location, listing: Listing) -> bool:
        """True if the description names Megatron's backend: other programs write a `metadata.json` as well."""
        info = listing.by_name.get(DESCRIPTION)
        if info is None or info.size_bytes > _MOST_BYTES:
            return False
        try:
            said = parse_json(read_bytes(location.store, info), code="checkpoint.malformed", what=DESCRIPTION)
        except ReshardError:
            return False
        return isinstance(said, dict) and cast("dict[str, Any]", said).get("sharded_backend") == "torch_dist"

    def tracked_tag(self, location: Location, listing: Listing) -> str | None:
        """The directory of the iteration in `latest_checkpointed_iteration.txt`, or `release`.

        Source: Megatron-LM `training/checkpointing.py` (`read_metadata`, `get_checkpoint_name`).
        """
        info = listing.by_name.get(_TRACKER)
        if info is None or info.size_bytes > _MOST_BYTES:
            return None
        text = read_bytes(location.store, info).decode("ascii", "replace").strip()
        tag = _STEP.format(int(text)) if re.fullmatch(r"\d{1,18}", text) else text
        return tag if tag in listing.directories else None
