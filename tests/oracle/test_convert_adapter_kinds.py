"""Every kind of PEFT configuration: merged as PEFT merges it, exported as PEFT saves it, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from house.conversions import refused_conversion
from house.promises import broken_promises
from house.requests import asked
from oracle.adapter_kinds import Kind, logits_of, model_of
from oracle.launcher import Worlds
from oracle.outputs import convert
from reshard.choices import TargetFormat
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.options import SourceSpec
from reshard_engine.storage.locations import serving
from reshard_engine.testing.stores import MemoryStore

pytestmark = [
    # What PEFT 0.21 asks transformers 5.23, and what it says of tied heads.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*weight tying.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
]
_Q: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "r": 4, "init_lora_weights": False}
_ALL: dict[str, Any] = _Q | {"target_modules": ["q_proj", "o_proj", "up_proj"]}
_GPT2: dict[str, Any] = {"r": 4, "init_lora_weights": False}
MERGED: dict[str, Kind] = {
    "plain": Kind(_Q),
    "tied": Kind(_Q, tied=True),
    "all-linear": Kind(_Q | {"target_modules": "all-linear"}, tied=True),
    "rslora": Kind(_Q | {"use_rslora": True, "lora_alpha": 16}),
    "alpha-pattern": Kind(
        _ALL | {"alpha_pattern": {"layers.0.self_attn.q_proj": 3, "^model.layers.1.mlp.up_proj": 32}}
    ),
    "rank-pattern": Kind(_ALL | {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 5}, "use_rslora": True}),
    "dora": Kind(_ALL | {"use_dora": True}),
    "one-layer": Kind(_ALL | {"layers_to_transform": [1]}),
    "layers-pattern": Kind(_ALL | {"layers_to_transform": 0, "layers_pattern": "layers"}),
    "exclude-modules": Kind(_ALL | {"exclude_modules": ["layers.0.mlp.up_proj"]}),
    "regex": Kind(_Q | {"target_modules": r".*\.(1\.self_attn\.q_proj|0\.mlp\.down_proj)"}),
    "bias-all": Kind(_Q | {"bias": "all"}, model="biased"),
    "bias-lora-only": Kind(_Q | {"bias": "lora_only"}, model="biased"),
    "lora-bias": Kind(_Q | {"lora_bias": True}, model="biased"),
    "conv1d": Kind(_GPT2 | {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}, model="gpt2", tied=True),
    "conv1d-square": Kind(_GPT2 | {"target_modules": ["attn.c_proj"], "fan_in_fan_out": True}, model="gpt2"),
    "conv1d-and-linear": Kind(_GPT2 | {"target_modules": ["c_attn", "lm_head"], "fan_in_fan_out": True}, model="gpt2"),
    "embedding": Kind(_Q | {"target_modules": ["q_proj", "embed_tokens"]}),
    "embedding-tied": Kind(_Q | {"target_modules": ["q_proj", "embed_tokens"]}, tied=True),
    "head": Kind(_Q | {"target_modules": ["q_proj", "lm_head"]}),
    "head-tied": Kind(_Q | {"target_modules": ["q_proj", "lm_head"]}, tied=True),
    "saved-head": Kind(_Q | {"modules_to_save": ["lm_head"]}),
    "saved-head-tied": Kind(_Q | {"modules_to_save": ["lm_head"]}, tied=True),
    "saved-embedding": Kind(_Q | {"modules_to_save": ["embed_tokens"]}),
    "saved-embedding-tied": Kind(_Q | {"modules_to_save": ["embed_tokens"]}, tied=True),
    "saved-both": Kind(_Q | {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "saved-both-tied": Kind(_Q | {"modules_to_save": ["embed_tokens", "lm_head"]}, tied=True),
    "saved-tied-anew": Kind(_Q | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, tied=True),
    "saved-norm": Kind(_Q | {"modules_to_save": ["norm"]}),
    "saved-score": Kind(_Q, model="labels"),
    "tokens": Kind(_Q | {"trainable_token_indices": {"embed_tokens": [5, 2, 60]}}),
    "tokens-tied": Kind(_Q | {"trainable_token_indices": [7, 1]}, tied=True),
    "resized": Kind(_Q, resized=True),
    "resized-tied": Kind(_Q, resized=True, tied=True),
    "resized-saved": Kind(_Q | {"modules_to_save": ["embed_tokens", "lm_head"]}, resized=True),
    "resized-saved-tied": Kind(_Q | {"modules_to_save": ["embed_tokens"]}, resized=True, tied=True),
    "resized-tokens-tied": Kind(_Q | {"trainable_token_indices": [61, 62, 65]}, resized=True, tied=True),
    "resized-embedding": Kind(_Q | {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, resized=True),
    "several": Kind(_Q | {"modules_to_save": ["lm_head"]}, more=({"target_modules": ["q_proj", "k_proj"], "r": 2},)),
    "pissa": Kind(_Q | {"init_lora_weights": "pissa"}),
    "olora": Kind(_Q | {"init_lora_weights": "olora"}),
    "orthogonal": Kind(_Q | {"init_lora_weights": "orthogonal"}),
    "mica": Kind(_Q | {"init_lora_weights": "mica"}),
    "zero3": Kind(_Q | {"modules_to_save": ["embed_tokens"]}, tied=True, stage=3),
    "zero1": Kind(_Q | {"trainable_token_indices": [7, 1]}, tied=True, stage=1),
    "zero0": Kind(_Q | {"modules_to_save": ["embed_tokens"]}, tied=True, stage=0),
}
"""Kinds that are merged."""
WITHOUT_BASE: dict[str, Kind] = {
    "plain": Kind(_Q, exclude_frozen=True),
    "tied": Kind(_Q, tied=True, exclude_frozen=True),
    "dora": Kind(_Q | {"use_dora": True}, exclude_frozen=True, stage=3),
    "rslora": Kind(_Q | {"use_rslora": True, "lora_alpha": 16}, exclude_frozen=True),
    "bias": Kind(_Q | {"bias": "lora_only"}, model="biased", exclude_frozen=True),
    "lora-bias": Kind(_Q | {"lora_bias": True}, model="biased", exclude_frozen=True),
    "embedding": Kind(_Q | {"target_modules": ["q_proj", "embed_tokens"]}, tied=True, exclude_frozen=True),
    "head-tied": Kind(_Q | {"target_modules": ["q_proj", "lm_head"]}, tied=True, exclude_frozen=True),
    "saved-head": Kind(_Q | {"modules_to_save": ["lm_head"]}, exclude_frozen=True),
    "saved-embedding-tied": Kind(_Q | {"modules_to_save": ["embed_tokens"]}, tied=True, exclude_frozen=True),
    "saved-embedding-tied-zero3": Kind(
        _Q | {"modules_to_save": ["embed_tokens"]}, tied=True, exclude_frozen=True, stage=3
    ),
    "saved-both-tied": Kind(_Q | {"modules_to_save": ["embed_tokens", "lm_head"]}, tied=True, exclude_frozen=True),
    "saved-score": Kind(_Q, model="labels", exclude_frozen=True),
    "tokens-tied": Kind(_Q | {"trainable_token_indices": [7, 1]}, tied=True, exclude_frozen=True),
    "resized-saved": Kind(_Q | {"modules_to_save": ["embed_tokens", "lm_head"]}, resized=True, exclude_frozen=True),
    "resized-saved-tied": Kind(
        _Q | {"modules_to_save": ["embed_tokens"]}, resized=True, tied=True, exclude_frozen=True
    ),
    "gpt2": Kind(
        _GPT2 | {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}, model="gpt2", exclude_frozen=True
    ),
}
"""Kinds that were saved as Hugging Face's Trainer saves them; merged with `--base`."""

