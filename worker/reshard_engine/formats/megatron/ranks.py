"""The parts of a whole checkpoint that each model-parallel rank of Megatron-core holds, and its buffers.

It is the way back from `placement` and `buffers`. A rank has the layers of its stage's chunks and the experts of its
expert-parallel rank, under numbers that begin at 0; its part of each parameter that tensor parallelism cuts, padding
included. Its distributed optimizer has buffers of these parts, which close into buckets.

Nothing here is assumed: a parameter whose order of registration, cut or stage is not known is an error, and so is a run
whose arguments leave several layouts.

Source: as in `placement` and `buffers`; megatron-core 0.16.1 `transformer/transformer_layer.py`,
`extensions/transformer_engine.py` (`TELayerNormColumnParallelLinear`, `TEGroupedLinear`: names of parameters),
`tensor_parallel/layers.py` (`get_extra_state` of parallel layers is None); Megatron-LM
`training/tokenizer/tokenizer.py` (`_vocab_size_with_padding`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import lcm, prod

from reshard.errors import listed, printable
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.megatron.buffers import (
    BUCKET_ALIGNMENT,
    Bucket,
    LayoutError,
    Member,
    Slot,
    aligned,
    closed_buckets,
    slots_of,
)
from reshard_engine.formats.megatron.common import CommonState
from reshard_engine.formats.megatron.names import BUFFERS, EXPERT, LOCAL_EXPERT, NORMS, VOCABULARY
from reshard_engine.formats.megatron.placement import (
    GATED,
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    Rank,
    Run,
    cut_of,
    orders_of,
    tied,
)
from reshard_engine.tensors.cuts import Cut, CutError, parts, rows_of, taken
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.layout import ZEROS
from reshard_engine.tensors.shard_map import LogicalTensor
from reshard_engine.tensors.views import View

Runs = tuple[tuple[int, int, int], ...]
"""(tensor or `ZEROS`, first element, last element + 1) of each run."""
MASTERS = "fp32"
_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_GROUPED = re.compile(r"(linear_fc[12])\.(weight|bias)")
_PARALLEL_LAYER = re.compile(r"(?:.+\.)?(?:linear_proj|linear_qkv|linear_fc1|linear_fc2|output_layer)")
"""Modules with an extra state, which is None but for scales of FP8."""
_EXTRA_STATE = "_extra_state"
_MOST_PADDING = 1 << 16
"""Rows of padding that a run may add beside as many as it has tokens."""
_WIDE_BUCKETS = 1 << 16
"""Elements: with `--ddp-pad-buckets-for-high-nccl-busbw`, buckets end at a multiple."""


@dataclass(frozen=True, slots=True)
class Held:
    """A rank's part of a parameter, or of a buffer of its modules."""

    key: str
    """Its name in the rank's model."""
    name: str
    """Its name in the whole model."""
    shape: tuple[int, ...]
    dtype: Dtype
    """Element type of the model's own tensor."""
    weight: Runs
    states: Mapping[str, Runs] = field(default_factory=dict[str, Runs])
    """Masters, as `fp32`, and the optimizer's states; empty for a tensor that no optimizer owns."""
    alone: bool = False
    """True for an embedding that two pipeline stages share."""

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return prod(self.shape)

    @property
    def trained(self) -> bool:
        """True if the optimizer owns it."""
        return bool(self.states)


@dataclass(frozen=True, slots=True)
class WholePart:
    """A whole parameter, or a buffer of a router, in the parts of tensor-parallel ranks."""

    name: str
    shape: tuple[int, ...]
    """With the padding of a vocabulary."""
    dtype: Dtype
    chunks: Sequence[tuple[tuple[int, ...], tuple[int, ...], Runs]]
    """Offsets, sizes and elements of each part; the halves of a gated unit are two."""


