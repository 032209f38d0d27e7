"""Recognises checkpoints that are not supported yet: torch's distributed checkpoints, and both kinds of Megatron's.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`.metadata`, `__RANK_NUMBER.distcp`) and `format_utils.py`;
megatron-core 0.16.1 `dist_checkpointing/core.py` (`metadata.json`, `common.pt`) and Megatron-LM
`training/checkpointing.py` (`latest_checkpointed_iteration.txt`, `iter_0000010/mp_rank_00/model_optim_rng.pt`).
"""

from __future__ import annotations

import re
import shlex

from reshard.errors import SourceError, printable
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing

_RANK = re.compile(r"mp_rank_\d+(_\d+)?(_\d+)?")
_ITERATION = re.compile(r"iter_\d+|release")
_TRACKER = "latest_checkpointed_iteration.txt"
_FSDP = re.compile(r"(pytorch_model|optimizer)_fsdp_\d+")


def unsupported_kind(location: Location, listing: Listing) -> SourceError | None:
    """The error for a directory of a known kind that is not supported; None for any other directory."""
    names = {f.path.rpartition("/")[2] for f in listing.files}
    inner = [d for d in listing.directories if _ITERATION.fullmatch(d) or _FSDP.fullmatch(d)]
    if {"metadata.json", "common.pt"} <= names:
        return _error(location, "a distributed checkpoint of megatron-core", _MEGATRON)
    if ".metadata" in names or any(n.endswith(".distcp") for n in names):
        return _error(location, "a distributed checkpoint of torch (DCP, as FSDP saves it)", _dcp(location.url))
    if any(_FSDP.fullmatch(d) for d in inner):
        return _error(location, "a sharded checkpoint of FSDP", _dcp(location.child(inner[0]).url))
    if (
        _TRACKER in names
        or any(_ITERATION.fullmatch(d) for d in inner)
        or any(map(_RANK.fullmatch, listing.directories))
    ):
        return _error(location, "a checkpoint of Megatron-LM", _MEGATRON)
    return None


_MEGATRON = (
    "convert it with Megatron's own tools (Megatron Bridge, or tools/checkpoint/convert.py) to Hugging Face weights, "
    "and name that directory; of Megatron-DeepSpeed name the directory that holds `latest`"
)


def _dcp(url: str) -> str:
    place = shlex.quote(url)
    # torch unpickles `.metadata`, which would run code that an attacker put there.
    return (
        "if you trust whoever wrote it: "
        f"mkdir weights && python -m torch.distributed.checkpoint.format_utils dcp_to_torch {place} "
        "weights/pytorch_model.bin && reshard inspect weights"
    )


def _error(location: Location, kind: str, fix: str) -> SourceError:
    text = f"{printable(location.url)} is {kind}: recognised, not supported yet"
    return SourceError("source.unsupported", text, fix=fix)
