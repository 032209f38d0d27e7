"""LoRA under ZeRO: adapters that PEFT loads, with the logits of the run; what cannot be one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import BartForConditionalGeneration

import reshard
from house.tiers import rest_full
from oracle.adapters import LORA, bart, bart_config, logits_of
from oracle.conversions import agree
from oracle.driver import Oracle
from oracle.fixtures import TrainedFactory
from oracle.launcher import Worlds
from oracle.outputs import cast, convert, raw, read_safetensors, tensor_of
from oracle.truth import Truth
from reshard.engine import load_engine
from reshard.errors import ReshardError
from reshard.options import SourceSpec

Run = Callable[..., Path]
pytestmark = [
    # What PEFT 0.21 asks transformers 5.23, and what it says of a head that is tied and saved whole.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
]


@pytest.fixture(scope="module")
def run(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(stage, kind, offload=, more=)``: the folder of a finished run."""
    done: dict[str, Path] = {}

    def train(stage: int, kind: str = "plain", *, offload: bool = False, more: tuple[str, ...] = ()) -> Path:
        key = f"{kind}-z{stage}-{offload}-{len(more)}"
        if key not in done:
            folder = done[key] = tmp_path_factory.mktemp(key)
            options = {"stage": stage, "kind": kind, "offload": offload, "more": list(more)}
            worlds.run("oracle.adapters:train", world=2, folder=str(folder), **options)
        return done[key]

    return train


def _truth(folder: Path) -> Truth:
    return Truth(folder / "truth.safetensors", folder / "none")


def _opened(adapter: Path) -> Any:
    return PeftModel.from_pretrained(bart(), adapter)


