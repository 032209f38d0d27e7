"""Names of files and directories of distributed checkpoints.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`.metadata`, `__RANK_NUMBER.distcp`; `__RANK.metadata` of
`use_collectives=False`), `distributed/checkpoint/_hf_utils.py` (`_gen_file_name`); accelerate 1.15.0
`utils/constants.py` and `utils/fsdp_utils.py` (`pytorch_model_fsdp_0`, `optimizer_0`); pytorch-lightning 2.6.6
`strategies/fsdp.py` (`meta.pt`); megatron-core 0.16.1 `dist_checkpointing/core.py` (`metadata.json`, `common.pt`).
"""

from __future__ import annotations

import re

from reshard_engine.storage.protocol import Listing

METADATA = ".metadata"
SUFFIX = ".distcp"
OWN_STATE, BUFFERS = "reshard", "buffers"
"""An attribute of `.metadata` that our own writer adds, as Megatron adds others; torch ignores it."""
META = "meta.pt"
"""Lightning's file beside the shards: all of its checkpoint but weights and optimizers."""
TRAINER_STATE = "trainer_state.json"
"""The Trainer's own state: counters and its log."""
RANK_METADATA = re.compile(r"__(\d{1,7})\.metadata")
"""A rank's own metadata, of a save without collectives."""
DATA_FILE = re.compile(r"__(\d{1,7})_(\d{1,7})\.distcp")
SHARD_FILE = re.compile(r"shard-(\d{5,7})-model-(\d{5,7})-of-(\d{5,7})\.safetensors")
"""A rank's file of the Hugging Face storage writer."""
MODEL_DIRECTORY = re.compile(r"pytorch_model_fsdp_(\d{1,4})")
OPTIMIZER_DIRECTORY = re.compile(r"optimizer_(\d{1,4})")
_MEGATRON = frozenset({"metadata.json", "common.pt"})


def names_of(listing: Listing) -> dict[str, int]:
    """The names of the files of a directory, each with its number in the listing."""
    return {f.path.rpartition("/")[2]: i for i, f in enumerate(listing.files)}


def is_shard(name: str) -> bool:
    """True for a file of shards, or their metadata."""
    return name == METADATA or name.endswith(SUFFIX) or RANK_METADATA.fullmatch(name) is not None


def is_distributed(listing: Listing) -> bool:
    """True if a directory holds files of torch's distributed checkpoints, and they are not Megatron's."""
    names = names_of(listing)
    if names.keys() >= _MEGATRON:
        return False
    return any(map(is_shard, names))
