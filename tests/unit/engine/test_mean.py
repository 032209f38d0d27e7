"""Means of copies: computed as DeepSpeed computes them, and never where there is nothing to average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from reshard.errors import SourceError
from reshard_engine.execute.casts.cast import NumpyCast
from reshard_engine.execute.gather import TensorReader, mean_of
from reshard_engine.formats.deepspeed.parallel.ranks import Joiner
from reshard_engine.formats.deepspeed.parallel.rules import AVERAGED, CutRules
from reshard_engine.formats.deepspeed.parallel.tensor import RuleLayers
from reshard_engine.tensors.dtypes import BY_NAME, FLOAT32
from reshard_engine.tensors.shard_map import ShardMap, ShardMapBuilder
from reshard_engine.tensors.views import Box, Mean, View

FLOATS = ("float64", "float32", "float16", "bfloat16")
KERNEL = NumpyCast()


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy().copy()


def _mean(copies: list[torch.Tensor]) -> torch.Tensor:
    dtype = copies[0].dtype
    found = mean_of(map(_bytes, copies), BY_NAME[str(dtype).removeprefix("torch.")], KERNEL)
    return torch.from_numpy(found).view(dtype)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", FLOATS)
def test_the_mean_is_what_deepspeed_computes(name: str, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    wide = torch.randn(count, 4096, generator=generator, dtype=torch.float64)
    # Exponents all over, so that sums round; what is equal in all copies is the next test's.
    copies = list((wide * torch.exp2(torch.randint(-8, 9, (4096,), generator=generator))).to(getattr(torch, name)))
    expected = copies[0] if count == 1 else sum(copies) / len(copies)
    same = torch.stack([c == copies[0] for c in copies]).all(dim=0)
    expected = torch.where(same, copies[0], expected)
    assert torch.equal(_mean(copies), expected)


@pytest.mark.parametrize("name", FLOATS)
def test_equal_copies_are_taken_bit_for_bit(name: str) -> None:
    dtype = getattr(torch, name)
    info = torch.finfo(dtype)
    edge = [0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal / 4, float("inf"), float("nan"), 0.1, 1 / 3]
    copy = torch.tensor(edge, dtype=dtype)
    for count in (2, 3, 5):
        assert _bytes(_mean([copy] * count)).tobytes() == _bytes(copy).tobytes()


def test_copies_that_differ_at_one_element_leave_the_others_alone() -> None:
    first = torch.full((1000,), torch.finfo(torch.float32).max)
    other = first.clone()
    other[500] = -other[500]
    found = _mean([first, other])
    assert float(found[500]) == 0.0
    assert torch.equal(torch.cat((found[:500], found[501:])), torch.cat((first[:500], first[501:])))


@dataclass
class _Memory:
    """A source file in memory."""

    data: bytes
    name: str = "memory"

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]


@dataclass
class _Source:
    """As much of a checkpoint as gathering looks at."""

    shard_map: ShardMap
    files: tuple[_Memory, ...]


def _reader(copies: list[torch.Tensor], build: Any) -> tuple[TensorReader, Any]:
    builder, dtype = ShardMapBuilder(), BY_NAME[str(copies[0].dtype).removeprefix("torch.")]
    numbers = [builder.tensor("w", "fp32", dtype, tuple(c.shape)) for c in copies]
    files: list[_Memory] = []
    for index, (number, copy) in enumerate(zip(numbers, copies, strict=True)):
        builder.whole(number, file=index, offset=3)
        files.append(_Memory(b"pad" + _bytes(copy).tobytes()))
    built = build(builder, numbers, dtype)
    source: Any = _Source(builder.build(), tuple(files))
    return TensorReader(source, KERNEL), built


def test_a_mean_is_gathered_in_any_interval_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard_engine.execute.gather.MEAN_ELEMS", 7)
    copies = list(torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(1)))
    reader, mean = _reader(copies, lambda b, numbers, dtype: b.mean("w", "fp32", numbers, dtype))
    expected = (sum(copies) / 3).flatten()
    for begin, end in ((0, 55), (1, 2), (6, 50), (54, 55)):
        got = torch.from_numpy(reader.elements(mean, FLOAT32, begin, end)).view(torch.float32)
        assert torch.equal(got, expected[begin:end])
        narrow = torch.from_numpy(reader.elements(mean, BY_NAME["bfloat16"], begin, end)).view(torch.bfloat16)
        assert torch.equal(narrow, expected[begin:end].bfloat16())


def test_a_weight_is_the_rounded_mean_of_its_masters() -> None:
    copies = list(torch.randn(2, 64, generator=torch.Generator().manual_seed(2)))
    reader, weight = _reader(copies, lambda b, n, _: b.mean("w", "weight", n, BY_NAME["bfloat16"]))
    got = torch.from_numpy(reader.elements(weight, BY_NAME["bfloat16"], 0, 64)).view(torch.bfloat16)
    assert torch.equal(got, (sum(copies) / 2).bfloat16())
    # Read wider than it is, it is still the weight.
    wide = torch.from_numpy(reader.elements(weight, FLOAT32, 3, 9)).view(torch.float32)
    assert torch.equal(wide, got[3:9].float())


def test_a_part_of_a_mean_is_a_mean() -> None:
    copies = list(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(3)))

    def build(builder: ShardMapBuilder, numbers: list[int], dtype: Any) -> int:
        mean = builder.mean("w", "fp32", numbers, dtype)
        right = View((6, 2), (Box(mean, (6, 4), (0, 2), (0, 0), (6, 2)),))
        return builder.view("w@1", "fp32", right, (6, 2))

    reader, part = _reader(copies, build)
    expected = (sum(copies) / 2)[:, 2:].flatten()
    got = torch.from_numpy(reader.elements(part, FLOAT32, 1, 11)).view(torch.float32)
    assert torch.equal(got, expected[1:11])
    assert reader._map.is_computed(part)
    assert len(reader._map.pieces(part, 0, 12).begin) == 0


def test_copies_that_cannot_be_averaged_are_refused() -> None:
    builder = ShardMapBuilder()
    narrow, other = builder.tensor("w", "fp32", FLOAT32, (4,)), builder.tensor("w", "fp32", FLOAT32, (5,))
    count = builder.tensor("w", "fp32", BY_NAME["int64"], (4,))
    for copies in ([narrow, other], [narrow, count], [count, count]):
        with pytest.raises(ValueError, match=r"copies of|no mean"):
            builder.mean("w", "fp32", copies, FLOAT32)


def test_the_joiner_averages_what_the_rule_names_and_compares_the_rest() -> None:
    builder = ShardMapBuilder()
    rules = CutRules({AVERAGED: [r"router\."], "tp_replicated_parameter_patterns": [r"norm\."]}, complete=True, what="")
    joiner = Joiner(builder, RuleLayers([rules]), None, tp=2)

    def join(name: str, state: str) -> int:
        parts = [builder.tensor(name, state, FLOAT32, (8,)) for _ in range(2)]
        shape, cut = joiner.shape_and_cut(name, [(8,), (8,)])
        return joiner.joined(name, state, parts, cut, shape)

    masters, weight, norm = join("router.w", "fp32"), join("router.w", "weight"), join("norm.w", "fp32")
    assert list(joiner.averaged) == ["router.w"]
    assert [(a.fqn, a.first, a.other, a.rounded) for a in joiner.agreements] == [
        ("router.w", 0, 3, True),
        ("router.w", 1, 4, True),
        ("norm.w", 6, 7, False),
    ]
    assert builder._derived == {masters: Mean((0, 1)), weight: Mean((0, 1))}
    assert norm == 6


def test_means_are_no_bytes_of_files() -> None:
    builder = ShardMapBuilder()
    copies = [builder.tensor("w", "fp32", FLOAT32, (4,)) for _ in range(2)]
    builder.mean("w", "fp32", copies, FLOAT32)
    with pytest.raises(SourceError, match="2 tensors are not covered"):
        builder.build()
    for number in copies:
        builder.whole(number, file=0, offset=16 * number)
    shard_map = builder.build()
    assert shard_map.derived == {2: Mean((0, 1))}
    assert np.array_equal(shard_map.tensor, [0, 1])
