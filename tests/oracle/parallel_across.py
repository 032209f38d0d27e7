"""The models of `megatron_train` with the names, cuts, groups and files of Megatron-DeepSpeed, on DeepSpeed itself.

Megatron-DeepSpeed is not at hand: this has its modules' names and order, its rule of grouping, its schedule, what it
saves and what it insists on when it loads, stated in words of its own (Megatron-DeepSpeed, July 2025:
`megatron/model/gpt_model.py`, `megatron/model/transformer.py`, `megatron/optimizer/__init__.py`,
`megatron/optimizer_param_scheduler.py`, `megatron/checkpointing.py`). The arithmetic is that of Megatron-core's local
layers, so that both have the same losses.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from oracle.parallel_cases import ACROSS_SAMPLES, AcrossCase, Layout, across_config
from oracle.parallel_cuts import ROWS, WHOLE, Cut
from oracle.parallel_gather import LocalState, local_state
from oracle.parallel_gpt import tensor_ranks
from oracle.parallel_layers import ColumnParallel, Place, Ranks, RowParallel, VocabParallel, enter, join
from oracle.parallel_megatron import Topology, megatron_groups
from oracle.parallel_train import Run

HIDDEN, SEQUENCE, HEADS, LAYERS, PAD_TO = 32, 16, 4, 4, 8
SIZE = HIDDEN // HEADS
GROUPS = {"gpt": 4, "llama": 2}
INNER = {"gpt": 128, "llama": 48}


class Norm(nn.Module):
    """LayerNorm with a bias, or RMSNorm."""

    def __init__(self, case: AcrossCase, place: Place) -> None:
        super().__init__()
        self.weight = place.parameter("weight", (HIDDEN,), WHOLE, mean=1.0, std=0.1)
        self.bias = place.parameter("bias", (HIDDEN,), WHOLE, std=0.1) if case.model == "gpt" else None

    def forward(self, value: Tensor) -> Tensor:
        """Normalised values."""
        if self.bias is None:
            return F.rms_norm(value, (HIDDEN,), self.weight, 1e-5)
        return F.layer_norm(value, (HIDDEN,), self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Causal attention whose queries, keys and values are one matrix."""

    def __init__(self, case: AcrossCase, place: Place) -> None:
        super().__init__()
        gpt, groups = case.model == "gpt", GROUPS[case.model]
        blocks = (HEADS * SIZE, groups * SIZE, groups * SIZE)
        self.split, self.rotary = case.split, not gpt
        self.heads, self.groups = HEADS // place.ranks.size, groups // place.ranks.size
        cut = Cut(dim=0, blocks=blocks) if case.split else ROWS
        self.query_key_value = ColumnParallel(place.inside("query_key_value"), HIDDEN, sum(blocks), bias=gpt, cut=cut)
        self.dense = RowParallel(place.inside("dense"), HIDDEN, HIDDEN, bias=gpt)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        batch, length, _ = hidden.shape
        fused, each = self.query_key_value(hidden), self.heads // self.groups
        if self.split:
            rows = [self.heads * SIZE, self.groups * SIZE, self.groups * SIZE]
            q, k, v = (part.unflatten(-1, (-1, SIZE)) for part in fused.split(rows, -1))
        else:
            parts = fused.unflatten(-1, (self.groups, each + 2, SIZE)).split([each, 1, 1], 3)
            q, k, v = (part.flatten(2, 3) for part in parts)
        if self.rotary:
            q, k = _rotated(q), _rotated(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(SIZE)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.float().masked_fill(future, -10000.0).softmax(-1).to(v.dtype)
        out: Tensor = self.dense((weights @ v).transpose(1, 2).reshape(batch, length, -1))
        return out


def _rotated(value: Tensor) -> Tensor:
    """Rotary positions over the whole head, its halves turned against each other."""
    rates = 1.0 / (10000 ** (torch.arange(0, SIZE, 2, dtype=torch.float32) / SIZE))
    angles = torch.outer(torch.arange(value.shape[1], dtype=torch.float32), rates)
    angles = torch.cat([angles, angles], -1)[None, :, None]
    first, second = value.chunk(2, -1)
    return value * angles.cos().to(value.dtype) + torch.cat([-second, first], -1) * angles.sin().to(value.dtype)


class Mlp(nn.Module):
    """GELU between two matrices, or a gated unit whose gate and other half are one matrix."""

    def __init__(self, case: AcrossCase, place: Place) -> None:
        super().__init__()
        self.gpt, inner = case.model == "gpt", INNER[case.model]
        rows, cut = (inner, ROWS) if self.gpt else (2 * inner, Cut(dim=0, blocks=(inner, inner)))
        self.dense_h_to_4h = ColumnParallel(place.inside("dense_h_to_4h"), HIDDEN, rows, bias=self.gpt, cut=cut)
        self.dense_4h_to_h = RowParallel(place.inside("dense_4h_to_h"), inner, HIDDEN, bias=self.gpt)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        inner = self.dense_h_to_4h(hidden)
        if self.gpt:
            inner = F.gelu(inner)
        else:
            gate, other = inner.chunk(2, -1)
            inner = F.silu(gate) * other
        out: Tensor = self.dense_4h_to_h(inner)
        return out


class ParallelTransformerLayerPipe(nn.Module):
    """One layer; `type:transformer` finds it by this name."""

    def __init__(self, case: AcrossCase, place: Place) -> None:
        super().__init__()
        self.input_layernorm = Norm(case, place.inside("input_layernorm"))
        self.self_attention = Attention(case, place.inside("self_attention"))
        self.post_attention_layernorm = Norm(case, place.inside("post_attention_layernorm"))
        self.mlp = Mlp(case, place.inside("mlp"))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Words(VocabParallel):
    """Embeddings of tokens, or logits of hidden states for every row, padding included."""

    def forward(self, tokens: Tensor, hidden: Tensor | None = None) -> Tensor:
        """A call either way, so that ZeRO-3 gathers the weight."""
        if hidden is None:
            found: Tensor = super().forward(tokens)
            return found
        return join(F.linear(enter(hidden, self.ranks), self.weight), self.ranks)


class Positions(nn.Module):
    """Learned positions."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.weight = place.parameter("weight", (SEQUENCE, HIDDEN), WHOLE, std=0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        return hidden + self.weight


def _words(case: AcrossCase, place: Place) -> Words:
    return Words(place, Cut(dim=0, vocab=case.vocab, pad_to=PAD_TO), HIDDEN)


class Embedding(nn.Module):
    """Words, and positions of a GPT."""

    def __init__(self, case: AcrossCase, place: Place) -> None:
        super().__init__()
        self.word_embeddings = _words(case, place.inside("word_embeddings"))
        gpt = case.model == "gpt"
        self.position_embeddings = Positions(place.inside("position_embeddings")) if gpt else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states."""
        hidden: Tensor = self.word_embeddings(tokens)
        return hidden if self.position_embeddings is None else self.position_embeddings(hidden)


class Head(nn.Module):
    """The output layer of a model that does not tie it."""

    def __init__(self, case: AcrossCase, place: Place) -> None:
        super().__init__()
        self.lm_head = _words(case, place.inside("lm_head"))

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.lm_head(hidden, hidden)
        return out


class Encoder(nn.Module):
    """The layers, and the norm behind them."""

    def __init__(self, case: AcrossCase, place: Place) -> None:
        super().__init__()
        layers = [ParallelTransformerLayerPipe(case, place.inside(f"layers.{i}")) for i in range(LAYERS)]
        self.layers = nn.ModuleList(layers)
        self.final_layernorm = Norm(case, place.inside("final_layernorm"))

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states, same shape."""
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.final_layernorm(hidden)
        return out


class LanguageModel(nn.Module):
    """Embedding, encoder, and the output layer of a model that does not tie it."""

    def __init__(self, case: AcrossCase, place: Place) -> None:
        super().__init__()
        self.embedding = Embedding(case, place.inside("embedding"))
        self.encoder = Encoder(case, place.inside("encoder"))
        self.output_layer = _words(case, place.inside("output_layer")) if case.model == "llama" else None


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Plain(nn.Module):
    """The model without pipeline, with Megatron's way of saving and of loading."""

    def __init__(self, case: AcrossCase, place: Place) -> None:
        super().__init__()
        self.language_model = LanguageModel(case, place.inside("language_model"))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean loss."""
        model = self.language_model
        hidden = model.encoder(model.embedding(tokens))
        head = model.embedding.word_embeddings if model.output_layer is None else model.output_layer
        return _loss(head(tokens, hidden), labels)

    def _parts(self) -> dict[str, nn.Module | None]:
        model = self.language_model
        return {
            "word_embeddings": model.embedding.word_embeddings,
            "position_embeddings": model.embedding.position_embeddings,
            "encoder": model.encoder,
            "output_layer": model.output_layer,
        }

    def state_dict(self, *_: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Nested, as Megatron makes DeepSpeed save it."""
        keep = bool(options.get("keep_vars", False))
        found = {k: m.state_dict(keep_vars=keep) for k, m in self._parts().items() if m is not None}
        words = {k: found.pop(k) for k in ("word_embeddings", "position_embeddings") if k in found}
        return {"language_model": {"embedding": words, **found}}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> None:  # type: ignore[override]
        """Strict, level by level: a key that is missing or at another level is an error."""
        found = state_dict["language_model"]
        held = {**found["embedding"], **{k: v for k, v in found.items() if k != "embedding"}}
        parts = {k: m for k, m in self._parts().items() if m is not None}
        assert held.keys() == parts.keys(), sorted(held)
        assert found.keys() == {"embedding", *(parts.keys() & {"encoder", "output_layer"})}, sorted(found)
        for key, module in parts.items():
            module.load_state_dict(OrderedDict(held[key]), strict=strict)


def _pipeline(case: AcrossCase, layout: Layout, seed: int) -> PipelineModule:
    """This rank's stage: layer 0 casts, 1 embeds; a collective call."""
    topology = PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp)
    ranks = tensor_ranks(topology, layout.tp)

    def at(prefix: str) -> Place:
        return Place(ranks, seed, prefix)

    gpt, embed = case.model == "gpt", at("tied_modules.embed")
    tied = partial(TiedLayerSpec, "embed", Embedding, case, embed, tied_weight_attr=["word_embeddings.weight"])
    specs: list[Any] = [lambda tokens: tokens, tied() if gpt else LayerSpec(Embedding, case, at("1"))]
    specs += [LayerSpec(ParallelTransformerLayerPipe, case, at(str(n + 2))) for n in range(LAYERS)]
    specs.append(LayerSpec(Norm, case, at(str(LAYERS + 2))))
    specs.append(tied(forward_fn=_tied_head) if gpt else LayerSpec(Head, case, at(str(LAYERS + 3))))
    return PipelineModule(specs, topology=topology, loss_fn=_loss, partition_method="type:transformer")


