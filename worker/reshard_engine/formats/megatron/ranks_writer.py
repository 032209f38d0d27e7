"""Lays out what the ranks of one layout hold: directories of ranks, and the buckets of `dp_reshardable`.

With `--ckpt-format torch`, `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` holds the rank's part of the model and the run's
state, and `distrib_optim.pt` the vectors of its distributed optimizer. In `torch_dist`, `dp_reshardable` keeps a vector
of each bucket of each rank under a key of its own. What `legacy` and `buckets` say of these files holds here, too.

Source: as in `legacy` and `buckets`; megatron-core 0.16.1 `optimizer/distrib_optimizer.py`
(`load_parameter_state_from_dp_zero` and `load_parameter_state_from_dp_reshardable` ask for equal lengths, and for the
types of parameters and gradients), `optimizer/optimizer.py` (`ChainedOptimizer.load_parameter_state`: the first
expert-parallel rank holds the states of all else).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from reshard.choices import CkptFormat, CommonStatePlace, OpaquePolicy, OptimizerSharding, RngPolicy
from reshard.errors import RequestError, listed, printable
from reshard.models.jobs import ConvertRequest
from reshard.options import MegatronOptions
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.dcp_files.shards import AnyEntry, RunsEntry, ValueEntry
from reshard_engine.formats.megatron.buffers import LayoutError
from reshard_engine.formats.megatron.common import GROUPS, read_groups, written_items
from reshard_engine.formats.megatron.legacy import LEGACY, MODEL_FILE, OPTIMIZER_FILE
from reshard_engine.formats.megatron.model import RANDOM, MegatronFacts
from reshard_engine.formats.megatron.names import Entry
from reshard_engine.formats.megatron.placement import Rank, Run
from reshard_engine.formats.megatron.ranks import (
    MASTERS,
    GradientBuffer,
    Held,
    LocalModels,
    WholePart,
    cut_at,
    with_extra_states,
)
from reshard_engine.formats.megatron.writer import NO_OPTIMIZER, Layout, TorchDistWriter
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PDict,
    PList,
    PRuns,
    PTuple,
    mapping_items,
    mapping_of,
    namespace_items,
    ordered_dict,
    sequence_items,
)
from reshard_engine.tensors.dtypes import FLOAT32
from reshard_engine.tensors.layout import TargetFile, TargetLayout
from reshard_engine.tensors.shard_map import LogicalTensor, ShardMap
from reshard_engine.tensors.views import View

_ARGS, _RANK = "args", "rank"
_PER_CHUNK, _PIPELINE_LAYOUT = "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout"
_FIX = (
    "say the arguments that are missing or differ (--megatron-args FILE), or choose another layout; --to megatron "
    "without --ckpt-format torch and dp_reshardable is for every layout"
)
_EXPERT = ".local_experts."
_STATES = ("param", "exp_avg", "exp_avg_sq")
"""The states that `distrib_optim.pt` has a place for, whatever the optimizer is."""


@dataclass(frozen=True, slots=True)
class RankedState:
    """Everything that the files of a run's ranks hold."""

    checkpoint: Checkpoint
    models: LocalModels
    common: Mapping[str | int, Node]
    """The run's state without its optimizer, under Megatron's keys."""
    optimizers: Sequence[Node]
    """The dict of each of a rank's optimizers, with its param groups; empty without an optimizer."""
    random_states: Mapping[tuple[int, ...], Node]
    """Random states of the source's ranks, in the order of its ranks; empty for none."""
    plain: bool = False
    """True for a run whose optimizer is not distributed."""
    extra_states: Mapping[str, Node] = field(default_factory=dict[str, Node])
    """Extra states of modules by their names in the whole model; all others are None."""

    def random_state(self, rank: Rank) -> Node:
        """The random states of a rank: those of source rank r mod N; None for none."""
        states = [self.random_states[place] for place in sorted(self.random_states)]
        return states[(rank.stage * self.models.run.tensor + rank.tensor) % len(states)] if states else None

    def args(self, rank: Rank) -> Node:
        """The arguments, with the number of the first rank that holds these parts, where they have one."""
        node: Node = self.common.get(_ARGS)
        items, run = namespace_items(node), self.models.run
        if _RANK not in items or run.data_ranks is None:
            return node
        # Expert-parallel ranks are the inner ones of data-parallel ranks.
        number = (rank.stage * run.data_ranks + rank.expert) * run.tensor + rank.tensor
        return replace(node, state=mapping_of({**items, _RANK: number}))


# The run that loads the files.


