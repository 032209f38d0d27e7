"""What casts lose: counted as the numbers say, saturated to the largest one, reported by whole conversions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file

from house.casts import BITS, PAIRS, elements
from house.conversions import convert
from reshard.choices import TargetFormat
from reshard.cli.main import run
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.models.jobs import CastLoss, ConvertRequest, ConvertResult
from reshard.options import SourceSpec
from reshard_engine.execute.casts.cast import Losses, NumpyCast, are_nan, losses_of
from reshard_engine.tensors.dtypes import BY_NAME, Dtype

_LARGEST = {"float32": torch.finfo(torch.float32).max, "bfloat16": torch.finfo(torch.bfloat16).max, "float16": 65504.0}


def _numbers(data: np.ndarray[Any, Any], dtype: Dtype) -> list[float]:
    values = torch.from_numpy(data.copy()).view(getattr(torch, dtype.name)).to(torch.float64)
    return values.tolist()


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda d: d.name)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_losses_are_what_the_numbers_say(source: Dtype, target: Dtype, data: st.DataObject) -> None:
    before = np.array(data.draw(elements(source)), dtype=BITS[source.itemsize_bytes]).view(np.uint8)
    after = NumpyCast().cast(before, source, target)
    pairs = list(zip(_numbers(before, source), _numbers(after, target), strict=True))
    over = [i for i, (x, y) in enumerate(pairs) if math.isfinite(x) and math.isinf(y)]
    expected = Losses(
        len(over),
        sum(x != 0 and y == 0 for x, y in pairs),
        sum(math.isnan(x) for x, _ in pairs),
        sum(math.isinf(x) for x, _ in pairs),
    )
    widens = target.name == "float32" and source.itemsize_bytes == 2
    found = losses_of(before, after, source, target)
    assert found == (Losses() if widens else expected)
    limited = after.copy()
    assert losses_of(before, limited, source, target, saturate=True) == found
    largest = _LARGEST[target.name]
    for i, (value, (x, y)) in enumerate(zip(_numbers(limited, target), pairs, strict=True)):
        wanted = math.copysign(largest, x) if i in over else y
        assert value == wanted or (math.isnan(value) and math.isnan(wanted))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_nans_are_found(dtype: str, data: st.DataObject) -> None:
    source = BY_NAME[dtype]
    values = np.array(data.draw(elements(source)), dtype=BITS[source.itemsize_bytes]).view(np.uint8)
    assert are_nan(values, source).tolist() == [math.isnan(x) for x in _numbers(values, source)]


def test_sums_add_up() -> None:
    assert Losses(1, 2, 3, 4) + Losses(10, 20, 30, 40) == Losses(11, 22, 33, 44)
    assert not Losses()
    assert Losses(nan=1)


_VALUES = {
    "fine": torch.linspace(-2.0, 2.0, 5000),
    "large": torch.tensor([1.0, 70000.0, -1e30, 65504.0] * 700),
    "tiny": torch.tensor([-1e-9, -1.0]),
    "odd": torch.tensor([math.nan, math.inf, -math.inf, 1e-9, 0.0, -0.0, 2.0]),
}
_CASTS = (
    CastLoss(fqn="large", overflowed=1400),
    CastLoss(fqn="odd", underflowed=1, nan=1, infinite=2),
    CastLoss(fqn="tiny", underflowed=1),
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    save_file(_VALUES, tmp_path / "source" / "model.safetensors")
    return tmp_path / "source"


def _convert(source: Path, **options: Any) -> ConvertResult:
    return convert(source, source.parent / "target", "safetensors", dtype="fp16", **options)


@pytest.mark.parametrize("part_bytes", [1 << 10, 64 << 20])
def test_a_conversion_reports_what_it_lost(source: Path, part_bytes: int) -> None:
    done = _convert(source, part_bytes=part_bytes)
    assert done.casts == _CASTS
    assert done.warnings == ("1,400 elements of large became infinite in the narrower type",)
    found = load_file(source.parent / "target" / "model.safetensors")
    assert all(torch.equal(found[n].nan_to_num(), v.half().nan_to_num()) for n, v in _VALUES.items())
    again = _convert(source, part_bytes=part_bytes)
    assert again.already_done
    assert again.casts == _CASTS


@pytest.mark.parametrize("part_bytes", [1 << 10, 64 << 20])
@pytest.mark.parametrize("verify", ["default", "full"])
def test_saturation(source: Path, part_bytes: int, verify: str) -> None:
    done = _convert(source, part_bytes=part_bytes, on_overflow="saturate", verify=verify)
    assert done.casts == _CASTS
    assert done.warnings == ("1,400 elements of large became the largest number of the narrower type",)
    found = load_file(source.parent / "target" / "model.safetensors")
    assert torch.equal(found["large"], _VALUES["large"].clamp(-65504.0, 65504.0).half())
    assert torch.isinf(found["odd"]).sum() == 2
    assert load_engine().verify(str(source.parent / "target")).ok


def test_an_overflow_stops_a_conversion_that_wants_none(source: Path) -> None:
    with pytest.raises(ReshardError) as caught:
        _convert(source, on_overflow="error")
    assert caught.value.code == "tensor.overflow"
    assert "1400 finite elements of large" in caught.value.message
    assert not (source.parent / "target").exists()
    # The next one is another conversion: what this one left does not stop it.
    assert _convert(source, on_overflow="saturate").casts == _CASTS


def test_bf16_has_the_range_of_fp32(source: Path) -> None:
    target = source.parent / "target"
    spec = SourceSpec(url=str(source))
    request = ConvertRequest(source=spec, target=str(target), to=TargetFormat.TORCH, dtype="bf16", on_overflow="error")
    assert load_engine().convert(request).casts == (CastLoss(fqn="odd", nan=1, infinite=2),)


def test_the_command_says_it_in_a_line(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(source), str(source.parent / "t"), "--to", "safetensors", "--dtype", "fp16"]
    assert run(arguments) == 0
    said = "casts: 1,400 elements too large, 2 elements now zero, 1 element NaN, 2 elements infinite before, in 3 "
    assert said + "parameters: large, odd, tiny" in capsys.readouterr().err
    assert run([*arguments[:2], str(source.parent / "e"), *arguments[3:], "--on-overflow", "error"]) == 8


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_becomes_zero_is_counted_where_nothing_else_is_odd(sign: float, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    save_file({"tiny": torch.tensor([sign * 1e-9, 1.0, -1.0])}, tmp_path / "source" / "model.safetensors")
    assert _convert(tmp_path / "source").casts == (CastLoss(fqn="tiny", underflowed=1),)
