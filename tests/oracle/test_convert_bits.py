"""Values move as bits: NaN payloads, minus zero, subnormals and infinities survive; casts round as torch's do."""

from __future__ import annotations

import math
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from oracle.driver import Oracle, Trained
from oracle.fixtures import TrainedFactory
from oracle.outputs import convert, raw, read_bin, read_safetensors, read_universal, tensor_of
from oracle.truth import RawTensor

# A signalling NaN, a negative quiet one with payload, -0.0, two subnormals, infinities, the greatest number, a tie.
WORDS = [0x7FA00001, 0xFFC0DEAD, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000]
HALVES = [0x7FA1, 0xFFC3, 0x8000, 0x0001, 0x807F, 0xFF80]  # the like in bf16
CASES = ["z1_bf16", "z2_bf16", "z3_bf16", "bf16opt"]


@dataclass(frozen=True)
class Planted:
    """A checkpoint with planted bits, and what every tensor must be."""

    source: Path
    masters: dict[str, RawTensor]
    first_moments: dict[str, RawTensor]
    frozen: RawTensor


def places(run: Trained, partition_elems: int) -> Iterator[tuple[int, str, int]]:
    """(word, parameter, element) for each planted word, by the layouts of the stages; padding has no place."""
    names: list[str] = run.truth.meta["flat_order"][0]
    masters = run.truth.kind("fp32")
    for rank in range(run.world):
        offset = 0 if run.case.stage == 3 else -rank * partition_elems
        for name in names:
            numel = math.prod(masters[name].shape)
            # Stage 3 gives each rank a share of each parameter; elsewhere the ranks' flat groups follow one another.
            share = -(-numel // run.world) if run.case.stage == 3 else numel
            first = rank * share if run.case.stage == 3 else 0
            for word, element in enumerate(range(first - offset, first - offset + len(WORDS))):
                if first <= element < min(first + share, numel):
                    yield word, name, element
            offset += share


def planted_into(run: Trained, kind: str, partition_elems: int) -> dict[str, RawTensor]:
    """The tensors of one kind with ``WORDS`` where the first elements of each rank's flat group belong."""
    tensors = run.truth.kind(kind)
    for word, name, element in places(run, partition_elems):
        old = tensors[name]
        data = old.data[: 4 * element] + struct.pack("<I", WORDS[word]) + old.data[4 * element + 4 :]
        tensors[name] = RawTensor(old.dtype, old.shape, data)
    return tensors


@pytest.fixture(params=CASES)
def planted(request: pytest.FixtureRequest, oracle: Oracle, trained: TrainedFactory, tmp_path: Path) -> Planted:
    """A copy of a real checkpoint with planted bits."""
    run = trained(request.param)
    shutil.copytree(run.dir, tmp_path / "ckpt")
    elems = oracle.plant(tmp_path / "ckpt" / run.tag, WORDS, HALVES)
    assert {word for word, _, _ in places(run, elems)} == set(range(len(WORDS)))
    frozen = run.truth.tensors["frozen/adapter.weight"]
    halves = struct.pack(f"<{len(HALVES)}H", *HALVES)
    return Planted(
        tmp_path / "ckpt",
        planted_into(run, "fp32", elems),
        planted_into(run, "exp_avg", elems),
        RawTensor(frozen.dtype, frozen.shape, halves + frozen.data[len(halves) :]),
    )


def widened(value: RawTensor) -> RawTensor:
    """bf16 bits as the upper halves of fp32 bits: exact, whatever the value."""
    halves = struct.unpack(f"<{len(value.data) // 2}H", value.data)
    return RawTensor("F32", value.shape, struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves)))


def test_bits_survive_into_atoms(planted: Planted, tmp_path: Path) -> None:
    convert(planted.source, tmp_path / "universal", "universal")
    found = read_universal(tmp_path / "universal")
    atoms = found.kind("fp32")
    assert atoms.pop("adapter.weight") == widened(planted.frozen)
    assert atoms == planted.masters
    assert found.kind("exp_avg") == planted.first_moments
    module = found.model["module"]
    assert raw(module["adapter.weight"]) == planted.frozen
    assert raw(module["mask"]) == RawTensor("BOOL", (3,), bytes([1, 0, 1]))
    assert raw(module["scale"]) == RawTensor("F32", (), struct.pack("<f", 1.1))


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_bits_survive_into_fp32_weights(planted: Planted, form: str, tmp_path: Path) -> None:
    convert(planted.source, tmp_path / "out", form, dtype="fp32")
    tensors = (read_safetensors if form == "safetensors" else read_bin)(tmp_path / "out").tensors
    assert {name: tensors[name] for name in planted.masters} == planted.masters
    assert tensors["adapter.weight"] == widened(planted.frozen)
    assert tensors["mask"] == RawTensor("BOOL", (3,), bytes([1, 0, 1]))
    assert tensors["scale"] == RawTensor("F32", (), struct.pack("<f", 1.1))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_casts_round_as_torch_does(planted: Planted, dtype: str, tmp_path: Path) -> None:
    result = convert(planted.source, tmp_path / "out", "safetensors", dtype=dtype)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    found = read_safetensors(tmp_path / "out").tensors
    for name, master in planted.masters.items():
        before, after = tensor_of(master), tensor_of(found[name])
        numbers = ~before.isnan()
        assert torch.equal(after.isnan(), before.isnan())
        # As integers: -0.0 and 0.0 are equal as floats.
        assert torch.equal(after[numbers].view(torch.int16), before.to(wanted)[numbers].view(torch.int16)), name
    assert found["mask"].dtype == "BOOL"
    assert found["scale"] == RawTensor("F32", (), struct.pack("<f", 1.1))
    assert [text for text in result.warnings if "became infinite" in text]  # 0x7F7FFFFF has no place in 16 bits