def _agrees(folder: Path, adapter: Path) -> None:
    """PEFT has the run's masters bit for bit under its own names, and computes the run's logits."""
    model = _opened(adapter)
    held = model.state_dict()
    masters = _truth(folder).kind("fp32")
    assert masters
    assert {name: raw(held[name]) for name in masters} == masters
    wanted = tensor_of(_truth(folder).tensors["logits"])
    assert torch.allclose(logits_of(model), wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(logits_of(bart()), wanted, rtol=0, atol=1e-3), "training changed something"


@pytest.mark.parametrize(
    ("stage", "kind"), rest_full(product((2, 3), LORA), *((2 + n % 2, kind) for n, kind in enumerate(LORA)))
)
def test_peft_loads_the_adapter(stage: int, kind: str, run: Run, tmp_path: Path) -> None:
    folder = run(stage, kind)
    convert(folder / "state", tmp_path / "adapter", "peft", model_files=str(folder / "config"))
    _agrees(folder, tmp_path / "adapter")
    written = (tmp_path / "adapter" / "adapter_config.json").read_bytes()
    assert written == (folder / "config" / "adapter_config.json").read_bytes()


@pytest.mark.parametrize("stage", [2, 3])
def test_the_guide_s_run_with_everything_on_the_cpu(stage: int, run: Run, tmp_path: Path) -> None:
    folder = run(stage, "plain", offload=True)
    convert(folder / "state", tmp_path / "adapter", "peft", model_files=str(folder / "config"))
    _agrees(folder, tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["plain", "dora", "ranks"])
def test_a_scale_is_all_that_a_configuration_adds(kind: str, run: Run, tmp_path: Path) -> None:
    folder = run(2, kind)
    convert(folder / "state", tmp_path / "adapter", "peft", lora_alpha=LORA[kind]["lora_alpha"])
    _agrees(folder, tmp_path / "adapter")


def test_a_configuration_beside_the_tag_is_found(run: Run, tmp_path: Path) -> None:
    folder = run(3)
    place = folder / "state" / "adapter_config.json"
    place.write_bytes((folder / "config" / "adapter_config.json").read_bytes())
    try:
        for number, source in enumerate((folder / "state", folder / "state" / "pytorch_model")):
            convert(source, tmp_path / str(number), "peft")
            _agrees(folder, tmp_path / str(number))
    finally:
        place.unlink()


def test_inspection_says_that_there_are_adapters(run: Run, trained: TrainedFactory) -> None:
    def named(source: Path) -> dict[str, str]:
        return {t.name: t.detail for t in load_engine().inspect(SourceSpec(url=str(source))).targets}

    assert named(run(3, more=("other",)) / "state")["peft"].startswith("default, other; merged: ")
    assert "peft" not in named(trained("z2_bf16").dir)


def test_sixteen_bits_and_a_card(run: Run, tmp_path: Path) -> None:
    folder = run(2)
    options = {"dtype": "bf16", "card": True, "base_model": "org/bart"}
    convert(folder / "state", tmp_path / "adapter", "peft", model_files=str(folder / "config"), **options)
    card = ModelCard.load(tmp_path / "adapter" / "README.md")
    assert card.data.to_dict() == {"library_name": "peft", "base_model": "org/bart", "tags": ["reshard"]}
    assert _opened(tmp_path / "adapter") is not None
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert all(".default" not in name for name in found)


def test_one_of_several_adapters(run: Run, tmp_path: Path) -> None:
    folder = run(3, more=("other",))
    config = str(folder / "config")
    with pytest.raises(ReshardError) as caught:
        convert(folder / "state", tmp_path / "a", "peft", model_files=config)
    assert caught.value.code == "request.unsatisfiable"
    assert "default, other" in caught.value.message
    with pytest.raises(ReshardError) as caught:
        convert(folder / "state", tmp_path / "a", "peft", model_files=config, adapter="third")
    assert "default, other" in caught.value.fix
    convert(folder / "state", tmp_path / "a", "peft", model_files=config, adapter="default")
    _agrees(folder, tmp_path / "a")
    convert(folder / "state", tmp_path / "b", "peft", lora_alpha=2, adapter="other")
    assert json.loads((tmp_path / "b" / "adapter_config.json").read_text())["r"] == 2
    _opened(tmp_path / "b")


@pytest.mark.parametrize("kind", LORA)
@pytest.mark.parametrize("stage", [2, 3])
def test_merged_weights_are_the_model_that_was_trained(stage: int, kind: str, run: Run, tmp_path: Path) -> None:
    """`from_pretrained` opens the target by itself; its logits are the run's, its weights PEFT's own merge."""
    folder = run(stage, kind)
    files = tmp_path / "files"
    bart_config().save_pretrained(files)
    (files / "adapter_config.json").write_bytes((folder / "config" / "adapter_config.json").read_bytes())
    for part_bytes in (1 << 10, 64 << 20):
        out = tmp_path / str(part_bytes)
        options = {"merge_adapter": True, "model_files": str(files), "part_bytes": part_bytes, "verify": "full"}
        convert(folder / "state", out, "safetensors", **options)
        model, report = BartForConditionalGeneration.from_pretrained(out, output_loading_info=True)
        assert {key: list(names) for key, names in report.items() if names} == {}
        wanted = tensor_of(_truth(folder).tensors["logits"])
        assert torch.allclose(logits_of(model), wanted, rtol=0, atol=1e-5)
    one, other = (read_safetensors(tmp_path / str(n)).tensors for n in (1 << 10, 64 << 20))
    assert one == other
    convert(folder / "state", tmp_path / "adapter", "peft", model_files=str(folder / "config"))
    theirs = _opened(tmp_path / "adapter").merge_and_unload().state_dict()
    assert all(torch.allclose(tensor_of(v), theirs[k], rtol=1e-5, atol=1e-6) for k, v in one.items())
    assert set(one) <= set(theirs)


def test_a_merge_says_what_it_needs(run: Run, trained: TrainedFactory, tmp_path: Path) -> None:
    folder, out = run(2), tmp_path / "out"
    for source, to, options, code, word in (
        (trained("z2_bf16").dir, "safetensors", {"lora_alpha": 1}, "request.unsatisfiable", "no LoRA adapter"),
        (folder / "state", "safetensors", {}, "request.unsatisfiable", "the scale of the adapter is unknown"),
        (folder / "state", "universal", {"lora_alpha": 1}, "request.invalid", "consolidated weights"),
    ):
        with pytest.raises(ReshardError) as caught:
            convert(source, out, to, merge_adapter=True, **options)
        assert caught.value.code == code
        assert word in caught.value.message
        assert not out.exists()
    convert(folder / "state", tmp_path / "a", "torch", merge_adapter=True, lora_alpha=32, dtype="bf16")
    with pytest.raises(ReshardError) as caught:
        convert(folder / "state", tmp_path / "a", "torch", merge_adapter=True, lora_alpha=16, dtype="bf16")
    assert caught.value.code == "request.target_exists", "another scale is another conversion"


@pytest.mark.parametrize(("stage", "offload"), rest_full(product((2, 3), (False, True)), (2, True), (3, False)))
def test_load_state_goes_on_with_three_ranks(
    stage: int, offload: bool, run: Run, worlds: Worlds, tmp_path: Path
) -> None:
    options = {"stage": stage, "offload": offload}
    (tmp_path / "through").mkdir()
    (tmp_path / "resumed").mkdir()
    through = worlds.run("oracle.adapters:train", world=2, folder=str(tmp_path / "through"), steps=4, **options)[0]
    state = run(stage, offload=offload) / "state"
    fitting = reshard.ensure(state, dp=3, out=tmp_path / "three")
    resumed = worlds.run(
        "oracle.adapters:train", world=3, folder=str(tmp_path / "resumed"), resume=str(fitting), **options
    )[0]
    assert agree(resumed, through[2:], significant=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_weights_with_tied_embeddings_where_deepspeed_fails(
    dtype: torch.dtype, run: Run, oracle: Oracle, tmp_path: Path
) -> None:
    folder = run(3, offload=True)
    error = oracle.peer_safetensors(folder / "state", tmp_path / "peer")
    assert error is not None
    assert "share memory" in error
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    convert(folder / "state", tmp_path / "out", "safetensors", dtype=name)
    found = read_safetensors(tmp_path / "out")
    masters = _truth(folder).kind("fp32")
    assert {k: found.tensors[k] for k in masters} == {k: cast(v, dtype) for k, v in masters.items()}
    frozen = {f"base_model.model.{k}": v for k, v in bart().state_dict().items()}
    named = found.tensors | {alias: found.tensors[owner] for alias, owner in found.aliases.items()}
    untouched = {k: v for k, v in frozen.items() if k in named}
    assert "base_model.model.lm_head.weight" in untouched
    assert {k: named[k] for k in untouched} == {k: raw(v.to(dtype)) for k, v in untouched.items()}
    assert len(found.aliases) == 3, found.aliases


def test_nothing_that_was_trained_is_left_behind(run: Run, tmp_path: Path) -> None:
    """Biases were trained; a configuration that does not say so would lose them."""
    folder = run(2, "saved")
    with pytest.raises(ReshardError) as caught:
        convert(folder / "state", tmp_path / "a", "peft", lora_alpha=8)
    assert caught.value.code == "request.unsatisfiable"
    assert "bias" in caught.value.message


def test_what_is_no_lora_run_is_refused(trained: TrainedFactory, run: Run, tmp_path: Path) -> None:
    source = trained("z2_bf16").dir
    with pytest.raises(ReshardError) as caught:
        convert(source, tmp_path / "a", "peft", lora_alpha=1)
    assert caught.value.code == "request.unsatisfiable"
    assert "embed.weight" in caught.value.message
    with pytest.raises(ReshardError) as caught:
        convert(run(2) / "state", tmp_path / "a", "peft")
    assert caught.value.code == "request.unsatisfiable"
    assert "--lora-alpha" in caught.value.fix
    with pytest.raises(ReshardError) as caught:
        convert(source, tmp_path / "a", "safetensors", lora_alpha=1)
    assert caught.value.code == "request.invalid"
    assert not (tmp_path / "a").exists()


class _Attention(torch.nn.Module):
    """Two adapted layers, `layers.0.q_proj` and `layers.0.v_proj`."""

    def __init__(self) -> None:
        super().__init__()
        inner = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in ("q_proj", "v_proj")})
        self.layers = torch.nn.ModuleList([inner])