def target_run(facts: MegatronFacts, request: ConvertRequest) -> dict[str | int, Node]:
    """The arguments that a layout changes, by name.

    Args:
        facts: The facts of the source, with the arguments that the user says.
        request: The request. The data-parallel ranks of its layout are those of context parallelism, too.

    Raises:
        RequestError: `request.invalid` for a layout that no run has.
    """
    args, number, layout = facts.common.args, facts.common.number, request.layout
    if layout.dp is None:
        raise RequestError("request.invalid", "files for one layout need the data-parallel ranks", fix="add --dp N")
    chunks, context = layout.vpp, number("context_parallel_size") or 1
    if chunks is not None and layout.pp == 1:
        raise RequestError("request.invalid", "--virtual-pipeline: there is one pipeline stage", fix="add --pp N")
    if layout.dp % context:
        raise RequestError(
            "request.invalid",
            f"--dp {layout.dp}: ranks of data and context parallelism, and the arguments say {context} of the latter",
            fix="choose another --dp, or say context_parallel_size in --megatron-args",
        )
    before = number("tensor_model_parallel_size")
    experts = number("expert_tensor_parallel_size") or before
    found: dict[str | int, Node] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "data_parallel_size": layout.dp // context,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.tp if experts == before else experts,
        "virtual_pipeline_model_parallel_size": chunks,
        "world_size": layout.world_size,
        "ckpt_format": request.options.of(MegatronOptions).ckpt_format.value,
    }
    if args.get(_PER_CHUNK) is not None:
        layers = number("num_layers")
        found[_PER_CHUNK] = None if chunks is None or layers is None else layers // (layout.pp * chunks)
    if layout.pp == 1 and args.get(_PIPELINE_LAYOUT) is not None:
        found[_PIPELINE_LAYOUT] = None
    if request.vocab_divisor is not None:
        found["make_vocab_size_divisible_by"] = request.vocab_divisor
    return found


def _saved_name(state: str) -> str:
    return "param" if state == MASTERS else state


def _of_types(buffer: GradientBuffer) -> PTuple:
    """The types of a buffer's parameters and gradients, by which Megatron finds it."""
    return PTuple((Global("torch", buffer.dtype), Global("torch", buffer.gradients)))


def legacy_files(state: RankedState, *, opaque: OpaquePolicy) -> list[TargetFile]:
    """All files, those of models last: without its own no rank's loader goes on.

    Raises:
        LayoutError: The run's arguments do not say what a rank holds, or the files have no place for a state.
    """
    trees = [tree for rank in state.models.run.ranks() for tree in _trees(state, rank)]
    # Numbers of parts follow those of the source's tensors, and all parts are known only now.
    shard_map = TargetLayout((), None, parts=tuple(state.models.parts)).map_over(state.checkpoint.shard_map)
    files = [_file(name, node, shard_map, opaque) for name, node in trees]
    return sorted(files, key=lambda file: file.commit)


def _file(name: str, node: Node, shard_map: ShardMap, opaque: OpaquePolicy) -> TargetFile:
    file = name.rpartition("/")[2]
    template, slots = tree_template(file.removesuffix(".pt"), node, shard_map, opaque=opaque)
    return TargetFile(name, template, slots, commit=file == MODEL_FILE)


def _trees(state: RankedState, rank: Rank) -> Iterator[tuple[str, Node]]:
    directory = rank.directory(state.models.run)
    if state.optimizers and not state.plain:
        yield f"{directory}/{OPTIMIZER_FILE}", _vectors(state.models, rank)
    yield f"{directory}/{MODEL_FILE}", _model(state, rank)


def _model(state: RankedState, rank: Rank) -> Node:
    run = state.models.run
    chunks = state.models.chunks(rank)
    models: dict[str | int, Node] = {}
    for at, held in enumerate(chunks):
        last = (rank.stage, at) == (run.pipeline - 1, run.chunks - 1)
        models["model" if run.chunks == 1 else f"model{at}"] = _entries(held, state.extra_states, last=last)
    found: dict[str | int, Node] = {**state.common, **models}
    if _ARGS in found:
        found[_ARGS] = state.args(rank)
    if state.optimizers:
        made = state.optimizers
        if state.plain:
            made = [_plain(state.models, rank, node, of_experts=at == 1) for at, node in enumerate(made)]
        found["optimizer"] = made[0] if len(made) == 1 else PList([*made])
    if (random := state.random_state(rank)) is not None:
        found[RANDOM] = random
    return mapping_of(found)


