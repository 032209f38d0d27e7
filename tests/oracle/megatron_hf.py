"""Real megatron-core models of the architectures that have names of Hugging Face; runs inside the ranks.

Each model has random weights in fp32, no norm of ones and no bias of zeros, and is saved as `torch_dist` with the
arguments that Megatron-LM would have. Its logits are the truth.
"""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from oracle import megatron_cpu
from oracle.dcp_models import start_world

TOKENS, LAYERS, HIDDEN, HEADS, LENGTH = 90, 3, 64, 4, 12
ROPE, SCALE = 5000, 4.0
"""Base of the rotary embedding, and the scale of Llama 3's. No number here is the default of transformers."""
_LAYER_NORM: Mapping[str, Any] = {
    "normalization": "LayerNorm", "add_bias_linear": True, "ffn_hidden_size": 256, "layernorm_epsilon": 3e-5,
}  # fmt: skip
_SWIGLU: Mapping[str, Any] = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "num_query_groups": 2,
    "ffn_hidden_size": 80, "layernorm_epsilon": 3e-5,
}  # fmt: skip
_MOE: Mapping[str, Any] = {
    **_SWIGLU, "num_moe_experts": 4, "moe_router_topk": 3, "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather",
}  # fmt: skip
_MLA: Mapping[str, Any] = {
    **_MOE, "num_query_groups": None, "multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 20,
    "kv_lora_rank": 24, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12, "rotary_base": ROPE,
    "moe_layer_freq": [0, 1, 1], "moe_shared_expert_intermediate_size": 48, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5, "layernorm_epsilon": 1e-6,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _LAYER_NORM,
    "starcoder2": {**_LAYER_NORM, "num_query_groups": 2},
    "llama": _SWIGLU,
    "llama3": _SWIGLU,
    "mistral": {**_SWIGLU, "kv_channels": 24},
    "qwen2": {**_SWIGLU, "add_qkv_bias": True},
    "qwen3": {**_SWIGLU, "qk_layernorm": True, "kv_channels": 24},
    "mixtral": _MOE,
    "qwen2-moe": {
        **_MOE, "add_qkv_bias": True, "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": True,
    },
    "qwen3-moe": {**_MOE, "qk_layernorm": True},
    "deepseek-v3": {**_MLA, "rope_type": "rope", "mscale_all_dim": 0.0},
    "deepseek-yarn": {
        **_MLA, "rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8,
        "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.9,
    },
}  # fmt: skip
"""Fields of `TransformerConfig` by family; StarCoder 2 is that of the page on rules.

`llama3` and `deepseek-yarn` have scaled rotary embeddings; heads of Mistral and Qwen 3 are no part of the hidden size.
"""
TIED = ("gpt2", "qwen2", "starcoder2")
"""The models whose head is the embedding."""


def tokens() -> torch.Tensor:
    """The samples."""
    return torch.randint(0, TOKENS, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def _config(family: str, tp: int) -> Any:
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    said = dict(MODELS[family])
    kind = MLATransformerConfig if said.get("multi_latent_attention") else TransformerConfig
    return kind(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, use_cpu_initialization=True,
        tensor_model_parallel_size=tp, activation_func=F.silu if "gated_linear_unit" in said else F.gelu,
        hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False, bias_activation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False, persist_layer_norm=False,
        **said,
    )  # fmt: skip


def _args(family: str, config: Any, tp: int, padded: int) -> Namespace:
    """The arguments of Megatron-LM's `argparse`; fields of the configuration are called the same, but for these."""
    gpt, experts, gated = family == "gpt2", config.num_moe_experts, config.gated_linear_unit
    renamed = {"rotary_base", "gated_linear_unit", "num_moe_experts", "layernorm_epsilon", "add_bias_linear"}
    names = set(MODELS[family]) - renamed
    return Namespace(
        **{
            "add_qkv_bias": False, "qk_layernorm": False, "multi_latent_attention": False, "num_query_groups": 1,
            "kv_channels": config.kv_channels, "moe_layer_freq": 1, "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": False, "moe_router_enable_expert_bias": False, "moe_router_num_groups": None,
            "moe_router_group_topk": None, "moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False,
            **{name: getattr(config, name) for name in names},
        },
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, group_query_attention=not gpt,
        swiglu=gated, num_experts=experts,
        add_bias_linear=config.add_bias_linear, norm_epsilon=config.layernorm_epsilon, rotary_base=ROPE,
        rotary_percent=1.0, rotary_interleaved=False, position_embedding_type="learned_absolute" if gpt else "rope",
        use_rope_scaling=family == "llama3", rope_scaling_factor=SCALE,
        max_position_embeddings=LENGTH, seq_length=LENGTH, openai_gelu=False,
        bias_gelu_fusion=False, squared_relu=False, quick_geglu=False, apply_layernorm_1p=False, window_size=None,
        untie_embeddings_and_output_weights=family not in TIED, padded_vocab_size=padded, vocab_size=TOKENS,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=1, expert_model_parallel_size=1,
        expert_tensor_parallel_size=tp, context_parallel_size=1, data_parallel_size=1, iteration=1,
        transformer_impl="local", mtp_num_layers=None,
    )  # fmt: skip


class Attention(torch.nn.Module):
    """The product of queries, keys and values of MLA, which without Transformer Engine nothing computes.

    All else of the attention is Megatron-core's.
    """

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, **_: Any) -> Any:
        """`[length, batch, heads, size]` each; returns `[length, batch, heads * size]`."""
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.scale
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", weights, value).flatten(2)


