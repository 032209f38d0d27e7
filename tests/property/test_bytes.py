"""Laws of bytes: CRCs combine, casts round as torch rounds, chunks put together are the file."""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from house.requests import asked, needed_by
from reshard.choices import OpaquePolicy, TargetFormat, WeightDtype
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.execute.casts.cast import NumpyCast
from reshard_engine.execute.gather import TensorReader, fill
from reshard_engine.formats.registry import writer_of
from reshard_engine.formats.sources import read_checkpoint
from reshard_engine.integrity.checksums import combine
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.plan.model import Chunk, WriteItem
from reshard_engine.plan.planner import plan_conversion
from reshard_engine.storage.locations import open_location
from reshard_engine.tensors.dtypes import BY_NAME

DATA = Path(__file__).parent.parent / "data"
FLOATS = [BY_NAME[n] for n in ("float32", "bfloat16", "float16", "float64")]


@given(st.binary(max_size=200), st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_crcs_combine(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_crcs_combine_over_gigabytes() -> None:
    zeros = zlib.crc32(b"")
    block = bytes(1 << 20)
    for _ in range(64):
        zeros = zlib.crc32(block, zeros)
    assert combine(zlib.crc32(b"abc"), zeros, 64 << 20) == zlib.crc32(bytes(64 << 20), zlib.crc32(b"abc"))


bits32 = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from(
        [0x80000000, 1, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F7F8000, 0x477FF000, 0x33000000, 0x00007FFF]
    ),
    st.integers(0, 2**16 - 1).map(lambda high: high << 16 | 0x8000),
)


@given(st.lists(bits32, min_size=1, max_size=64))
@settings(max_examples=300, deadline=None)
def test_casts_round_as_torch_rounds(values: list[int]) -> None:
    """Every bit but the payload of NaNs, for which torch's own kernels disagree with each other."""
    data = np.array(values, dtype=np.uint32).view(np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.from_numpy(np.array(values, dtype=np.uint32).view(np.float32))
    nan = torch.isnan(tensor).numpy()
    for name in ("bfloat16", "float16"):
        ours = NumpyCast().cast(data, BY_NAME["float32"], BY_NAME[name]).view(np.uint16)
        theirs = tensor.to(getattr(torch, name)).view(torch.int16).numpy().view(np.uint16)
        assert (ours[~nan] == theirs[~nan]).all()
        exponent = 0x7F80 if name == "bfloat16" else 0x7C00
        assert ((ours[nan] & 0x7FFF) > exponent).all(), "a NaN stays a NaN"
        assert ((ours[nan] >> 15) == (np.array(values, np.uint32)[nan] >> 31)).all(), "with its sign"


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=64))
@settings(max_examples=200, deadline=None)
def test_widening_is_exact(values: list[int]) -> None:
    data = np.array(values, dtype=np.uint16).view(np.uint8)
    for name in ("bfloat16", "float16"):
        ours = NumpyCast().cast(data, BY_NAME[name], BY_NAME["float32"]).view(np.uint32)
        theirs = torch.from_numpy(np.array(values, np.int32).astype(np.uint16).view(np.int16)).view(
            getattr(torch, name)
        )
        wide = theirs.to(torch.float32).view(torch.int32).numpy().view(np.uint32)
        nan = torch.isnan(theirs).numpy()
        assert (ours[~nan] == wide[~nan]).all()
        back = NumpyCast().cast(ours.view(np.uint8), BY_NAME["float32"], BY_NAME[name]).view(np.uint16)
        assert (back[~nan] == np.array(values, np.uint16)[~nan]).all()


_OF_OTHER_SOURCES = (TargetFormat.SLIM, TargetFormat.PEFT, TargetFormat.MEGATRON)
"""Targets that do not take the sources here."""


@pytest.mark.parametrize("to", [t for t in TargetFormat if t not in _OF_OTHER_SOURCES])
@pytest.mark.parametrize("dtype", [None, WeightDtype.BF16])
@pytest.mark.parametrize("name", ["zero2_tiny", "zero3_tiny"])
def test_chunks_put_together_are_the_file(name: str, to: TargetFormat, dtype: WeightDtype | None) -> None:
    """Whatever the grain, also when it cuts elements, the bytes are the same."""
    if to in (TargetFormat.UNIVERSAL, TargetFormat.FSDP_RANKS, TargetFormat.TORCH_CHECKPOINTING) and dtype is not None:
        return
    source = SourceSpec(url=str(DATA / name))
    request = asked(source=source, target="/nowhere/out", to=to, dtype=dtype, **needed_by(to))
    checkpoint = read_checkpoint(open_location(source.url), None, OpaqueLedger(OpaquePolicy.REFUSE))
    layout = writer_of(to).lay_out(checkpoint, request, name="out")
    for file in layout.files[:12]:
        whole = np.zeros(file.size_bytes, dtype=np.uint8)
        reader = TensorReader(checkpoint, NumpyCast())
        fill(reader, [WriteItem(Chunk(0, 0, len(whole)), file, 0, 0, len(whole))], whole)
        for grain in (1, 7, 64, 333):
            parts = [np.zeros(min(grain, len(whole) - at), np.uint8) for at in range(0, len(whole), grain)]
            for index, part in enumerate(parts[:200]):
                chunk = Chunk(0, index * grain, len(part))
                item = WriteItem(chunk, file, chunk.offset, 0, len(part))
                fill(TensorReader(checkpoint, NumpyCast()), [item], part)
            cut = sum(len(p) for p in parts[:200])
            assert np.concatenate(parts[:200]).tobytes() == whole[:cut].tobytes()


@given(st.integers(1 << 10, 1 << 16))
@settings(max_examples=50, deadline=None)
def test_units_tile_every_file_exactly_once(part_bytes: int) -> None:
    source = SourceSpec(url=str(DATA / "zero3_tiny"))
    checkpoint = read_checkpoint(open_location(source.url), None, OpaqueLedger(OpaquePolicy.REFUSE))
    request = ConvertRequest(source=source, target="/nowhere/out", to=TargetFormat.UNIVERSAL, part_bytes=part_bytes)
    layout = writer_of(request.to).lay_out(checkpoint, request, name="out")
    plan = plan_conversion(checkpoint, layout, request, min_part_bytes=None)
    assert plan.digest == plan_conversion(checkpoint, layout, request, min_part_bytes=None).digest
    spans: dict[int, list[tuple[int, int]]] = {}
    seen_commit = False
    for number, unit in enumerate(plan.units):
        assert unit.index == number
        assert unit.length_bytes <= part_bytes
        assert unit.commit or not seen_commit, "commit units come last"
        seen_commit = seen_commit or unit.commit
        for chunk in unit.chunks:
            spans.setdefault(chunk.file, []).append((chunk.offset, chunk.length_bytes))
            assert unit.commit == (
                plan.files[chunk.file].commit and plan.files[chunk.file].size_bytes <= plan.chunk_bytes
            )
    for index, file in enumerate(plan.files):
        at = 0
        for offset, length in sorted(spans[index]):
            assert offset == at
            at += length
        assert at == file.size_bytes
