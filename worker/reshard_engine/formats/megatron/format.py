"""Checkpoints of Megatron-core as a format."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar, cast

from reshard.choices import DamagedPolicy
from reshard.errors import RequestError, ReshardError, printable
from reshard.models.jobs import ConvertRequest
from reshard.options import MegatronOptions
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.source_file import parse_json
from reshard_engine.formats.format import Format, Reader
from reshard_engine.formats.megatron.legacy import LegacyReader, holds_ranks
from reshard_engine.formats.megatron.model import DAMAGED, MegatronFacts
from reshard_engine.formats.megatron.torch_dist import COMMON, DESCRIPTION, TorchDistReader
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, read_bytes
from reshard_engine.tensors.layout import KnownFiles

_MOST_BYTES = 1 << 16
_TRACKER = "latest_checkpointed_iteration.txt"
_STEP = "iter_{:07d}"


class Megatron(Format):
    """`torch_dist`, and the older directories of ranks."""

    name = "megatron"
    readers: ClassVar[tuple[Reader, ...]] = (TorchDistReader(), LegacyReader())
    of_training = True
    files = KnownFiles(entries=(COMMON,))

    def owns(self, location: Location, listing: Listing) -> bool:
        """True if the description names Megatron's backend: other programs write a `metadata.json` as well."""
        info = listing.by_name.get(DESCRIPTION)
        if info is None and LegacyReader().recognises(listing):
            return holds_ranks(location, listing)
        if info is None or info.size_bytes > _MOST_BYTES:
            return False
        try:
            said = parse_json(read_bytes(location.store, info), code="checkpoint.malformed", what=DESCRIPTION)
        except ReshardError:
            return False
        return isinstance(said, dict) and cast("dict[str, Any]", said).get("sharded_backend") == "torch_dist"

    def relabelled(self, checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
        """The checkpoint without an optimizer that is damaged, if the request asks for that.

        Raises:
            RequestError: `request.invalid` for a source of another format.
        """
        if request.options.of(MegatronOptions).damaged is not DamagedPolicy.DROP_OPTIMIZER:
            return checkpoint
        if not isinstance(checkpoint.facts, MegatronFacts):
            raise RequestError(
                "request.invalid",
                f"--damaged: for checkpoints of Megatron-core, and {printable(checkpoint.url)} is {checkpoint.format}",
                fix="leave it out",
            )
        bare = (replace(p, states={}, scalars={}, group=None) for p in checkpoint.parameters)
        return replace(
            checkpoint,
            parameters=tuple(bare),
            optimizer=None,
            agreements=tuple(a for a in checkpoint.agreements if a.code != DAMAGED),
            undecided=(),
            assumed=(),
            no_optimizer="it is left out (--damaged drop-optimizer)",
        )

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
