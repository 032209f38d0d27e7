"""A lazy state dict holds one tensor at a time; a model is loaded a bounded part at a time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from checkpoints import gpt_parameters
from measure import measure

from house.sources import zero_source

PARAMETERS = gpt_parameters(768, 9, 20_000)
"""About 80 million: 1 GB of masters and moments, of which the largest tensor has 61 MB."""
LARGEST_BYTES = 20_000 * 768 * 4
SLACK_BYTES = 64 << 20
_IMPORTS = "import torch, reshard.deepspeed"
"""Takes 148 MiB with torch for the CPU, 280 MiB with torch for CUDA (2.13.0)."""
_LAZY = """
import sys
from reshard.deepspeed import get_fp32_state_dict_from_zero_checkpoint as get
found = get(sys.argv[1], lazy_mode=True)
total = 0
for name, lazy in found.items():
    tensor = lazy.contiguous()
    assert tensor.shape == lazy.shape and tensor.dtype is lazy.dtype
    total += tensor.numel()
print(total)
"""


source = zero_source(PARAMETERS, stage=2, ranks=4)
"""A ZeRO-2 checkpoint of about a gigabyte on four ranks."""


def test_iterating_all_tensors_takes_one_of_them(source: Path) -> None:
    run = measure([sys.executable, "-c", _LAZY, str(source)], env={**os.environ})
    assert run.read_bytes > 300_000_000, "it did read them"
    imports = measure([sys.executable, "-c", _IMPORTS], env={**os.environ}).peak_anonymous_bytes
    allowed = imports + LARGEST_BYTES + SLACK_BYTES
    assert run.peak_anonymous_bytes <= allowed, f"{run.peak_anonymous_bytes >> 20} MiB, allowed {allowed >> 20}"
