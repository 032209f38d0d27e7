"""Linear layers in eight bits: the bits of others' own quantizers, models that transformers opens, and the errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

import reshard
from house.expected import raised
from reshard.errors import ReshardError
from reshard_engine.formats.weights.writer import _LINEAR  # pyright: ignore[reportPrivateUsage]

SIZES = {
    "llama": {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2},
    "opt": {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256, "num_attention_heads": 2},
}
MORE = {"vocab_size": 61, "num_hidden_layers": 2, "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 2}
QUANTIZER = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float"))

TOKENS = torch.arange(10)[None]


def model_of(kind: str, **changes: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES[kind], **MORE, **changes}))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A model with blocks of zeros, of numbers that e4m3 ties between, of tiny and of very different magnitudes."""
    torch.manual_seed(7)
    model = model_of("llama")
    weight = model.model.layers[0].mlp.down_proj.weight.data
    weight[:128, :128] = 0
    weight[:128, 128:256] = torch.arange(-64, 64).float() * 0.5 + 0.25
    weight[128:, :128] *= 1e-30
    weight[128:, 128:256] *= 10.0 ** torch.arange(-30, 98, 1).clamp(max=30).float()
    model.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def _convert(source: Path, target: Path, **options: Any) -> reshard.ConvertResult:
    given = {"to": "safetensors", "quantize": "fp8-block", "model_files": source, **options}
    return reshard.convert(source, target, progress=False, **given)


def _held(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def _with_numbers(source: Any, values: dict[str, torch.Tensor]) -> Any:
    """A model as `source`, in bf16, with these weights."""
    found = AutoModelForCausalLM.from_config(source.config, dtype=torch.bfloat16)
    found.load_state_dict(values, strict=False)
    found.tie_weights()
    return found


def _reference(source: Path) -> dict[str, torch.Tensor]:
    """The tensors as transformers quantizes them."""
    quantizer, found = cast("Any", Fp8Quantize)(QUANTIZER), {}
    for name, value in _held(source).items():
        linear = re.search(r"(self_attn|mlp)\..*\.weight$", name)
        found |= quantizer.convert({name: value}) if linear else {name: value}
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"part_size": 5000, "max_shard_size": 100_000, "verify": "full"}, {"dtype": "bf16"}],
    ids=["whole", "small units", "bf16"],
)
def test_bits_are_those_of_transformers(options: dict[str, Any], llama: Path, tmp_path: Path) -> None:
    _convert(llama, tmp_path / "out", **options)
    found, wanted = _held(tmp_path / "out"), _reference(llama)
    assert found.keys() == wanted.keys()
    rest = torch.bfloat16 if options.get("dtype") else torch.float32
    for name, value in wanted.items():
        whole = name.endswith("_scale_inv") or value.element_size() == 1
        expected = value if whole else value.to(rest)
        assert found[name].dtype == expected.dtype, name
        assert torch.equal(found[name].view(torch.uint8), expected.view(torch.uint8)), name
    assert sum(t.dtype == torch.float8_e4m3fn for t in found.values()) == 14
    assert reshard.verify(tmp_path / "out").ok


def test_a_block_without_a_scale_becomes_zeros(llama: Path, tmp_path: Path) -> None:
    """Its numbers are so small that their factor is infinite: transformers makes NaNs of the zeros among them."""
    model = AutoModelForCausalLM.from_pretrained(llama)
    model.model.layers[0].mlp.up_proj.weight.data[:128, :128] *= 1e-37
    model.save_pretrained(llama)
    _convert(llama, tmp_path / "out")
    found, name = _held(tmp_path / "out"), "model.layers.0.mlp.up_proj.weight"
    assert found[f"{name}_scale_inv"][0, 0] == 1
    assert not found[name][:128, :128].float().any()


def test_masters_of_sixteen_bits_are_quantized_as_they_are(llama: Path, tmp_path: Path) -> None:
    reshard.convert(llama, tmp_path / "half", to="safetensors", dtype="bf16", model_files=llama, progress=False)
    _convert(tmp_path / "half", tmp_path / "out")
    found, wanted = _held(tmp_path / "out"), _reference(tmp_path / "half")
    assert found.keys() == wanted.keys()
    assert [n for n, t in wanted.items() if not torch.equal(found[n].view(torch.uint8), t.view(torch.uint8))] == []


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("kind", "tied"), [("llama", False), ("llama", True), ("opt", True)])
def test_transformers_opens_it(kind: str, *, tied: bool, tmp_path: Path) -> None:
    """Without a GPU it dequantizes while it loads: the logits are those of the numbers that we say readers compute."""
    torch.manual_seed(3)
    source = model_of(kind, tie_word_embeddings=tied)
    source.save_pretrained(tmp_path / "source")
    _convert(tmp_path / "source", tmp_path / "out", dtype="bf16", card=True)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    found, values = _held(tmp_path / "out"), {}
    dequantizer = cast("Any", Fp8Dequantize)(QUANTIZER)
    for name, value in found.items():
        if (scales := found.get(f"{name}_scale_inv")) is not None:
            numbers = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            values[name] = (value.float() * numbers).bfloat16()
            assert torch.equal(values[name], dequantizer._dequantize_one(value, scales, torch.bfloat16))
        elif not name.endswith("_scale_inv"):
            values[name] = value
    wanted = _with_numbers(source, values)
    with torch.no_grad():
        assert torch.equal(model.eval()(TOKENS).logits, wanted.eval()(TOKENS).logits)


