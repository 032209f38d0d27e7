"""Runs the tools that docs/comparison.md compares with, and prints as JSON how each one behaved.

    python compared_peers.py CHECKPOINT SCRATCH

CHECKPOINT is a save directory of ZeRO-2. Run as a process of its own: the peers execute what they find.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


class Payload:
    """A value that makes a directory when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self.made), 0o777, True)


def outcome(call: Callable[[], Any]) -> str:
    """`ok`, or the error of a call."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - which way it fails is the answer; CheckpointException is not an Exception
        return f"{type(error).__name__}: {error}"
    return "ok"


def to_universal(tag: Path, out: Path) -> None:
    """Run ds_to_universal."""
    ds_to_universal.main(
        Namespace(
            input_folder=str(tag),
            output_folder=str(out),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def main(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """All that the page says of peers and that a look can show."""
    tag = (checkpoint / "latest").read_text().strip()
    hostile = scratch / "hostile"
    shutil.copytree(checkpoint, hostile)
    ran = {name: scratch / f"ran-{name}" for name in ("zero_to_fp32", "ds_to_universal", "dcp")}

    def plant(name: str) -> None:
        path = hostile / tag / "mp_rank_00_model_states.pt"
        whole = torch.load(checkpoint / tag / path.name, weights_only=False)
        torch.save({**whole, "note": Payload(ran[name])}, path)

    said: dict[str, Any] = {}
    plant("zero_to_fp32")
    said["hostile zero_to_fp32"] = outcome(lambda: get_fp32_state_dict_from_zero_checkpoint(str(hostile)))
    plant("ds_to_universal")
    said["hostile ds_to_universal"] = outcome(lambda: to_universal(hostile / tag, scratch / "hostile-universal"))
    saved = scratch / "dcp"
    dcp.save({"weight": torch.ones(4), "note": Payload(ran["dcp"])}, checkpoint_id=str(saved), no_dist=True)
    said["hostile dcp"] = outcome(lambda: dcp_to_torch_save(str(saved), str(scratch / "hostile.pt")))
    said["executed"] = sorted(name for name, made in ran.items() if made.is_dir())

    said["weights of zero_to_fp32"] = sorted(get_fp32_state_dict_from_zero_checkpoint(str(checkpoint)))
    convert_zero_checkpoint_to_fp32_state_dict(str(checkpoint), str(scratch / "fp32"))
    said["files of zero_to_fp32"] = sorted(p.name for p in (scratch / "fp32").iterdir())
    said["ds_to_universal"] = outcome(lambda: to_universal(checkpoint / tag, scratch / "universal"))
    said["files of ds_to_universal"] = sorted(p.name for p in (scratch / "universal").iterdir())
    said["s3 zero_to_fp32"] = outcome(lambda: get_fp32_state_dict_from_zero_checkpoint("s3://bucket/run1"))
    said["s3 ds_to_universal"] = outcome(lambda: to_universal(Path("s3://bucket/run1/x"), scratch / "s3-universal"))
    said["dcp reads zero"] = outcome(lambda: dcp_to_torch_save(str(checkpoint / tag), str(scratch / "zero.pt")))
    clean = scratch / "clean-dcp"
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=str(clean), no_dist=True)
    said["dcp_to_torch_save"] = outcome(lambda: dcp_to_torch_save(str(clean), str(scratch / "clean.pt")))
    return said


if __name__ == "__main__":
    result = main(Path(sys.argv[1]), Path(sys.argv[2]))
    Path(sys.argv[2], "said.json").write_text(json.dumps(result))
