"""Small real transformers models, trained by real DeepSpeed inside the ranks.  Configurations only, no downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig, PretrainedConfig

from oracle.gather import gather_states
from oracle.train import start_world

VOCAB = 61
_IDS = {"bos_token_id": 1, "eos_token_id": 2}


def config_of(kind: str) -> PretrainedConfig:
    """``gpt2`` has a tied head and Conv1D matrices, ``opt`` a tied one; ``llama`` an untied one and grouped queries."""
    if kind == "gpt2":
        return GPT2Config(
            vocab_size=VOCAB,
            n_positions=24,
            n_embd=20,
            n_layer=2,
            n_head=2,
            tie_word_embeddings=True,
            **_NO_DROPOUT,
            **_IDS,
        )
    if kind == "opt":
        return OPTConfig(
            vocab_size=VOCAB,
            hidden_size=20,
            word_embed_proj_dim=20,
            ffn_dim=28,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=24,
            tie_word_embeddings=True,
            dropout=0.0,
            pad_token_id=0,
            **_IDS,
        )
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=34,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        tie_word_embeddings=False,
        **_IDS,
    )


_NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def tokens(rows: int, seed: int) -> torch.Tensor:
    """Token ids that depend on the seed alone."""
    return torch.randint(VOCAB, (rows, 12), generator=torch.Generator().manual_seed(seed))


def train_and_save(
    kind: str, stage: int, folder: str, steps: int = 2, persistence: int = 0, ungathered: bool = False
) -> list[str]:
    """Trains two steps in fp32 and saves ``folder/ckpt``; rank 0 leaves masters and logits in ``truth.safetensors``.

    Args:
        kind: As in ``config_of``.
        stage: ZeRO stage.
        folder: Where everything goes.
        steps: How many.
        persistence: Parameters of at most so many elements stay whole at stage 3.
        ungathered: Whether rank 0 also saves the module as it is, in ``folder/st`` and ``folder/bin``.

    Returns:
        The names of the trained parameters.
    """
    rank, world = start_world()
    torch.manual_seed(4321)
    model = AutoModelForCausalLM.from_config(config_of(kind))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": persistence},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2}},
        "steps_per_print": 10**9,
    }
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config)
    for step in range(steps):
        ids = tokens(2 * world, step)[rank * 2 : rank * 2 + 2]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(Path(folder, "ckpt")))
    if ungathered and rank == 0:
        engine.module.save_pretrained(Path(folder, "st"))
        Path(folder, "bin").mkdir()
        torch.save(engine.module.state_dict(), Path(folder, "bin", "pytorch_model.bin"))
    masters = gather_states(engine).tensors
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=tokens(3, 99)).logits
    kept = {key: value.contiguous() for key, value in masters.items() if key.startswith("fp32/")}
    if rank == 0:
        save_file(kept | {"logits": logits.contiguous()}, str(Path(folder, "truth.safetensors")))
    return sorted(key.removeprefix("fp32/") for key in kept)
