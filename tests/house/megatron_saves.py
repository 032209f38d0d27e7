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
