"""LoRA runs as PEFT, Accelerate and DeepSpeed really save them; runs inside the ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import save_file
from transformers import BartConfig, BartForConditionalGeneration, PretrainedConfig, PreTrainedModel

from oracle.gather import gather_states
from oracle.hf_models import VOCAB, tokens
from oracle.train import start_world

SEEDS = (5, 6)
"""Of the tokens whose logits are the truth."""
LORA: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 32},
    "dora": {"r": 4, "lora_alpha": 6, "use_dora": True},
    "saved": {"r": 4, "lora_alpha": 8, "modules_to_save": ["lm_head"], "bias": "lora_only"},
    "ranks": {"r": 4, "lora_alpha": 8, "rank_pattern": {"decoder.layers.0.self_attn.q_proj": 2}},
}
"""Kinds of adapters: options of `LoraConfig`."""


def bart_config() -> PretrainedConfig:
    """BART's shape, small: tied embeddings in encoder, decoder and head."""
    return BartConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=24,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )


def bart() -> PreTrainedModel:
    """The model before training, the same in every process."""
    torch.manual_seed(4321)
    return BartForConditionalGeneration(bart_config())


def logits_of(model: Any) -> torch.Tensor:
    """What a model computes for fixed tokens."""
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens(3, SEEDS[0]), decoder_input_ids=tokens(3, SEEDS[1])).logits
    return logits


def _config(stage: int, *, offload: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu"}}
        zero |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def train(
    folder: str, stage: int, kind: str = "plain", offload: bool = False, more: list[str] | None = None,
    resume: str | None = None, steps: int = 2, compiled: bool = False,
) -> list[float]:  # fmt: skip
    """Some steps under Accelerate, then `save_state` into `folder/state`; rank 0 leaves logits, masters and moments.

    Args:
        folder: Where `state` and `truth.safetensors` go.
        stage: ZeRO stage.
        kind: Of `LORA`.
        offload: Whether optimizer and parameters are on the CPU.
        more: Names of further adapters, which are there and not trained.
        resume: A directory to `load_state` from first.
        steps: How many.
        compiled: Whether the model is compiled before DeepSpeed gets it.

    Returns:
        The losses of these steps, the mean over all ranks.
    """
    rank, world = start_world()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    config = _config(stage, offload=offload) | {"train_micro_batch_size_per_gpu": 6 // world}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    base = bart()
    model = get_peft_model(base, LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, lora_dropout=0.0, **LORA[kind]))
    for name in more or []:
        model.add_adapter(name, LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, lora_dropout=0.0, r=2, lora_alpha=2))
    trained = [p for p in model.parameters() if p.requires_grad]
    torch.compiler.set_stance("force_eager" if compiled else "default")
    running: Any = torch.compile(model) if compiled else model
    engine, optimizer = accelerator.prepare(running, torch.optim.AdamW(trained, lr=1e-2))
    first = 0
    if resume is not None:
        accelerator.load_state(resume)
        first = steps
    losses: list[float] = []
    each = 6 // world
    for step in range(first, first + steps):
        part = slice(rank * each, (rank + 1) * each)
        ids, labels = tokens(6, 10 + step)[part], tokens(6, 20 + step)[part]
        loss = engine(input_ids=ids, labels=labels).loss
        accelerator.backward(loss)
        optimizer.step()
        shared = loss.detach().clone()
        dist.all_reduce(shared)
        losses.append(shared.item() / world)
    accelerator.save_state(str(Path(folder, "state")))
    masters = gather_states(engine).tensors
    logits = logits_of(engine)
    if rank == 0:
        truth = {key: value.contiguous() for key, value in masters.items()} | {"logits": logits.contiguous()}
        save_file(truth, str(Path(folder, "truth.safetensors")))
        model.peft_config["default"].save_pretrained(str(Path(folder, "config")))
    dist.barrier()
    return losses