OTHERS: dict[str, Kind] = {
    "AdaLoRA": Kind({"target_modules": ["q_proj"], "total_step": 10}, method="AdaLoraConfig"),
    "BOFT": Kind({"target_modules": ["q_proj"], "boft_block_size": 4}, method="BOFTConfig"),
    "C3A": Kind({"target_modules": ["q_proj"], "block_size": 4}, method="C3AConfig"),
    "DeLoRA": Kind({"target_modules": ["q_proj"]}, method="DeloraConfig"),
    "FourierFT": Kind({"target_modules": ["q_proj"], "n_frequency": 8}, method="FourierFTConfig"),
    "GraLoRA": Kind({"target_modules": ["q_proj"], "r": 4}, method="GraloraConfig"),
    "HiRA": Kind({"target_modules": ["q_proj"]}, method="HiraConfig"),
    "HRA": Kind({"target_modules": ["q_proj"]}, method="HRAConfig"),
    "IA3": Kind({"target_modules": ["k_proj"], "feedforward_modules": []}, method="IA3Config"),
    "LN tuning": Kind({"target_modules": ["input_layernorm"]}, method="LNTuningConfig"),
    "LoHa": Kind({"target_modules": ["q_proj"]}, method="LoHaConfig"),
    "LoKr": Kind({"target_modules": ["q_proj"]}, method="LoKrConfig"),
    "MiSS": Kind({"target_modules": ["q_proj"], "r": 4}, method="MissConfig"),
    "OFT": Kind({"target_modules": ["q_proj"], "oft_block_size": 4}, method="OFTConfig"),
    "OSF": Kind({"target_modules": ["q_proj"]}, method="OSFConfig"),
    "prefix tuning": Kind({"num_virtual_tokens": 3}, method="PrefixTuningConfig"),
    "prompt tuning": Kind({"num_virtual_tokens": 3}, method="PromptTuningConfig"),
    "P-tuning": Kind({"num_virtual_tokens": 3, "encoder_hidden_size": 8}, method="PromptEncoderConfig"),
    "RandLoRA": Kind({"target_modules": ["q_proj"], "r": 4}, method="RandLoraConfig"),
    "RoAd": Kind({"target_modules": ["q_proj"], "group_size": 4}, method="RoadConfig"),
    "SHiRA": Kind({"target_modules": ["q_proj"], "r": 2}, method="ShiraConfig"),
    "trainable tokens": Kind(
        {"token_indices": [1, 2], "target_modules": ["embed_tokens"]}, method="TrainableTokensConfig"
    ),
    "VB-LoRA": Kind({"target_modules": ["q_proj"], "vector_length": 4, "num_vectors": 8}, method="VBLoRAConfig"),
    "VeRA": Kind({"target_modules": ["q_proj"], "r": 4}, method="VeraConfig"),
    "WaveFT": Kind({"target_modules": ["q_proj"], "n_frequency": 8}, method="WaveFTConfig"),
}
"""Other methods than LoRA: none is merged or exported."""
VARIANTS: dict[str, Kind] = {
    "alora_invocation_tokens": Kind(_Q | {"alora_invocation_tokens": [3, 4]}),
    "kasa_config": Kind(_Q | {"kasa_config": {}}),
    "layer_replication": Kind(_Q | {"layer_replication": [[0, 2], [1, 2]]}),
    "monteclora_config": Kind(_Q | {"monteclora_config": {}}),
    "target_parameters": Kind({"target_parameters": ["mlp.up_proj.weight"], "r": 4, "init_lora_weights": False}),
    "use_bdlora": Kind(
        _Q | {"use_bdlora": {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["v_proj"], "nblocks": 2}}
    ),
    "velora_config": Kind(_Q | {"velora_config": {"num_groups": 4}}),
}
"""Options of LoRA that are merged by another rule, or by none."""
UNMERGEABLE: dict[str, tuple[Kind, str]] = {
    "two-on-one": (Kind(_Q | {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, tied=True), "tied to"),
    "dora-conv1d": (
        Kind(_GPT2 | {"target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True}, model="gpt2"),
        "DoRA",
    ),
    "dora-embedding": (Kind(_Q | {"target_modules": ["embed_tokens"], "use_dora": True}), "DoRA"),
    "square-of-both": (
        Kind(_GPT2 | {"target_modules": ["attn.c_proj", "c_attn", "lm_head"], "fan_in_fan_out": True}, model="gpt2"),
        "both orientations",
    ),
}
"""LoRA that no rule merges, with a word of the reason."""


def _trained(worlds: Worlds, folder: Path, kinds: Mapping[str, Kind]) -> Path:
    said = {name: asdict(kind) for name, kind in kinds.items()}
    worlds.run("oracle.adapter_kinds:train_kinds", world=1, folder=str(folder), kinds=said, timeout_s=240)
    for name in kinds:
        files = folder / name / "files"
        files.mkdir()
        shutil.copy(folder / name / "base" / "config.json", files)
        shutil.copy(folder / name / "adapter" / "adapter_config.json", files)
    return folder


@pytest.fixture(scope="module")
def sources(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with their frozen parameters."""
    return _trained(worlds, tmp_path_factory.mktemp("kinds"), MERGED)


@pytest.fixture(scope="module")
def slim_sources(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs without."""
    return _trained(worlds, tmp_path_factory.mktemp("slim"), WITHOUT_BASE)


def _opened(kind: Kind, folder: Path) -> Any:
    auto: Any = AutoModelForSequenceClassification if kind.model == "labels" else AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    assert {key: list(names) for key, names in report.items() if names} == {}
    return model


def _merge_bound(kind: Kind, folder: Path, name: str, base: Tensor) -> Tensor:
    """The distance that two sums of the same terms in fp32 may have: two last places of their sizes, for each term."""
    held = load_file(folder / "adapter" / "adapter_model.safetensors")
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    stem = f"base_model.model.{name.removesuffix('.weight')}"
    if kind.tied and f"{stem}.lora_embedding_A" not in held and "embed_tokens" in stem:
        stem = "base_model.model.lm_head"  # tied to it: merged in the same place
    names = ("lora_embedding_A", "lora_embedding_B") if f"{stem}.lora_embedding_A" in held else None
    a, b = (held[f"{stem}.{n}"] for n in names) if names else (held[f"{stem}.lora_{n}.weight"] for n in "AB")
    size = b.abs() @ a.abs() * max(config["lora_alpha"], *config["alpha_pattern"].values(), 1.0)
    size = size if size.shape == base.shape else size.T
    bound: Tensor = (base.abs() + size) * (2 * (a.shape[0] + 2) * 2**-23)
    return bound * (8 if config["use_dora"] else 1)  # and a quotient of lengths of rows


def _as_peft_merges(kind: Kind, folder: Path, out: Path) -> None:
    """Names and tied names are PEFT's, what is not merged has its bits, what is merged its values; logits are alike."""
    ours, theirs = load_file(out / "model.safetensors"), load_file(folder / "merged" / "model.safetensors")
    base = load_file(folder / "base" / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, wanted in theirs.items():
        found = ours[name]
        assert found.dtype == wanted.dtype
        if torch.equal(found, wanted):
            continue
        assert name.endswith(".weight")
        assert bool(((found - wanted).abs() <= _merge_bound(kind, folder, name, base[name])).all()), name
    said, meant = (json.loads((f / "config.json").read_text()) for f in (out, folder / "merged"))
    assert said["tie_word_embeddings"] == meant["tie_word_embeddings"]
    model, peft = _opened(kind, out), _opened(kind, folder / "merged")
    logits, wanted, before = logits_of(model), logits_of(peft), logits_of(model_of(kind))
    size = float(wanted.abs().max())
    assert torch.allclose(logits, wanted, rtol=0, atol=1e-6 * size)
    assert not torch.allclose(logits, before, rtol=0, atol=1e-4 * size), "training changed it"


@pytest.mark.parametrize("name", MERGED)
def test_merged_as_peft_merges(name: str, sources: Path, tmp_path: Path) -> None:
    folder = sources / name
    adapter = {"adapter": "default"} if name == "several" else {}
    options = {"merge_adapter": True, "model_files": str(folder / "files"), **adapter}
    convert(folder / "state", tmp_path / "out", "safetensors", **options)
    _as_peft_merges(MERGED[name], folder, tmp_path / "out")


@pytest.mark.parametrize("name", WITHOUT_BASE)
def test_merged_into_a_base_model_from_elsewhere(name: str, slim_sources: Path, tmp_path: Path) -> None:
    folder = slim_sources / name
    files = str(folder / "files")
    options = {"merge_adapter": True, "model_files": files, "base": str(folder / "base"), "verify": "full"}
    convert(folder / "state", tmp_path / "out", "safetensors", **options)
    _as_peft_merges(WITHOUT_BASE[name], folder, tmp_path / "out")


def test_a_scale_in_the_request_names_what_it_assumes(slim_sources: Path, tmp_path: Path) -> None:
    """No tensor shows `use_rslora`: `--lora-alpha` alone warns, and with `--rslora` both results are PEFT's."""
    kind, folder = WITHOUT_BASE["rslora"], slim_sources / "rslora"
    merge = {"merge_adapter": True, "base": str(folder / "base"), "lora_alpha": 16}
    assumed = convert(folder / "state", tmp_path / "assumed", "safetensors", **merge)
    (warning,) = (w for w in assumed.warnings if "is assumed" in w)
    assert "assumed to be 16 / rank" in warning
    for answer in ("--rslora", "alpha_pattern", "init_lora_weights", "--model-files DIR"):
        assert answer in warning
    with pytest.raises(AssertionError):
        _as_peft_merges(kind, folder, tmp_path / "assumed")

    done = convert(folder / "state", tmp_path / "out", "safetensors", rslora=True, **merge)
    (warning,) = (w for w in done.warnings if "is assumed" in w)
    assert "assumed to be 16 / sqrt(rank)" in warning
    assert "--rslora" not in warning
    shutil.copy(folder / "base" / "config.json", tmp_path / "out")
    _as_peft_merges(kind, folder, tmp_path / "out")

    exported = convert(folder / "state", tmp_path / "peft", "peft", lora_alpha=16, rslora=True)
    assert any("assumed to be 16 / sqrt(rank)" in w for w in exported.warnings)
    merged = PeftModel.from_pretrained(_opened(kind, folder / "base"), tmp_path / "peft").merge_and_unload()
    theirs = load_file(folder / "merged" / "model.safetensors")
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(
    ("to", "options", "word"),
    [
        ("peft", {"rslora": True}, "--rslora works only with --lora-alpha"),
        ("safetensors", {"rslora": True, "lora_alpha": 8}, "are for adapters"),
    ],
)
def test_rslora_is_a_part_of_a_scale_in_the_request(
    to: str, options: dict[str, Any], word: str, slim_sources: Path, tmp_path: Path
) -> None:
    error = _refused(slim_sources / "rslora" / "state", tmp_path / "out", to, **options)
    assert error.code == "request.invalid"
    assert word in error.message


def _exported_as_peft_saves(kind: Kind, folder: Path, out: Path) -> tuple[str, ...]:
    """Names and bits are those of PEFT's `save_pretrained`; what the checkpoint cannot say is warned of."""
    options = {"adapter": "default"} if kind.more else {}
    result = convert(folder / "state", out, "peft", model_files=str(folder / "files"), **options)
    ours, theirs = (load_file(f / "adapter_model.safetensors") for f in (out, folder / "adapter"))
    # Of a tied weight DeepSpeed keeps one name, and so its value.
    gone = kind.exclude_frozen and not kind.tied
    lost = {n for n in theirs if n.endswith(".base_layer.weight")} if gone else set()
    assert set(ours) == set(theirs) - lost
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert bool(lost) == any("as it was before training" in w for w in result.warnings)
    return result.warnings


@pytest.mark.parametrize("name", MERGED)
def test_exported_as_peft_saves(name: str, sources: Path, tmp_path: Path) -> None:
    _exported_as_peft_saves(MERGED[name], sources / name, tmp_path / "out")


@pytest.mark.parametrize("name", WITHOUT_BASE)
def test_exported_without_the_base_model(name: str, slim_sources: Path, tmp_path: Path) -> None:
    _exported_as_peft_saves(WITHOUT_BASE[name], slim_sources / name, tmp_path / "out")


@pytest.fixture(scope="module")
def others(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that are not merged."""
    kinds = OTHERS | VARIANTS | {name: kind for name, (kind, _) in UNMERGEABLE.items()}
    return _trained(worlds, tmp_path_factory.mktemp("others"), kinds)


def _refused(source: Path, out: Path, to: str, **options: Any) -> ReshardError:
    error = refused_conversion(convert, source, out, to, **options)
    assert error.fix
    return error


@pytest.mark.parametrize("name", OTHERS)
def test_another_method_is_refused_by_name(name: str, others: Path, tmp_path: Path) -> None:
    """Whatever the configuration says, and without one: by the names of its parameters."""
    kind = "prompt learning" if "num_virtual_tokens" in OTHERS[name].options else name
    for said in ({"model_files": str(others / name / "files")}, {"lora_alpha": 8}):
        merging = _refused(others / name / "state", tmp_path / "out", "safetensors", merge_adapter=True, **said)
        exporting = _refused(others / name / "state", tmp_path / "out", "peft", **said)
        for error in (merging, exporting):
            assert error.code == "request.unsatisfiable"
            assert kind in error.message or "the PEFT method ADALORA" in error.message


@pytest.mark.parametrize("name", VARIANTS)
def test_an_option_with_another_rule_is_refused_by_name(name: str, others: Path, tmp_path: Path) -> None:
    folder = others / name
    options = {"merge_adapter": True, "model_files": str(folder / "files")}
    error = _refused(folder / "state", tmp_path / "out", "safetensors", **options)
    assert error.code == "request.unsatisfiable"
    own = {"kasa_config": "KaSA", "monteclora_config": "lora_monteclora_sampler", "velora_config": "lora_velora_embed"}
    assert own.get(name, name) in error.message
    if name in own:  # it keeps more than two factors, which no adapter file has here
        assert (
            own[name]
            in _refused(folder / "state", tmp_path / "out", "peft", model_files=options["model_files"]).message
        )
    else:
        _exported_as_peft_saves(VARIANTS[name], folder, tmp_path / "adapter")


@pytest.mark.parametrize("name", UNMERGEABLE)
def test_what_no_rule_merges_is_refused(name: str, others: Path, tmp_path: Path) -> None:
    kind, word = UNMERGEABLE[name]
    for said in ({"model_files": str(others / name / "files")}, {"lora_alpha": 8}):
        error = _refused(others / name / "state", tmp_path / "out", "safetensors", merge_adapter=True, **said)
        assert error.code == "request.unsatisfiable"
        assert word in error.message
        assert "PEFT" in error.fix
    _exported_as_peft_saves(kind, others / name, tmp_path / "adapter")


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("arrow_config", {"top_k": 2}, True),
        ("use_qalora", True, True),
        ("megatron_config", {"hidden_size": 4}, True),
        ("bias", "some", True),
        ("a_key_of_tomorrow", 3, True),
        ("a_key_of_tomorrow", False, False),
        ("another_of_tomorrow", {}, False),
        ("peft_version", "0.99", False),
    ],
)
def test_a_key_that_is_not_understood_is_refused(
    key: str, value: object, refused: bool, sources: Path, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    facts = json.loads((sources / "plain" / "files" / "adapter_config.json").read_text())
    (files / "adapter_config.json").write_text(json.dumps(facts | {key: value}))
    options = {"merge_adapter": True, "model_files": str(files)}
    source = sources / "plain" / "state"
    if not refused:
        convert(source, tmp_path / "out", "safetensors", **options)
        return
    error = _refused(source, tmp_path / "out", "safetensors", **options)
    assert (error.code, error.details["keys"]) == ("request.unsatisfiable", [key])
    assert key in error.message


def test_trained_tokens_need_the_run_s_configuration(sources: Path, tmp_path: Path) -> None:
    source = sources / "tokens" / "state"
    for to, merge in (("safetensors", {"merge_adapter": True}), ("peft", {})):
        error = _refused(source, tmp_path / "out", to, lora_alpha=8, **merge)
        assert "trainable_token_indices" in error.fix
    files = tmp_path / "files"
    files.mkdir()
    facts = json.loads((sources / "tokens" / "files" / "adapter_config.json").read_text())
    for wrong in ([5, 2], [5, 2, 61], [5, 5, 2], [5, 2, -1], [5, 2, True], "all", {"lm_head": [5, 2, 60]}):
        (files / "adapter_config.json").write_text(json.dumps(facts | {"trainable_token_indices": wrong}))
        options = {"merge_adapter": True, "model_files": str(files)}
        error = _refused(source, tmp_path / "out", "safetensors", **options)
        assert "trainable_token_indices" in error.message + error.fix


def test_a_scale_makes_a_configuration_that_loses_nothing(sources: Path, tmp_path: Path) -> None:
    """Biases of the adapter and modules that were saved are in it, or PEFT would leave them out in silence."""
    for name in ("lora-bias", "saved-norm", "saved-both"):
        folder, out = sources / name, tmp_path / name
        convert(folder / "state", out, "peft", lora_alpha=8)
        model = PeftModel.from_pretrained(model_of(MERGED[name]), out)
        theirs = PeftModel.from_pretrained(model_of(MERGED[name]), folder / "adapter")
        assert torch.equal(logits_of(model), logits_of(theirs))


def test_a_half_adapter_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    """MiCA freezes one of the factors: a checkpoint without its frozen parameters has the other alone."""
    kinds = {"half": Kind(_Q | {"init_lora_weights": "mica"}, exclude_frozen=True)}
    folder = _trained(worlds, tmp_path / "runs", kinds) / "half"
    base = {"merge_adapter": True, "base": str(folder / "base")}
    for to, options in (("peft", {}), ("safetensors", base)):
        error = _refused(folder / "state", tmp_path / "out", to, model_files=str(folder / "files"), **options)
        assert error.code == "request.unsatisfiable"
        assert "4 of 4 adapted modules" in error.message


def test_buffers_of_a_module_that_was_saved_whole(worlds: Worlds, tmp_path: Path) -> None:
    """The statistics of a batch norm are not parameters: they go with their module, under its plain name."""
    worlds.run("oracle.adapter_kinds:train_with_buffers", world=1, folder=str(tmp_path))
    files = {"model_files": str(tmp_path / "adapter")}
    convert(tmp_path / "state", tmp_path / "out", "safetensors", merge_adapter=True, **files)
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(tmp_path / "merged.safetensors")
    assert set(ours) == set(theirs)
    exact = [n for n in ours if n != "first.weight"]
    assert all(torch.equal(ours[n], theirs[n]) for n in exact)
    assert torch.allclose(ours["first.weight"], theirs["first.weight"], rtol=0, atol=1e-6)
    convert(tmp_path / "state", tmp_path / "peft", "peft", **files)
    ours, theirs = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("peft", "adapter"))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("name", [*list(OTHERS)[:2], *list(VARIANTS)[:2], *list(UNMERGEABLE)[:2]])
def test_inspection_promises_what_works(name: str, others: Path, tmp_path: Path) -> None:
    assert broken_promises(others / name / "state", tmp_path, known={"DIR": str(others / name / "files")}) == []


@pytest.mark.parametrize("name", list(WITHOUT_BASE)[:3])
def test_inspection_promises_what_works_without_the_base_model(name: str, slim_sources: Path, tmp_path: Path) -> None:
    known = {"DIR": str(slim_sources / name / "files")}
    assert broken_promises(slim_sources / name / "state", tmp_path, known=known) == []


def _said(source: Path) -> tuple[str, tuple[str, ...]]:
    found = load_engine().inspect(SourceSpec(url=str(source)))
    return next(t.detail for t in found.targets if t.name == "peft"), found.warnings


@pytest.mark.parametrize("name", ["plain", "embedding", "saved-head"])
def test_an_adapter_s_own_file_is_no_run(name: str, slim_sources: Path, tmp_path: Path) -> None:
    folder = slim_sources / name
    for base in ({}, {"base": str(folder / "base")}):
        options = {"merge_adapter": True, "model_files": str(folder / "files"), **base}
        error = _refused(folder / "adapter", tmp_path / "out", "safetensors", **options)
        assert error.code == "request.unsatisfiable"
        assert "as PEFT saved it" in error.message
        assert "merge_and_unload" in error.fix


def test_what_is_not_in_the_checkpoint_is_said(slim_sources: Path, sources: Path, tmp_path: Path) -> None:
    """Inspection, a merge without a base and plain weights name what was not saved."""
    detail, warnings = _said(slim_sources / "tied" / "state")
    assert "--base DIR" in detail
    assert any("base model's weights are not in the checkpoint" in w for w in warnings)
    detail, warnings = _said(sources / "tied" / "state")
    assert "--base" not in detail
    assert warnings == ()
    for name in ("tied", "dora", "saved-embedding-tied-zero3"):
        folder = slim_sources / name
        options = {"merge_adapter": True, "model_files": str(folder / "files")}
        error = _refused(folder / "state", tmp_path / "out", "safetensors", **options)
        assert error.code == "request.unsatisfiable"
        assert "not in the checkpoint" in error.message
        assert "--base DIR" in error.fix
    result = convert(slim_sources / "tied" / "state", tmp_path / "plain", "safetensors")
    assert any("not in the checkpoint" in w for w in result.warnings)
    assert convert(sources / "tied" / "state", tmp_path / "whole", "torch").warnings == ()


def _in_the_cache(base: Path, hub: Path, *, commits: tuple[str, ...] = ("0123abc",), main: str | None) -> Path:
    """A model's directory as huggingface_hub keeps it: links to blobs."""
    model = hub / "models--org--name"
    (model / "blobs").mkdir(parents=True)
    for commit in commits:
        (model / "snapshots" / commit).mkdir(parents=True)
        for file in base.iterdir():
            blob = model / "blobs" / f"{commit}{file.name}"
            shutil.copy(file, blob)
            (model / "snapshots" / commit / file.name).symlink_to(blob)
    (model / "refs").mkdir()
    if main is not None:
        (model / "refs" / "main").write_text(main)
    return model


def test_a_base_model_in_the_hub_s_cache(slim_sources: Path, tmp_path: Path) -> None:
    folder = slim_sources / "tied"
    options = {"merge_adapter": True, "model_files": str(folder / "files")}
    wanted = tmp_path / "wanted"
    convert(folder / "state", wanted, "safetensors", base=str(folder / "base"), **options)
    one = _in_the_cache(folder / "base", tmp_path / "one", main=None)
    several = _in_the_cache(folder / "base", tmp_path / "two", commits=("aa", "bb"), main="bb\n")
    for number, base in enumerate((one, several, several / "snapshots" / "aa")):
        convert(folder / "state", tmp_path / str(number), "safetensors", base=str(base), **options)
        found = (tmp_path / str(number) / "model.safetensors").read_bytes()
        assert found == (wanted / "model.safetensors").read_bytes()
    for main in (None, "../../snapshots/aa", "cc"):
        place = _in_the_cache(folder / "base", tmp_path / f"bad{main!r:.4}", commits=("aa", "bb"), main=main)
        error = _refused(folder / "state", tmp_path / "out", "safetensors", base=str(place), **options)
        assert error.code == "checkpoint.ambiguous"
        assert "snapshots/aa" in error.fix
    error = _refused(folder / "state", tmp_path / "out", "safetensors", base=str(tmp_path / "one"), **options)
    assert error.code == "source.unknown_kind"
    assert "models--org--name" in error.fix


def test_a_base_model_as_torch_saves_it_and_sharded(slim_sources: Path, tmp_path: Path) -> None:
    """Tied names are stored twice in such files, as one storage; shards have an index."""
    folder = slim_sources / "saved-embedding-tied"
    options = {"merge_adapter": True, "model_files": str(folder / "files")}
    model = model_of(WITHOUT_BASE["saved-embedding-tied"])
    (tmp_path / "bin").mkdir()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    model.save_pretrained(tmp_path / "shards", max_shard_size="6KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for name in ("bin", "shards"):
        out = tmp_path / f"out-{name}"
        convert(folder / "state", out, "safetensors", base=str(tmp_path / name), verify="full", **options)
        _as_peft_merges(WITHOUT_BASE["saved-embedding-tied"], folder, out)


def test_a_base_model_that_does_not_fit(slim_sources: Path, sources: Path, tmp_path: Path) -> None:
    """Numbers and a name, before anything is written."""
    kept = str(slim_sources / "plain" / "base")
    for run, base, code, words in (
        (
            "gpt2",
            kept,
            "request.unsatisfiable",
            ("does not fit this run", "6 weights", "c_attn.weight, which is not there"),
        ),
        ("embedding", str(slim_sources / "resized-saved-tied" / "base"), "request.unsatisfiable", ("(66, 16)", "61")),
        (
            "bias",
            kept,
            "request.unsatisfiable",
            ("does not fit this run", "4 weights", "q_proj.bias, which is not there"),
        ),
        ("resized-saved-tied", str(slim_sources / "tied" / "base"), "request.unsatisfiable", ("(66, 16)", "(61, 16)")),
        ("plain", str(tmp_path / "nowhere"), "source.not_found", ("nowhere",)),
        ("plain", str(slim_sources / "plain" / "files"), "source.unknown_kind", ("holds no weights",)),
    ):
        options = {"merge_adapter": True, "model_files": str(slim_sources / run / "files"), "base": base}
        error = _refused(slim_sources / run / "state", tmp_path / "out", "safetensors", **options)
        assert error.code == code, error
        assert all(w in error.message for w in words), error.message
    options = {"model_files": str(sources / "plain" / "files"), "base": kept}
    error = _refused(sources / "plain" / "state", tmp_path / "out", "safetensors", merge_adapter=True, **options)
    assert (error.code, "has its own" in error.message) == ("request.invalid", True)
    error = _refused(sources / "plain" / "state", tmp_path / "out", "safetensors", **options)
    assert (error.code, "--merge-adapter" in error.message) == ("request.invalid", True)


def test_an_adapter_that_changed_its_base_model_is_not_merged_into_another(worlds: Worlds, tmp_path: Path) -> None:
    """PiSSA and its like take the first factors out of the base weights: those of the hub still have them."""
    kinds = {n: Kind(_Q | {"init_lora_weights": n}, exclude_frozen=True) for n in ("pissa", "olora")}
    runs = _trained(worlds, tmp_path / "runs", kinds)
    for name in kinds:
        options = {"merge_adapter": True, "model_files": str(runs / name / "files"), "base": str(runs / name / "base")}
        error = _refused(runs / name / "state", tmp_path / "out", "safetensors", **options)
        assert error.code == "request.unsatisfiable"
        assert f"init_lora_weights: {name}" in error.message


def test_a_base_model_in_an_object_store(slim_sources: Path, tmp_path: Path) -> None:
    """Run, base and target in one store: what is not merged is copied within it, the rest read by ranges."""
    folder = slim_sources / "saved-embedding-tied"
    store = MemoryStore()
    store.load(folder / "state", "b/run")
    store.load(folder / "files", "b/files")
    store.load(folder / "base", "b/models--org--name/snapshots/abc")
    store.put("b/models--org--name/refs/main", b"abc", metadata={}, if_absent=False)
    spec = SourceSpec(url="mem://b/run")
    places = {"model_files": "mem://b/files", "base": "mem://b/models--org--name"}
    request = asked(
        source=spec, target="mem://b/out", to=TargetFormat.SAFETENSORS, merge_adapter=True, part_bytes=1024, **places
    )
    with serving("mem", store):
        load_engine().convert(request)
        assert load_engine().verify("mem://b/out").ok
        with pytest.raises(ReshardError) as caught:
            load_engine().convert(request.model_copy(update={"target": "mem://b/models--org--name/snapshots/abc/out"}))
    assert caught.value.code == "request.overlap"
    (tmp_path / "out").mkdir()
    for name, data in store.snapshot("b/out").items():
        (tmp_path / "out" / name.removeprefix("b/out/")).write_bytes(data)
    _as_peft_merges(WITHOUT_BASE["saved-embedding-tied"], folder, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "reshard.json").read_text())
    assert {t["fqn"] for t in written["tensors"]} == set(load_file(tmp_path / "out" / "model.safetensors"))
    assert "base/model.safetensors" in {s["path"] for s in written["sources"]}


def test_another_base_model_is_another_conversion(slim_sources: Path, tmp_path: Path) -> None:
    """Its files are pinned: a target of other weights is not taken for done."""
    folder = slim_sources / "tied"
    options = {"merge_adapter": True, "model_files": str(folder / "files"), "base": str(tmp_path / "base")}
    shutil.copytree(folder / "base", tmp_path / "base")
    convert(folder / "state", tmp_path / "out", "safetensors", **options)
    assert convert(folder / "state", tmp_path / "out", "safetensors", **options).already_done
    held = load_file(tmp_path / "base" / "model.safetensors")
    held["model.norm.weight"] += 1
    save_file(held, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ReshardError) as caught:
        convert(folder / "state", tmp_path / "out", "safetensors", **options)
    assert caught.value.code == "request.target_exists"


def test_frozen_parameters_of_a_model_without_adapters(worlds: Worlds, tmp_path: Path) -> None:
    """Weights from a checkpoint that was saved without some say so; with them there is nothing to say."""
    for exclude in (False, True):
        source = tmp_path / f"run-{exclude}"
        worlds.run("oracle.adapter_kinds:train_partly_frozen", world=1, folder=str(source), exclude=exclude)
        result = convert(source, tmp_path / f"out-{exclude}", "safetensors")
        assert any("exclude_frozen_parameters" in w for w in result.warnings) == exclude
        assert ("first.weight" in load_file(tmp_path / f"out-{exclude}" / "model.safetensors")) != exclude
        inspected = load_engine().inspect(SourceSpec(url=str(source)))
        assert any("exclude_frozen_parameters" in w for w in inspected.warnings) == exclude
        asked = convert(source, tmp_path / f"asked-{exclude}", "safetensors", exclude_frozen=True)
        assert asked.warnings == (), "nobody misses what was asked to be left out"
