"""Recognises checkpoints that are not supported yet: both kinds of Megatron's.

Source: megatron-core 0.16.1 `dist_checkpointing/core.py` (`metadata.json`, `common.pt`) and Megatron-LM
`training/checkpointing.py` (`latest_checkpointed_iteration.txt`, `iter_0000010/mp_rank_00/model_optim_rng.pt`).
"""

from __future__ import annotations

import re

from reshard.errors import SourceError, printable
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing

_RANK = re.compile(r"mp_rank_\d+(_\d+)?(_\d+)?")
_ITERATION = re.compile(r"iter_\d+|release")
_TRACKER = "latest_checkpointed_iteration.txt"


def unsupported_kind(location: Location, listing: Listing) -> SourceError | None:
    """The error for a directory of a known kind that is not supported; None for any other directory."""
    names = {f.path.rpartition("/")[2] for f in listing.files}
    if {"metadata.json", "common.pt"} <= names:
        return _error(location, "a distributed checkpoint of megatron-core", _MEGATRON)
    if (
        _TRACKER in names
        or any(map(_ITERATION.fullmatch, listing.directories))
        or any(map(_RANK.fullmatch, listing.directories))
    ):
        return _error(location, "a checkpoint of Megatron-LM", _MEGATRON)
    return None


_MEGATRON = (
    "convert it with Megatron's own tools (Megatron Bridge, or tools/checkpoint/convert.py) to Hugging Face weights, "
    "and name that directory; of Megatron-DeepSpeed name the directory that holds `latest`"
)


def _error(location: Location, kind: str, fix: str) -> SourceError:
    text = f"{printable(location.url)} is {kind}: recognised, not supported yet"
    return SourceError("source.unsupported", text, fix=fix)
