"""Every `next:` line of `reshard convert` is run as printed, with its placeholders filled: local and in a bucket.

Those of `--framework` are in `test_next_lines_of_frameworks.py`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import accelerate
import fsspec
import peft
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import transformers

from house.printed_lines import PLACES, converted
from house.promises import command
from house.tiers import rest_full
from oracle.cases import CASES
from oracle.fixtures import TrainedFactory
from oracle.hf_models import config_of
from oracle.launcher import Worlds
from oracle.models import build_model

SOURCES = "z2_bf16", "z3_fp32"


@pytest.mark.parametrize("target", PLACES, indirect=True)
@pytest.mark.parametrize("to", ["zero", "universal"])
@pytest.mark.parametrize("source", rest_full(SOURCES, SOURCES[0]))
def test_deepspeed_resumes_by_the_lines(
    source: str, to: str, target: str, trained: TrainedFactory, worlds: Worlds, tmp_path: Path
) -> None:
    run = trained(source)
    words = ["--to", to, *(["--dp", "3"] if to == "zero" else [])]
    printed = converted(run.dir, f"{target}/global_step5", tmp_path, *words)
    wanted = worlds.run("oracle.next_lines:run_source", world=2, case=source, folder=str(run.dir))[0]
    loaded = worlds.run("oracle.next_lines:run_lines", world=3, case=source, lines=printed.lines)[0]
    assert wanted["found"]
    assert loaded["found"]
    assert loaded["state"] == wanted["state"]


@pytest.mark.parametrize("target", PLACES, indirect=True)
@pytest.mark.parametrize("words", ["safetensors", "torch", "safetensors --max-shard-size 20KB"])
@pytest.mark.parametrize("source", rest_full(SOURCES, SOURCES[0]))
def test_a_script_loads_weights_by_the_line(
    source: str, words: str, target: str, trained: TrainedFactory, tmp_path: Path
) -> None:
    run = trained(source)
    printed = converted(run.dir, target, tmp_path, "--to", *words.split())
    model, untouched = build_model(CASES[source], 1), build_model(CASES[source], 1)
    printed.run(model=model, torch=torch, safetensors=safetensors, accelerate=accelerate)
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, dict(untouched.named_parameters())[n])]
    assert len(changed) == len(list(model.parameters()))


@pytest.mark.parametrize("target", PLACES, indirect=True)
@pytest.mark.parametrize("source", rest_full(SOURCES, SOURCES[0]))
def test_torch_loads_a_state_dict_by_the_line(
    source: str, target: str, trained: TrainedFactory, tmp_path: Path
) -> None:
    run = trained(source)
    printed = converted(run.dir, target, tmp_path, "--to", "dcp")
    model = build_model(CASES[source], 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    printed.run(dcp=dcp, state_dict={"model": model.state_dict()})
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("target", PLACES, indirect=True)
def test_transformers_loads_weights_by_the_command_and_the_line(target: str, tmp_path: Path) -> None:
    """A Trainer's checkpoint has configuration and tokenizer beside the state: the first line takes them along."""
    source, model = tmp_path / "checkpoint-5", transformers.AutoModelForCausalLM.from_config(config_of("llama"))
    model.config.save_pretrained(source)
    torch.save(
        {"model": model.state_dict(), "optimizer": torch.optim.AdamW(model.parameters()).state_dict()},
        source / "state.pt",
    )
    code, _, err = command("convert", str(source), target, "--to", "safetensors")
    assert code == 0, err
    (line,) = re.findall(r"^next: for from_pretrained, with configuration and tokenizer: (.+)$", err, re.MULTILINE)
    words = shlex.split(line)
    assert words[:2] == ["reshard", "convert"]
    code, _, err = command(*words[1:])
    assert code == 0, err
    call: list[str] = re.findall(r"^next: in the script: (.+)$", err, re.MULTILINE)
    if target.startswith("s3://"):
        fsspec.filesystem("s3").get(f"{target}/", f"{tmp_path}/node/", recursive=True)
    loaded = eval(call[0].replace("DIR", str(tmp_path / "node")), vars(transformers))
    assert all(torch.equal(p, loaded.state_dict()[n]) for n, p in model.state_dict().items())


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers for a former name
@pytest.mark.parametrize("target", PLACES, indirect=True)
def test_peft_loads_an_adapter_by_the_line(target: str, tmp_path: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_config(config_of("llama"))
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    (tmp_path / "run").mkdir()
    torch.save({"model": adapted.state_dict()}, tmp_path / "run" / "state.pt")
    printed = converted(tmp_path / "run", target, tmp_path, "--to", "peft", "--lora-alpha", "4")
    base_model = transformers.AutoModelForCausalLM.from_config(config_of("llama"))
    loaded = printed.run(PeftModel=peft.PeftModel, base_model=base_model)
    wanted = {n: t for n, t in adapted.state_dict().items() if "lora_" in n}
    assert wanted
    assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in wanted.items())
