"""The reader of native checkpoints: it sorts the files, refuses what it cannot read, and joins the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from reshard.choices import OpaquePolicy
from reshard.errors import SourceError, counted, printable
from reshard_engine.checkpoint import Agreement, Buffer, Checkpoint, OptimizerState, Parameter, Question, Undecided
from reshard_engine.containers.source_file import SourceFile, open_all
from reshard_engine.containers.torch_file import TorchFile, add_whole_tensor, open_torch_file
from reshard_engine.formats.carried import UNKNOWN, NotCarriedKeys
from reshard_engine.formats.deepspeed.config import decoupled_weight_decay, zero_options
from reshard_engine.formats.deepspeed.facts import DeepSpeedFacts, own_entries, run_fields, split_groups
from reshard_engine.formats.deepspeed.files import (
    CONFIG,
    FROZEN_FRAGMENTS,
    FROZEN_SHAPES,
    FUSED_LAYERS,
    FUSED_LAYERS_LEGACY,
    INFO,
    PARAM_SHAPES,
    RNG_KEYS,
    TIED,
    RankFiles,
    looks_like_deepspeed,
    sort_files,
)
from reshard_engine.formats.deepspeed.native.slices import (
    ModelTrees,
    ModuleTensors,
    Slice,
    add_slice,
    module_names,
    weight_of,
)
from reshard_engine.formats.deepspeed.parallel.ranks import Joiner, degrees, layer_extra_states, layer_of, layer_tensors
from reshard_engine.formats.deepspeed.parallel.rules import AVERAGED
from reshard_engine.formats.deepspeed.parallel.tensor import rules_of
from reshard_engine.formats.deepspeed.rank_files import (
    MAX_WORLD,
    ModelStates,
    RankOpener,
    RankStates,
    States,
    module_entries,
    module_tensors,
    parse_model_states,
    parse_rank_states,
)
from reshard_engine.formats.deepspeed.stage0 import assemble_stage0
from reshard_engine.formats.deepspeed.zero3 import FOLDER, with_swapped
from reshard_engine.formats.format import ReadOptions, refuse_choices
from reshard_engine.pickles.nodes import Node, PTensor, PTensorRef
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import TensorsAt, TreeDifference, compare_trees, is_extra_state
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing
from reshard_engine.tensors.shard_map import ShardMapBuilder

# Buffers and extra states of modules: every tensor-parallel rank holds a copy, and no rule cuts them.
#
# The checkpoint takes the first rank's copy. Values that are not tensors are compared at once, tensors before writing.


class Copies:
    """Collects the pairs of tensors that must be equal."""

    def __init__(self, builder: ShardMapBuilder) -> None:
        """Share the builder of the checkpoint."""
        self._builder = builder
        self.agreements: list[Agreement] = []

    def compare(self, name: str, copies: Sequence[int], *, advisory: bool) -> None:
        """Note that the ranks' copies of a tensor should be equal.

        Args:
            name: Its name.
            copies: Each tensor-parallel rank's.
            advisory: True if a difference is only reported.

        Raises:
            SourceError: `source.unsupported` if their shapes or types differ.
        """
        first, *others = (self._builder.tensors[n] for n in copies)
        if any((o.shape, o.dtype) != (first.shape, first.dtype) for o in others):
            raise _differing(name)
        self.agreements += [
            Agreement(name, "value", copies[0], n, f"tensor-parallel rank {rank}", advisory=advisory)
            for rank, n in enumerate(copies[1:], start=1)
        ]

    def extra_states(
        self,
        tables: Sequence[Mapping[str, tuple[TorchFile, Node]]],
        trees: ModelTrees,
        policy: OpaquePolicy,
        noted: NotCarriedKeys,
    ) -> dict[str, Node]:
        """The extra states of all tensor-parallel ranks, by name.

        Args:
            tables: Each rank's, with the files that hold them.
            trees: Registers their tensors.
            policy: Under `drop`, extra states that differ are left out.
            noted: Collects the names of extra states that are left out.

        Raises:
            SourceError: `source.unsupported` if they differ and are not to be dropped.
        """
        found: dict[str, Node] = {}
        for name in dict.fromkeys(n for table in tables for n in table):
            copies = [trees.carried(table[name][1], table[name][0]) for table in tables if name in table]
            try:
                self._compare_trees(name, copies, ranks=len(tables))
            except SourceError:
                if policy is not OpaquePolicy.DROP:
                    raise
                noted.add(f"module.{name}", "tensor-parallel ranks hold different extra states")
                continue
            found[name] = copies[0]
        return found

    def _compare_trees(self, name: str, copies: Sequence[Node], *, ranks: int) -> None:
        if len(copies) != ranks:
            raise _differing(name)
        for copy in copies[1:]:
            for difference in compare_trees(copies[0], copy, name):
                if not isinstance(difference, TensorsAt):
                    raise _differing(difference.path)
                assert isinstance(difference.a, PTensorRef)
                assert isinstance(difference.b, PTensorRef)
                self.compare(difference.path, [difference.a.index, difference.b.index], advisory=False)


def _differing(name: str) -> SourceError:
    return SourceError(
        "source.unsupported",
        f"{printable(name)} differs between tensor-parallel ranks, and nothing says how to put its values together",
        fix="--opaque drop leaves such extra states out and names them; their modules then start with fresh ones",
    )


# Entries that the files of several ranks should hold alike: a checkpoint keeps those of the first rank.
#
# DeepSpeed has every rank write its own copy of counters, hyper-parameters and client state. Where a rank's copy
# differs or has more entries, the report names the difference: a target has no place for it.
#
# Source: deepspeed 0.19.8 `runtime/engine.py` (`_save_checkpoint`: ZeRO-3 and every model-parallel rank save all of
# `_common_checkpoint_state` and of the client's state), `runtime/pipe/engine.py`.

OTHER = "ranks hold different values: the target gets the first rank's"
_OWN = frozenset(
    {
        *("module", "optimizer", PARAM_SHAPES, FROZEN_SHAPES, FROZEN_FRAGMENTS, "shared_params"),
        *("buffer_names", FUSED_LAYERS, FUSED_LAYERS_LEGACY, *RNG_KEYS),
    }
)
"""Entries that differ by rank on purpose. The reader takes them from every rank where they matter."""
_OPEN_AT_ONCE = 16
_OF_PROCESS = frozenset({"args.rank", "args.local_rank", "args.curr_ckpt_iteration"})
"""Megatron's arguments that say which process a rank was."""
_PLACEMENT = f"{INFO}.{FUSED_LAYERS}"
"""The start of paths that repeat the entry `ds_autoep_layers`: they say which experts a rank holds."""


