"""Runs of Megatron-core as it saves them with a distributed optimizer, without Megatron-core: random states.

The layout of buffers is that of `_ParamAndGradBuffer.__init__`, loop by loop; which rank holds what is written down for
even pipelines only. Real files of such runs are compared in `oracle.test_megatron_buckets`.
"""

from __future__ import annotations

import io
import math
import pickle
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

STATES = ("param", "exp_avg", "exp_avg_sq")
GROUP = {
    "is_expert_parallel": False, "lr_mult": 1.0, "is_decoupled_lr": False, "max_lr": 1e-3, "min_lr": 1e-5, "lr": 5e-4,
    "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-8, "step": 7,
}  # fmt: skip
PAIR = (torch.bfloat16, torch.float32)
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_ENGINE_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def entry_of(name: str) -> tuple[str, tuple[int, ...]]:
    """The key of a parameter's entry in `torch_dist`, and its place along the axes of layers and experts in front."""
    if not name.startswith("decoder.layers."):
        return name, ()
    layer, _, rest = name.removeprefix("decoder.layers.").partition(".")
    index: tuple[int, ...] = (int(layer),)
    if "local_experts." in rest:
        head, _, tail = rest.partition("local_experts.")
        number, _, leaf = tail.partition(".")
        rest, index = f"{head}experts.{leaf}", (int(layer), int(number))
    return f"decoder.layers.{_ENGINE_NORMS.get(rest, rest)}", index


@dataclass
class Vector:
    """One buffer of one rank: the names in it with their places, and its buckets."""

    slots: list[tuple[str, int, int, int]]
    """(name, begin and end in the padded buffer, bucket), in the order of the buffer."""
    buckets: list[tuple[int, int]]
    """Begin and padded end of each bucket."""
    unpadded: list[int]


