"""A small GPT on DeepSpeed's ``PipelineModule``, cut over tensor, pipeline and data parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from oracle.parallel_cases import (
    DEPTH,
    HEAD_WIDTH,
    HEADS,
    INNER,
    MICRO_BATCHES,
    ROWS_PER_STEP,
    SEQUENCE,
    VOCAB,
    WIDTH,
    GptCase,
    Layout,
    gpt_config,
    gpt_rules,
)
from oracle.parallel_cuts import ROWS, WHOLE, Cut
from oracle.parallel_gather import LocalState, local_state
from oracle.parallel_layers import ColumnParallel, Norm, Place, Ranks, RowParallel, VocabParallel
from oracle.parallel_train import Run, initialized


def vocab_cut(case: GptCase) -> Cut:
    """How the embedding is padded and cut."""
    return Cut(dim=0, vocab=VOCAB, pad_to=case.pad_to)


class Positions(nn.Module):
    """Learned positions and a norm after them.

    The norm gives the first of four stages vectors: DeepSpeed drops empty parameter groups, and ZeRO-1 hangs in its
    first step when stages have different numbers of groups (0.19.8, seen).
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.positions = place.parameter("positions", (SEQUENCE, WIDTH), WHOLE, std=0.3)
        self.norm = Norm(place.inside("norm"), WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        out: Tensor = self.norm(hidden + self.positions)
        return out


class Embed(nn.Module):
    """The tied module: tokens, and positions if the case has them here."""

    def __init__(self, case: GptCase, place: Place) -> None:
        super().__init__()
        self.tokens = VocabParallel(place.inside("tokens"), vocab_cut(case), WIDTH)
        self.places = Positions(place.inside("places")) if case.positions == "tied" else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings."""
        hidden: Tensor = self.tokens(tokens)
        return hidden if self.places is None else self.places(hidden)


class Attention(nn.Module):
    """Causal attention with grouped heads.  No bias on keys: its true gradient is zero, Adam would step by noise."""

    def __init__(self, case: GptCase, place: Place) -> None:
        super().__init__()
        self.by_blocks = case.qkv == "blocks"
        self.kv_heads = case.kv_heads // place.ranks.size
        if not self.kv_heads or case.kv_heads % place.ranks.size:
            raise ValueError(f"{place.ranks.size} ranks do not divide {case.kv_heads} key-value heads")
        self.group = HEADS // case.kv_heads
        cut = Cut(dim=0, blocks=case.qkv_blocks) if self.by_blocks else ROWS
        self.qkv = ColumnParallel(place.inside("qkv"), WIDTH, sum(case.qkv_blocks), bias=False, cut=cut)
        self.dense = RowParallel(place.inside("dense"), HEADS * HEAD_WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        batch, length, _ = hidden.shape
        fused = self.qkv(hidden)
        lead = (batch, length, self.kv_heads)
        if self.by_blocks:
            queries = self.kv_heads * self.group * HEAD_WIDTH
            keys = self.kv_heads * HEAD_WIDTH
            q, k, v = fused.split([queries, keys, keys], -1)
            q, k, v = (
                q.reshape(*lead, self.group, HEAD_WIDTH),
                k.reshape(*lead, 1, HEAD_WIDTH),
                v.reshape(*lead, 1, -1),
            )
        else:
            q, k, v = fused.reshape(*lead, self.group + 2, HEAD_WIDTH).split([self.group, 1, 1], 3)
        q, k, v = (part.permute(0, 2, 3, 1, 4) for part in (q, k, v))  # [batch, kv head, member, position, width]
        scores = (q @ k.transpose(-1, -2)).float() / HEAD_WIDTH**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype)
        mixed = (weights @ v).permute(0, 3, 1, 2, 4).reshape(batch, length, -1)
        out: Tensor = self.dense(mixed)
        return out


class Mlp(nn.Module):
    """GELU, or a gated unit whose gate and value lie in one matrix."""

    def __init__(self, case: GptCase, place: Place) -> None:
        super().__init__()
        self.glu = case.glu
        outputs, cut = (2 * INNER, Cut(dim=0, blocks=(INNER, INNER))) if case.glu else (INNER, ROWS)
        self.up = ColumnParallel(place.inside("up"), WIDTH, outputs, bias=True, cut=cut)
        self.down = RowParallel(place.inside("down"), INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        inner = self.up(hidden)
        if self.glu:
            gate, value = inner.chunk(2, -1)
            inner = F.silu(gate) * value
        else:
            inner = F.gelu(inner)
        out: Tensor = self.down(inner)
        return out


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, case: GptCase, place: Place) -> None:
        super().__init__()
        self.norm_1 = Norm(place.inside("norm_1"), WIDTH)
        self.attention = Attention(case, place.inside("attention"))
        self.norm_2 = Norm(place.inside("norm_2"), WIDTH)
        self.mlp = Mlp(case, place.inside("mlp"))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        hidden = hidden + self.attention(self.norm_1(hidden))
        out: Tensor = hidden + self.mlp(self.norm_2(hidden))
        return out


class FinalNorm(nn.Module):
    """The norm before the output layer."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.final = Norm(place.inside("final"), WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        out: Tensor = self.final(hidden)
        return out


def _head(embed: Embed, hidden: Tensor) -> Tensor:
    return embed.tokens.logits(hidden)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build_gpt(case: GptCase, layout: Layout, seed: int) -> PipelineModule:
    """This rank's stage of the model; a collective call."""
    topology = PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp)
    ranks = tensor_ranks(topology, layout.tp)

    def at(prefix: str) -> Place:
        return Place(ranks, seed, prefix)

    tied = at("tied_modules.embed")
    attributes = ["tokens.weight"]
    specs: list[LayerSpec] = [TiedLayerSpec("embed", Embed, case, tied, tied_weight_attr=attributes)]
    if case.positions == "layer":
        specs.append(LayerSpec(Positions, at(str(len(specs)))))
    for _ in range(DEPTH):
        specs.append(LayerSpec(Block, case, at(str(len(specs)))))
    specs.append(LayerSpec(FinalNorm, at(str(len(specs)))))
    specs.append(TiedLayerSpec("embed", Embed, case, tied, forward_fn=_head, tied_weight_attr=attributes))
    return PipelineModule(specs, topology=topology, loss_fn=_loss, partition_method=case.partition_method)


