"""The device kernel on a real GPU: the reference's bits, and a fall back when memory runs out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reshard_engine.dtypes import BY_NAME
from reshard_engine.execute.cast import NumpyCast, TorchCast

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_every_high_half_and_rounding_case_has_the_reference_bits(target: str) -> None:
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    data = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.uint8)
    ours = NumpyCast().cast(data, BY_NAME["float32"], BY_NAME[target])
    finite = data[~np.repeat(np.isnan(data.view(np.float32)), 4)]
    reference = NumpyCast().cast(finite, BY_NAME["float32"], BY_NAME[target])
    assert TorchCast("cuda").cast(finite, BY_NAME["float32"], BY_NAME[target]).tobytes() == reference.tobytes()
    assert TorchCast("cuda").cast(data, BY_NAME["float32"], BY_NAME[target]).tobytes() == ours.tobytes()


def test_out_of_memory_falls_back_to_the_reference() -> None:
    data = np.arange(1 << 20, dtype=np.float32).view(np.uint8)
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        found = TorchCast("cuda").cast(data, BY_NAME["float32"], BY_NAME["bfloat16"])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.tobytes() == NumpyCast().cast(data, BY_NAME["float32"], BY_NAME["bfloat16"]).tobytes()