@dataclass(frozen=True)
class MegatronRun:
    """A model, its parallelism, and how its buckets close.

    Attributes:
        experts: of each layer; none of them is a shared one.
        bucket: elements at which a bucket closes, with `overlap_grad_reduce`.
        said: arguments beside those that follow.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    expert_ranks: int = 1
    data: int = 2
    layers: int = 4
    experts: int = 0
    tied: bool = False
    hidden: int = 10
    vocabulary: int = 12
    rows: int = 12
    bucket: int | None = None
    seed: int = 3
    said: dict[str, Any] = field(default_factory=dict[str, Any])

    # The truth.

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All parameters in the order of the model; the vocabulary with its padding."""
        h = self.hidden
        found: dict[str, tuple[int, ...]] = {EMBEDDING: (self.rows, h)}
        for layer in range(self.layers):
            head = f"decoder.layers.{layer}."
            found |= {
                f"{head}input_layernorm.weight": (h,),
                f"{head}self_attention.linear_proj.weight": (h, h),
                f"{head}self_attention.linear_qkv.weight": (3 * h, h),
                f"{head}pre_mlp_layernorm.weight": (h,),
            }
            if self.experts:
                found[f"{head}mlp.router.weight"] = (self.experts, h)
            inner = [f"mlp.experts.local_experts.{e}." for e in range(self.experts)] or ["mlp."]
            for name in inner:
                found |= {f"{head}{name}linear_fc1.weight": (4 * h, h), f"{head}{name}linear_fc2.weight": (h, 2 * h)}
        found["decoder.final_layernorm.weight"] = (h,)
        return found if self.tied else {**found, OUTPUT: (self.rows, h)}

    @cached_property
    def truth(self) -> dict[str, dict[str, torch.Tensor]]:
        """Masters, moments and weights of the whole model, with the padding of the vocabulary."""
        made = torch.Generator().manual_seed(self.seed)
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, shape in self.shapes().items():
            states = {state: torch.randn(shape, generator=made) for state in STATES}
            found[name] = {**states, "weight": states["param"].to(torch.bfloat16)}
        return found

    def expected(self) -> dict[str, torch.Tensor]:
        """The truth as `NAME/KIND`, without padding."""
        found: dict[str, torch.Tensor] = {}
        for name, states in self.truth.items():
            for kind, value in states.items():
                rows = slice(0, self.vocabulary if name in (EMBEDDING, OUTPUT) else None)
                found[f"{name}/{'fp32' if kind == 'param' else kind}"] = value[rows]
        return found

    # The ranks.

    def part(self, name: str, kind: str, rank: int) -> torch.Tensor:
        """What a tensor-parallel rank holds."""
        whole = self.truth[EMBEDDING if name == OUTPUT and self.tied else name][kind]
        if self.tensor == 1 or "layernorm" in name or "router" in name:
            return whole
        if name.endswith("linear_fc1.weight"):
            gate, other = whole.chunk(2)
            return torch.cat([gate.chunk(self.tensor)[rank], other.chunk(self.tensor)[rank]])
        return whole.chunk(self.tensor, dim=1 if "linear_proj" in name or "linear_fc2" in name else 0)[rank]

    def held(self, stage: int, chunk: int, expert_rank: int) -> list[tuple[str, str]]:
        """(global name, name in the rank's file) of the parameters of a chunk, in the order of registration."""
        each = self.layers // self.pipeline // self.chunks
        first = (chunk * self.pipeline + stage) * each
        share = self.experts // self.expert_ranks
        found = [(EMBEDDING, EMBEDDING)] if (stage, chunk) == (0, 0) else []
        for name in self.shapes():
            if not name.startswith("decoder.layers."):
                continue
            layer, _, rest = name.removeprefix("decoder.layers.").partition(".")
            if int(layer) not in range(first, first + each):
                continue
            head, expert, tail = rest.partition("local_experts.")
            if expert:
                number, _, leaf = tail.partition(".")
                if int(number) // share != expert_rank:
                    continue
                rest = f"{head}local_experts.{int(number) % share}.{leaf}"
            found.append((name, f"decoder.layers.{int(layer) - first}.{rest}"))
        if (stage, chunk) == (self.pipeline - 1, self.chunks - 1):
            found += [(n, n) for n in ("decoder.final_layernorm.weight", OUTPUT) if n in self.shapes()]
            if self.tied and self.pipeline > 1:
                found.append((OUTPUT, OUTPUT))
        return found

    def vector(self, names: list[str], stage: int, chunk: int, ranks: int) -> Vector:
        """The buffer of these parameters.

        Source: megatron-core 0.16.1 `distributed/param_and_grad_buffer.py` (`_ParamAndGradBuffer.__init__`).
        """
        most = self.bucket if stage == chunk == 0 else None
        slots: list[tuple[str, int, int, int]] = []
        buckets: list[tuple[int, int]] = []
        unpadded: list[int] = []
        start = bucket_start = end = 0
        members = 0

        def close(at: int) -> int:
            nonlocal bucket_start, members
            unpadded.append(at - bucket_start)
            stop = math.ceil(at / math.lcm(ranks, 128)) * math.lcm(ranks, 128)
            buckets.append((bucket_start, stop))
            bucket_start, members = stop, 0
            return stop

        for name in reversed(names):
            start = math.ceil(start / 64) * 64
            alone = self.tied and self.pipeline > 1 and name in (EMBEDDING, OUTPUT)
            if alone and members:
                start = close(start)
            end = start + self.part(name, "param", 0).numel()
            slots.append((name, start, end, len(buckets)))
            members += 1
            full = most is not None and end - bucket_start >= most
            start = close(end) if full or alone else end
        if members:
            close(end)
        return Vector(slots, buckets, unpadded)

    def args(self) -> Namespace:
        """The arguments that matter."""
        found = {
            "num_layers": self.layers, "hidden_size": self.hidden, "swiglu": True, "num_experts": self.experts or None,
            "untie_embeddings_and_output_weights": not self.tied, "vocab_size": self.vocabulary,
            "padded_vocab_size": self.rows, "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline, "expert_model_parallel_size": self.expert_ranks,
            "virtual_pipeline_model_parallel_size": self.chunks if self.chunks > 1 else None,
            "expert_tensor_parallel_size": self.tensor, "data_parallel_size": self.data, "optimizer": "adam",
            "overlap_grad_reduce": self.bucket is not None, "ddp_bucket_size": self.bucket, "transformer_impl": "local",
            "moe_grouped_gemm": False, "consumed_train_samples": 56,
        }  # fmt: skip
        return Namespace(**{**found, **self.said})

    def groups(self) -> list[list[dict[str, Any]]]:
        """The param groups of each optimizer."""
        dense = [{**GROUP, "wd_mult": 1.0, "weight_decay": 0.1}, {**GROUP, "wd_mult": 0.0, "weight_decay": 0.0}]
        experts = [{**GROUP, "wd_mult": 1.0, "weight_decay": 0.1, "is_expert_parallel": True}]
        return [dense, experts] if self.expert_ranks > 1 else [dense]

    def buffers(self, stage: int, expert_rank: int, *, of_experts: bool) -> Iterator[Vector]:
        """The buffers of one rank's optimizer, one for each chunk."""
        ranks = self.data // self.expert_ranks if of_experts else self.data
        for chunk in range(self.chunks):
            names = [name for name, _ in self.held(stage, chunk, expert_rank)]
            mine = [n for n in names if (self.expert_ranks > 1 and ".experts." in n) is of_experts]
            if mine:
                yield self.vector(mine, stage, chunk, ranks)

    # `--ckpt-format torch`.

    def save_legacy(self, root: Path, *, iteration: int = 7) -> Path:
        """Write `iter_0000007/mp_rank_*`; returns the directory of the iteration."""
        place = root / f"iter_{iteration:07d}"
        for stage in range(self.pipeline):
            for expert_rank in range(self.expert_ranks):
                for rank in range(self.tensor):
                    name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if self.pipeline > 1 else "")
                    folder = place / (name + (f"_{expert_rank:03d}" if self.expert_ranks > 1 else ""))
                    folder.mkdir(parents=True)
                    self._save_rank(folder, stage, expert_rank, rank, iteration)
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return place

    def _save_rank(self, folder: Path, stage: int, expert_rank: int, rank: int, iteration: int) -> None:
        models = [
            {local: self.part(name, "weight", rank).clone() for name, local in self.held(stage, chunk, expert_rank)}
            for chunk in range(self.chunks)
        ]
        keys = ["model"] if self.chunks == 1 else [f"model{i}" for i in range(self.chunks)]
        optimizers = [{"optimizer": {"param_groups": g}} for g in self.groups()]
        state = {
            "args": self.args(), "checkpoint_version": 3.0, "iteration": iteration,
            **dict(zip(keys, models, strict=True)),
            "optimizer": optimizers if len(optimizers) > 1 else optimizers[0],
            "opt_param_scheduler": {"num_steps": 56},
        }  # fmt: skip
        torch.save(state, folder / "model_optim_rng.pt")
        found = [
            None if expert_rank and not of_experts else self._vectors(stage, expert_rank, rank, of_experts=of_experts)
            for of_experts in (False, True)[: len(optimizers)]
        ]
        torch.save(found if len(found) > 1 else found[0], folder / "distrib_optim.pt")

    def _vectors(self, stage: int, expert_rank: int, rank: int, *, of_experts: bool) -> dict[Any, Any]:
        """What `get_parameter_state_dp_zero` makes."""
        buffers: dict[Any, Any] = {"buckets_coalesced": True}
        for number, vector in enumerate(self.buffers(stage, expert_rank, of_experts=of_experts)):
            stored = {state: self._coalesced(vector, state, rank) for state in STATES}
            buffers[number] = {PAIR: {**stored, "numel_unpadded": sum(vector.unpadded)}}
        return buffers

    def _coalesced(self, vector: Vector, state: str, rank: int) -> torch.Tensor:
        return torch.cat([self._bucket(vector, number, state, rank) for number in range(len(vector.buckets))])

    def _bucket(self, vector: Vector, number: int, state: str, rank: int) -> torch.Tensor:
        """What is stored of one bucket; gaps hold what memory held."""
        found = torch.full((vector.unpadded[number],), 7.5)
        first = vector.buckets[number][0]
        for name, begin, end, bucket in vector.slots:
            if bucket == number:
                found[begin - first : end - first] = self.part(name, state, rank).reshape(-1)
        return found

    # `torch_dist`.

    def save_gathered(self, root: Path) -> Path:
        """As `save_torch_dist`, with an object of each rank that holds all its vectors."""
        return self.save_torch_dist(root, kind="dp_zero_gather_scatter")

    def save_flattened(self, root: Path) -> Path:
        """As `save_torch_dist`, with the states of 0.14: a row for each part of a parameter."""
        return self.save_torch_dist(root, kind="fully_sharded_model_space")

    def save_torch_dist(self, root: Path, *, shuffled: bool = False, kind: str = "dp_reshardable") -> Path:
        """Write `iter_0000007`; returns it.

        Args:
            root: The directory of the run.
            shuffled: True for keys in another order than the model's, in files of many ranks, as a fully parallel save
                has them.
            kind: How the optimizer is saved.
        """
        place = root / "iter_0000007"
        place.mkdir(parents=True)
        writer = _Writer(place)
        entries = list(self._model_entries())
        if shuffled:
            entries.reverse()
        for at, (key, whole, boxes) in enumerate(entries):
            for offsets, part in boxes:
                writer.chunk(key, whole, offsets, part, at % 8 if shuffled else 0)
        for chained, of_experts in enumerate((False, True)[: len(self.groups())]):
            for owner, (stage, expert_rank, rank) in enumerate(self._owners(of_experts=of_experts)):
                prefix = f"chained_{chained}." if len(self.groups()) > 1 else ""
                head = f"{prefix}optimizer.distributed.dp_group_idx_{owner}."
                if kind == "fully_sharded_model_space":
                    self._save_flattened(writer, stage, expert_rank, rank, of_experts=of_experts)
                    continue
                if kind == "dp_zero_gather_scatter":
                    vectors = self._vectors(stage, expert_rank, rank, of_experts=of_experts)
                    writer.value(f"{head}param_state/shard_0_1", [vectors])
                    writer.value(f"{head}optimizer/shard_0_1", [{"param_groups": self.groups()[chained]}])
                    continue
                self._save_owner(writer, head, stage, expert_rank, rank, of_experts=of_experts)
        optimizer: dict[Any, Any] = {"param_state_sharding_type": kind}
        if kind == "fully_sharded_model_space":
            held = [{"optimizer": {"param_groups": g}, **optimizer} for g in self.groups()]
            optimizer = held[0] if len(held) == 1 else dict(enumerate(held))
        common = {
            "args": self.args(), "checkpoint_version": 3.0, "iteration": 7, "optimizer": optimizer,
            "opt_param_scheduler": {"num_steps": 56}, "content_metadata": {"distrib_optim_sharding_type": kind},
        }  # fmt: skip
        torch.save(common, place / "common.pt")
        (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        writer.close()
        return place

    def _save_flattened(self, writer: _Writer, stage: int, expert_rank: int, rank: int, *, of_experts: bool) -> None:
        """The runs of elements of each part that data-parallel ranks hold."""
        ranks = self.data // self.expert_ranks if of_experts else self.data
        for vector in self.buffers(stage, expert_rank, of_experts=of_experts):
            for name, begin, end, bucket in vector.slots:
                whole = self.shapes().get(name, ())
                split = self.part(name, "param", rank).shape != whole
                if (rank and not split) or (name == OUTPUT and self.tied):
                    continue
                first, stop = vector.buckets[bucket]
                cuts = {begin, end, *range(first, stop, (stop - first) // ranks)}
                dim = 1 if "linear_proj" in name or "linear_fc2" in name else 0
                halves = 2 if name.endswith("linear_fc1.weight") else 1
                cuts |= {begin + (end - begin) // 2} if halves == 2 else set()
                counts = [1] * len(whole)
                counts[dim] = halves * (self.tensor if split else 1)
                numel = (end - begin) // halves
                key, index = entry_of(name)
                axes = self._axes(key)
                for state in STATES:
                    flat = self.part(name, state, rank).reshape(-1)
                    full = f"optimizer.state.{'fp32_param' if state == 'param' else state}.{key}"
                    writer.original[full] = (*axes, *whole)
                    for low, high in pairwise(sorted(c for c in cuts if begin <= c <= end)):
                        half, at = divmod(low - begin, numel)
                        place = [0] * len(whole)
                        place[dim] = half * self.tensor + rank if split else half
                        run = flat[low - begin : high - begin].reshape(*([1] * (len(axes) + len(whole))), -1)
                        file = (low - first) * ranks // (stop - first)
                        writer.chunk(full, (*axes, *counts, numel), (*index, *place, at), run, file)

    def _axes(self, key: str) -> tuple[int, ...]:
        """The axes of layers and experts in front of an entry."""
        places = [index for other, index in map(entry_of, self.shapes()) if other == key]
        return tuple(1 + max(index[d] for index in places) for d in range(len(places[0])))

    def _owners(self, *, of_experts: bool) -> Iterator[tuple[int, int, int]]:
        for stage in range(self.pipeline):
            for expert_rank in range(self.expert_ranks if of_experts else 1):
                for rank in range(self.tensor):
                    yield stage, expert_rank, rank

    def _model_entries(self) -> Iterator[tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], torch.Tensor]]]]:
        """Key, shape and chunks of the model's entries, in the order of the model."""
        seen: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        for name in self.shapes():
            key, index = entry_of(name)
            seen.setdefault(key, []).append((index, name))
        for key, members in seen.items():
            axes = tuple(1 + max(index[d] for index, _ in members) for d in range(len(members[0][0])))
            boxes = [((*index, *at), part[(None,) * len(index)]) for index, n in members for at, part in self._boxes(n)]
            yield key, (*axes, *self.shapes()[members[0][1]]), boxes

    def _boxes(self, name: str) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        whole = self.truth[name]["weight"]
        zero = (0,) * whole.ndim
        if self.part(name, "weight", 0).shape == whole.shape and not name.endswith("linear_fc1.weight"):
            yield zero, whole
            return
        halves = 2 if name.endswith("linear_fc1.weight") else 1
        dim = 1 if "linear_proj" in name or "linear_fc2" in name else 0
        for at, part in enumerate(whole.chunk(self.tensor * halves, dim=dim)):
            yield (*zero[:dim], at * part.shape[dim], *zero[dim + 1 :]), part

    def _save_owner(
        self, writer: _Writer, head: str, stage: int, expert_rank: int, rank: int, *, of_experts: bool
    ) -> None:
        ranks = self.data // self.expert_ranks if of_experts else self.data
        numels: list[Any] = []
        lengths: list[Any] = []
        for number, vector in enumerate(self.buffers(stage, expert_rank, of_experts=of_experts)):
            numels.append({PAIR: [end - begin for begin, end in vector.buckets]})
            lengths.append({PAIR: vector.unpadded})
            for bucket, (first, stop) in enumerate(vector.buckets):
                unpadded = vector.unpadded[bucket]
                edges = {0, unpadded, *range(0, unpadded, (stop - first) // ranks)}
                for _, begin, end, at in vector.slots:
                    edges |= {begin - first, end - first} if at == bucket else set()
                cuts = sorted(edges)
                for state in STATES:
                    values = self._bucket(vector, bucket, state, rank)
                    key = f"{head}gbuf_idx_{number}.dtype_{PAIR}.bucket_idx_{bucket}.{state}"
                    for begin, end in pairwise(cuts):
                        file = begin * ranks // (stop - first)
                        writer.chunk(key, (unpadded,), (begin,), values[begin:end], file)
        groups = self.groups()[1 if of_experts else 0]
        for name, value in (
            ("optimizer", {"param_groups": groups}), ("per_bucket_numel", numels),
            ("per_bucket_numel_unpadded", lengths),
        ):  # fmt: skip
            writer.value(f"{head}{name}/shard_0_1", [value])


class _Writer:
    """Files and metadata of `torch_dist`."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._files: dict[int, io.BytesIO] = {}
        self._entries: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self.original: dict[str, tuple[int, ...]] = {}
        """The shapes of tensors that were flattened."""

    def _record(self, value: Any, file: int) -> _StorageInfo:
        stream = self._files.setdefault(file, io.BytesIO())
        begin = stream.tell()
        record = io.BytesIO()
        torch.save(value, record)
        stream.write(record.getvalue())
        return _StorageInfo(f"__{file}_0.distcp", begin, len(record.getvalue()))

    def chunk(self, key: str, whole: tuple[int, ...], offsets: tuple[int, ...], part: torch.Tensor, file: int) -> None:
        """Add a chunk of a tensor."""
        properties = TensorProperties.create_from_tensor(part)
        entry = self._entries.setdefault(key, TensorStorageMetadata(properties, torch.Size(whole), []))
        index = MetadataIndex(key, torch.Size(offsets), len(entry.chunks))
        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
        self._places[index] = self._record(part.clone(), file)

    def value(self, key: str, value: Any) -> None:
        """Add an object."""
        self._entries[key] = BytesStorageMetadata()
        self._places[MetadataIndex(key)] = self._record(value, 0)

    def close(self) -> None:
        """Write everything."""
        for file, stream in self._files.items():
            (self._place / f"__{file}_0.distcp").write_bytes(stream.getvalue())
        metadata: Any = Metadata(self._entries, None, self._places)
        if self.original:
            metadata.mcore_data = {k: {"nd_reformulated_orig_global_shape": v} for k, v in self.original.items()}
        (self._place / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


@st.composite
def laid_out(draw: st.DrawFn, model: MegatronRun) -> MegatronRun:
    """A model in a layout that fits 4 or 8 layers, and no experts or 4 of them."""
    pipeline = draw(st.sampled_from([1, 2, 4]))
    return replace(
        model,
        tensor=draw(st.sampled_from([1, 2, 3])),
        pipeline=pipeline,
        chunks=draw(st.sampled_from([1, model.layers // pipeline])) if pipeline > 1 else 1,
        expert_ranks=draw(st.sampled_from([1, 2, 4])) if model.experts else 1,
        data=draw(st.sampled_from([4, 8])),
        bucket=draw(st.sampled_from([None, 100, 900])),
    )
