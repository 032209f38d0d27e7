"""Models that were uploaded to the hub load from there: by transformers, the tokenizer and PEFT's own reading.

The hub is a stand-in (`servers/hub.py`); the programs that load are the real ones, each in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

import reshard
from oracle.hf_models import config_of, tokens
from servers.hub import Hub, hub_of_this_process

_LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
name, revision, out = sys.argv[1:]
model, report = AutoModelForCausalLM.from_pretrained(name, revision=revision, output_loading_info=True)
assert not any(report.values()), report
model.eval()
with torch.no_grad():
    logits = model(input_ids=torch.load(out + '.in')).logits
words = AutoTokenizer.from_pretrained(name, revision=revision)('b a')['input_ids']
steps = GenerationConfig.from_pretrained(name, revision=revision).max_new_tokens
torch.save((logits, model.state_dict(), words, steps), out)
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    with hub_of_this_process(monkeypatch) as found:
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory of a model with its tokenizer, as it was trained."""
    folder = tmp_path / "model"
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(folder)
    GenerationConfig(max_new_tokens=7).save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]  # as its documents do
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("how", ["direct", "branch", "pushed", "torch"])
def test_from_pretrained_loads_the_repository(hub: Hub, model: Path, tmp_path: Path, how: str) -> None:
    """The logits are those of the same export on a disk, bit for bit."""
    local, revision = tmp_path / "local", "exp/1" if how == "branch" else "main"
    options = {"to": "torch" if how == "torch" else "safetensors", "dtype": "bf16", "max_shard_size": 8_000}
    options |= {"model_files": model, "base_model": "org/base", "card": True, "progress": False}
    reshard.convert(model, local, **options)
    if how == "pushed":
        reshard.push(local, "hf://org/name")
    else:
        hub.repository("org/name", {"LICENSE": b"mine"})
        reshard.convert(model, "hf://org/name" + ("@exp%2F1" if how == "branch" else ""), **options)
    out = tmp_path / "loaded"
    torch.save(tokens(3, 99), f"{out}.in")
    env = {**hub.env(), "HF_HOME": str(tmp_path / "cache"), "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-c", _LOAD, "org/name", revision, str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    logits, state, words, steps = torch.load(out)
    here = AutoModelForCausalLM.from_pretrained(local)
    here.eval()
    with torch.no_grad():
        assert torch.equal(logits, here(input_ids=tokens(3, 99)).logits)
    assert {n: t.dtype for n, t in state.items()} == dict.fromkeys(here.state_dict(), torch.bfloat16)
    assert all(torch.equal(t, here.state_dict()[n]) for n, t in state.items())
    assert (words, steps) == ([1, 0], 7)
    card = ModelCard.load("org/name") if revision == "main" else None
    assert card is None or card.data.base_model == "org/base"
