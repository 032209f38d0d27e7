"""Recognises checkpoints that are not read yet by the names of their files, and says what reads them today.

Source: megatron-core 0.16.1 `dist_checkpointing/core.py` (`metadata.json`, `common.pt`); Megatron-LM
`training/checkpointing.py` (`latest_checkpointed_iteration.txt`, `iter_0000010/mp_rank_00/model_optim_rng.pt`); verl
0.9.1 `utils/checkpoint/fsdp_checkpoint_manager.py` (names by rank, which SkyRL has too) and
`trainer/ppo/ray_trainer.py` (`global_step_3/actor` beside a tracker with Megatron's name); accelerate 1.15.0
`utils/fsdp_utils.py` (`use_dcp=False`, LOCAL_STATE_DICT); torch_checkpointing 0.1.1 `checkpoint_layout.py`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from reshard.errors import SourceError, printable
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing

_MEGATRON_RANK = re.compile(r"mp_rank_\d+(_\d+)?(_\d+)?")
_MEGATRON_STEP = re.compile(r"iter_\d+|release")
_TRACKER = "latest_checkpointed_iteration.txt"
_VERL_STEP = re.compile(r"global_step_\d+")
_VERL = re.compile(r"(?:model|optim|extra_state)_world_size_\d+_rank_(\d+)\.pt")
_ACCELERATE = re.compile(r"(?:pytorch_model_fsdp|optimizer)(?:_\d+)?_rank(\d+)\.bin")
_SHARD = re.compile(r"model_(\d+)\.(?:pt|safetensors)")
_OPTIMIZER_SHARD = re.compile(r"optimizer_\d+\.pt")
_WHOLE = re.compile(r"(?:pytorch_)?model\.(?:safetensors|bin)|.*\.index\.json")
_MEGATRON_FIX = (
    "convert it with Megatron's own tools (Megatron Bridge, or tools/checkpoint/convert.py) to Hugging Face weights, "
    "and name that directory; of Megatron-DeepSpeed name the directory that holds `latest`"
)


def unsupported_kind(location: Location, listing: Listing) -> SourceError | None:
    """The error for a directory of a known kind that is not supported; None for any other directory."""
    names = names_of(listing)
    if {"metadata.json", "common.pt"} <= names:
        return _error(location, "a distributed checkpoint of megatron-core", _MEGATRON_FIX)
    if (ranks := _rank_files(location, listing)) is not None:
        return ranks
    # verl's runs have a tracker of the same name beside directories of its own.
    tracked = _TRACKER in names and not any(map(_VERL_STEP.fullmatch, listing.directories))
    by_step = any(map(_MEGATRON_STEP.fullmatch, listing.directories))
    if tracked or by_step or any(map(_MEGATRON_RANK.fullmatch, listing.directories)):
        return _error(location, "a checkpoint of Megatron-LM", _MEGATRON_FIX)
    return None


def holds_shards(listing: Listing) -> bool:
    """True for files of ranks that no weights in one piece lie beside: each of them looks like weights."""
    names = names_of(listing)
    shards = any(_ranks(pattern, names) for pattern in (_VERL, _ACCELERATE)) or _by_item(names)
    return shards and not any(map(_WHOLE.fullmatch, names))


def _rank_files(location: Location, listing: Listing) -> SourceError | None:
    names = names_of(listing)
    if not holds_shards(listing):
        return None
    if ranks := _ranks(_VERL, names):
        fix = _verl_fix(location, listing)
        return _error(location, f"a directory of verl's or SkyRL's FSDP files, one for each of {ranks} ranks", fix)
    if ranks := _ranks(_ACCELERATE, names):
        fix = "save with Accelerator.save_state and StateDictType.SHARDED_STATE_DICT: a distributed checkpoint is read"
        return _error(location, f"a directory of Accelerate's FSDP files, one for each of {ranks} ranks", fix)
    fix = (
        "load it with torch_checkpointing and save it with torch.distributed.checkpoint; for the weights alone, name "
        "the directory into which torch_checkpointing consolidates them as Hugging Face's files"
    )
    return _error(location, f"a directory of torch_checkpointing's shards, of {_ranks(_SHARD, names)} ranks", fix)


def _verl_fix(location: Location, listing: Listing) -> str:
    place = location.child("huggingface")
    if "huggingface" in listing.directories and any(
        map(_WHOLE.fullmatch, names_of(place.store.list_directory(place.path)))
    ):
        return f"its weights alone: reshard inspect {shlex.quote(printable(place.url, max_chars=1_024))}"
    here = shlex.quote(printable(location.url, max_chars=1_024))
    merger = f"python -m verl.model_merger merge --backend fsdp --local_dir {here} --target_dir OUT"
    return f"for weights of verl, in bf16: {merger}; then name OUT; of SkyRL name its export of Hugging Face weights"


def names_of(listing: Listing) -> set[str]:
    """The names of a directory's files."""
    return {f.path.rpartition("/")[2] for f in listing.files}


def _by_item(names: Iterable[str]) -> bool:
    """True for torch_checkpointing's names: each item of each rank in a file of its own."""
    held = list(names)
    return _ranks(_SHARD, held) > 0 and ("metadata.pkl" in held or any(map(_OPTIMIZER_SHARD.fullmatch, held)))


def _ranks(pattern: re.Pattern[str], names: Iterable[str]) -> int:
    """The number of ranks that files of this pattern are of."""
    return len({match[1] for match in map(pattern.fullmatch, names) if match is not None})


def _error(location: Location, kind: str, fix: str) -> SourceError:
    text = f"{printable(location.url)} is {kind}: recognised, not supported yet"
    return SourceError("source.unsupported", text, fix=fix)