def note_models(models: Sequence[Sequence[ModelStates]], noted: NotCarriedKeys) -> None:
    """Compare the model states of all ranks, by model-parallel rank, with those of the first."""
    first = models[0][0]
    mine = _shared_entries(first)
    others = [m for group in models for m in group if m is not first]
    tensors = [d for d in _differences(mine, mine) if isinstance(d, TensorsAt)] if others else []
    for other in others:
        files = (first.torch_file, other.torch_file)
        # One pickle for both: only what tensors hold can differ.
        alike = other.entries is first.entries
        found = _unlike(tensors if alike else _differences(mine, _shared_entries(other)), files)
        told = (p for p in found if p not in _OF_PROCESS and not p.startswith(_PLACEMENT))
        noted.add_all(told, OTHER, file=other.torch_file.file.name)
    for group in models:
        for other in group[1:]:
            noted.add_all(_module_differences(group[0], other), OTHER, file=other.torch_file.file.name)


def note_copies(first: ModelStates, files: Sequence[SourceFile], opener: RankOpener, noted: NotCarriedKeys) -> None:
    """Compare model states with those of a first rank, for files from which nothing else is needed.

    Args:
        first: Model states of the first data-parallel rank of a model-parallel rank.
        files: The files of the other data-parallel ranks. A few are open at a time.
        opener: Opens the files.
        noted: Collects the paths of entries that differ.
    """
    for begin in range(0, len(files), _OPEN_AT_ONCE):
        chunk = files[begin : begin + _OPEN_AT_ONCE]
        others = open_all(chunk, lambda f: opener.states(f, parse_model_states))
        note_models([[first, *others]], noted)


