"""Consolidated weights: bit for bit what DeepSpeed's zero_to_fp32 gives where it works, and right where it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from house.expected import raised, some
from oracle.cases import CASES
from oracle.driver import Oracle, Trained
from oracle.fixtures import TrainedFactory
from oracle.hf_models import config_of, tokens
from oracle.launcher import Worlds
from oracle.outputs import Weights, cast, convert, raw, read_bin, read_safetensors, tensor_of
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
    if run.case.empty_param:
        # Below stage 3 DeepSpeed compares addresses, which are 0 for both: it takes the second for a tie of the first.
        assert theirs.pop("no_rows") == theirs["empty"] != named["no_rows"]
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
    error = some(oracle.peer_fp32(run.dir, tmp_path / "peer.safetensors"))
    assert PEER_REFUSES[name] in error
    assert shard(run, tmp_path / "ours", "safetensors", dtype="fp32").tensors == expected_weights(run, torch.float32)


def test_tied_weights_as_safetensors(oracle: Oracle, trained: TrainedFactory, tmp_path: Path) -> None:
    run = trained("z2_bf16")
    error = some(oracle.peer_safetensors(run.dir, tmp_path / "peer"))
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
        error = raised(SourceError, convert, tmp_path / "source", tmp_path / "safe", "safetensors")
        assert (error.code, error.fix) == ("tensor.unsupported", "write --to torch instead")
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
    error = raised(SourceError, convert, tmp_path / "source", tmp_path / "out", "torch")
    assert (error.code, error.message) == ("tensor.unsupported", "element type bits8")
    assert "copy the file again" not in error.fix


# Consolidated weights of real transformers models load with ``from_pretrained``, and compute the same.


_MODEL_SHARD_BYTES = 8_000


@pytest.fixture(scope="module")
def hf_run(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """``hf_run(kind, stage)``: folder of a trained model: ``ckpt/`` and ``truth.safetensors``."""
    done: dict[tuple[str, int], Path] = {}

    def run(kind: str, stage: int) -> Path:
        if (kind, stage) not in done:
            folder = done[kind, stage] = tmp_path_factory.mktemp(f"{kind}-z{stage}")
            worlds.run("oracle.hf_models:train_and_save", world=2, kind=kind, stage=stage, folder=str(folder))
        return done[kind, stage]

    return run


def logits_of(model: PreTrainedModel) -> Tensor:
    """What the model computes for fixed tokens."""
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens(3, 99)).logits
    return logits


def weights_of(model: PreTrainedModel) -> dict[str, RawTensor]:
    """Every parameter under its owner's name."""
    return {name: raw(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("form", ["safetensors", "safetensors-sharded", "torch", "torch-sharded"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_from_pretrained_gives_the_trained_model(
    kind: str, stage: int, form: str, hf_run: Callable[[str, int], Path], tmp_path: Path
) -> None:
    folder = hf_run(kind, stage)
    truth = Truth(folder / "truth.safetensors", folder / "none")
    to, _, sharded = form.partition("-")
    convert(folder / "ckpt", tmp_path, to, max_shard_bytes=_MODEL_SHARD_BYTES if sharded else None)
    assert len(list(tmp_path.glob("*.index.json"))) == bool(sharded)
    config_of(kind).save_pretrained(tmp_path)

    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)

    assert {key: list(names) for key, names in report.items() if names} == {}
    assert weights_of(model) == truth.kind("fp32")
    rebuilt = AutoModelForCausalLM.from_config(config_of(kind))
    rebuilt.load_state_dict({name: tensor_of(value) for name, value in truth.kind("fp32").items()}, strict=False)
    rebuilt.tie_weights()
    assert torch.equal(logits_of(model), logits_of(rebuilt))
    # The engine's own forward pass at stage 3 uses other kernels, hence no bits here.
    assert torch.allclose(logits_of(model), tensor_of(truth.tensors["logits"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_directory_opens_by_itself(
    stage: int, dtype: str, hf_run: Callable[[str, int], Path], tmp_path: Path
) -> None:
    """OPT with its tied head: nothing but the target's path, and the trained model's logits."""
    folder = hf_run("opt", stage)
    files = tmp_path / "files"
    config_of("opt").save_pretrained(files)
    config = json.loads((files / "config.json").read_text())
    (files / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    GenerationConfig(max_new_tokens=7).save_pretrained(files)
    (files / "training_args.bin").write_bytes(b"not carried")
    convert(folder / "ckpt", tmp_path / "out", "safetensors", dtype=dtype, model_files=str(files))

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    masters = Truth(folder / "truth.safetensors", folder / "none").kind("fp32")
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert weights_of(model) == {name: raw(tensor_of(value).to(wanted)) for name, value in masters.items()}
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert model.generation_config.max_new_tokens == 7
    rebuilt = AutoModelForCausalLM.from_config(config_of("opt"), dtype=wanted)
    rebuilt.load_state_dict({name: tensor_of(value).to(wanted) for name, value in masters.items()}, strict=False)
    rebuilt.tie_weights()
    assert torch.equal(logits_of(model), logits_of(rebuilt))
    truth = tensor_of(Truth(folder / "truth.safetensors", folder / "none").tensors["logits"])
    assert torch.allclose(logits_of(model).float(), truth, rtol=0, atol=1e-5 if dtype == "fp32" else 0.05)
    assert not (tmp_path / "out" / "training_args.bin").exists()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_bf16_weights_are_the_rounded_masters(kind: str, hf_run: Callable[[str, int], Path], tmp_path: Path) -> None:
    folder = hf_run(kind, 3)
    convert(folder / "ckpt", tmp_path, "safetensors", dtype="bf16")
    config_of(kind).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    masters = Truth(folder / "truth.safetensors", folder / "none").kind("fp32")
    assert weights_of(model) == {name: raw(tensor_of(value).bfloat16()) for name, value in masters.items()}