def _entries(chunk: Sequence[Held], extra: Mapping[str, Node], *, last: bool) -> Node:
    by_key = {held.key: held for held in chunk}
    found: dict[str, Node] = {}
    before = ""
    for key, of_module in with_extra_states([*by_key], last=last):
        if not of_module:
            found[key] = PRuns(by_key[key].dtype.name, by_key[key].shape, by_key[key].weight)
            before = by_key[key].name.rpartition(".")[0]
        else:
            found[key] = extra.get(_extra_name(key, before))
    return ordered_dict(found)


def _extra_name(key: str, before: str) -> str:
    """The name of an extra state in the whole model.

    Args:
        key: Its key in the rank's model.
        before: The module, in the whole model, of the tensor before it.
    """
    module, name = key.rpartition(".")[0::2]
    same = before.endswith(f".{module.rpartition('.')[2]}") and (_EXPERT in before) == (_EXPERT in module)
    return f"{before if same else module}.{name}"


def _vectors(models: LocalModels, rank: Rank) -> Node:
    if models.run.experts == 1:
        return _of_optimizer(models.buffers(rank))
    dense = None if rank.expert else _of_optimizer(models.buffers(rank))
    return PList([dense, _of_optimizer(models.buffers(rank, of_experts=True))])


def _of_optimizer(buffers: Sequence[GradientBuffer]) -> Node:
    found: dict[str | int, Node] = {"buckets_coalesced": True}
    for number, buffer in enumerate(buffers):
        states = [_saved_name(state) for state in buffer.states()]
        if set(states) != {*_STATES}:
            raise LayoutError(
                f"the parameters have the states {listed(states)}, and {OPTIMIZER_FILE} has a place for "
                f"{listed(list(_STATES))} alone"
            )
        stored = sum(bucket.unpadded for bucket in buffer.buckets)
        vectors: dict[str | int, Node] = {}
        for name in _STATES:
            state = MASTERS if name == "param" else name
            runs = tuple(run for at in range(len(buffer.buckets)) for run in buffer.runs(at, state))
            vectors[name] = PRuns(FLOAT32.name, (stored,), runs)
        found[number] = PDict([_of_types(buffer), mapping_of({**vectors, "numel_unpadded": stored})])
    return mapping_of(found)


# An optimizer that is not distributed: its parameters are numbered by param groups.
#
# Source: megatron-core 0.16.1 `optimizer/optimizer.py` (`Float16OptimizerWithFloat16Params.state_dict`,
# `FP32Optimizer.state_dict`), torch 2.13.0 `optim/optimizer.py` (`state_dict`).


def _plain(models: LocalModels, rank: Rank, optimizer: Node, *, of_experts: bool) -> Node:
    items = mapping_items(optimizer, what="optimizer")
    inner = mapping_items(items["optimizer"], what="optimizer")
    groups = [mapping_items(g, what=GROUPS) for g in sequence_items(inner[GROUPS], what=GROUPS)]
    held = [
        h for chunk in models.chunks(rank) for h in chunk if h.trained and models.run.is_shared(h.name) != of_experts
    ]
    common = replace(models.run.common, items={"optimizer": optimizer})
    found = read_groups(common, {h.key: len(h.shape) for h in held})
    if found.undecided:
        raise LayoutError(found.undecided[0].text)
    members = [[h for h in held if found.group[h.key] == number] for number in range(len(groups))]
    first = [sum(map(len, members[:number])) for number in range(len(members))]
    states: dict[str | int, Node] = {}
    for begin, group in zip(first, members, strict=True):
        for number, one in enumerate(group, begin):
            kept = {s: PRuns(FLOAT32.name, one.shape, runs) for s, runs in one.states.items() if s != MASTERS}
            states[number] = mapping_of({**kept})
    made = [
        mapping_of({**group, "params": PList([*range(begin, begin + len(own))])})
        for group, begin, own in zip(groups, first, members, strict=True)
    ]
    state = mapping_of({"state": mapping_of(states), GROUPS: PList([*made])})
    if all(h.dtype is FLOAT32 for h in held):
        return state
    masters = [
        PList([PRuns(FLOAT32.name, h.shape, h.states[MASTERS]) for h in own if h.dtype is not FLOAT32])
        for own in members
    ]
    return mapping_of({**items, "optimizer": state, "fp32_from_fp16_params": PList([*masters])})


# `dp_reshardable`.


