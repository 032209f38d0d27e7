"""DeepSpeed's own offline converters, run inside a rank of a world of one."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
)
from safetensors.torch import save_file


def peer_fp32(checkpoint_dir: str, out: str, tag: str | None = None) -> dict[str, Any]:
    """Consolidates with zero_to_fp32 into the safetensors file ``out``; returns the names or the error's text."""
    try:
        state: Any = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=tag)
    except Exception as error:  # noqa: BLE001 - which way the peer fails is the answer
        return {"names": [], "error": f"{type(error).__name__}: {error}"}
    # Cloned, because safetensors refuses the tied names that share memory.
    save_file({name: value.detach().clone().contiguous() for name, value in state.items()}, out)
    return {"names": list(state), "error": None}


def peer_universal(tag_dir: str, out_dir: str) -> dict[str, Any]:
    """Converts one tag's folder with ds_to_universal into ``out_dir``; returns the error's text or None."""
    arguments = Namespace(
        input_folder=tag_dir,
        output_folder=out_dir,
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        ds_to_universal.main(arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - which way the peer fails is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}


def peer_safetensors(checkpoint_dir: str, out_dir: str) -> dict[str, Any]:
    """Consolidates with zero_to_fp32 straight into safetensors; returns the error's text or None."""
    try:
        convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, out_dir, safe_serialization=True)
    except Exception as error:  # noqa: BLE001 - which way the peer fails is the answer
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}
