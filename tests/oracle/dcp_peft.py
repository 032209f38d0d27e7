"""Adapters of PEFT in the Trainer's FSDP runs: their kinds, and PEFT's own word on what a run has trained.

Functions run inside the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from oracle.dcp_peft_cases import OPTIONS
from oracle.hf_models import config_of

BASE_SEED = 1357
"""Of the base model: a run that resumes has to start with the same one, which the Trainer's checkpoints do not hold."""


def base_of(kind: str) -> nn.Module:
    """The frozen model, the same in every process."""
    torch.manual_seed(BASE_SEED)
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(kind))
    return model


def adapted(kind: str, adapter: str, seed: int) -> PeftModel:
    """The model with a freshly drawn adapter, no part of which is zero."""
    base: Any = base_of(kind)
    torch.manual_seed(seed)
    targets = ["c_attn", "c_fc"] if kind == "gpt2" else ["q_proj", "v_proj", "down_proj"]
    options = {"fan_in_fan_out": kind == "gpt2", "init_lora_weights": False, **OPTIONS[adapter]}
    model: Any = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, target_modules=targets, **options)
    )
    return model


def save_as_peft_does(kind: str, adapter: str, tensors: dict[str, Tensor], folder: Path) -> None:
    """Gives a model the state of a run, and has PEFT save the adapter and merge it.

    Args:
        kind: Of the model.
        adapter: Of its adapter.
        tensors: Every parameter of the run by ``fp32/<name>`` or ``frozen/<name>``.
        folder: Gets ``adapter/`` and ``base/``, the model before it, by ``save_pretrained``, and
            ``merged.safetensors``, the whole merged model.
    """
    base: Any = base_of(kind)
    base.save_pretrained(str(folder / "base"))
    model = adapted(kind, adapter, seed=0)
    state = {
        key.partition("/")[2]: value for key, value in tensors.items() if key.partition("/")[0] in ("fp32", "frozen")
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert unexpected == [], unexpected
    assert set(missing) <= {name for name, _ in model.named_parameters(remove_duplicate=False)} - state.keys()
    model.save_pretrained(str(folder / "adapter"))
    merged = model.merge_and_unload()
    own = {name: value.detach().contiguous().clone() for name, value in merged.state_dict().items()}
    save_file(own, folder / "merged.safetensors")