def model_entries(models: LocalModels, entry_of: Callable[[str], Entry]) -> Iterator[AnyEntry]:
    """The model's own tensors in the order of the model, in the chunks of tensor-parallel ranks.

    The chunks show how parameters are cut, which the vectors of buckets do not.

    Args:
        models: The parts of all ranks.
        entry_of: The key of a parameter, and its place along the first axes of that key's tensor.

    Raises:
        LayoutError: As `LocalModels.chunks`, or parameters of one key differ in shape or type.
    """
    found: dict[str, dict[tuple[int, ...], WholePart]] = {}
    for part in models.whole_parts():
        entry = entry_of(part.name)
        found.setdefault(entry.name, {})[entry.index] = part
    for key, members in found.items():
        front = tuple(max(at) + 1 for at in zip(*members, strict=True))
        kinds = {(part.dtype.name, part.shape) for part in members.values()}
        if len(kinds) > 1 or len(members) != prod(front):
            raise LayoutError(f"the {len(members)} parameters of {printable(key)} differ in shape or type")
        first = next(iter(members.values()))
        ones = (1,) * len(front)
        chunks = [
            ((*index, *offsets), (*ones, *sizes), runs)
            for index, part in members.items()
            for offsets, sizes, runs in part.chunks
        ]
        yield RunsEntry((key,), first.dtype, (*front, *first.shape), tuple(chunks))


def bucket_entries(models: LocalModels, optimizers: Sequence[Node]) -> Iterator[AnyEntry]:
    """The vectors of all buckets of all ranks, and beside them the param groups and the lengths of buckets.

    Args:
        models: The parts of all ranks.
        optimizers: As in `RankedState`.

    Raises:
        LayoutError: As `LocalModels.buffers`.
    """
    for owner in _owners(models):
        for key, value in mapping_items(optimizers[owner.chained], what="optimizer").items():
            yield _object(owner, str(key), value)
        for key in ("per_bucket_numel", "per_bucket_numel_unpadded"):
            yield _object(owner, key, PList([_lengths(b, unpadded=key.endswith("unpadded")) for b in owner.buffers]))
        for number, buffer in enumerate(owner.buffers):
            head = f"{owner.head}gbuf_idx_{number}.dtype_(torch.{buffer.dtype}, torch.{buffer.gradients})"
            for bucket in range(len(buffer.buckets)):
                for state in buffer.states():
                    key = f"{head}.bucket_idx_{bucket}.{_saved_name(state)}"
                    yield _vector(key, buffer, bucket, state, owner.ranks)


@dataclass(frozen=True, slots=True)
class _Owner:
    """A model-parallel rank of one of the chained optimizers."""

    head: str
    """The text with which its keys begin."""
    chained: int
    buffers: Sequence[GradientBuffer]
    ranks: int
    """The data-parallel ranks that share its buffers."""


def _object(owner: _Owner, name: str, value: Node) -> ValueEntry:
    return ValueEntry((f"{owner.head}{name}/shard_0_1",), PList([value]))


def _lengths(buffer: GradientBuffer, *, unpadded: bool) -> Node:
    return PDict([_of_types(buffer), PList([b.unpadded if unpadded else b.numel for b in buffer.buckets])])


def _vector(key: str, buffer: GradientBuffer, bucket: int, state: str, ranks: int) -> RunsEntry:
    """One state of a bucket, in chunks as the ranks of the run would save them."""
    edges = buffer.edges(bucket, ranks)
    cuts = zip(pairwise(edges), cut_at(buffer.runs(bucket, state), edges), strict=True)
    chunks = tuple(((begin,), (end - begin,), runs) for (begin, end), runs in cuts)
    return RunsEntry((key,), FLOAT32, (buffer.buckets[bucket].unpadded,), chunks)


def _owners(models: LocalModels) -> Iterator[_Owner]:
    several = models.run.experts > 1
    for chained, of_experts in enumerate((False, True) if several else (False,)):
        prefix = f"chained_{chained}." if several else ""
        ranks = [rank for rank in models.run.ranks() if of_experts or not rank.expert]
        for number, rank in enumerate(ranks):
            head = f"{prefix}optimizer.distributed.dp_group_idx_{number}."
            buffers = models.buffers(rank, of_experts=of_experts)
            yield _Owner(head, chained, buffers, models.data_ranks(of_experts=of_experts))


# The writer.


