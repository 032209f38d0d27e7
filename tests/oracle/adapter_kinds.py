"""Every kind of PEFT configuration, trained by real DeepSpeed for a step in one process; runs inside a rank.

Each case leaves in its folder what DeepSpeed saved (`state`), what PEFT saves of the adapter (`adapter`), what PEFT's
own `merge_and_unload` and `save_pretrained` make of it (`merged`), and the model before PEFT (`base`).
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import peft
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from oracle.hf_models import VOCAB, tokens
from oracle.train import start_world

WIDTH = 16
ADDED_TOKENS = 5
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@dataclass(frozen=True)
class Kind:
    """One configuration of PEFT on one small model."""

    options: dict[str, Any]
    """Options of the method's config class."""
    model: str = "llama"
    tied: bool = False
    method: str = "LoraConfig"
    resized: bool = False
    """True if tokens were added before training, as chat templates need."""
    more: tuple[dict[str, Any], ...] = ()
    """LoRA configurations of further adapters, called `other0`, ...; they are there and not trained."""
    stage: int = 2
    exclude_frozen: bool = False
    """As Hugging Face's Trainer saves PEFT models."""


_Q = {"target_modules": ["q_proj", "v_proj"]}
_ALL = {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"]}


def config_of(kind: Kind) -> PretrainedConfig:
    """The configuration of a case's model."""
    if kind.model == "gpt2":
        return GPT2Config(
            vocab_size=VOCAB, n_positions=24, n_embd=WIDTH, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, tie_word_embeddings=kind.tied, **_IDS,
        )  # fmt: skip
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=22, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, attention_bias=kind.model == "biased",
        tie_word_embeddings=kind.tied, num_labels=3, **_IDS,
    )  # fmt: skip


def model_of(kind: Kind) -> PreTrainedModel:
    """The model before PEFT, the same in every process."""
    torch.manual_seed(99)
    auto: Any = AutoModelForSequenceClassification if kind.model == "labels" else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config_of(kind))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    if kind.resized:
        model.resize_token_embeddings(VOCAB + ADDED_TOKENS, mean_resizing=False)
    return model


def logits_of(model: Any) -> torch.Tensor:
    """The logits of a model for fixed tokens."""
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens(3, 5)).logits
    return logits


def train_kinds(folder: str, kinds: dict[str, dict[str, Any]]) -> list[str]:
    """Trains every case and saves it; the names of those done."""
    start_world()
    warnings.simplefilter("ignore")
    for name, said in kinds.items():
        _train(Path(folder, name), Kind(**said))
    return list(kinds)


def _train(folder: Path, kind: Kind) -> None:
    base = model_of(kind)
    base.save_pretrained(folder / "base")
    torch.manual_seed(7)
    config = getattr(peft, kind.method)(task_type="SEQ_CLS" if kind.model == "labels" else "CAUSAL_LM", **kind.options)
    model = get_peft_model(base, config)
    for number, options in enumerate(kind.more):
        model.add_adapter(f"other{number}", LoraConfig(task_type="CAUSAL_LM", **options))
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trained, lr=1e-2), config=_ds_config(kind)
    )
    labels = {"labels": torch.tensor([0, 1, 2])} if kind.model == "labels" else {"labels": tokens(3, 1)}
    loss = engine(input_ids=tokens(3, 1), **labels).loss
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(str(folder / "state"), exclude_frozen_parameters=kind.exclude_frozen)
    _save_truth(folder, engine.module)
    engine.destroy()


def _ds_config(kind: Kind) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": kind.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def _save_truth(folder: Path, model: PeftModel) -> None:
    for hook in ("_forward_pre_hooks", "_forward_hooks"):
        for module in model.modules():
            getattr(module, hook).clear()  # the engine's own: no copy of a model is made with them
    model.save_pretrained(str(folder / "adapter"))
    try:
        merged: Any = copy.deepcopy(model).merge_and_unload()
        merged.save_pretrained(folder / "merged")
    except (AttributeError, ValueError, RuntimeError, NotImplementedError) as error:
        (folder / "unmergeable").write_text(repr(error))


class Normed(torch.nn.Module):
    """A linear layer and a batch norm, which keeps statistics in buffers."""

    def __init__(self) -> None:
        """Fresh weights."""
        super().__init__()
        self.first = torch.nn.Linear(6, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number for each row."""
        out: torch.Tensor = self.norm(self.first(x))
        return out.sum(dim=1)


def train_with_buffers(folder: str) -> None:
    """Trains a model whose batch norm is saved whole; leaves what PEFT saves and merges."""
    start_world()
    warnings.simplefilter("ignore")
    torch.manual_seed(5)
    options: dict[str, Any] = {"target_modules": ["first"], "modules_to_save": ["norm"], "init_lora_weights": False}
    model: Any = get_peft_model(Normed(), LoraConfig(r=2, **options))
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trained, lr=1e-2), config=_ds_config(Kind({}))
    )
    engine.backward(engine(torch.randn(8, 6)).square().mean())
    engine.step()
    engine.save_checkpoint(str(Path(folder, "state")))
    model.save_pretrained(str(Path(folder, "adapter")))
    merged: Any = model.merge_and_unload()
    save_file(merged.state_dict(), str(Path(folder, "merged.safetensors")))


def train_partly_frozen(folder: str, exclude: bool) -> None:
    """Trains a model whose first layer is frozen and saves it, with that layer or without."""
    start_world()
    torch.manual_seed(5)
    model = Normed()
    model.first.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trained, lr=1e-2), config=_ds_config(Kind({}))
    )
    engine.backward(engine(torch.randn(8, 6)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, exclude_frozen_parameters=exclude)