def note_optimizers(states: Sequence[RankStates], noted: NotCarriedKeys) -> None:
    """Compare the param groups and other entries of all ranks' optimizer files with those of the first rank."""
    first = states[0]
    for other in states[1:]:
        files = (first.torch_file, other.torch_file)
        found = list(_unlike(_differences(first.extras, other.extras), files))
        for index, (a, b) in enumerate(zip(first.param_groups, other.param_groups, strict=False)):
            found += _unlike(_differences(_without_params(a), _without_params(b), f"param_groups[{index}]"), files)
        noted.add_all(found, OTHER, file=other.torch_file.file.name)


def _shared_entries(model: ModelStates) -> dict[str | int, Node]:
    return {k: v for k, v in model.entries.items() if k not in _OWN}


def _without_params(group: Mapping[str | int, Node]) -> dict[str | int, Node]:
    return {k: v for k, v in group.items() if k != "params"}


def _differences(
    mine: Mapping[Any, Node], theirs: Mapping[Any, Node], prefix: str = ""
) -> Iterator[TreeDifference | TensorsAt]:
    for key in dict.fromkeys((*mine, *theirs)):
        path = f"{prefix}.{key}" if prefix else str(key)
        if key in mine and key in theirs:
            yield from compare_trees(mine[key], theirs[key], path)
        else:
            yield TreeDifference(path, None, None)


def _unlike(found: Iterable[TreeDifference | TensorsAt], files: tuple[TorchFile, TorchFile]) -> Iterator[str]:
    """The paths of entries that differ. Tensors differ if their metadata or checksums do."""
    return (d.path for d in found if not (isinstance(d, TensorsAt) and _same_tensor(d.a, d.b, files)))


def _module_differences(first: ModelStates, other: ModelStates) -> Iterator[str]:
    """Entries of two data-parallel ranks' state dicts that differ: buffers, extra states, and what hooks add."""
    files = (first.torch_file, other.torch_file)
    for name in dict.fromkeys((*first.module, *other.module)):
        a, b = first.module.get(name), other.module.get(name)
        # Placeholders of sharded parameters are empty.
        if a is None or b is None or ((a.numel or b.numel) and not _same_tensor(a, b, files)):
            yield f"module.{name}"
    yield from _unlike(_differences(first.extra_states, other.extra_states, "module"), files)


def _same_tensor(a: Node, b: Node, files: tuple[TorchFile, TorchFile]) -> bool:
    """True if two tensors are equal by metadata: by shape, type, and the checksums of their storages."""
    if not (isinstance(a, PTensor) and isinstance(b, PTensor)):
        return False
    if (a.shape, a.dtype, a.offset, a.stride) != (b.shape, b.dtype, b.offset, b.stride):
        return False
    sums = [_crc32(t, f) for t, f in zip((a, b), files, strict=True)]
    return None in sums or sums[0] == sums[1]


def _crc32(tensor: PTensor, file: TorchFile) -> int | None:
    """The checksum of a tensor's storage; None where the file keeps none."""
    record = file.storages.get(tensor.storage.key)
    return None if record is None else record.crc32


# Joins the slices of all model-parallel ranks to one checkpoint, and notes the tensors that must be equal.


@dataclass(frozen=True)
class ParsedRun:
    """All parsed files of a tag directory, by model-parallel rank."""

    states: Sequence[Sequence[RankStates]]
    models: Sequence[Sequence[ModelStates]]
    pp: int
    tp: int
    layers: Mapping[tuple[int, int], TorchFile] = field(default_factory=dict[tuple[int, int], TorchFile])
    experts: Mapping[tuple[int, int, int], TorchFile] = field(default_factory=dict[tuple[int, int, int], TorchFile])
    others: tuple[str, ...] = ()
    """Names of files in the directory that DeepSpeed does not write."""
    noted: NotCarriedKeys = field(default_factory=NotCarriedKeys)
    """Collects the keys that this reader does not know."""

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """Every file, once."""
        parsed = [f.torch_file for group in (*self.states, *self.models) for f in group]
        opened = (f.file for f in (*parsed, *self.layers.values(), *self.experts.values()))
        swapped = (f for group in self.states for s in group for f in s.swapped.values())
        return tuple(dict.fromkeys((*opened, *swapped)))


