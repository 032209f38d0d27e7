"""What people write to get safetensors from a distributed checkpoint: torch's conversion, then a save of the model.

python bench/dcp_peer.py DIRECTORY OUTPUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def main() -> None:
    """Convert the checkpoint that the arguments name."""
    output = Path(sys.argv[2])
    output.mkdir(parents=True)
    whole = output / "whole.pt"
    dcp_to_torch_save(sys.argv[1], whole)
    state = torch.load(whole, mmap=True, weights_only=True)
    save_file({name: tensor.contiguous() for name, tensor in state["model"].items()}, output / "model.safetensors")
    whole.unlink()


if __name__ == "__main__":
    main()