@pytest.mark.parametrize(("modules", "loaded"), [(["layers.0.q_proj", "v_proj"], 2), (["q_proj", "_proj"], 1)])
def test_a_configuration_names_what_peft_loads(modules: list[str], loaded: int, tmp_path: Path) -> None:
    """PEFT leaves the factors of a module that `target_modules` do not name out, and says nothing."""
    adapted = get_peft_model(_Attention(), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
    factors = {n: p.data.fill_(1.0) for n, p in adapted.named_parameters() if "lora_B" in n}
    assert len(factors) == 2
    adapted.save_pretrained(tmp_path / "own")
    config = json.loads((tmp_path / "own" / "adapter_config.json").read_bytes()) | {"target_modules": modules}
    (tmp_path / "own" / "adapter_config.json").write_text(json.dumps(config))
    torch.save({"model": adapted.state_dict()}, tmp_path / "run.pt")
    again = PeftModel.from_pretrained(_Attention(), tmp_path / "own")
    assert sum(bool(p.sum()) for n, p in again.named_parameters() if "lora_B" in n) == loaded
    options: dict[str, Any] = {"to": "peft", "model_files": str(tmp_path / "own"), "progress": False}
    if loaded < len(factors):
        with pytest.raises(ReshardError) as caught:
            reshard.convert(tmp_path / "run.pt", tmp_path / "out", **options)
        assert (caught.value.code, "layers.0.v_proj" in caught.value.message) == ("request.unsatisfiable", True)
        return
    reshard.convert(tmp_path / "run.pt", tmp_path / "out", **options)
    again = PeftModel.from_pretrained(_Attention(), tmp_path / "out")
    assert all(torch.equal(p, factors[n]) for n, p in again.named_parameters() if "lora_B" in n)
