"""Consolidated weights: bit for bit what DeepSpeed's zero_to_fp32 gives where it works, and right where it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import get_state_dict

from oracle.cases import CASES
from oracle.driver import Oracle, Trained
from oracle.fixtures import TrainedFactory
from oracle.outputs import Weights, cast, convert, raw, read_bin, read_safetensors
from oracle.truth import RawTensor, Truth
from reshard.choices import WeightDtype
from reshard.errors import SourceError
from reshard_engine.tensors.dtypes import BY_NAME

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FLOATS = ("F64", "F32", "BF16", "F16")
_SHARD_BYTES = 2_000
_FORMS: dict[str, tuple[str, int | None, Callable[[Path], Weights]]] = {
    "safetensors": ("safetensors", None, read_safetensors),
    "safetensors-sharded": ("safetensors", _SHARD_BYTES, read_safetensors),
    "bin": ("torch", None, read_bin),
    "bin-sharded": ("torch", _SHARD_BYTES, read_bin),
}

# zero_to_fp32 of DeepSpeed 0.19.8 refuses these, with these words; ours reads them.
PEER_REFUSES = {
    "z0_fp32": "'NoneType' object is not iterable",
    "z0_bf16": "'NoneType' object is not iterable",
    "bf16opt": "is not a zero checkpoint",
    "bf16opt_two_groups": "is not a zero checkpoint",
    "z2_legacy_stream": "mmap",
    "z3_legacy_stream": "mmap",
    "z2_fast_writer": "can't find",
    "z3_nvme": "something is wrong",
    "z3_nvme_two_groups": "something is wrong",
}
_zero = [name for name, case in CASES.items() if case.stage in (1, 2, 3) and name not in PEER_REFUSES]
_ALWAYS = (
    "z1_fp32",
    "z2_fp16",
    "z3_fp32",
    "z2_round_robin_alignment",
    "z1_round_robin_two_groups",
    "z3_sub_groups_two_groups",
    "z3_before_first_step",
    "z1_elastic",
    "z2_empty_param",
    "z3_fast_writer",
    "z1_frozen_late",
    "z2_frozen_late",
    "z3_frozen_late",
)
WHERE_THE_PEER_WORKS = [name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.full) for name in _zero]


def expected_weights(run: Trained, dtype: torch.dtype | None) -> dict[str, RawTensor]:
    """Masters, frozen weights and buffers in ``dtype``; scalars, integers and booleans as the run held them.

    Without a type everything is as the run held it.
    """
    truth = run.truth
    masters = truth.kind("fp32")
    loose = {fqn: v for fqn, v in truth.kind("module").items() if fqn not in masters}
    # What was frozen late is the optimizer's: its master goes on to be stepped.
    tensors = truth.kind("frozen") | masters | loose | truth.kind("buffer")
    return {k: cast(v, dtype) if dtype and v.dtype in _FLOATS and v.shape else v for k, v in tensors.items()}


def shard(run: Trained, folder: Path, form: str, **options: Any) -> Weights:
    """Converts and reads back."""
    to, shard_bytes, read = _FORMS[form]
    convert(run.dir, folder, to, max_shard_bytes=shard_bytes, **options)
    return read(folder)


def peer_weights(oracle: Oracle, run: Trained, out: Path) -> dict[str, RawTensor]:
    """What DeepSpeed's ``get_fp32_state_dict_from_zero_checkpoint`` returns."""
    assert oracle.peer_fp32(run.dir, out) is None
    return Truth(out, out).tensors