class MegatronWriter:
    """Writes distributed checkpoints, and files for one layout."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Lay out every file.

        Raises:
            RequestError: `request.invalid` for options that contradict one another, or for a layout that no run has;
                `request.unsatisfiable` for a source that the files have no place for, or that does not say what decides
                the places in them.
        """
        options = request.options.of(MegatronOptions)
        directories = options.ckpt_format is CkptFormat.TORCH
        buckets = options.optimizer_sharding is OptimizerSharding.DP_RESHARDABLE
        if not directories and not buckets:
            if request.layout.vpp is not None:
                raise RequestError(
                    "request.invalid",
                    "--virtual-pipeline: every layout loads such files",
                    fix="leave it out, or --ckpt-format torch, or --optimizer-sharding dp_reshardable",
                )
            return TorchDistWriter().lay_out(checkpoint, request, name=name)
        if request.dtype is not None or request.exclude_frozen:
            raise RequestError(
                "request.invalid",
                "files for one layout hold all parameters as the run has them: no --dtype, no --exclude-frozen",
                fix="leave --dtype and --exclude-frozen out",
            )
        try:
            return (_Directories if directories else _Buckets)(checkpoint, request).target(name)
        except LayoutError as error:
            raise RequestError("request.unsatisfiable", str(error), fix=_FIX) from error


class _OneLayout(Layout):
    """Files for one layout."""

    def __init__(self, checkpoint: Checkpoint, request: ConvertRequest) -> None:
        super().__init__(checkpoint, request)
        self._changes = target_run(self._facts, self._request)
        common = self._facts.common
        run = Run.of(replace(common, args={**common.args, **self._changes}))
        self._ranks = LocalModels(
            checkpoint, run, divisor=self._request.vocab_divisor, saved_order=checkpoint.format == LEGACY
        )
        if (rows := self._ranks.vocabulary_rows) is not None:
            self._changes["padded_vocab_size"] = rows
        self._warn_of_random_states()

    def _warn_of_random_states(self) -> None:
        held = len(self._facts.random_states)
        if held and held != self._layout.tp * self._layout.pp and self._request.rng is RngPolicy.KEEP:
            self._warnings.append("random states do not fit other ranks: rank r gets those of source rank r mod N")

    def _parallel_sizes(self) -> dict[str, Node]:
        return {str(name): value for name, value in self._changes.items()}

    def _parts(self) -> Sequence[tuple[LogicalTensor, View]]:
        return self._ranks.parts

    def _stages_and_ranks(self, held: Iterable[tuple[int, ...]]) -> tuple[int, int]:
        return self._layout.pp, self._layout.tp

    def _optimizers(self) -> list[dict[str | int, Node]]:
        found, apart = super()._optimizers(), self._layout.ep > 1
        if found and len(found) != 1 + apart:
            raise LayoutError(f"the param groups are those of {len(found)} optimizers, and a rank has {1 + apart}")
        return found


class _Buckets(_OneLayout):
    """`torch_dist` with the optimizer in buckets."""

    def _model(self) -> Iterator[AnyEntry]:
        yield from model_entries(self._ranks, self._facts.rules.entry_of)

    def _optimizer(self) -> Iterator[AnyEntry]:
        if optimizers := self._optimizers():
            yield from bucket_entries(self._ranks, [mapping_of(one) for one in optimizers])

    def _optimizer_dict(self, held: Mapping[str | int, Node]) -> Node:
        return mapping_of({"param_state_sharding_type": self._sharding.value})


class _Directories(_OneLayout):
    """Directories of ranks."""

    def target(self, name: str) -> TargetLayout:
        if self._options.optimizer_sharding not in (None, OptimizerSharding.NONE):
            text = "--optimizer-sharding: directories of ranks have vectors, or none for a plain optimizer"
            raise RequestError("request.invalid", text, fix="leave it out")
        if self._options.common_state is not CommonStatePlace.FILE:
            raise RequestError("request.invalid", "--common-state: for --ckpt-format torch_dist", fix="leave it out")
        plain, optimizers = self._sharding is OptimizerSharding.NONE, [mapping_of(one) for one in self._optimizers()]
        changes = self._parallel_sizes() | ({"use_distributed_optimizer": not plain} if optimizers else {})
        if not optimizers:
            self._warnings.append(NO_OPTIMIZER)
        state = RankedState(
            self._checkpoint,
            self._ranks,
            written_items(self._facts.common, changes, self._checkpoint.counters.steps),
            optimizers,
            self._kept_random_states(),
            plain,
            self._facts.extra_states,
        )
        files = legacy_files(state, opaque=self._request.opaque)
        pointer, left = self._pointer(name), tuple(self._left)
        return TargetLayout(tuple(files), pointer, tuple(self._warnings), tuple(self._ranks.parts), left)
