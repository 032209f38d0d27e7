"""Names of Hugging Face: transformers computes from our files what real megatron-core computed, and the reverse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

import reshard
from house.rank_cases import rank_case
from house.repository import real_checkpoint
from house.shared import made_once
from oracle.launcher import Worlds
from oracle.megatron_hf import LAYERS, MODELS, TIED, TOKENS, tokens
from oracle.test_megatron_out import megatron_is_needed
from oracle.whole_tensors import named, whole
from reshard.errors import RequestError

PAGE = Path(__file__).parents[2] / "docs" / "formats" / "megatron-hf.md"
SAID = {
    "llama": "llama", "llama3": "llama", "mistral": "mistral",
    "starcoder2": PAGE.read_text().partition("```yaml\n")[2].partition("```")[0],
}  # fmt: skip
"""Families whose names are equal, of which the user says which it is; and the rules of the page on rules."""
LAYOUTS = [*((family, 2) for family in MODELS), *((family, 1) for family in ("gpt2", "llama", "qwen3", "mixtral"))]
Saved: TypeAlias = Callable[[str, int], Path]
ROUNDING = 5e-6
"""Logits are below 4; the sums of both are in fp32, in other orders."""


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """`saved(family, tp)`: a folder with `ckpt` and `logits.safetensors` of real megatron-core."""

    def case(family: str, tp: int) -> Path:
        def make(folder: Path) -> None:
            worlds.run("oracle.megatron_hf:save", world=tp, family=family, tp=tp, out=str(folder / "run"))

        return made_once(tmp_path_factory, f"megatron-hf-{family}-{tp}", make)[0] / "run"

    return case


def convert(source: Path, target: Path, to: str = "safetensors", **options: Any) -> reshard.ConvertResult:
    return reshard.convert(source, target, to=to, progress=False, **options)


def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(found.values()), found
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def equal(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return all(first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first)


@megatron_is_needed
@pytest.mark.parametrize(("family", "tp"), LAYOUTS)
def test_transformers_computes_what_megatron_computed(family: str, tp: int, saved: Saved, tmp_path: Path) -> None:
    """With our `config.json`, card and padded vocabulary, at both sizes of tensor parallelism; back bit for bit."""
    run = saved(family, tp)
    result = convert(run / "ckpt", tmp_path / "hf", names="hf", hf_rules=SAID.get(family), card=True)
    assert ModelCard.load(tmp_path / "hf" / "README.md").data.library_name == "transformers"
    assert not any("config.json" in warning for warning in result.warnings)
    model = transformers_model(tmp_path / "hf")
    assert type(model).__name__ == json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"][0]
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (LAYERS, TOKENS)
    assert model.config.tie_word_embeddings is (family in TIED)
    wanted = load_file(run / "logits.safetensors")["logits"]
    assert wanted.abs().max() > 1
    torch.testing.assert_close(logits(model), wanted, atol=ROUNDING, rtol=0)
    convert(tmp_path / "hf", tmp_path / "back", names="megatron-core", hf_rules=SAID.get(family))
    convert(run / "ckpt", tmp_path / "own")
    assert equal(tmp_path / "back", tmp_path / "own")


@megatron_is_needed
@pytest.mark.parametrize("family", MODELS)
def test_megatron_computes_what_transformers_computed(
    family: str, saved: Saved, tmp_path: Path, worlds: Worlds
) -> None:
    """Weights that transformers saved, as a checkpoint that real megatron-core loads on two tensor-parallel ranks."""
    convert(saved(family, 2) / "ckpt", tmp_path / "hf", names="hf", hf_rules=SAID.get(family))
    model = transformers_model(tmp_path / "hf")
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator).mul_(0.05))
    model.save_pretrained(tmp_path / "changed")
    (tmp_path / "args.json").write_text('{"transformer_impl": "local"}')
    target, out = tmp_path / "iter_0000001", tmp_path / "logits.safetensors"
    options: dict[str, Any] = {"names": "megatron-core", "hf_rules": SAID.get(family)}
    convert(tmp_path / "changed", target, "megatron", megatron_args=tmp_path / "args.json", **options)
    worlds.run("oracle.megatron_hf:load", world=2, family=family, tp=2, checkpoint=str(target), out=str(out))
    torch.testing.assert_close(load_file(out)["logits"], logits(model), atol=ROUNDING, rtol=0)


# Masters and optimizer states, of the real checkpoints.

CASES = {
    "td_full_llama_bf16_pad_tp2dp2": "llama", "td_full_gpt_fp32_tp2dp2": "gpt2", "v19_td_moe_bf16_ep2dp2": "mixtral",
    "legacy_llama_bf16_tp1pp2vpp2dp2_dist": "llama",
}  # fmt: skip


def by_hand(name: str, value: torch.Tensor, family: str, heads: int, size: int) -> dict[str, torch.Tensor]:
    """The parts of a parameter, by torch and by words that are replaced."""
    layer = name.split(".")[2] if name.startswith("decoder.layers.") else ""
    kind = name.rpartition(".")[2]
    place = f"transformer.h.{layer}" if family == "gpt2" else f"model.layers.{layer}"
    expert = name.partition(".local_experts.")[2].partition(".")[0]
    if "linear_qkv" in name:
        rest, groups = value.shape[1:], (value.shape[0] // size - heads) // 2
        grouped = value.view(groups, heads // groups + 2, size, *rest)
        q, k, v = (grouped[:, at].reshape(-1, *rest) for at in (slice(None, -2), -2, -1))
        if family == "gpt2":
            fused = torch.cat([q, k, v])
            return {f"{place}.attn.c_attn.{kind}": fused.T if fused.ndim == 2 else fused}
        return {f"{place}.self_attn.{n}_proj.{kind}": t for n, t in (("q", q), ("k", k), ("v", v))}
    if "linear_fc1" in name and family != "gpt2":
        gate, up = value.chunk(2)
        if family == "mixtral":
            return {f"{place}.block_sparse_moe.experts.{expert}.{n}.weight": t for n, t in (("w1", gate), ("w3", up))}
        return {f"{place}.mlp.gate_proj.weight": gate, f"{place}.mlp.up_proj.weight": up}
    words = {
        "gpt2": {
            "self_attention.linear_proj": "attn.c_proj", "mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj",
            "input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2",
        },
        "llama": {
            "self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj",
            "input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm",
        },
    }  # fmt: skip
    words["mixtral"] = {
        **words["llama"], "mlp.router": "block_sparse_moe.gate",
        f"mlp.experts.local_experts.{expert}.linear_fc2": f"block_sparse_moe.experts.{expert}.w2",
    }  # fmt: skip
    outside = {
        "embedding.word_embeddings": ("transformer.wte", "model.embed_tokens"),
        "embedding.position_embeddings": ("transformer.wpe", ""),
        "decoder.final_layernorm": ("transformer.ln_f", "model.norm"), "output_layer": ("", "lm_head"),
    }  # fmt: skip
    if not layer:
        return {f"{outside[name.rpartition('.')[0]][family != 'gpt2']}.{kind}": value}
    module = name.rpartition(".")[0].removeprefix(f"decoder.layers.{layer}.")
    turned = family == "gpt2" and value.ndim == 2
    return {f"{place}.{words[family][module]}.{kind}": value.T if turned else value}


@pytest.mark.parametrize("name", CASES)
def test_masters_and_moments_follow_their_weights(name: str, tmp_path: Path) -> None:
    """As a distributed checkpoint under names of Hugging Face, against the live truth; and back bit for bit."""
    case, family = rank_case(name, tmp_path, folder="mcore"), CASES[name]
    options: dict[str, Any] = {"to": "dcp", "framework": "state-dict"}
    convert(case.folder / "ckpt", tmp_path / "dcp", names="hf", hf_rules=family, **options)
    found = {k.replace("/model", "/fp32"): v for k, v in named(whole(tmp_path / "dcp")).items() if "/step" not in k}
    wanted: dict[str, torch.Tensor] = {}
    for key, value in load_file(case.truth).items():
        fqn, _, kind = key.rpartition("/")
        if kind != "weight":
            wanted |= {f"{n}/{kind}": t for n, t in by_hand(fqn, value, family, heads=4, size=8).items()}
    if family == "gpt2":
        wanted["lm_head.weight/fp32"] = wanted["transformer.wte.weight/fp32"]  # a state dict has tied names twice
    assert found.keys() == wanted.keys()
    assert [k for k, v in wanted.items() if not torch.equal(found[k], v)] == []
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps({"model_type": family, "num_attention_heads": 4, "n_head": 4}))
    convert(tmp_path / "dcp", tmp_path / "back", names="megatron-core", model_files=config, **options)
    convert(case.folder / "ckpt", tmp_path / "own", **options)
    assert reshard.diff(tmp_path / "back", tmp_path / "own").equal


def test_a_run_that_does_not_say_what_it_is_needs_the_user(tmp_path: Path) -> None:
    """Its config.json is not written, and the reason is named; other names are refused."""
    case = rank_case("td_full_llama_bf16_pad_tp2dp2", tmp_path, folder="mcore")
    source = case.folder / "ckpt"
    result = convert(source, tmp_path / "both", names="hf")
    assert any("those of llama, mistral: --hf-rules says which" in w for w in result.warnings)
    result = convert(source, tmp_path / "llama", names="hf", hf_rules="llama")
    assert any("config.json is not written: the run's arguments do not say norm_epsilon" in w for w in result.warnings)
    assert equal(tmp_path / "both", tmp_path / "llama")
    assert not (tmp_path / "llama" / "config.json").exists()
    for wrong, why in (("gpt2", "normalization=RMSNorm"), ("qwen3", "qk_layernorm=False"), ("mixtral", "linear_fc1")):
        with pytest.raises(RequestError, match=why) as caught:
            convert(source, tmp_path / wrong, names="hf", hf_rules=wrong)
        assert caught.value.code == "request.unsatisfiable"
    with pytest.raises(RequestError, match="how many heads"):
        convert(tmp_path / "llama", tmp_path / "back", names="megatron-core")
    with pytest.raises(RequestError, match="for checkpoints of Megatron-core"):
        convert(tmp_path / "llama", tmp_path / "again", names="hf")


def test_a_save_without_arguments_takes_heads_from_a_configuration(tmp_path: Path) -> None:
    """Megatron-core alone, without Megatron-LM's script: the model's own `config.json` says the heads."""
    source, config = real_checkpoint("mcore_tp2pp2dp2"), tmp_path / "config"
    config.mkdir()
    with pytest.raises(RequestError, match="the run's arguments do not say normalization"):
        convert(source, tmp_path / "out", names="hf")
    with pytest.raises(RequestError, match="how many heads"):
        convert(source, tmp_path / "out", names="hf", hf_rules="llama")
    (config / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 4}')
    convert(source, tmp_path / "out", names="hf", hf_rules="llama", model_files=config)
    convert(source, tmp_path / "own")
    convert(tmp_path / "out", tmp_path / "back", names="megatron-core")
    assert equal(tmp_path / "back", tmp_path / "own")


def test_transposes_are_equal_in_small_units_and_read_back(tmp_path: Path) -> None:
    """Units that begin and end within rows, with every check; and under DeepSpeed's universal form."""
    source = rank_case("td_full_gpt_fp32_tp2dp2", tmp_path, folder="mcore").folder / "ckpt"
    convert(source, tmp_path / "whole", names="hf")
    convert(source, tmp_path / "small", names="hf", verify="full", part_size=4096)
    assert equal(tmp_path / "whole", tmp_path / "small")
    convert(source, tmp_path / "universal", "universal", names="hf")
    convert(tmp_path / "universal", tmp_path / "again")
    found, wanted = (load_file(tmp_path / f / "model.safetensors") for f in ("again", "whole"))
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
