"""A whole conversion whose casts go through the device's program: the same target, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.choices import TargetFormat, WeightDtype
from reshard.local import load_engine
from reshard.models.jobs import ConvertRequest, ConvertResult
from reshard.options import SourceSpec
from reshard_engine.execute import executor
from reshard_engine.execute.casts import device
from reshard_engine.execute.casts.cast import CastKernel, NumpyCast
from reshard_engine.execute.casts.device import DeviceCast
from reshard_engine.execute.checks import full, source as agreements
from reshard_engine.integrity.manifest import MANIFEST_NAME
from reshard_engine.operations import conversion

DATA = Path(__file__).parent.parent / "data"
Use = Callable[[CastKernel], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Makes a kernel that of every conversion from now on."""

    def choose(kernel: CastKernel) -> None:
        for module in (conversion, executor, full, agreements):
            monkeypatch.setattr(module, "default_kernel", lambda: kernel)

    return choose


def convert(source: str, target: Path, to: TargetFormat, dtype: WeightDtype) -> ConvertResult:
    request = ConvertRequest(source=SourceSpec(url=str(DATA / source)), target=str(target), to=to, dtype=dtype)
    return load_engine().convert(request)


def digests(target: Path) -> dict[str, str]:
    """Everything but the manifest, which says when it was made."""
    files = (p for p in target.rglob("*") if p.is_file() and p.name != MANIFEST_NAME)
    return {str(p.relative_to(target)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize("dtype", [WeightDtype.BF16, WeightDtype.FP16])
@pytest.mark.parametrize("to", [TargetFormat.SAFETENSORS, TargetFormat.TORCH])
@pytest.mark.parametrize("source", ["zero2_tiny", "zero3_tiny"])
def test_the_target_is_the_same(source: str, to: TargetFormat, dtype: WeightDtype, tmp_path: Path, use: Use) -> None:
    use(NumpyCast())
    plain = convert(source, tmp_path / "cpu" / "out", to, dtype)
    kernel = DeviceCast("cpu", least_bytes=0, slice_bytes=64 << 10, memory_bytes=64 << 20)
    use(kernel)
    ours = convert(source, tmp_path / "device" / "out", to, dtype)
    assert kernel.report()["device_bytes"] > 0, "it was used"
    assert kernel.report()["cpu_bytes"] == 0
    assert ours.warnings == plain.warnings
    assert digests(tmp_path / "device" / "out") == digests(tmp_path / "cpu" / "out")


def test_a_device_without_room_is_said_and_changes_nothing(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(NumpyCast())
    plain = convert("zero3_tiny", tmp_path / "cpu" / "out", TargetFormat.SAFETENSORS, WeightDtype.BF16)

    def no_room(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device, "run", no_room)
    use(DeviceCast("cpu", least_bytes=0))
    ours = convert("zero3_tiny", tmp_path / "device" / "out", TargetFormat.SAFETENSORS, WeightDtype.BF16)
    said = [w for w in ours.warnings if w not in plain.warnings]
    assert len(said) == 1
    assert "out of memory" in said[0]
    assert digests(tmp_path / "device" / "out") == digests(tmp_path / "cpu" / "out")


def test_batches_are_read_into_the_memory_that_is_sent(
    tmp_path: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not copied once more to pinned memory."""
    sent: list[bool] = []
    submit = device._Lane.submit

    def seen(lane: device._Lane, source: device.Source, *rest: Any) -> None:
        sent.append(len(source.pinned) > 0)
        submit(lane, source, *rest)

    monkeypatch.setattr(device._Lane, "submit", seen)
    kernel = DeviceCast("cpu", least_bytes=0)
    kernel.start()
    use(kernel)
    convert("zero3_tiny", tmp_path / "out", TargetFormat.SAFETENSORS, WeightDtype.BF16)
    assert sum(sent) > len(sent) // 2