_NO_ORDER = Undecided(
    Question.ORDER,
    "its ds_config is a path, and the files do not show whether round_robin_gradients was on, so that the order of the "
    "optimizer's parameters is unknown",
    "load it once on as many ranks, with the config as a dict, and save it again",
)


def assemble(
    run: ParsedRun, *, url: str, tag: str | None, ledger: OpaqueLedger, rules: Mapping[str, object] | None
) -> Checkpoint:
    """The checkpoint of a ZeRO run from its parsed files.

    Raises:
        SourceError: `checkpoint.*` if the files do not add up, `rules.*` if the rules do not fit them.
    """
    return _Assembly(run, rules).checkpoint(url=url, tag=tag, ledger=ledger)


class _Assembly:
    """One checkpoint being put together."""

    def __init__(self, run: ParsedRun, rules: Mapping[str, object] | None) -> None:
        self._run = run
        self._files = run.files
        self._number = {f: i for i, f in enumerate(self._files)}
        self._builder = ShardMapBuilder()
        pairs = zip(run.states, run.models, strict=True)
        self._slices = [add_slice(self._builder, s, m, self._number) for s, m in pairs]
        self._rules, affine = rules_of(self._slices[0].model, rules)
        self._joiner = Joiner(self._builder, self._rules, affine, tp=run.tp)
        self._trained = self._joiner.trained(self._slices)
        self._modules = [self._module_of(s) for s in self._slices]
        self._unregistered = {n for m in self._modules for n in m.unregistered}
        self._copies = Copies(self._builder)
        self._not_carried = run.noted
        self._note_not_carried()

    def _note_not_carried(self) -> None:
        noted, run = self._not_carried, self._run
        states = [s for group in run.states for s in group]
        for state in states:
            noted.add_all(state.unread, UNKNOWN, file=state.torch_file.file.name)
        note_optimizers(states, noted)
        note_models(run.models, noted)
        for name in run.others:
            noted.add(name, "no file of DeepSpeed's", file=name)
        for file in run.experts.values():
            left = (e.name for e in module_entries(file.root, file.file.name) if not isinstance(e.value, PTensor))
            noted.add_all(left, "an entry of an expert's file that is not a tensor", file=file.file.name)

    def _module_of(self, piece: Slice) -> ModuleTensors:
        owned = {p.fqn: p.shape for p in piece.trained}
        sharded = piece.states[0].stage == 3
        return ModuleTensors(self._builder, piece.models, self._number, owned=owned, sharded=sharded)

    def checkpoint(self, *, url: str, tag: str | None, ledger: OpaqueLedger) -> Checkpoint:
        """The checkpoint of all parts."""
        run, piece = self._run, self._slices[0]
        first, model, module = piece.states[0], piece.model, self._modules[0]
        weights, loose, buffers = self._weights()
        parameters = [
            replace(
                p,
                weight=weight_of(self._builder, weights, p.fqn, p.shape),
                layer=self._layer_of(p.fqn),
                padding=self._padding_of(p),
                frozen_late=any(p.fqn in m.frozen_late for m in self._modules),
            )
            for p in self._trained
        ]
        loose = [replace(p, layer=self._layer_of(p.fqn), padding=self._padding_of(p)) for p in loose]
        held = {p.fqn: p.weight for p in (*parameters, *loose) if p.weight is not None} | buffers
        # In the order of the model; param groups have another order.
        numbers = {n: held[n] for n in dict.fromkeys((*weights, *held)) if n in held}
        trees = ModelTrees(self._builder, self._number)
        extra_states = self._copies.extra_states(self._extra_tables(), trees, ledger.policy, self._not_carried)
        groups, params = split_groups(trees.carried(n, first.torch_file) for n in first.param_group_nodes)
        beside = {k: trees.carried(v, first.torch_file) for k, v in first.extras.items()}
        rng = tuple(self._rng(trees))
        # A flat order that `round_robin_gradients` made fits the source's number of ranks only.
        order = tuple(k for k in model.entries if k != PARAM_SHAPES or not self._reordered)
        taken = {*model.entries} - {*order} | {*(rng[0] if rng else ())}
        entries = trees.model_state(model, numbers, module, extra_states=extra_states, without=taken)
        return Checkpoint(
            url=url,
            tag=tag,
            format="deepspeed-bf16-optimizer" if first.bf16_optimizer else f"deepspeed-zero{first.stage}",
            framework_version=model.version,
            world={
                "dp": len(run.states[0]),
                "tp": run.tp,
                "pp": run.pp,
                **({"ep": piece.ep} if run.experts or piece.fused.placements else {}),
            },
            files=self._files,
            parameters=(*parameters, *loose),
            buffers=tuple(Buffer(n, t, registered=n not in self._unregistered) for n, t in buffers.items()),
            shared=module.shared,
            optimizer=OptimizerState(
                groups,
                decoupled_weight_decay(model.entries.get(CONFIG)),
                tuple(sorted(self._joiner.rank_numbers.union(*(s.rank_numbers for s in self._slices)))),
                tuple(dict.fromkeys(name for s in self._slices for name in s.unread)),
            ),
            **run_fields(entries, rng),
            module_names=module_names(model.paths, numbers, extra_states),
            extra_states=extra_states,
            not_carried=(*self._not_carried.found(), *module.not_carried()),
            shard_map=self._builder.build(),
            foreign_globals=tuple(sorted(ledger.foreign)),
            warnings=(*module.warnings, *self._warnings(first)),
            agreements=(
                *self._joiner.agreements,
                *self._copies.agreements,
                *(a for s in self._slices for a in s.agreements),
                *self._roundings(parameters),
            ),
            facts=DeepSpeedFacts(
                zero_stage=first.stage,
                bf16_optimizer=first.bf16_optimizer,
                stage_layers=self._stage_layers(),
                vocab_divisor=self._rules.vocab_divisor if self._rules is not None else None,
                vocab_rows=self._joiner.vocab_rows,
                entries=own_entries(entries),
                order=order,
                module_paths=model.paths,
                optimizer_entries=beside,
                params=params,
                dealt=any(s.dealt for s in self._slices),
            ),
            undecided=(_NO_ORDER,) if any(s.unproven for s in self._slices) else (),
            unexplained=tuple(self._joiner.unexplained),
            frozen_left_out=any(m.leaves_out_frozen(first.stage) for s in self._slices for m in s.models),
        )

    def _extra_tables(self) -> list[dict[str, tuple[TorchFile, Node]]]:
        """Per tensor-parallel rank the entries of its state dicts that are not tensors, by name."""
        tp = self._run.tp
        tables: list[dict[str, tuple[TorchFile, Node]]] = [{} for _ in range(tp)]
        for mp, piece in enumerate(self._slices):
            for name, node in piece.model.extra_states.items():
                tables[mp % tp].setdefault(name, (piece.model.torch_file, node))
        for rank, table in layer_extra_states(self._run.layers).items():
            tables[rank % tp] |= table
        return tables

    def _padding_of(self, parameter: Parameter) -> Mapping[str, int]:
        return self._joiner.padding.get(parameter.fqn, {})

    def _layer_of(self, name: str) -> int | None:
        return layer_of(name, self._run.layers) if self._run.layers else None

    def _stage_layers(self) -> tuple[int, ...]:
        if not self._run.layers:
            return ()
        stages = [self._slices[first] for first in range(0, len(self._slices), self._run.tp)]
        own = [[self._layer_of(p.fqn) for p in s.trained if not p.fqn.startswith(TIED)] for s in stages]
        found = [min((n for n in layers if n is not None), default=-1) for layers in own]
        return tuple(found) if -1 not in found and found == sorted(set(found)) else ()

    def _rng(self, trees: ModelTrees) -> Iterator[Mapping[str, Node]]:
        """Random states, rank by rank, if the first rank has any."""
        models = [m for piece in self._slices for m in piece.models]
        keys = [k for k in RNG_KEYS if models[0].entries.get(k) is not None]
        for model in models if keys else ():
            yield {k: trees.carried(model.entries.get(k), model.torch_file) for k in keys}

    @property
    def _reordered(self) -> bool:
        return len(self._slices) > 1 or any(s.dealt or s.ep > 1 for s in self._slices) or bool(self._run.experts)

    def _warnings(self, first: RankStates) -> list[str]:
        found: list[str] = []
        if first.elastic:
            found.append(
                "elastic (list-form) optimizer states carry no hyper-parameters: they come from ds_config, "
                "so the learning rate is the configured one until a scheduler sets it at its next step"
            )
        if first.swapped:
            found.append(
                "the run kept optimizer states on NVMe: DeepSpeed restores neither moments nor steps from any "
                "checkpoint where offload_optimizer.device is nvme (0.19.8); resume with cpu or none"
            )
        if not any(first.states) and not self._slices[0].model.stepped:
            found.append("the checkpoint has no optimizer states: it was saved before the first step")
        if averaged := list(self._joiner.averaged):
            found.append(
                f"{counted(len(averaged), 'parameter is', 'parameters are')} the mean of {self._run.tp} "
                "tensor-parallel copies, as "
                f"{AVERAGED} says, weights and moments: where copies differ, the mean equals none of them "
                f"({', '.join(map(printable, averaged[:4]))}{', ...' if len(averaged) > 4 else ''})"
            )
        return found

    def _weights(self) -> tuple[dict[str, int], list[Parameter], dict[str, int]]:
        """Weights in the model's dtype by name, frozen parameters, and buffers: whole, wherever they are stored."""
        if len(self._slices) == 1 and self._rules is None and not self._run.layers and not self._run.experts:
            module = self._modules[0]
            return dict(module.weights), list(module.frozen_parameters), dict(module.buffers)
        tables = self._tables()
        names = [p.fqn for p in self._trained]
        own = set(names)
        buffer_names = {n for s in self._slices for n in s.model.buffer_names}
        weights: dict[str, int] = {}
        loose: list[Parameter] = []
        buffers: dict[str, int] = {}
        for name in dict.fromkeys(n for table in tables for n in table):
            parts = [table[name] for table in tables if name in table]
            if name in buffer_names:
                buffers[name] = parts[0]
                self._copies.compare(name, parts, advisory=True)
                continue
            if is_extra_state(name) or name in self._unregistered:
                buffers[name] = parts[0]
                self._unregistered.add(name)
                self._copies.compare(name, parts, advisory=False)
                continue
            if len(parts) != len(tables):
                raise SourceError(
                    "checkpoint.incomplete",
                    f"{printable(name)} is on {len(parts)} of {len(tables)} tensor-parallel ranks",
                )
            tensor, parameter = self._whole_weight(name, parts)
            if name in own:
                weights[name] = tensor
            else:
                loose.append(parameter)
        return weights, loose, buffers

    def _whole_weight(self, name: str, parts: Sequence[int]) -> tuple[int, Parameter]:
        shapes = [self._builder.tensors[t].shape for t in parts]
        shape, cut = self._joiner.shape_and_cut(name, shapes)
        tensor = self._joiner.joined(name, "weight", parts, cut, shape)
        return tensor, Parameter(name, self._builder.tensors[tensor].shape, None, tensor, cut=cut)

    def _tables(self) -> list[dict[str, int]]:
        """Per tensor-parallel rank the numbers of its model's tensors by name, over all stages and kinds of files."""
        tp = self._run.tp
        tables: list[dict[str, int]] = [{} for _ in range(tp)]
        for mp, module in enumerate(self._modules):
            table = tables[mp % tp]
            for found in (module.weights, module.frozen_numbers, module.buffers):
                for name, number in found.items():
                    table.setdefault(name, number)
        layers = layer_tensors(self._run.layers, [p.fqn for p in self._trained])
        for rank, found in layers.items():
            for name, (file, tensor) in found.items():
                tables[rank % tp].setdefault(name, self._whole(name, file, tensor))
        for (_, _, mp), file in self._run.experts.items():
            for name, tensor in module_tensors(file.root, printable(file.file.name)).items():
                tables[mp % tp].setdefault(name, self._whole(name, file, tensor))
        return [self._slices[0].fused.whole_weights(self._builder, table) for table in tables]

    def _whole(self, name: str, file: TorchFile, tensor: PTensor) -> int:
        return add_whole_tensor(self._builder, name, "weight", tensor, torch_file=file, file=self._number[file.file])

    def _roundings(self, parameters: Sequence[Parameter]) -> list[Agreement]:
        """Agreements that check the joined ranks: each weight in the model's dtype must be its rounded master."""
        if len(self._slices) == 1 and not self._run.experts:
            return []
        return [
            Agreement(p.fqn, "fp32", p.states["fp32"], p.weight, "the weight in the model's dtype", rounded=True)
            for p in parameters
            if p.weight is not None and "fp32" in p.states
        ]


