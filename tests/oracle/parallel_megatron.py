"""A GPT with the names, groups and nested state dict of Megatron-DeepSpeed, without pipeline, at any ZeRO stage.

Megatron-DeepSpeed itself is not at hand: this has what it saves and what it insists on when it loads. Its rules of
grouping and nesting are stated here in their own words, from `megatron/optimizer/__init__.py` (`get_param_groups`),
`megatron/model/language_model.py` (`state_dict_for_save_checkpoint`, `load_state_dict`), `megatron/checkpointing.py`
(`save_checkpoint`, `check_checkpoint_args`) and `megatron/model/gpt_model.py` (`UniversalCheckpointInfo`), July 2025.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from oracle.parallel_cases import (
    HEAD_WIDTH,
    HEADS,
    INNER,
    MEGATRON_BLOCKS,
    MEGATRON_ROWS,
    SEQUENCE,
    VOCAB,
    WIDTH,
    Layout,
    MegatronCase,
    megatron_config,
)
from oracle.parallel_cuts import WHOLE, Cut
from oracle.parallel_gather import local_state
from oracle.parallel_layers import ColumnParallel, Norm, Place, Ranks, RowParallel, VocabParallel, enter, join
from oracle.parallel_train import Run, initialized
from oracle.train import mean_losses


class Topology:
    """The `mpu` of a run: tensor-parallel ranks follow one another."""

    def __init__(self, tp: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.tp, self.dp, self.rank = tp, world // tp, rank
        slices = [dist.new_group(list(range(first, first + tp))) for first in range(0, world, tp)]
        replicas = [dist.new_group(list(range(first, world, tp))) for first in range(tp)]
        self._slice, self._replica = slices[rank // tp], replicas[rank % tp]

    def get_data_parallel_group(self) -> Any:
        """The ranks that hold the same slices."""
        return self._replica

    def get_data_parallel_rank(self) -> int:
        """The place among them."""
        return self.rank // self.tp

    def get_data_parallel_world_size(self) -> int:
        """The number of them."""
        return self.dp

    def get_model_parallel_group(self) -> Any:
        """The ranks that hold one whole model."""
        return self._slice

    def get_model_parallel_rank(self) -> int:
        """The place among them."""
        return self.rank % self.tp

    def get_model_parallel_world_size(self) -> int:
        """The number of them."""
        return self.tp

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


class Attention(nn.Module):
    """Causal attention, one fused matrix ordered by head.  No bias on keys: its true gradient is zero."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.heads = HEADS // place.ranks.size
        self.query_key_value = ColumnParallel(place.inside("query_key_value"), WIDTH, 3 * WIDTH, bias=False)
        self.dense = RowParallel(place.inside("dense"), WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        batch, length, _ = hidden.shape
        fused = self.query_key_value(hidden).reshape(batch, length, self.heads, 3, HEAD_WIDTH)
        q, k, v = (part.transpose(1, 2) for part in fused.unbind(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.dense(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):
    """GELU between two matrices."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.dense_h_to_4h = ColumnParallel(place.inside("dense_h_to_4h"), WIDTH, INNER, bias=True)
        self.dense_4h_to_h = RowParallel(place.inside("dense_4h_to_h"), INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        out: Tensor = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(hidden)))
        return out


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.input_layernorm = Norm(place.inside("input_layernorm"), WIDTH)
        self.self_attention = Attention(place.inside("self_attention"))
        self.post_attention_layernorm = Norm(place.inside("post_attention_layernorm"), WIDTH)
        self.mlp = Mlp(place.inside("mlp"))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Positions(nn.Module):
    """Learned positions."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.weight = place.parameter("weight", (SEQUENCE, WIDTH), WHOLE, std=0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        return hidden + self.weight


class Words(VocabParallel):
    """The vocabulary; as the output layer it has a logit for every row, padding included."""

    def forward(self, tokens: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Embeddings of tokens, or logits of hidden states: a call either way, so that ZeRO-3 gathers the weight."""
        if hidden is None:
            found: Tensor = super().forward(tokens)
            return found
        return join(F.linear(enter(hidden, self.ranks), self.weight), self.ranks)


class Embedding(nn.Module):
    """Words and positions."""

    def __init__(self, case: MegatronCase, place: Place) -> None:
        super().__init__()
        cut = Cut(dim=0, vocab=VOCAB, pad_to=case.pad_to)
        self.word_embeddings = Words(place.inside("word_embeddings"), cut, WIDTH)
        self.position_embeddings = Positions(place.inside("position_embeddings"))


class Encoder(nn.Module):
    """The layers and the norm behind them."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(place.inside(f"layers.{i}")) for i in range(MEGATRON_BLOCKS))
        self.final_layernorm = Norm(place.inside("final_layernorm"), WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.final_layernorm(hidden)
        return out


class LanguageModel(nn.Module):
    """Embedding and encoder."""

    def __init__(self, case: MegatronCase, place: Place) -> None:
        super().__init__()
        self.embedding = Embedding(case, place.inside("embedding"))
        self.encoder = Encoder(place.inside("encoder"))


class MegatronGpt(nn.Module):
    """The model, with Megatron's way of saving and of loading."""

    def __init__(self, case: MegatronCase, place: Place) -> None:
        super().__init__()
        self.language_model = LanguageModel(case, place.inside("language_model"))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss; the softmax covers the padded vocabulary, so that training writes into its padding."""
        embedding = self.language_model.embedding
        hidden = embedding.position_embeddings(embedding.word_embeddings(tokens))
        logits = embedding.word_embeddings(tokens, self.language_model.encoder(hidden))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def state_dict(self, *_: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Nested, as Megatron makes DeepSpeed save it."""
        keep = bool(options.get("keep_vars", False))
        model = self.language_model
        embedding = {
            "word_embeddings": model.embedding.word_embeddings.state_dict(keep_vars=keep),
            "position_embeddings": model.embedding.position_embeddings.state_dict(keep_vars=keep),
        }
        return {"language_model": {"embedding": embedding, "encoder": model.encoder.state_dict(keep_vars=keep)}}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> None:  # type: ignore[override]
        """Strict, level by level: a key that is missing or at another level is an error."""
        assert set(state_dict) == {"language_model"}, sorted(state_dict)
        found = state_dict["language_model"]
        model = self.language_model
        model.embedding.word_embeddings.load_state_dict(found["embedding"]["word_embeddings"], strict=strict)
        model.embedding.position_embeddings.load_state_dict(found["embedding"]["position_embeddings"], strict=strict)
        model.encoder.load_state_dict(OrderedDict(found["encoder"]), strict=strict)


def megatron_groups(model: nn.Module, weight_decay: float, *, whole_shapes: bool) -> list[dict[str, Any]]:
    """Two groups; one at ZeRO-3, where every parameter is an empty vector by now, unless its whole shape counts."""
    found: dict[bool, list[Any]] = {True: [], False: []}
    for name, param in model.named_parameters():
        shape = getattr(param, "ds_shape", param.shape) if whole_shapes else param.shape
        found[not (name.endswith(".bias") or len(shape) == 1)].append(param)
    names = {True: "wd_no_scale_lr", False: "no_wd_no_scale_lr"}
    return [
        {
            "name": names[decays],
            "params": params,
            "wd_mult": float(decays),
            "lr_mult": 1.0,
            "weight_decay": weight_decay * float(decays),
        }
        for decays, params in found.items()
        if params
    ]


def _engine(case: MegatronCase, topology: Topology, *, seed: int, load_universal: bool) -> Any:
    config = megatron_config(case, topology.dp)
    init: Any = deepspeed.zero.Init
    ranks = Ranks(topology.get_model_parallel_rank(), topology.tp, topology.get_model_parallel_group())
    with init(
        data_parallel_group=topology.get_data_parallel_group(),
        config_dict_or_path=config,
        enabled=case.stage == 3,
        mpu=topology,
    ):
        model = MegatronGpt(case, Place(ranks, seed, "gpt"))
    groups = megatron_groups(model, case.weight_decay, whole_shapes=case.whole_shapes)
    return initialized(model, groups, config, load_universal, mpu=topology)


def _batch(step: int, topology: Topology) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(50_001 + step)
    rows = torch.randint(VOCAB, (MEGATRON_ROWS, SEQUENCE + 1), generator=generator)
    rows[:, 1::2] = rows[:, 0:-1:2]
    mine = rows.chunk(topology.dp)[topology.get_data_parallel_rank()]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def _args(case: MegatronCase, topology: Topology) -> Namespace:
    rows = Cut(dim=0, vocab=VOCAB, pad_to=case.pad_to).padded_rows(topology.tp)
    return Namespace(
        num_layers=MEGATRON_BLOCKS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        make_vocab_size_divisible_by=case.pad_to,
        padded_vocab_size=rows,
        weight_decay=case.weight_decay,
        tensor_model_parallel_size=topology.tp,
        pipeline_model_parallel_size=1,
        data_parallel_size=topology.dp,
        world_size=topology.tp * topology.dp,
        no_pipeline_parallel=True,
        zero_stage=case.stage,
        lr=1e-2,
    )


def _info(case: MegatronCase, topology: Topology) -> dict[str, Any]:
    """As Megatron writes it: what is whole and what is cut by columns only where it cut anything."""
    layer = r"language_model.encoder.layers.\d+"
    info: dict[str, Any] = {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": VOCAB,
        "padded_vocab_size": _args(case, topology).padded_vocab_size,
        "vocabulary_parameter_patterns": ["language_model.embedding.word_embeddings.weight"],
        "parameter_with_2_sub_params_cat_dim_0": [],
    }
    if topology.tp > 1:
        info["tp_replicated_parameter_patterns"] = [
            rf"{layer}.input_layernorm.(weight|bias)",
            rf"{layer}.post_attention_layernorm.(weight|bias)",
            "language_model.encoder.final_layernorm.(weight|bias)",
            "language_model.embedding.position_embeddings.weight",
            rf"{layer}.self_attention.dense.bias",
            rf"{layer}.mlp.dense_4h_to_h.bias",
        ]
        info["parameter_with_row_parallelism_patterns"] = [
            rf"{layer}.mlp.dense_4h_to_h.weight",
            rf"{layer}.self_attention.dense.weight",
        ]
    return info


def start(case: MegatronCase, layout: Layout, *, seed: int, load_universal: bool) -> Run:
    """An engine for ``case`` on ``layout`` that saves Megatron's client state, and compares it as Megatron does."""
    topology = Topology(layout.tp)
    engine = _engine(case, topology, seed=seed, load_universal=load_universal)
    mine = _args(case, topology)
    compared = ["num_layers", "hidden_size", "num_attention_heads"]
    if not load_universal:
        compared += ["make_vocab_size_divisible_by", "padded_vocab_size"]
        compared += ["tensor_model_parallel_size", "pipeline_model_parallel_size"]

    def differing(client: dict[str, Any]) -> list[str]:
        theirs = vars(client["args"])
        return [name for name in compared if theirs[name] != vars(mine)[name]]

    client = {
        "args": mine,
        "checkpoint_version": 3.0,
        "iteration": case.steps,
        "tokens": case.steps * MEGATRON_ROWS * SEQUENCE,
        "universal_checkpoint_info": _info(case, topology),
    }
    place = (topology.get_model_parallel_rank(), 0)
    return Run(
        engine,
        lambda: local_state(engine, place, topology.get_data_parallel_rank()),
        lambda steps: mean_losses(engine, steps, lambda step: engine(*_batch(step, topology))),
        client,
        differing=differing,
    )