def tensor_ranks(topology: Any, size: int) -> Ranks:
    """The tensor-parallel group of this rank, made before the layers that need it (the grid makes its own)."""
    rank = dist.get_rank()
    if size == 1:
        return Ranks(0, 1, None)
    mine = None
    for members in topology.get_axis_comm_lists("model"):
        group = dist.new_group(members)
        if rank in members:
            mine = group
    return Ranks(topology.get_coord(rank).model, size, mine)


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim > 1], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for p in trainable if p.ndim <= 1], "lr": 5e-3, "weight_decay": 0.0},
    ]


def micro_batches(step: int, dp_rank: int, dp: int) -> list[tuple[Tensor, Tensor]]:
    """This data-parallel rank's micro-batches of ``step``; all ranks' rows together do not depend on ``dp``."""
    generator = torch.Generator().manual_seed(70_001 + step)
    rows = torch.randint(VOCAB, (ROWS_PER_STEP, SEQUENCE + 1), generator=generator)
    # A learnable rule, so that losses move: every other token repeats its neighbour.
    rows[:, 1::2] = rows[:, 0:-1:2]
    mine = rows.chunk(dp)[dp_rank]
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in mine.chunk(MICRO_BATCHES)]


def universal_info(case: GptCase, layout: Layout) -> dict[str, Any]:
    """``universal_checkpoint_info`` as Megatron-DeepSpeed saves it (megatron/model/gpt_model.py), for this model."""
    info = gpt_rules(case)
    for rule in info.get("parameter_with_sub_params", []):
        # DeepSpeed wants tuples where sub-parameters have lengths of their own (0.19.8, universal_checkpoint.py).
        rule["shape"] = tuple(tuple(dim) if isinstance(dim, list) else dim for dim in rule["shape"])
    padded = vocab_cut(case).padded_rows(layout.tp)
    return {"universal_checkpoint_version": 0.2, "padded_vocab_size": padded} | info


def start(case: GptCase, layout: Layout, *, seed: int, load_universal: bool) -> Run:
    """A pipeline engine for ``case`` on this layout with freshly drawn weights."""
    model = build_gpt(case, layout, seed)
    engine = initialized(model, param_groups(model), gpt_config(case, layout.dp), load_universal)
    grid = engine.grid
    replica, replicas = grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()

    def state() -> LocalState:
        return local_state(engine, (grid.get_slice_parallel_rank(), grid.get_stage_id()), replica)

    def train(steps: int) -> list[float]:
        """Losses of the next global batches, equal on all ranks."""
        losses = []
        for _ in range(steps):
            rows = micro_batches(engine.global_steps, replica, replicas)
            losses.append(float(engine.train_batch(data_iter=iter(rows))))
        return losses

    info = {"universal_checkpoint_info": universal_info(case, layout)} if case.info else {}
    return Run(engine, state, train, info, {"parts": [int(layer) for layer in engine.module.parts]})