# Opens and checks the files of all ranks.

_K = TypeVar("_K")


class DeepSpeedReader:
    """ZeRO-1, ZeRO-2, ZeRO-3 and BF16_Optimizer under data, tensor, pipeline and expert parallelism; stage 0."""

    family = "deepspeed"

    def recognises(self, listing: Listing) -> bool:
        """True if a file of the directory has a name that DeepSpeed gives."""
        return looks_like_deepspeed(listing)

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """The checkpoint in a tag directory.

        Raises:
            SourceError: As the functions that read the files of ranks and join them say.
        """
        files = sort_files(location.store, listing)
        if not files.optim:
            return self._read_stage0(location, files, options)
        refuse_choices(options.choices, f"{printable(location.url)} holds one model, and names its parameters")
        opener = RankOpener(options.ledger)
        noted = NotCarriedKeys()
        states, models = _read_ranks(files, opener, noted)
        if states[0][0].stage == 3 and FOLDER in listing.directories:
            states = with_swapped(states, models[0][0], location)
        pp, tp = degrees(models[0][0], files.model_parallel, 1 + max((t for _, t in files.layers), default=-1))
        run = ParsedRun(
            states,
            models,
            pp,
            tp,
            _open_table(files.layers, opener),
            _open_table(files.experts, opener),
            files.others,
            noted,
        )
        return assemble(run, url=location.url, tag=options.tag, ledger=options.ledger, rules=options.rules)

    def _read_stage0(self, location: Location, files: RankFiles, options: ReadOptions) -> Checkpoint:
        model_file = files.models.get(0)
        if files.models_by_rank and model_file is None:
            raise SourceError(
                "checkpoint.incomplete",
                "ZeRO-3 model states without any *_optim_states.pt",
                fix="copy the optimizer files too: ZeRO-3 weights are in them",
            )
        if model_file is None:
            raise SourceError("checkpoint.incomplete", "no mp_rank_00_model_states.pt", fix="copy it from the same tag")
        if files.model_parallel > 1 or files.layers or files.experts or files.expert_optim:
            raise SourceError(
                "source.unsupported",
                "a run without ZeRO under tensor, pipeline or expert parallelism, which this version does not read",
                fix="save with ZeRO stage 1, 2 or 3",
            )
        others = options.choices.model_copy(update={"param_order": None})
        refuse_choices(others, f"{printable(location.url)} holds one model")
        model = parse_model_states(open_torch_file(model_file, options.ledger))
        refuse_by_config(model)
        if model.param_shapes is not None and model.entries.get("optimizer") is None:
            raise SourceError(
                "checkpoint.incomplete",
                "the model states are of a ZeRO run, and every *_optim_states.pt is missing",
                fix="copy the optimizer files of the same tag",
            )
        return assemble_stage0(
            model,
            files.others,
            url=location.url,
            tag=options.tag,
            ledger=options.ledger,
            rules=options.rules,
            order=options.choices.param_order,
        )


