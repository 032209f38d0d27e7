"""Checkpoints of parallel runs with something taken out, to show that the oracles notice."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch


def without_rule(tag_dir: str, out_dir: str, key: str) -> None:
    """Copies a checkpoint without one list of its ``universal_checkpoint_info``.

    Args:
        tag_dir: the folder with the files.
        out_dir: the copy, made anew.
        key: which list.
    """
    shutil.copytree(tag_dir, out_dir)
    for path in Path(out_dir).glob("mp_rank_*_model_states.pt"):
        state = torch.load(path, map_location="cpu", weights_only=False)
        del state["universal_checkpoint_info"][key]
        torch.save(state, path)