def _shake(model: Any, rank: int) -> None:
    """Random values everywhere: equal ones on all ranks where a parameter is whole."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "." in name and tensor.is_floating_point() and "rotary" not in name and "local_tokens" not in name:
                cut = bool(getattr(tensor, "tensor_model_parallel", False))
                seed = zlib.crc32(f"{name}{rank if cut else ''}".encode())
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)).mul_(0.1))


def _model(family: str, tp: int) -> tuple[Any, Any, int]:
    """A model on this rank, its configuration, and the rows of its vocabulary."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tp, expert_tensor_parallel_size=tp)
    torch.manual_seed(3)
    model_parallel_cuda_manual_seed(3)
    config, padded = _config(family, tp), -(-TOKENS // (8 * tp)) * 8 * tp
    if config.multi_latent_attention:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        mla: Any = import_module("megatron.core.transformer.multi_latent_attention")
        for name in ("TEColumnParallelLinear", "TELinear"):
            setattr(mla, name, type(name, (), {}))  # a class of no module: Megatron asks whether a module is of it
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = Attention
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm,
            normalization=config.normalization,
        )  # fmt: skip
    model: Any = GPTModel(
        config, spec, padded, LENGTH, share_embeddings_and_output_weights=family in TIED,
        position_embedding_type="learned_absolute" if family == "gpt2" else "rope", rotary_base=ROPE,
        rope_scaling=family == "llama3", rope_scaling_factor=SCALE,
    ).eval()  # fmt: skip
    return model, config, padded


def _logits(model: Any) -> torch.Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    batch = tokens()
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    with torch.no_grad():
        found: Any = model(batch, torch.arange(LENGTH).unsqueeze(0).expand(len(batch), -1), mask)
    return gather_from_tensor_model_parallel_region(found)[..., :TOKENS].float().contiguous()


def save(family: str, tp: int, out: str) -> None:
    """Save a model in OUT/ckpt, and its logits in OUT/logits.safetensors."""
    rank, _ = start_world()
    megatron_cpu.prepare()
    from megatron.core import dist_checkpointing, parallel_state

    model, config, padded = _model(family, tp)
    _shake(model, rank)
    logits = _logits(model)
    folder = Path(out, "ckpt", "iter_0000001")
    if rank == 0:
        folder.mkdir(parents=True)
        save_file({"logits": logits}, Path(out, "logits.safetensors"))
        (folder.parent / "latest_checkpointed_iteration.txt").write_text("1")
    dist.barrier()
    ranks = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {
        "args": _args(family, config, tp, padded), "checkpoint_version": 3.0, "iteration": 1,
        "model": model.sharded_state_dict(metadata=ranks),
    }  # fmt: skip
    dist_checkpointing.save(state, str(folder), content_metadata={"singleton_local_shards": False})


def load(family: str, tp: int, checkpoint: str, out: str) -> None:
    """Load a checkpoint that has weights alone, and save the logits in OUT."""
    rank, _ = start_world()
    megatron_cpu.prepare()
    from megatron.core import dist_checkpointing, parallel_state

    model, _, _ = _model(family, tp)
    ranks = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=ranks)}, checkpoint)
    model.load_state_dict(state["model"], strict=True)
    logits = _logits(model)
    if rank == 0:
        save_file({"logits": logits}, out)