def _read_ranks(
    files: RankFiles, opener: RankOpener, noted: NotCarriedKeys
) -> tuple[list[list[RankStates]], list[list[ModelStates]]]:
    """Optimizer states and model states of all ranks, by model-parallel rank."""
    states: list[list[RankStates]] = []
    models: list[list[ModelStates]] = []
    for mp in range(files.model_parallel):
        optim = {dp: f for (dp, m), f in files.optim.items() if m == mp}
        ranks = _complete_ranks(optim, "optim_states", files, mp, count=len(states[0]) if states else None)
        states.append(_open_all(optim, ranks, opener, parse_rank_states))
        _check_world(states[-1])
        if (states[-1][0].stage, len(states[-1])) != (states[0][0].stage, len(states[0])):
            raise SourceError("checkpoint.mixed", f"model-parallel rank {mp} is of another run than rank 0")
        models.append(_read_models(files, mp, len(states[-1]), opener, noted, sharded=states[-1][0].stage == 3))
    return states, models


def _read_models(
    files: RankFiles, mp: int, world: int, opener: RankOpener, noted: NotCarriedKeys, *, sharded: bool
) -> list[ModelStates]:
    """Model states of one model-parallel rank: data-parallel rank 0's, or all ranks' if each holds shares."""
    table = {dp: f for (dp, m), f in files.models_by_rank.items() if m == mp}
    if not sharded:
        table = {0: files.models[mp]} if mp in files.models else {}
    if 0 not in table:
        name = f"mp_rank_{mp:02d}_model_states.pt"
        name = f"zero_pp_rank_0_{name}" if sharded else name
        raise SourceError(
            "checkpoint.incomplete",
            f"{name} is missing: it names the parameters",
            fix=f"copy {name} of the same tag",
        )
    first = opener.states(table[0], parse_model_states)
    refuse_by_config(first)
    if not sharded:
        return [first]
    wanted = _complete_ranks(table, "model_states", files, mp, count=world)
    # Each rank has its own shares of frozen parameters and its own random states. All else should be equal.
    differ = bool(first.frozen_shapes) or any(first.entries.get(k) is not None for k in RNG_KEYS)
    if differ:
        return [first, *_open_all(table, wanted[1:], opener, parse_model_states)]
    note_copies(first, [table[rank] for rank in wanted[1:]], opener, noted)
    return [first]


