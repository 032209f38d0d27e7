"""`torch_dist` as Megatron-core lays it out, written by torch's own planner on a mesh that exists on paper only.

The keys, the nesting of common data and the objects are those of files that megatron-core 0.16.1 and 0.19.2 wrote.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.tensor.placement_types import Replicate, Shard

from laws.dcp_files import Save, Sharded, save

HIDDEN, LAYERS, VOCABULARY, PADDED = 8, 3, 10, 16
DESCRIPTION = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
GROUP = {
    "is_expert_parallel": False, "default_config": True, "lr_mult": 1.0, "is_decoupled_lr": False, "max_lr": 1e-3,
    "min_lr": 1e-5, "lr": 5e-4, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-8, "step": 7,
}  # fmt: skip


def small_model(*, experts: int = 0) -> dict[str, torch.Tensor]:
    """Masters under the keys of the files: equal layers are one tensor with an axis in front."""
    made = torch.Generator().manual_seed(11)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made).to(torch.bfloat16).float() + 1e-5

    within = (LAYERS, experts) if experts else (LAYERS,)
    fc = "experts.experts." if experts else ""
    return {
        "embedding.word_embeddings.weight": tensor(PADDED, HIDDEN),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": tensor(LAYERS, HIDDEN),
        "decoder.layers.self_attention.linear_proj.weight": tensor(LAYERS, HIDDEN, HIDDEN),
        "decoder.layers.self_attention.linear_qkv.weight": tensor(LAYERS, 3 * HIDDEN, HIDDEN),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": tensor(LAYERS, HIDDEN),
        f"decoder.layers.mlp.{fc}linear_fc1.weight": tensor(*within, 2 * HIDDEN, HIDDEN),
        f"decoder.layers.mlp.{fc}linear_fc2.weight": tensor(*within, HIDDEN, HIDDEN),
        "decoder.final_layernorm.weight": tensor(HIDDEN),
        "output_layer.weight": tensor(PADDED, HIDDEN),
    }


def entries(masters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights in bf16, masters and moments of a run with `fully_reshardable` optimizer states."""
    found = {key: value.to(torch.bfloat16) for key, value in masters.items()}
    for key, value in masters.items():
        found |= {f"optimizer.state.{name}.{key}": value * by for name, by in (("param", 1), ("exp_avg", 0.5))}
        found[f"optimizer.state.exp_avg_sq.{key}"] = value.square()
    return found


def common_state(**args: Any) -> dict[str, Any]:
    """The common state of such a run."""
    said = {
        "num_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "padded_vocab_size": PADDED,
        "tensor_model_parallel_size": 2,
    }
    groups = [{**GROUP, "wd_mult": 1.0, "weight_decay": 0.1}, {**GROUP, "wd_mult": 0.0, "weight_decay": 0.0}]
    return {
        "args": Namespace(**{**said, "optimizer": "adam", **args}),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"},
        "opt_param_scheduler": {"num_steps": 56},
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    }


def save_torch_dist(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    common: Mapping[str, Any] | None,
    *,
    ranks: int = 2,
    objects: Mapping[str, Any] | None = None,
) -> Path:
    """Save them on so many ranks, the last axis but one cut where it divides; with `common.pt` unless it is None."""
    mesh = (ranks,)
    state: dict[str, Any] = {}
    for key, value in tensors.items():
        dim = max(value.ndim - 2, 0)
        cut = value.ndim > 0 and value.shape[dim] % ranks == 0
        state[key] = Sharded(value, (Shard(dim) if cut else Replicate(),))
    state |= {f"rng_state/shard_0.{r}_1.{ranks}": [[{"random_rng_state": (3, r)}]] for r in range(ranks)}
    state |= objects or {}
    if common is None:
        state["common_state/shard_0_1"] = [common_state()]
    save(state, directory, Save(mesh=mesh, flatten=False))
    (directory / "metadata.json").write_text(json.dumps(DESCRIPTION))
    if common is not None:
        torch.save(dict(common), directory / "common.pt")
    return directory


def as_bridge_saves(place: Path) -> Path:
    """Turn a `torch_dist` checkpoint into one of Megatron-Bridge, as its source says; returns its run's directory.

    The common state has no arguments. Beside the files of Megatron-core are the configuration, field by field, and the
    state of the run; above them is a copy of that. The configuration of a real run is shaped so: Megatron-Bridge
    0.1.0rc3, Llama.
    """
    common = torch.load(place / "common.pt", weights_only=False)
    args = vars(common.pop("args"))
    torch.save(common, place / "common.pt")
    names = (
        "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "vocab_size",
        "pipeline_model_parallel_size",
        "tensor_model_parallel_size", "virtual_pipeline_model_parallel_size", "expert_model_parallel_size",
        "expert_tensor_parallel_size", "context_parallel_size", "moe_grouped_gemm", "transformer_impl", "normalization",
    )  # fmt: skip
    gated = args["swiglu"]
    model = {
        "_target_": "megatron.bridge.models.llama.llama_provider.Llama31ModelProvider",
        "activation_func": {"_call_": False, "_target_": f"torch.nn.functional.{'silu' if gated else 'gelu'}"},
        "gated_linear_unit": gated, "num_moe_experts": args["num_experts"], "pipeline_model_parallel_layout": None,
        "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"],
        "num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None,
        **{name: args.get(name) for name in names},
    }  # fmt: skip
    config = {
        "ddp": {
            "_target_": "megatron.bridge.training.config.DistributedDataParallelConfig", "grad_reduce_in_fp32": True,
            "overlap_grad_reduce": args["overlap_grad_reduce"], "bucket_size": args["ddp_bucket_size"],
            "num_distributed_optimizer_instances": 1, "pad_buckets_for_high_nccl_busbw": False,
        },
        "model": model,
        "optimizer": {"optimizer": "adam", "lr": 1e-3, "min_lr": 1e-5, "decoupled_weight_decay": True},
        "peft": None,
    }  # fmt: skip
    (place / "run_config.yaml").write_text(yaml.safe_dump(config))
    state = {"step": torch.tensor(common["iteration"], dtype=torch.int32)}
    state |= {"consumed_train_samples": torch.tensor(args["consumed_train_samples"], dtype=torch.int32)}
    state |= {"do_train": torch.tensor(True), "floating_point_operations_so_far": torch.tensor(1.0)}
    torch.save(state, place / "train_state.pt")
    torch.save(state, place.parent / "latest_train_state.pt")
    (place.parent / "latest_checkpointed_iteration.txt").unlink(missing_ok=True)
    return place.parent