@pytest.mark.parametrize("name", WHERE_THE_PEER_WORKS)
def test_fp32_equals_zero_to_fp32(name: str, oracle: Oracle, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained(name)
    theirs = peer_weights(oracle, run, tmp_path / "peer.safetensors")
    ours = shard(run, tmp_path / "ours", "safetensors", dtype="fp32")
    assert ours.tensors == expected_weights(run, torch.float32)
    named = ours.tensors | {alias: ours.tensors[owner] for alias, owner in ours.aliases.items()}
    left_out = run.truth.kind("frozen").keys() - run.truth.kind("fp32").keys() if run.case.stage == 1 else set()
    assert set(theirs) == set(named) - left_out
    masters = {fqn: theirs[fqn] for fqn in run.truth.kind("fp32")}
    assert masters == {fqn: ours.tensors[fqn] for fqn in masters}
    # The peer leaves frozen weights and buffers in the model's dtype: they are widened, as ours are.
    assert {k: cast(v, torch.float32) if v.dtype in _FLOATS else v for k, v in theirs.items()} == {
        k: named[k] for k in theirs
    }


@pytest.mark.parametrize("name", ["z0_bf16", "z2_bf16", "z3_bf16", "z2_fp16", "z2_frozen_late", "bf16opt"])
def test_without_a_type_nothing_is_cast(name: str, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained(name)
    found = shard(run, tmp_path / "out", "safetensors").tensors
    assert found == expected_weights(run, None)
    assert {found[fqn].dtype for fqn in run.truth.kind("fp32")} == {"F32"}
    assert found["adapter.weight"].dtype == ("F16" if "fp16" in name else "BF16")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_run_without_masters_keeps_every_type(tmp_path: Path) -> None:
    """Pure bf16 under FSDP, with a buffer of float64: torch's own state dict, bit for bit and byte for byte."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(torch.bfloat16)
    model[1].weight.requires_grad_(False)
    model.register_buffer("exact", torch.linspace(0, 1, 5, dtype=torch.float64))
    model.register_buffer("rough", torch.linspace(0, 1, 5, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    held = {name: raw(tensor) for name, tensor in model.state_dict().items()}

    for to, read in (("safetensors", read_safetensors), ("torch", read_bin)):
        convert(tmp_path / "dcp", tmp_path / to, to)
        assert read(tmp_path / to).tensors == held
    convert(tmp_path / "dcp", tmp_path / "wide", "safetensors", dtype="fp32")
    assert read_safetensors(tmp_path / "wide").tensors == {name: cast(v, torch.float32) for name, v in held.items()}


@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name", ["z2_bf16", "z3_bf16"])
def test_every_form_in_every_dtype(name: str, dtype: str, form: str, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained(name)
    found = shard(run, tmp_path / "out", form, dtype=dtype)
    assert found.tensors == expected_weights(run, _DTYPES[dtype])
    assert found.aliases == run.truth.meta["aliases"] == {"head.weight": "embed.weight"}
    assert found.tensors["seen"] == run.truth.tensors["buffer/seen"]
    assert (len(found.files) > 1) == form.endswith("sharded")


def test_shards_keep_to_their_size(trained: TrainedFactory, tmp_path: Path) -> None:
    found = shard(trained("z2_bf16"), tmp_path / "out", "safetensors-sharded")
    for name in found.files:
        part = read_safetensors_file(tmp_path / "out" / name)
        assert len(part) == 1 or sum(map(len, part.values())) <= _SHARD_BYTES


def read_safetensors_file(path: Path) -> dict[str, bytes]:
    """Tensor bytes of one file."""
    return {key: value.data for key, value in Truth(path, path).tensors.items()}


@pytest.mark.parametrize("name", ["z2_bf16", "z3_bf16", "z1_fp32"])
def test_frozen_weights_can_be_left_out(name: str, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained(name)
    found = shard(run, tmp_path / "out", "safetensors", exclude_frozen=True)
    wanted = expected_weights(run, torch.float32)
    assert found.tensors == {fqn: value for fqn, value in wanted.items() if fqn != "adapter.weight"}


@pytest.mark.parametrize("name", PEER_REFUSES)
def test_the_peer_refuses_and_ours_reads(name: str, oracle: Oracle, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained(name)
    error = oracle.peer_fp32(run.dir, tmp_path / "peer.safetensors")
    assert error is not None
    assert PEER_REFUSES[name] in error
    assert shard(run, tmp_path / "ours", "safetensors", dtype="fp32").tensors == expected_weights(run, torch.float32)


def test_tied_weights_as_safetensors(oracle: Oracle, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained("z2_bf16")
    error = oracle.peer_safetensors(run.dir, tmp_path / "peer")
    assert error is not None
    assert "share memory" in error
    ours = shard(run, tmp_path / "ours", "safetensors")
    assert "head.weight" not in ours.tensors
    assert ours.aliases == {"head.weight": "embed.weight"}
    assert ours.tensors["embed.weight"] == run.truth.tensors["fp32/embed.weight"]


def test_frozen_weights_of_stage_1(oracle: Oracle, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained("z1_bf16")
    assert "adapter.weight" not in peer_weights(oracle, run, tmp_path / "peer.safetensors")
    ours = shard(run, tmp_path / "ours", "safetensors", dtype="fp32").tensors["adapter.weight"]
    assert ours == cast(run.truth.tensors["frozen/adapter.weight"], torch.float32)


@pytest.mark.parametrize("name", ["z2_bf16", "z3_bf16"])
def test_frozen_weights_become_fp32_too(name: str, oracle: Oracle, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained(name)
    theirs = peer_weights(oracle, run, tmp_path / "peer.safetensors")["adapter.weight"]
    ours = shard(run, tmp_path / "ours", "safetensors", dtype="fp32").tensors["adapter.weight"]
    assert (theirs.dtype, ours.dtype) == ("BF16", "F32")
    assert cast(theirs, torch.float32) == ours


_OPAQUE = {
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "uint64": "U64",
    "float4_e2m1fn_x2": None,
    "complex32": None,
}
"""Element types that no cast knows, and their names in safetensors."""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", _OPAQUE)
def test_elements_of_every_type_go_through_unchanged(name: str, tmp_path: Path) -> None:
    size, dtype = BY_NAME[name].itemsize_bytes, getattr(torch, name)
    scales = torch.arange(24 * size, dtype=torch.uint8).view(4, 6 * size).view(dtype)
    (tmp_path / "source").mkdir()
    torch.save({"w": torch.ones(4, 6), "scales": scales}, tmp_path / "source" / "pytorch_model.bin")
    convert(tmp_path / "source", tmp_path / "bin", "torch", dtype=WeightDtype.BF16)
    found = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert (found["w"].dtype, found["scales"].dtype) == (torch.bfloat16, scales.dtype)
    assert torch.equal(found["scales"].view(torch.uint8), scales.view(torch.uint8))
    if _OPAQUE[name] is None:
        with pytest.raises(SourceError) as caught:
            convert(tmp_path / "source", tmp_path / "safe", "safetensors")
        assert (caught.value.code, caught.value.fix) == ("tensor.unsupported", "write --to torch instead")
        return
    convert(tmp_path / "bin", tmp_path / "safe", "safetensors")
    convert(tmp_path / "safe", tmp_path / "again", "torch")
    with safe_open(tmp_path / "safe" / "model.safetensors", "pt") as file:
        assert file.get_slice("scales").get_dtype() == _OPAQUE[name]
        stored = file.get_tensor("scales")
    again = torch.load(tmp_path / "again" / "pytorch_model.bin", weights_only=True)["scales"]
    for tensor in (stored, again):
        assert (tensor.dtype, tensor.shape) == (scales.dtype, scales.shape)
        assert torch.equal(tensor.view(torch.uint8), scales.view(torch.uint8))


def test_a_type_that_is_not_known_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    torch.save({"w": torch.zeros(4, dtype=torch.bits8)}, tmp_path / "source" / "pytorch_model.bin")
    with pytest.raises(SourceError) as caught:
        convert(tmp_path / "source", tmp_path / "out", "torch")
    assert (caught.value.code, caught.value.message) == ("tensor.unsupported", "element type bits8")
    assert "copy the file again" not in caught.value.fix