def _open_table(files: Mapping[_K, SourceFile], opener: RankOpener) -> dict[_K, TorchFile]:
    return dict(zip(files, open_all(list(files.values()), opener.open), strict=True))


def refuse_by_config(model: ModelStates) -> None:
    """Refuse runs whose config says that the optimizer states are of a kind that this reader cannot read.

    Raises:
        SourceError: `source.unsupported`.
    """
    if (zero_options(model) or {}).get("zenflow") is not None:
        raise SourceError(
            "source.unsupported",
            "the run used ZenFlow, which stores matrices transposed without saying so",
            fix="save again without zero_optimization.zenflow",
        )


def _complete_ranks(
    table: Mapping[int, SourceFile], kind: str, files: RankFiles, mp: int, *, count: int | None = None
) -> list[int]:
    present = sorted(table)
    world = (present[-1] + 1 if present else 0) if count is None else count
    if world > MAX_WORLD:
        raise SourceError("checkpoint.too_large", f"a file of rank {present[-1]}; the limit is {MAX_WORLD} ranks")
    missing = [r for r in range(world) if r not in table]
    if missing:
        prefix = files.prefix if kind == "optim_states" else ""
        name = f"{prefix}zero_pp_rank_{missing[0]}_mp_rank_{mp:02d}_{kind}.pt"
        raise missing_rank(missing, world, name)
    return list(range(world))


