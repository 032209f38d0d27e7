"""What people write around DeepSpeed's functions to get 16-bit weights: the fp32 state dict, cast and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file


def convert_to_bf16(source: str, output: str) -> None:
    """Write `output/model.safetensors`."""
    state: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(source)
    Path(output).mkdir(parents=True, exist_ok=True)
    save_file({n: t.to(torch.bfloat16).contiguous() for n, t in state.items()}, Path(output) / "model.safetensors")
