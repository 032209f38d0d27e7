"""Skeleton pickles of checkpoints nobody here can train: the stream that `torch.save` writes, without tensor data.

Stand-ins for tensors reduce to what torch 2.13.0 reduces them to (`torch/_tensor.py`, `_rebuild_tensor_v2`), and
Python's own pickler writes the stream, so that memo, batches and names are the real ones.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2

Shapes = dict[str, tuple[int, ...]]


class _Storage:
    def __init__(self, kind: type, key: int, numel: int) -> None:
        self.pid = ("storage", kind, str(key), "cuda:0", numel)


class _Tensor:
    def __init__(self, kind: type, key: int, shape: tuple[int, ...]) -> None:
        self._storage = _Storage(kind, key, prod(shape))
        self._shape = shape

    def __reduce_ex__(self, protocol: Any) -> Any:
        stride: list[int] = []
        step = 1
        for length in reversed(self._shape):
            stride.append(step)
            step *= max(1, length)
        args = (self._storage, 0, self._shape, tuple(reversed(stride)), False, OrderedDict())
        return _rebuild_tensor_v2, args


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, _Storage) else None


def _stream(value: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=2).dump(value)
    return out.getvalue()


def many(count: int) -> Shapes:
    """So many parameters, as a long network has them."""
    kinds = ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight", "post_attention.bias")
    return {f"model.layers.{i // 4}.{kinds[i % 4]}": (64, 64) if i % 4 < 2 else (64,) for i in range(count)}


def dense_405b() -> Shapes:
    """Llama 3.1 405B: 126 layers."""
    hidden, kv, inner, words = 16_384, 1_024, 53_248, 128_256
    shapes: Shapes = {"model.embed_tokens.weight": (words, hidden), "lm_head.weight": (words, hidden)}
    for layer in range(126):
        head = f"model.layers.{layer}."
        shapes |= {
            head + "self_attn.q_proj.weight": (hidden, hidden),
            head + "self_attn.k_proj.weight": (kv, hidden),
            head + "self_attn.v_proj.weight": (kv, hidden),
            head + "self_attn.o_proj.weight": (hidden, hidden),
            head + "mlp.gate_proj.weight": (inner, hidden),
            head + "mlp.up_proj.weight": (inner, hidden),
            head + "mlp.down_proj.weight": (hidden, inner),
            head + "input_layernorm.weight": (hidden,),
            head + "post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,)}


def moe_1t() -> Shapes:
    """A mixture of experts with 10**12 parameters: 61 layers of 384 experts, each with three matrices."""
    hidden, inner = 7_168, 2_048
    shapes: Shapes = {"model.embed_tokens.weight": (163_840, hidden)}
    for layer in range(61):
        head = f"model.layers.{layer}."
        shapes |= {f"{head}self_attn.{n}_proj.weight": (hidden, 1_536) for n in ("q_a", "q_b", "kv_a", "kv_b", "o")}
        shapes |= {f"{head}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        for expert in range(384):
            for matrix in ("gate", "up", "down"):
                shapes[f"{head}mlp.experts.{expert}.{matrix}_proj.weight"] = (inner, hidden)
    return shapes


def model_states(shapes: Shapes, *, stage: int) -> bytes:
    """Model states: at stage 3 `module` holds an empty placeholder for each parameter."""
    kind = torch.BFloat16Storage
    module = OrderedDict(
        (name, _Tensor(kind, key, (0,) if stage == 3 else shape)) for key, (name, shape) in enumerate(shapes.items())
    )
    return _stream(
        {
            "module": module,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in shapes.items())],
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
            "lr_scheduler": {"last_batch_iteration": 3},
            "skipped_steps": 0,
            "global_steps": 3,
            "dp_world_size": 64,
            "mp_world_size": 1,
            "ds_config": {"zero_optimization": {"stage": stage, "overlap_comm": True}, "bf16": {"enabled": True}},
            "ds_version": "0.19.8",
        }
    )


def optim_states(shapes: Shapes, *, rank: int, ranks: int) -> bytes:
    """One rank's optimizer states, with the slice of every parameter that begins in its share."""
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    names = list(shapes)
    mine = names[rank * len(names) // ranks : (rank + 1) * len(names) // ranks]
    numel = sum(prod(shapes[n]) for n in mine)
    flats = [_Tensor(torch.FloatStorage, key, (numel,)) for key in range(3)]
    slices = OrderedDict((n, fragment_address(start=0, numel=prod(shapes[n]))) for n in mine)
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
    base = {"state": {0: {"step": 3, "exp_avg": flats[1], "exp_avg_sq": flats[2]}}, "param_groups": [group]}
    inner = {
        "loss_scaler": None,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [flats[0]],
        "zero_stage": ZeroStageEnum.gradients,
        "group_paddings": [0],
        "partition_count": [ranks],
        "ds_version": "0.19.8",
        "param_slice_mappings": [slices],
    }
    return _stream({"optimizer_state_dict": inner, "ds_config": {}, "ds_version": "0.19.8"})


def skeletons() -> Iterator[tuple[str, bytes]]:
    """Name and stream of every skeleton; of 64 equal ranks the first and the last."""
    shapes = many(20_000)
    yield "20,000 parameters: model states", model_states(shapes, stage=2)
    yield "20,000 parameters: model states of stage 3", model_states(shapes, stage=3)
    yield "20,000 parameters: one rank of one", optim_states(shapes, rank=0, ranks=1)
    for rank in (0, 63):
        yield f"20,000 parameters: rank {rank} of 64", optim_states(shapes, rank=rank, ranks=64)
    for label, big in (("405B dense", dense_405b()), ("1T mixture of experts", moe_1t())):
        yield f"{label}: model states", model_states(big, stage=3)
        yield f"{label}: rank 0 of 64", optim_states(big, rank=0, ranks=64)