def missing_rank(missing: Sequence[int], world: int, name: str) -> SourceError:
    """The error for ranks whose files are not there."""
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return SourceError(
        "checkpoint.incomplete",
        f"{len(missing)} of {world} ranks have no file (rank {listed}); a missing rank is not a smaller world",
        fix=f"copy {name} (and its like) from the machine that wrote it",
        details={"missing_ranks": list(missing[:64]), "world_size": world},
    )


def _open_all(
    table: Mapping[int, SourceFile], ranks: Sequence[int], opener: RankOpener, parse: Callable[[TorchFile], States]
) -> list[States]:
    return open_all([table[rank] for rank in ranks], lambda file: opener.states(file, parse))


def _check_world(states: Sequence[RankStates]) -> None:
    first = states[0]
    stated = first.partition_count
    if stated is not None and stated > len(states):
        missing = list(range(len(states), stated))
        raise missing_rank(missing, stated, first.torch_file.file.name.replace("rank_0_", f"rank_{missing[0]}_", 1))
    if stated is not None and stated < len(states):
        raise SourceError(
            "checkpoint.mixed",
            f"{len(states)} optimizer files, but rank 0 says that the world had {stated} ranks",
            fix="remove the files that an older save with more ranks left behind",
        )
    for rank, other in enumerate(states):
        if (other.stage, len(other.fp32), len(other.param_groups)) != (
            first.stage,
            len(first.fp32),
            len(first.param_groups),
        ):
            raise SourceError(
                "checkpoint.mixed",
                f"{printable(other.torch_file.file.name)} (rank {rank}) is of another run than rank 0",
            )
