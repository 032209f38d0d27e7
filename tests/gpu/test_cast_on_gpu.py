"""Casts on a real GPU: the reference's bits, a fall back when memory runs out, transfers that overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from house.casts import EDGES, PAIRS, Bytes, hold, weights
from reshard_engine.execute.casts import device
from reshard_engine.execute.casts.cast import NumpyCast
from reshard_engine.execute.casts.device import DeviceCast
from reshard_engine.execute.casts.rows import Kind, Rows
from reshard_engine.tensors.dtypes import BY_NAME, Dtype

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FP32, BF16 = BY_NAME["float32"], BY_NAME["bfloat16"]


def on_gpu(**options: Any) -> DeviceCast:
    return DeviceCast("cuda", **{"least_bytes": 0, "slice_bytes": 1 << 20, "memory_bytes": 1 << 30, **options})


@pytest.fixture(scope="module")
def kernel() -> DeviceCast:
    return on_gpu()


def used(kernel: DeviceCast) -> None:
    """Nothing went another way."""
    assert not kernel.take_warnings()
    assert kernel.report()["cpu_bytes"] == 0


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x3000])
@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_every_high_half_and_rounding_case_has_the_reference_bits(kernel: DeviceCast, target: str, low: int) -> None:
    data = ((np.arange(1 << 16, dtype=np.uint32) << 16) | low).view(np.uint8)
    hold(kernel, data, FP32, BY_NAME[target], shift=0)
    used(kernel)


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_every_element_of_sixteen_bits_has_the_reference_bits(kernel: DeviceCast, source: str, target: str) -> None:
    if source != target:
        hold(kernel, np.arange(1 << 16, dtype=np.uint16).view(np.uint8), BY_NAME[source], BY_NAME[target], shift=1)
    used(kernel)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda d: d.name)
def test_random_bits_and_edges_have_the_reference_bits(kernel: DeviceCast, source: Dtype, target: Dtype) -> None:
    size = source.itemsize_bytes
    bits = np.random.default_rng(3).integers(0, 256, (3 << 20) + 5 * size, dtype=np.uint8).view(f"u{size}")
    edges = EDGES[source.name]
    bits[1 : 1 + len(edges)] = edges
    data = bits.view(np.uint8)
    ours, theirs = (np.zeros(len(bits) * target.itemsize_bytes, dtype=np.uint8) for _ in range(2))
    assert kernel.cast_into(data, source, target, ours) == NumpyCast().cast_into(data, source, target, theirs)
    assert ours.tobytes() == theirs.tobytes()
    used(kernel)


def test_rows_gathered_by_index_have_the_reference_bits(kernel: DeviceCast) -> None:
    rng = np.random.default_rng(4)
    length = rng.integers(1, 200, 20_000) * 4
    ends = np.cumsum(length + rng.integers(0, 3, len(length)) * 4)
    rows = Rows(ends - length, length, (np.cumsum(length) - length) // 2)
    source = rng.integers(0, 256, int(ends[-1]), dtype=np.uint8)
    ours, theirs = (np.zeros(int(length.sum()) // 2, dtype=np.uint8) for _ in range(2))
    for which, target in ((kernel, ours), (NumpyCast(), theirs)):
        which.cast_rows(rows, source, target, Kind(FP32, BF16))
    assert ours.tobytes() == theirs.tobytes()
    used(kernel)


def test_out_of_memory_falls_back_to_the_reference() -> None:
    data, kernel = weights(1 << 20), on_gpu()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        found = kernel.cast(data, FP32, BF16)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.tobytes() == NumpyCast().cast(data, FP32, BF16).tobytes()
    assert (kernel.report()["out_of_memory"], len(kernel.take_warnings())) == (2, 1)
    kernel.cast(data, FP32, BF16)
    assert kernel.report()["device_bytes"] > 0, "there is room again"


def test_no_more_memory_is_taken_than_was_given() -> None:
    memory = 256 << 20
    kernel = on_gpu(memory_bytes=memory, slice_bytes=4 << 20)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    data = weights(8 << 20)
    for target in ("bfloat16", "float16"):
        kernel.cast(data, FP32, BY_NAME[target])
    assert torch.cuda.max_memory_reserved() - before <= memory
    used(kernel)


def _intervals(trace: Path) -> list[tuple[str, int, float, float]]:
    """(category, stream, begin, end) of what the GPU did."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [
        (e["cat"], int(e["args"]["stream"]), float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") in {"kernel", "gpu_memcpy"} and "stream" in e.get("args", {})
    ]


def test_transfers_overlap_with_the_work_of_another_stream(tmp_path: Path) -> None:
    """Shown by a trace: something on one stream runs while a copy runs on another."""
    kernel, data = on_gpu(slice_bytes=4 << 20, memory_bytes=2 << 30), weights(64 << 20)
    out: Bytes = np.zeros(len(data) // 2, dtype=np.uint8)
    kernel.cast_into(data, FP32, BF16, out)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        kernel.cast_into(data, FP32, BF16, out)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    found = _intervals(tmp_path / "trace.json")
    assert len({stream for _, stream, _, _ in found}) >= device.LANES
    copies = [f for f in found if f[0] == "gpu_memcpy"]
    overlaps = [(a, b) for a in copies for b in found if a[1] != b[1] and max(a[2], b[2]) < min(a[3], b[3])]
    assert overlaps, "no copy ran beside anything of another stream"
    used(kernel)