def _tied_head(embed: Embedding, hidden: Tensor) -> Tensor:
    logits: Tensor = embed.word_embeddings(hidden, hidden)
    return logits


class Schedule:
    """Megatron-DeepSpeed's schedule by steps: which entries it saves, and which it insists on and compares."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.num_steps = optimizer, 0
        self.said = {
            "max_lr": 2e-3, "lr_warmup_steps": 2 * ACROSS_SAMPLES, "lr_warmup_tokens": None,
            "lr_decay_style": "cosine", "lr_decay_steps": 20 * ACROSS_SAMPLES, "lr_decay_tokens": None,
            "min_lr": 1e-4, "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant",
            "wd_incr_steps": 20 * ACROSS_SAMPLES,
        }  # fmt: skip
        self.step(0)

    def step(self, increment: int) -> None:
        """So many samples more."""
        self.num_steps += increment
        warmup, end = 2 * ACROSS_SAMPLES, 20 * ACROSS_SAMPLES
        if self.num_steps <= warmup:
            rate = 2e-3 * float(self.num_steps) / warmup
        else:
            part = 0.5 * (math.cos(math.pi * (self.num_steps - warmup) / (end - warmup)) + 1.0)
            rate = 1e-4 + part * (2e-3 - 1e-4)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = 0.1 * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Its entries."""
        return {**self.said, "num_steps": self.num_steps, "num_tokens": self.num_steps * SEQUENCE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the count of samples; all else must be this run's."""
        assert {k: state[k] for k in self.said} == self.said
        self.num_steps = 0
        self.step(state["num_steps"])


def _batch(case: AcrossCase, step: int, replica: int, dp: int) -> list[Tensor]:
    """This rank's samples of a step: those of `megatron_train`, one a micro-batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    return list(
        torch.randint(0, case.vocab, (ACROSS_SAMPLES, SEQUENCE), generator=generator).chunk(dp)[replica].split(1)
    )


def _args(case: AcrossCase, layout: Layout) -> Namespace:
    gpt = case.model == "gpt"
    return Namespace(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=GROUPS[case.model],
        ffn_hidden_size=INNER[case.model], kv_channels=SIZE, max_position_embeddings=SEQUENCE, seq_length=SEQUENCE,
        add_position_embedding=gpt, use_rotary_position_embeddings=not gpt, rope_theta=10000, rotary_percent=1.0,
        normalization="layernorm" if gpt else "rmsnorm", layernorm_epsilon=1e-5, swiglu=not gpt, add_bias_linear=gpt,
        untie_embeddings_and_output_weights=not gpt, make_vocab_size_divisible_by=PAD_TO,
        padded_vocab_size=Cut(dim=0, vocab=case.vocab, pad_to=PAD_TO).padded_rows(layout.tp), optimizer="adam",
        lr=2e-3, min_lr=1e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.98, adam_eps=1e-8,
        bf16=case.dtype == "bf16", fp16=case.dtype == "fp16", tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp, data_parallel_size=layout.dp, world_size=layout.world,
        no_pipeline_parallel=not case.pipeline, consumed_train_samples=case.steps * ACROSS_SAMPLES,
        consumed_valid_samples=0, transformer_impl="local", loss_scale_window=50, hysteresis=2, min_loss_scale=1.0,
    )  # fmt: skip


COMPARED = (
    "num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "add_position_embedding",
    "consumed_train_samples",
)  # fmt: skip
"""Arguments that loading compares or takes (`check_checkpoint_args`); those below it leaves out for universal ones."""
OF_LAYOUT = (
    "make_vocab_size_divisible_by", "padded_vocab_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
)  # fmt: skip


def _info(case: AcrossCase, layout: Layout) -> dict[str, Any]:
    """As Megatron-DeepSpeed writes it: slices of queries, keys and values are plain ones, whatever their order."""
    layer = r"\d+" if case.pipeline else r"language_model.encoder.layers.\d+"
    words = (
        r"tied_modules.embed.word_embeddings.weight" if case.model == "gpt" else r"\d+.(word_embeddings|lm_head).weight"
    )
    norm = r"\d+.(weight|bias)" if case.pipeline else "language_model.encoder.final_layernorm.(weight|bias)"
    embed = "tied_modules.embed" if case.pipeline else "language_model.embedding"
    if not case.pipeline:
        words = r"language_model.(embedding.word_embeddings|output_layer).weight"
    info: dict[str, Any] = {
        "universal_checkpoint_version": 0.4,
        "original_vocab_size": case.vocab,
        "padded_vocab_size": _args(case, layout).padded_vocab_size,
        "vocabulary_parameter_patterns": [words],
        "parameter_with_2_sub_params_cat_dim_0": [rf"{layer}.mlp.dense_h_to_4h.weight"]
        if case.model == "llama"
        else [],
    }
    if layout.tp > 1:
        info["tp_replicated_parameter_patterns"] = [
            rf"{layer}.(input|post_attention)_layernorm.(weight|bias)",
            norm,
            rf"{embed}.position_embeddings.weight",
            rf"{layer}.self_attention.dense.bias",
            rf"{layer}.mlp.dense_4h_to_h.bias",
        ]
        info["parameter_with_row_parallelism_patterns"] = [
            rf"{layer}.mlp.dense_4h_to_h.weight",
            rf"{layer}.self_attention.dense.weight",
        ]
    return info


def start(case: AcrossCase, layout: Layout, *, seed: int, load_universal: bool) -> Run:
    """An engine that saves Megatron's client state, and compares it as Megatron does."""
    if case.dtype == "fp16":
        accelerator: Any = get_accelerator()
        accelerator.is_fp16_supported = lambda: True
        accelerator.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    config = across_config(case, layout.dp)
    config |= {"checkpoint": {"load_universal": True}} if load_universal else {}
    more: dict[str, Any] = {}
    if case.pipeline:
        model: nn.Module = _pipeline(case, layout, seed)
    else:
        more["mpu"] = topology = Topology(layout.tp)
        ranks = Ranks(topology.get_model_parallel_rank(), layout.tp, topology.get_model_parallel_group())
        init: Any = deepspeed.zero.Init
        groups_of_data = topology.get_data_parallel_group()
        with init(
            data_parallel_group=groups_of_data, config_dict_or_path=config, enabled=case.stage == 3, mpu=topology
        ):
            model = Plain(case, Place(ranks, seed, "model"))
    groups = megatron_groups(model, 0.1, whole_shapes=False)
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), eps=1e-8, foreach=False)
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(model=model, optimizer=optimizer, lr_scheduler=Schedule, config=config, **more)
    rank, pipe = dist.get_rank(), engine.grid if case.pipeline else None
    place = (rank % layout.tp, 0) if pipe is None else (pipe.get_slice_parallel_rank(), pipe.get_stage_id())
    replica = rank // layout.tp if pipe is None else pipe.get_data_parallel_rank()
    mine, compared = _args(case, layout), (*COMPARED, *(() if load_universal else OF_LAYOUT))

    def differing(client: dict[str, Any]) -> list[str]:
        theirs = vars(client["args"])
        wrong = [name for name in compared if theirs[name] != vars(mine)[name]]
        wrong += [] if client["checkpoint_version"] == 3.0 else ["checkpoint_version"]
        if case.dtype == "fp16":
            # Megatron-core's run has other values than this one's configuration.
            scaler = engine.optimizer.loss_scaler
            said = (scaler.cur_scale, scaler.scale_window, scaler.cur_hysteresis, scaler.min_scale)
            wrong += [] if said == (1024.0, 1000, 2, 1.0) else [f"loss scale {said}"]
        return wrong + ([] if client["iteration"] == case.steps else ["iteration"])

    def train(steps: int) -> list[float]:
        return [_step(engine, case, replica, layout.dp) for _ in range(steps)]

    def state() -> LocalState:
        return local_state(engine, cast("tuple[int, int]", place), replica)

    client = {
        "args": mine,
        "checkpoint_version": 3.0,
        "iteration": case.steps,
        "tokens": case.steps * ACROSS_SAMPLES * SEQUENCE,
        "universal_checkpoint_info": _info(case, layout),
    }
    return Run(engine, state, train, client, differing=differing)


def _step(engine: Any, case: AcrossCase, replica: int, dp: int) -> float:
    """Train on the samples of the next step; the mean loss of all of them."""
    samples = _batch(case, engine.global_steps + 1, replica, dp)
    pairs = [(tokens, tokens.roll(-1, 1)) for tokens in samples]
    if case.pipeline:
        rows: Iterator[tuple[Tensor, Tensor]] = iter(pairs)
        return float(engine.train_batch(data_iter=rows))
    losses = []
    engine.train()
    for tokens, labels in pairs:
        loss = engine(tokens, labels)
        engine.backward(loss)
        engine.step(lr_kwargs={"increment": ACROSS_SAMPLES})
        losses.append(loss.detach().to(torch.float64))
    held = torch.stack([torch.stack(losses).sum(), torch.tensor(float(len(losses)), dtype=torch.float64)])
    dist.all_reduce(held)
    return float(held[0] / held[1])