@dataclass(frozen=True, slots=True)
class GradientBuffer:
    """One buffer of a rank's distributed optimizer."""

    dtype: str
    """Element type of its parameters."""
    gradients: str
    """Element type of their gradients."""
    held: Mapping[str, Held]
    """Its parameters by the names of the slots."""
    buckets: Sequence[Bucket]
    slots: Sequence[Slot]

    def states(self) -> list[str]:
        """The states of its parameters, masters first.

        Raises:
            LayoutError: Not all of them have the same states.
        """
        kinds = {tuple(sorted(held.states)): name for name, held in self.held.items()}
        if len(kinds) > 1:
            (one, first), (other, second) = list(kinds.items())[:2]
            raise LayoutError(
                f"{printable(first)} has the states {listed(one)}, and {printable(second)} has {listed(other)}: a "
                "buffer holds the same states of all of its parameters"
            )
        return sorted(next(iter(kinds)), key=lambda state: (state != MASTERS, state))

    def runs(self, bucket: int, state: str) -> Runs:
        """The elements of one bucket, without the padding behind its last parameter; zeros in gaps."""
        found: list[tuple[int, int, int]] = []
        at = 0
        for slot in (s for s in self.slots if s.bucket == bucket):
            found += [(ZEROS, 0, slot.begin - at)] if slot.begin > at else []
            found += self.held[slot.name].states[state]
            at = slot.end
        end = self.buckets[bucket].unpadded
        return (*found, *([(ZEROS, 0, end - at)] if end > at else []))

    def edges(self, bucket: int, ranks: int) -> list[int]:
        """Where the chunks of a bucket begin and end: at parameters, gaps, and the parts of data-parallel ranks."""
        length = self.buckets[bucket]
        found = {0, length.unpadded, *range(0, length.unpadded, length.numel // ranks)}
        for slot in self.slots:
            found |= {slot.begin, slot.end} if slot.bucket == bucket else set()
        return sorted(found)


def cut_at(runs: Runs, edges: Sequence[int]) -> Iterator[Runs]:
    """Runs that lie one after another, cut at these elements: the first edge is 0, the last one their end."""
    found: list[tuple[int, int, int]] = []
    at, rest = 0, iter(runs)
    tensor, first, last = 0, 0, 0
    for end in edges[1:]:
        while at < end:
            if first == last:
                tensor, first, last = next(rest)
            length = min(end - at, last - first)
            found.append((tensor, 0, length) if tensor == ZEROS else (tensor, first, first + length))
            at, first = at + length, first + length
        yield tuple(found)
        found.clear()


def padded_rows(common: CommonState, rows: int, tensor: int, divisor: int | None) -> int:
    """The rows of a vocabulary with the padding that a run of so many tensor-parallel ranks adds.

    Args:
        common: The state of the run, with its arguments.
        rows: Rows of tokens, or all rows where nothing says how many of them are padding.
        tensor: Tensor-parallel ranks.
        divisor: `make_vocab_size_divisible_by` of the run; None for what its arguments say.

    Raises:
        LayoutError: Nothing says what the rows are padded to.
    """
    said = divisor or common.number("make_vocab_size_divisible_by")
    if said is None and rows % tensor:
        raise LayoutError(f"nothing says to which multiple a vocabulary of {rows} rows is padded for {tensor} ranks")
    found = aligned(rows, tensor if said is None else said * tensor)
    if found > 2 * rows + _MOST_PADDING:
        raise LayoutError(f"a vocabulary of {rows} rows would be padded to {found}")
    return found


class LocalModels:
    """The parts of a checkpoint that the ranks of a run hold."""

    def __init__(
        self, checkpoint: Checkpoint, run: Run, *, divisor: int | None = None, saved_order: bool = False
    ) -> None:
        """Find the order of parameters, and their cuts.

        Args:
            checkpoint: The whole model, under Megatron-core's names.
            run: The run that loads it.
            divisor: As in `padded_rows`.
            saved_order: True if `checkpoint.module_names` are in the order in which the model registers them.

        Raises:
            LayoutError: Nothing says what a rank of this run holds.
        """
        self.run, self._checkpoint = run, checkpoint
        self._parameters = {p.fqn: p for p in checkpoint.parameters}
        self._buffers = {b.fqn: b.tensor for b in checkpoint.buffers}
        self.first_part = len(checkpoint.shard_map.tensors)
        self._numbers: dict[tuple[int, int, int], int] = {}
        self.parts: list[tuple[LogicalTensor, View]] = []
        """Tensors that are views of the checkpoint's; their numbers follow its last one."""
        self._states = [*dict.fromkeys(s for p in checkpoint.trained for s in p.states if s != MASTERS)]
        self._engine = run.common.args.get("transformer_impl") == "transformer_engine"
        self._grouped = run.common.args.get("moe_grouped_gemm") is True
        self._tied = run.pipeline > 1 and tied(self._parameters)
        self._shapes = {
            name: (self._rows(name, p.shape, divisor), *p.shape[1:]) if name in VOCABULARY else p.shape
            for name, p in self._parameters.items()
        }
        self._cuts: dict[str, Cut] = {}
        self._check_sizes()
        self._orders = self._orders_of(checkpoint, saved=saved_order)
        self._check_stages()
        self._chunks: dict[Rank, list[list[Held]]] = {}

    @property
    def vocabulary_rows(self) -> int | None:
        """The rows of the vocabulary with padding; None for a model without one."""
        return next((self._shapes[name][0] for name in VOCABULARY if name in self._shapes), None)

    # What the run says.

    def _rows(self, name: str, shape: Sequence[int], divisor: int | None) -> int:
        known = self._parameters[name].padding or self.run.common.number("vocab_size")
        if divisor is None and not known and not shape[0] % self.run.tensor:
            # Nothing tells tokens from padding: a run that can take all rows takes them.
            return shape[0]
        return padded_rows(self.run.common, shape[0], self.run.tensor, divisor)

    def _check_sizes(self) -> None:
        """Refuse numbers that do not divide.

        Raises:
            LayoutError: The numbers.
        """
        run, number = self.run, self.run.common.number
        heads = number("num_attention_heads")
        grouped = run.common.args.get("group_query_attention") is not False
        groups = number("num_query_groups") if grouped else heads
        if heads is not None and heads % run.tensor:
            raise LayoutError(f"{heads} attention heads do not divide by {run.tensor} tensor-parallel ranks")
        if groups is not None and groups % run.tensor and run.tensor % groups:
            # With fewer groups than ranks, megatron-core cuts the rows of linear_qkv evenly all the same.
            raise LayoutError(
                f"{groups} query groups do not divide by {run.tensor} tensor-parallel ranks, or these by them"
            )
        self._check_experts(number("num_experts"))
        self._check_run()

    def _check_experts(self, said: int | None) -> None:
        """Refuse experts that the ranks do not share evenly, or of which nothing says how they lie.

        Args:
            said: The number of experts of a layer by the arguments of the run.

        Raises:
            LayoutError: The numbers.
        """
        run, held = self.run, self._experts_by_layer()
        if run.experts > 1 and not held:
            raise LayoutError(f"the model has no experts for {run.experts} expert-parallel ranks")
        if other := next((layer for layer, numbers in held.items() if numbers != {*range(said or 0)}), None):
            raise LayoutError(f"{printable(other)} has {len(held[other])} experts, and the arguments say {said}")
        if held and (said or 0) % run.experts:
            raise LayoutError(f"{said} experts do not divide by {run.experts} expert-parallel ranks")
        if held and run.expert_tensor != run.tensor:
            raise LayoutError(
                f"experts are cut over {run.expert_tensor} tensor-parallel ranks, and all else over {run.tensor}"
            )
        if run.experts > 1 and run.expert_data_ranks is None:
            raise LayoutError(
                f"{run.data_ranks} data-parallel ranks do not divide by {run.experts} expert-parallel ranks"
            )
        if held and not isinstance(run.common.args.get("moe_grouped_gemm"), bool):
            raise LayoutError("the arguments of the run do not say how experts lie (moe_grouped_gemm)")

    def _experts_by_layer(self) -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for name in self._parameters:
            if (expert := LOCAL_EXPERT.fullmatch(name)) is not None:
                found.setdefault(expert[1], set()).add(int(expert[2]))
            elif EXPERT.fullmatch(name):
                raise LayoutError(f"{printable(name)} holds all experts of a rank")
        return found

    def _check_run(self) -> None:
        """Refuse runs whose parameters lie in another way.

        Raises:
            LayoutError: What the run has.
        """
        run = self.run
        if (instances := run.common.number("num_distributed_optimizer_instances") or 1) > 1:
            raise LayoutError(f"the run has {instances} instances of its distributed optimizer")
        said = run.common.args.get("transformer_impl")
        if said not in ("local", "transformer_engine"):
            raise LayoutError(f"the arguments of the run say that transformer_impl is {printable(str(said))}")
        for flag in ("fp8_param_gather", "fp4_param_gather", "use_megatron_fsdp", "use_torch_fsdp2"):
            if run.common.args.get(flag) is True:
                raise LayoutError(f"the run has --{flag.replace('_', '-')}, whose parameters lie in another way")

    def _orders_of(self, checkpoint: Checkpoint, *, saved: bool) -> list[list[str]]:
        """The orders in which the model may register its parameters, buffers of routers left out."""
        known = dict.fromkeys(n for n in checkpoint.module_names if n in self._parameters)
        names = [*known, *(n for n in self._parameters if n not in known)]
        saved = saved and len(known) == len(names)
        kept = saved and not (self._grouped and any(map(EXPERT.fullmatch, names)))
        return [names] if kept else orders_of(names, self.run, saved=False)

    def _check_stages(self) -> None:
        """Refuse a parameter that no chunk of a stage holds, such as a layer behind the last one."""
        run = self.run
        held = Counter(
            name
            for stage in range(run.pipeline)
            for chunk in range(run.chunks)
            for name in run.of_chunk(self._orders[0], stage, chunk)
        )
        if stray := next((n for n in self._orders[0] if held[n] != 1), None):
            raise LayoutError(f"{printable(stray)} is in {held[stray]} of the {run.pipeline} stages' chunks")

    # The parts of a rank.

    def chunks(self, rank: Rank) -> list[list[Held]]:
        """The tensors of each model chunk of a rank, in the order of the model.

        Raises:
            LayoutError: A parameter cannot be cut so, or the order of the model is not known.
        """
        if rank not in self._chunks:
            self._chunks[rank] = [self._chunk(rank, chunk, self._orders[0]) for chunk in range(self.run.chunks)]
        return self._chunks[rank]

    def _chunk(self, rank: Rank, chunk: int, order: Sequence[str]) -> list[Held]:
        run = self.run
        layers = run.layers_of(rank.stage, chunk)
        last = (rank.stage, chunk) == (run.pipeline - 1, run.chunks - 1)
        found: list[Held] = []
        for name in run.of_chunk(self._with_buffers(order), rank.stage, chunk):
            expert = run.expert_rank(name, run.common.number("num_experts") or 0)
            if expert in (None, rank.expert):
                found.append(self._held(name, self._key(name, layers, rank), rank))
        if last and self._tied:
            found.append(self._held(WORD_EMBEDDINGS, OUTPUT_LAYER, rank))
        return found

    def _with_buffers(self, order: Sequence[str]) -> list[str]:
        """The names with those of routers' buffers, each behind the last parameter of its module."""
        if not self._buffers:
            return [*order]
        unknown = next((n for n in self._buffers if BUFFERS.fullmatch(n) is None), None)
        if unknown is not None:
            raise LayoutError(f"nothing says which module registers {printable(unknown)}")
        behind: dict[str, list[str]] = {}
        for name in self._buffers:
            behind.setdefault(name.rpartition(".")[0], []).append(name)
        found: list[str] = []
        for at, name in enumerate(order):
            module = name.rpartition(".")[0]
            found.append(name)
            if at + 1 == len(order) or order[at + 1].rpartition(".")[0] != module:
                found += behind.pop(module, [])
        if behind:
            raise LayoutError(f"no parameter is beside {printable(next(iter(behind.values()))[0])}")
        return found

    def _key(self, name: str, layers: range, rank: Rank) -> str:
        """The name that the rank's model has for it."""
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return name
        rest = self._expert_key(layer[2], rank)
        dense = f"decoder.layers.{layer[1]}.mlp.linear_fc1.weight" in self._parameters
        for engine, local in NORMS.items() if self._engine else ():
            if rest.startswith(local) and (dense or not engine.startswith("mlp.")):
                rest = f"{engine}{rest.removeprefix(local)}"
                break
        return f"decoder.layers.{layers.index(int(layer[1]))}.{rest}"

    def _expert_key(self, rest: str, rank: Rank) -> str:
        expert = LOCAL_EXPERT.fullmatch(rest)
        if expert is None:
            return rest
        share = (self.run.common.number("num_experts") or 0) // self.run.experts
        number = int(expert[2]) - rank.expert * share
        if not self._grouped:
            return f"{expert[1]}.local_experts.{number}.{expert[3]}"
        legacy = self.run.common.args.get("moe_use_legacy_grouped_gemm") is True
        if legacy or not self._engine or (leaf := _GROUPED.fullmatch(expert[3])) is None:
            raise LayoutError(f"{printable(rest)} lies in one matrix with all experts of its rank (moe_grouped_gemm)")
        return f"{expert[1]}.{leaf[1]}.{leaf[2]}{number}"

    def _held(self, name: str, key: str, rank: Rank) -> Held:
        tensors = self._checkpoint.shard_map.tensors
        parameter = self._parameters.get(name)
        if parameter is None:
            stored = tensors[self._buffers[name]]
            return Held(key, name, stored.shape, stored.dtype, ((self._buffers[name], 0, stored.numel),))
        cut = self._cut(name)
        # The source may keep the exact value alone.
        number, kind = (parameter.value(), MASTERS) if parameter.weight is None else (parameter.weight, "weight")
        try:
            shape = self._local_shape(name, cut, rank)
            weight = self._runs(parameter, cut, number, kind, rank)
            states = {s: self._runs(parameter, cut, n, s, rank) for s, n in parameter.states.items()}
        except CutError as error:
            raise LayoutError(f"{printable(name)} {parameter.shape} over {self.run.tensor} ranks: {error}") from error
        if parameter.trained and MASTERS not in states:
            if tensors[number].dtype.name != "float32":
                raise LayoutError(f"{printable(name)} has no master")
            states = {MASTERS: weight, **states}
        if parameter.never_updated:
            # No gradient ever reached it, and these are the states that its optimizer begins with.
            zeros: Runs = ((ZEROS, 0, prod(shape)),)
            states = {**dict.fromkeys(self._states, zeros), **states}
        alone = self._tied and name == WORD_EMBEDDINGS
        kept = states if parameter.trained else dict[str, Runs]()
        return Held(key, name, shape, tensors[number].dtype, weight, kept, alone)

    def _cut(self, name: str) -> Cut:
        if name not in self._cuts:
            self._cuts[name] = cut_of(name, self._shapes, self.run, whole=True)
        return self._cuts[name]

    def _local_shape(self, name: str, cut: Cut, rank: Rank) -> tuple[int, ...]:
        shape = self._shapes[name]
        if cut.dim is None:
            return shape
        width = sum(p.width for p in parts(cut, shape[cut.dim], self.run.tensor, rank.tensor))
        return (*shape[: cut.dim], width, *shape[cut.dim + 1 :])

    def whole_parts(self) -> Iterator[WholePart]:
        """All parameters and buffers in the order of the model, each once, with the parts of tensor-parallel ranks.

        Raises:
            LayoutError: As `chunks`.
        """
        for name in self._with_buffers(self._orders[0]):
            held = [self._held(name, name, Rank(0, 0, rank)) for rank in range(self.run.tensor)]
            cut = Cut() if name in self._buffers else self._cut(name)
            if self.run.tensor == 1 and GATED.fullmatch(name):
                # One rank saves the halves of a gated unit as two chunks, too.
                cut = cut_of(name, self._shapes, replace(self.run, tensor=2, expert_tensor=2), whole=True)
            shape = self._shapes.get(name, held[0].shape)
            zero = (0,) * len(shape)
            if cut.dim is None:
                yield WholePart(name, shape, held[0].dtype, [(zero, shape, held[0].weight)])
                continue
            chunks: list[tuple[tuple[int, ...], tuple[int, ...], Runs]] = []
            step = prod(shape[cut.dim + 1 :]) * prod(shape[: cut.dim])
            for rank, one in enumerate(held):
                inside = parts(cut, shape[cut.dim], self.run.tensor, rank)
                edges = [0, *accumulate(part.width * step for part in inside)]
                for part, runs in zip(inside, cut_at(one.weight, edges), strict=True):
                    offsets = (*zero[: cut.dim], part.start, *zero[cut.dim + 1 :])
                    sizes = (*shape[: cut.dim], part.width, *shape[cut.dim + 1 :])
                    chunks.append((offsets, sizes, runs))
            yield WholePart(name, shape, held[0].dtype, chunks)

    # Elements.

    def _runs(self, parameter: Parameter, cut: Cut, tensor: int, state: str, rank: Rank) -> Runs:
        """The elements of a rank's part of a tensor."""
        shape = parameter.shape
        rows = self._shapes[parameter.fqn][:1]
        if parameter.fqn in VOCABULARY:
            share = rows[0] // (self.run.tensor if cut.dim is not None else 1)
            first = rank.tensor * share if cut.dim is not None else 0
            return self._rows_of(parameter, tensor, state, first, first + share)
        if cut.dim is None:
            return ((tensor, 0, prod(shape)),)
        inside = parts(cut, shape[cut.dim], self.run.tensor, rank.tensor)
        if cut.dim == 0:
            step = prod(shape[1:])
            return tuple((tensor, p.start * step, (p.start + p.width) * step) for p in inside)
        key = (tensor, self.run.tensor, rank.tensor)
        if key not in self._numbers:
            view = taken(cut, shape, tensor, self.run.tensor, rank.tensor)
            stored = self._checkpoint.shard_map.tensors[tensor]
            self._add(key, stored, f"{stored.fqn}@tp{rank.tensor}of{self.run.tensor}", view)
        number = self._numbers[key]
        return ((number, 0, prod(self.parts[number - self.first_part][1].grid)),)

    def _rows_of(self, parameter: Parameter, tensor: int, state: str, begin: int, end: int) -> Runs:
        """Rows `[begin, end)` of a vocabulary: tokens, then the source's padding as far as it reaches, then zeros."""
        step, tokens = prod(parameter.shape[1:]), parameter.shape[0]
        padding, kept = self._padding(parameter, state, self._shapes[parameter.fqn][0] - tokens)
        found: list[tuple[int, int, int]] = []
        first = 0
        for number, count in ((tensor, tokens), (padding, kept), (ZEROS, max(end - tokens - kept, 0))):
            low, high = max(begin, first), min(end, first + count)
            if number is not None and high > low:
                start = 0 if number == ZEROS else (low - first) * step
                found.append((number, start, start + (high - low) * step))
            first += count
        return tuple(found)

    def _padding(self, parameter: Parameter, state: str, rows: int) -> tuple[int | None, int]:
        """The tensor of the source's padding as far as this run has rows for it, and its rows.

        Digests cover whole tensors, so that the rows that are kept are one.
        """
        padding = parameter.padding.get(state)
        if padding is None or not rows:
            return None, 0
        stored = self._checkpoint.shard_map.tensors[padding]
        if stored.shape[0] <= rows:
            return padding, stored.shape[0]
        key = (padding, 0, rows)
        if key not in self._numbers:
            self._add(key, stored, stored.fqn, rows_of(stored.shape, padding, 0, rows))
        return self._numbers[key], rows

    def _add(self, key: tuple[int, int, int], stored: LogicalTensor, name: str, view: View) -> None:
        self._numbers[key] = self.first_part + len(self.parts)
        self.parts.append((LogicalTensor(name, stored.state, stored.dtype, view.grid), view))

    # Buffers of the distributed optimizer.

    def data_ranks(self, *, of_experts: bool) -> int:
        """The ranks that share a buffer.

        Raises:
            LayoutError: Nothing says it.
        """
        ranks = self.run.expert_data_ranks if of_experts else self.run.data_ranks
        if ranks is None:
            raise LayoutError("nothing says how many data-parallel ranks there are")
        return ranks

    def buffers(self, rank: Rank, *, of_experts: bool = False) -> list[GradientBuffer]:
        """The buffers of a rank's optimizer, chunk by chunk: those of all else, or those of experts.

        Raises:
            LayoutError: The arguments of the run leave several layouts, or the order of the model is not known.
        """
        every = sum(h.numel for chunk in self.chunks(rank) for h in chunk if h.name not in self._buffers)
        found: list[list[GradientBuffer]] = []
        for order in self._orders:
            made = [
                buffer
                for chunk in range(self.run.chunks)
                for buffer in self._buffers_of(rank, chunk, order, every, of_experts=of_experts)
            ]
            if [b.slots for b in made] not in [[b.slots for b in other] for other in found]:
                found.append(made)
        if len(found) > 1:
            raise LayoutError(
                f"the model may register its parameters in {len(found)} orders: the arguments of the run do not say "
                "transformer_impl or moe_grouped_gemm"
            )
        return found[0]

    def _buffers_of(
        self, rank: Rank, chunk: int, order: Sequence[str], every: int, *, of_experts: bool
    ) -> Iterator[GradientBuffer]:
        by_type: dict[str, list[Held]] = {}
        for held in self.chunks(rank)[chunk] if order is self._orders[0] else self._chunk(rank, chunk, order):
            if held.trained and self.run.is_shared(held.name) != of_experts:
                by_type.setdefault(held.dtype.name, []).append(held)
        for dtype, members in by_type.items():
            sizes = self.run.bucket_sizes(rank.stage, chunk, every)
            yield self._buffer(dtype, members, sizes, self.data_ranks(of_experts=of_experts))

    def _buffer(self, dtype: str, held: Sequence[Held], sizes: Sequence[int | None], ranks: int) -> GradientBuffer:
        members = [Member(h.key, h.numel, h.alone) for h in held]
        closed = {tuple(closed_buckets(members, most)): most for most in sizes}
        if len(closed) > 1:
            said = listed(["one bucket" if most is None else f"{most} elements" for most in closed.values()])
            raise LayoutError(
                f"the arguments of the run do not say at how many elements buckets close ({said}), and {len(members)} "
                f"parameters lie in {len(closed)} ways"
            )
        unit = lcm(ranks, BUCKET_ALIGNMENT)
        if self.run.common.args.get("ddp_pad_buckets_for_high_nccl_busbw") is True:
            unit = lcm(unit, _WIDE_BUCKETS)
        buckets = [Bucket(aligned(length, unit), length) for length in next(iter(closed))]
        return GradientBuffer(
            dtype, self._gradients(dtype), {h.key: h for h in held}, buckets, slots_of(members, buckets)
        )

    def _gradients(self, dtype: str) -> str:
        """The element type of gradients of parameters of a type.

        Source: megatron-core 0.16.1 `distributed/distributed_data_parallel.py` (`grad_reduce_in_fp32`).
        """
        said = self.run.common.args.get("accumulate_allreduce_grads_in_fp32")
        if dtype == "float32" or said is True:
            return "float32"
        if said is not False:
            raise LayoutError(
                "the arguments of the run do not say of which type gradients are (accumulate_allreduce_grads_in_fp32)"
            )
        return dtype


def with_extra_states(keys: Sequence[str], *, last: bool) -> list[tuple[str, bool]]:
    """Keys of a rank's model with those of extra states, which are true.

    Parallel layers have one, and a load that is strict asks for it.

    Args:
        keys: The keys of tensors in the order of the model.
        last: True for the last chunk of the last stage, which has the output layer, even one without a weight.
    """
    found: list[tuple[str, bool]] = []
    for at, key in enumerate(keys):
        module = key.rpartition(".")[0]
        found.append((key, False))
        following = keys[at + 1].rpartition(".")[0] if at + 1 < len(keys) else ""
        if following != module and _PARALLEL_LAYER.fullmatch(module):
            found.append((f"{module}.{_EXTRA_STATE}", True))
    output = f"{OUTPUT_LAYER.rpartition('.')[0]}.{_EXTRA_STATE}"
    if last and (output, True) not in found:
        found.append((output, True))
    return found