@pytest.mark.parametrize("kind", _LINEAR)
def test_the_layers_are_those_of_the_model(kind: str) -> None:
    """Every `nn.Linear` but the head, and nothing else."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, num_hidden_layers=2))
    linear = {f"{n}.weight" for n, m in model.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"}
    assert {n for n in model.state_dict() if re.fullmatch(_LINEAR[kind], n)} == linear


def test_the_result_says_the_errors(llama: Path, tmp_path: Path) -> None:
    """Of each matrix, measured by the numbers that readers compute; the same in any units."""
    results = [_convert(llama, tmp_path / "a").casts, _convert(llama, tmp_path / "b", part_size=3000).casts]
    found, before = _held(tmp_path / "a"), _held(llama)
    assert len(results[0]) == 14
    for casts in results:
        for loss in casts:
            numbers = found[f"{loss.fqn}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            distance = (found[loss.fqn].float() * numbers).double() - before[loss.fqn].double()
            rms = (distance.square().sum() / before[loss.fqn].double().square().sum()).sqrt()
            assert loss.largest_error == float(distance.abs().max())
            assert loss.relative_rms_error == pytest.approx(float(rms), rel=1e-9)
    assert json.loads((tmp_path / "a" / "reshard.json").read_bytes())["casts"][0]["relative_rms_error"] > 0
    assert _convert(llama, tmp_path / "a").casts == results[0]


@pytest.mark.parametrize("kind", ["fp8-block", "int8"])
def test_a_virtual_target_has_the_same_bytes(kind: str, llama: Path, tmp_path: Path) -> None:
    _convert(llama, tmp_path / "out", quantize=kind)
    with reshard.open_layout(llama, to="safetensors", quantize=kind, model_files=llama) as layout:
        whole = (tmp_path / "out" / "model.safetensors").read_bytes()
        for begin, end in ((0, len(whole)), (100_001, 100_100), (400_000, 700_001)):
            assert layout.read("model.safetensors", begin, end - begin) == whole[begin:end]
        assert layout.read("config.json") == (tmp_path / "out" / "config.json").read_bytes()


def test_layers_of_other_shapes_stay(tmp_path: Path) -> None:
    """With those that vLLM joins them with, and the configuration names them."""
    model_of("llama", num_attention_heads=4, num_key_value_heads=1).save_pretrained(tmp_path / "source")
    result = _convert(tmp_path / "source", tmp_path / "out")
    assert any("6 linear layers not quantized: lengths are no multiples of 128" in w for w in result.warnings)
    others = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    attention = [f"model.layers.{layer}.self_attn.{n}_proj" for layer in (0, 1) for n in "kqv"]
    assert others == sorted([*attention, "lm_head", "model.embed_tokens"])


def test_the_user_names_the_layers_of_other_models(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"model_type": "of-ours"}))
    error = raised(ReshardError, _convert, llama, tmp_path / "out")
    assert (error.code, "of-ours" in error.message) == ("request.unsatisfiable", True)
    _convert(llama, tmp_path / "out", quantize_layers="*.down_proj.weight, *.0.self_attn.q_proj.weight")
    assert sum(t.dtype == torch.float8_e4m3fn for t in _held(tmp_path / "out").values()) == 3
    error = raised(ReshardError, _convert, llama, tmp_path / "other", quantize_layers="*.down.weight")
    assert error.code == "request.invalid"


def test_what_cannot_be_quantized_is_refused(llama: Path, tmp_path: Path) -> None:
    def refused(**options: Any) -> tuple[str, str]:
        error = raised(ReshardError, _convert, llama, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()
        return error.code, error.message

    assert refused(to="torch") == (
        "request.invalid",
        "--to torch does not take --quantize; it is for --to safetensors",
    )
    assert refused(quantize=None, quantize_layers="*")[0] == "request.invalid"
    assert refused(model_files=None)[0] == "request.unsatisfiable"
    assert refused(quantize_layers="lm_head.weight")[0] == "request.unsatisfiable"
    _convert(llama, tmp_path / "fp8")
    error = raised(ReshardError, _convert, tmp_path / "fp8", tmp_path / "again")
    assert "quantized already" in error.message
    model = model_of("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(llama)
    assert refused()[0] == "tensor.overflow"


# -- int8 -----------------------------------------------------------------------------------------------


def _rows_of_compressed_tensors(source: Path, scale: torch.dtype) -> dict[str, torch.Tensor]:
    """The quantized weights and their scales as compressed-tensors makes them."""
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel", scale_dtype=scale)
    found = {}
    for name, value in _held(source).items():
        if re.search(r"(self_attn|mlp)\..*\.weight$", name):
            scales = calculate_qparams(value.amin(1, keepdim=True), value.amax(1, keepdim=True), args)[0].to(scale)
            codes = quantize(value, scales, torch.zeros_like(scales), args, dtype=torch.int8)
            found |= {name: codes, f"{name}_scale": scales}
    return found


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, torch.float32),
        ({"part_size": 5000, "max_shard_size": 100_000, "verify": "full", "dtype": "bf16"}, torch.bfloat16),
    ],
    ids=["fp32", "bf16 in small units"],
)
def test_int8_has_the_bits_of_compressed_tensors(
    options: dict[str, Any], scale: torch.dtype, llama: Path, tmp_path: Path
) -> None:
    result = _convert(llama, tmp_path / "out", quantize="int8", **options)
    found, wanted, before = _held(tmp_path / "out"), _rows_of_compressed_tensors(llama, scale), _held(llama)
    assert found.keys() == before.keys() | wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    assert all(found[name].dtype == scale for name in before.keys() - wanted.keys())
    assert reshard.verify(tmp_path / "out").ok
    losses = {loss.fqn: loss for loss in result.casts if loss.relative_rms_error}
    assert losses.keys() == {name for name in wanted if name.endswith(".weight")}
    for name, loss in losses.items():
        distance = (found[name].float() * found[f"{name}_scale"].float()).double() - before[name].double()
        assert loss.largest_error == float(distance.abs().max())
        rms = (distance.square().sum() / before[name].double().square().sum()).sqrt()
        assert loss.relative_rms_error == pytest.approx(float(rms), rel=1e-9)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_transformers_opens_int8_by_compressed_tensors(kind: str, tmp_path: Path) -> None:
    """Dequantized, the logits are those of the numbers in the files. Any lengths will do: a scale is of one row."""
    torch.manual_seed(3)
    sizes = {"llama": {"hidden_size": 96, "intermediate_size": 161}, "opt": {"ffn_dim": 97}}
    source = model_of(kind, tie_word_embeddings=kind == "opt", **sizes[kind])
    source.save_pretrained(tmp_path / "source")
    result = _convert(tmp_path / "source", tmp_path / "out", dtype="bf16", quantize="int8", card=True)
    assert not [w for w in result.warnings if "not quantized" in w]
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    found, values = _held(tmp_path / "out"), {}
    for name, value in found.items():
        if (scales := found.get(f"{name}_scale")) is not None:
            values[name] = dequantize(value, scales, torch.zeros_like(scales), args, dtype=torch.bfloat16)
        elif not name.endswith("_scale"):
            values[name] = value
    wanted = _with_numbers(source, values)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert not any(report.values()), report
    compressed = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sum(p.dtype == torch.int8 for p in compressed.parameters()) == sum(
        v.dtype == torch.int8 for v in found.values()
    )
    with torch.no_grad():
        logits = wanted.eval()(TOKENS).logits
        assert torch.equal(model.eval()(TOKENS).logits, logits)
        # Its activations are int8, too: close, and not the same.
        close = compressed.eval()(TOKENS).logits
    assert 0 < float((close - logits).abs().max()) < 0.1 * float(logits.abs().max())


def test_int8_refuses_numbers_without_a_scale(llama: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    weight = model.model.layers[0].mlp.up_proj.weight.data
    weight[3, 4] = 1e9  # its scale is beyond fp16
    model.save_pretrained(llama)
    error = raised(ReshardError, _convert, llama, tmp_path / "out", quantize="int8", dtype="fp16")
    assert (error.code, (tmp_path / "out").exists()) == ("tensor.overflow", False)
    weight[3, 4] = float("inf")
    model.save_pretrained(llama)
    error = raised(ReshardError, _convert, llama, tmp_path / "out", quantize="int8")
    assert (error.code, (tmp_path / "out").exists()) == ("tensor.overflow", False)
