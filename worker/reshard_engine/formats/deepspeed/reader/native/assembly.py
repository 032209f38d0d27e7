"""Joins the slices of all model-parallel ranks to one checkpoint, and notes the tensors that must be equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from reshard.errors import SourceError, counted, printable
from reshard_engine.checkpoint import Agreement, Buffer, Checkpoint, OptimizerState, Parameter, Question, Undecided
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.containers.torch_tensors import add_whole_tensor
from reshard_engine.formats.deepspeed.config import decoupled_weight_decay
from reshard_engine.formats.deepspeed.facts import DeepSpeedFacts, own_entries, run_fields, split_groups
from reshard_engine.formats.deepspeed.names import CONFIG, PARAM_SHAPES, RNG_KEYS, TIED
from reshard_engine.formats.deepspeed.reader.native.copies import Copies
from reshard_engine.formats.deepspeed.reader.native.cutting import rules_of
from reshard_engine.formats.deepspeed.reader.native.layers import layer_extra_states, layer_of, layer_tensors
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates, module_entries, module_tensors
from reshard_engine.formats.deepspeed.reader.native.module import ModuleTensors, weight_of
from reshard_engine.formats.deepspeed.reader.native.optim_states import RankStates
from reshard_engine.formats.deepspeed.reader.native.parallel import Joiner
from reshard_engine.formats.deepspeed.reader.native.ranks import note_models, note_optimizers
from reshard_engine.formats.deepspeed.reader.native.slices import Slice, add_slice
from reshard_engine.formats.deepspeed.reader.native.trees import ModelTrees, module_names
from reshard_engine.formats.deepspeed.rules.cut_rules import AVERAGED
from reshard_engine.formats.not_carried import UNKNOWN, NotCarriedKeys
from reshard_engine.pickles.nodes import Node, PTensor
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.state_dict import is_extra_state
from reshard_engine.tensors.shard_map import ShardMapBuilder


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
            noted.add_all(left, "an entry of an expert's file that is no tensor", file=file.file.name)

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
            ),
            **run_fields(entries, rng),
            module_names=module_names(model.paths, numbers, extra_states),
            extra_states=extra_states,
            not_carried=(*self._not_carried.found(), *module.not_carried()),
            shard_map=self._builder.build(),
            foreign_globals=tuple(sorted(ledger.foreign)),
            warnings=(*module.warnings, *self._warnings(first)),
            agreements=(*self._joiner.agreements, *self._copies.agreements, *self._roundings(parameters)),
            facts=DeepSpeedFacts(
                zero_stage=first.stage,
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
        """Per tensor-parallel rank the entries of its state dicts that are no tensors, by name."""
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
