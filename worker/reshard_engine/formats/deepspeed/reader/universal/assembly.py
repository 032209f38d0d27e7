"""Builds a checkpoint from parsed model states, atoms and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from reshard.errors import SourceError, printable
from reshard.models import NotCarried
from reshard_engine.checkpoint import Agreement, Checkpoint, OptimizerState, Parameter, Scalar
from reshard_engine.containers.opening import open_all
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.deepspeed.config import decoupled_weight_decay
from reshard_engine.formats.deepspeed.facts import DeepSpeedFacts, own_entries, run_fields, split_groups
from reshard_engine.formats.deepspeed.names import CONFIG, PARAM_SHAPES
from reshard_engine.formats.deepspeed.reader.native.autoep import fused_experts
from reshard_engine.formats.deepspeed.reader.native.cutting import rules_of
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates, Shapes
from reshard_engine.formats.deepspeed.reader.native.module import ModuleTensors
from reshard_engine.formats.deepspeed.reader.native.run_config import configured_stage, uses_round_robin
from reshard_engine.formats.deepspeed.reader.native.trees import ModelTrees, module_names
from reshard_engine.formats.deepspeed.reader.universal.atoms import FOLDER, MASTER, STEP, Atom, AtomFiles, parse_atom
from reshard_engine.formats.deepspeed.reader.universal.notes import LayoutNotes
from reshard_engine.formats.deepspeed.reader.universal.optimizer import OptimizerFile
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.tensors.cuts import Cut, rows_of
from reshard_engine.tensors.shard_map import LogicalTensor, ShardMapBuilder, is_packed


class Assembly:
    """One checkpoint being put together."""

    def __init__(
        self,
        models: Sequence[ModelStates],
        atoms: AtomFiles,
        optimizer: OptimizerFile,
        ledger: OpaqueLedger,
        rules: Mapping[str, Any] | None = None,
        *,
        stages: Sequence[ModelStates] = (),
    ) -> None:
        """Take the parsed files.

        Args:
            models: Model states of model-parallel rank 0: data-parallel rank 0's, or those of all ranks with shares.
            atoms: Files below `zero/`.
            optimizer: `optimizer_state.pt`.
            ledger: What happens to objects of classes that are not listed.
            rules: Rules for cuts, in place of those in the model states.
            stages: Model states of the first tensor-parallel rank of each further stage of a model-parallel run.
                Their shapes are those of one rank's parts; the shapes of the atoms are used instead.
        """
        self._parallel = (models[0].integer("mp_world_size") or 1) > 1
        # Ours have model states under the names of every stage, and the first of these is read.
        self._sharded = models[0].torch_file.file.name.startswith("zero_pp_rank_")
        self._optimizer = optimizer
        self._ledger = ledger
        fused = fused_experts(models[0])
        self._models = [fused.without(m) for m in models]
        self._groups = tuple(fused.whole(g) for g in _joined([_shapes(m) for m in (models[0], *stages)]))
        self._trained = {n: s for group in self._groups for n, s in group}
        self._atoms = {n: self._complete(atoms.by_name.get(n, {}), n) for n in self._trained}
        self._rules, _ = rules_of(models[0], rules)
        self._notes = LayoutNotes.of(models[0])
        self._loose = {n: s for n, s in atoms.by_name.items() if n not in self._trained}

    @staticmethod
    def _complete(states: Mapping[str, SourceFile], name: str) -> Mapping[str, SourceFile]:
        if MASTER not in states:
            raise SourceError(
                "checkpoint.incomplete",
                f"{FOLDER}/{printable(name)}/{MASTER}.pt is missing",
                fix="convert or copy the checkpoint again",
            )
        return states

    def checkpoint(self, *, url: str, tag: str | None, not_carried: tuple[NotCarried, ...] = ()) -> Checkpoint:
        """The checkpoint of all parts; `not_carried` names entries of the files that it does not hold."""
        model, ledger = self._models[0], self._ledger
        wanted = [f for states in self._atoms.values() for f in states.values()]
        parsed = open_all(wanted, lambda f: parse_atom(f, ledger))
        by_peer = any(isinstance(p, Atom) and p.merged for p in parsed) and not self._notes.ours
        if by_peer:
            _refuse_permuted(model)
        by_file = dict(zip(wanted, parsed, strict=True))
        if self._parallel:
            self._take_whole_shapes(by_file)
        held = [p.file if isinstance(p, Atom) else f for f, p in by_file.items()]
        files = (*(m.torch_file.file for m in self._models), self._optimizer.torch_file.file, *held)
        number = {f: i for i, f in enumerate(files)}
        builder = ShardMapBuilder()
        trained = self._parameters(builder, by_file, number)
        module = ModuleTensors(
            builder, self._models, number, owned=self._trained, sharded=self._sharded, whole=not self._parallel
        )
        self._refuse_strangers(module)
        trees = ModelTrees(builder, number)
        source = self._optimizer.torch_file
        extra_states = {n: trees.carried(v, model.torch_file) for n, v in model.extra_states.items()}
        paths = model.paths if self._notes.module_paths is None else self._notes.module_paths
        groups, params = split_groups(trees.carried(n, source) for n in self._optimizer.group_nodes)
        beside = {k: trees.carried(v, source) for k, v in self._optimizer.extras.items()}
        trained = [_with_weight(builder, p, module) for p in trained]
        # At one tensor-parallel rank `module` holds a vocabulary with its padding, which is no part of the model.
        numbers = module.numbers | {p.fqn: p.weight for p in trained if p.weight is not None}
        # The shapes in the model states of a model-parallel run are those of one rank's parts.
        partial = (PARAM_SHAPES,) if self._parallel else ()
        entries = trees.model_state(model, numbers, module, extra_states=extra_states, without=partial)
        return Checkpoint(
            url=url,
            tag=tag,
            format="deepspeed-universal",
            framework_version=model.version,
            world={},
            files=files,
            parameters=(
                *(replace(p, frozen_late=p.fqn in module.frozen_late) for p in trained),
                *(
                    replace(p, cut=self._cut_of(p.fqn, p.shape), layer=self._notes.layer_of(p.fqn))
                    for p in module.frozen_parameters
                ),
            ),
            buffers=module.buffer_entries(),
            shared=module.shared,
            optimizer=OptimizerState(groups, decoupled_weight_decay(entries.get(CONFIG))),
            **run_fields(entries),
            module_names=module_names(paths, module.numbers, extra_states),
            extra_states=extra_states,
            not_carried=(*not_carried, *module.not_carried()),
            shard_map=builder.build(),
            foreign_globals=tuple(sorted(ledger.foreign)),
            warnings=tuple(module.warnings),
            agreements=tuple(_roundings(trained)) if by_peer and uses_round_robin(model) is None else (),
            facts=DeepSpeedFacts(
                vocab_divisor=self._notes.vocab_divisor or (self._rules.vocab_divisor if self._rules else None),
                vocab_rows=self._notes.vocab_rows or (self._rules.vocab_rows if self._rules else None),
                groups_kept=self._notes.groups_kept,
                entries=own_entries(entries),
                order=tuple(entries),
                module_paths=paths,
                optimizer_entries=beside,
                params=params,
            ),
            frozen_left_out=model.leaves_out_frozen(configured_stage(model)),
        )

    def _cut_of(self, name: str, shape: tuple[int, ...]) -> Cut | None:
        return self._rules.cut_of(name, [shape]) if self._rules is not None else None

    def _take_whole_shapes(self, atoms: Mapping[SourceFile, Atom | Scalar]) -> None:
        """Replace the shapes of one tensor-parallel rank's parts with those of the atoms, which are whole."""

        def shape(name: str, local: tuple[int, ...]) -> tuple[int, ...]:
            atom = atoms[self._atoms[name][MASTER]]
            return atom.shape if isinstance(atom, Atom) and not atom.bare else local

        self._groups = tuple(tuple((n, shape(n, s)) for n, s in group) for group in self._groups)
        self._trained = {n: s for group in self._groups for n, s in group}

    def _parameters(
        self, builder: ShardMapBuilder, atoms: Mapping[SourceFile, Atom | Scalar], number: Mapping[SourceFile, int]
    ) -> list[Parameter]:
        group_of = self._optimizer.groups_of(len(self._groups))
        found: list[Parameter] = []
        for index, group in enumerate(self._groups):
            step = self._optimizer.step_of(index)
            for name, stored_shape in group:
                cut, layer = self._cut_of(name, stored_shape), self._notes.layer_of(name)
                # The model states of one tensor-parallel rank count the padding behind a vocabulary.
                shape = cut.data_shape(stored_shape) if cut is not None else stored_shape
                empty = Parameter(name, shape, group_of[index], None, cut=cut, layer=layer)
                found.append(self._with_states(builder, empty, atoms, number, step=step))
        return found

    def _with_states(
        self,
        builder: ShardMapBuilder,
        parameter: Parameter,
        atoms: Mapping[SourceFile, Atom | Scalar],
        number: Mapping[SourceFile, int],
        *,
        step: Scalar | None,
    ) -> Parameter:
        name, shape = parameter.fqn, parameter.shape
        vocabulary = parameter.cut is not None and parameter.cut.vocabulary is not None
        states: dict[str, int] = {}
        padding: dict[str, int] = {}
        scalars: dict[str, Scalar] = {}
        for state, file in self._atoms[name].items():
            atom = atoms[file]
            if isinstance(atom, Scalar):
                scalars[state] = atom
                continue
            data, behind = atom.split(shape) if vocabulary else (atom, None)
            states[state] = _add(builder, LogicalTensor(name, state, atom.dtype, shape), data, number[file])
            if behind is not None:
                rows = (prod(behind.shape) // prod(shape[1:]), *shape[1:])
                beside = LogicalTensor(f"{name}@padding", state, atom.dtype, rows)
                padding[state] = _add(builder, beside, behind, number[file])
        # At stage 3 `ds_to_universal` writes no counter beside the atoms.
        if step is not None and self._sharded:
            scalars.setdefault(STEP, step)
        return replace(parameter, states=states, scalars=scalars, padding=padding)

    def _refuse_strangers(self, module: ModuleTensors) -> None:
        # Frozen parameters, buffers and aliases may have a master too; their values come from the model states.
        known = {*module.buffers, *module.shared, *module.frozen_numbers}
        for name, states in self._loose.items():
            if name not in known or list(states) != [MASTER]:
                raise SourceError(
                    "checkpoint.mixed",
                    f"{FOLDER}/{printable(name)} has {', '.join(map(printable, sorted(states)))}; "
                    "the model states know no such trained parameter",
                    fix="remove what an older conversion into this directory left behind",
                )


_PERMUTED_FIX = "convert the original checkpoint, which is read correctly"


def _refuse_permuted(model: ModelStates) -> None:
    """Refuse runs with `round_robin_gradients` on several ranks: `ds_to_universal` gives values wrong names.

    Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`param_slice_mappings` in another order than the
    partitions); seen with 2 and 3 ranks, right with 1.
    """
    if uses_round_robin(model) and model.integer("dp_world_size") != 1:
        raise SourceError(
            "source.unsupported",
            "the run used round_robin_gradients: ds_to_universal then exchanges values between its parameters",
            fix=_PERMUTED_FIX,
        )


def _roundings(trained: Sequence[Parameter]) -> Iterator[Agreement]:
    """Agreements that find exchanged values, for a run whose config is a path: each weight is its rounded master."""
    for p in trained:
        if p.weight is not None and p.weight != p.states[MASTER]:
            yield Agreement(p.fqn, MASTER, p.states[MASTER], p.weight, "the weight", rounded=True, fix=_PERMUTED_FIX)


def _joined(stages: Sequence[tuple[Shapes, ...]]) -> tuple[Shapes, ...]:
    """The groups of all pipeline stages, each parameter where it comes first.

    Raises:
        SourceError: `checkpoint.mixed` if stages have different numbers of groups.
    """
    if len({len(groups) for groups in stages}) != 1:
        raise SourceError("checkpoint.mixed", "pipeline stages have different numbers of parameter groups")
    seen: set[str] = set()
    found: list[Shapes] = []
    for groups in zip(*stages, strict=True):
        members: list[tuple[str, tuple[int, ...]]] = []
        for name, shape in (item for group in groups for item in group):
            if name not in seen:
                seen.add(name)
                members.append((name, shape))
        found.append(tuple(members))
    return tuple(found)


def _shapes(model: ModelStates) -> tuple[Shapes, ...]:
    if model.param_shapes is None:
        raise SourceError(
            "source.unsupported_version",
            "the model states have no `param_shapes`: they do not say which parameters were trained, in which order",
            fix="convert the original checkpoint again",
        )
    return model.param_shapes


def _with_weight(builder: ShardMapBuilder, parameter: Parameter, module: ModuleTensors) -> Parameter:
    """The parameter with its weight of `module`, if that is there, and with the padding behind the weight's rows."""
    name, shape, number = parameter.fqn, parameter.shape, module.weights.get(parameter.fqn)
    stored_shape = builder.tensors[number].shape if number is not None else shape
    if (
        number is None
        or parameter.cut is None
        or stored_shape == shape
        or parameter.cut.data_shape(stored_shape) != shape
    ):
        return replace(parameter, weight=module.weight_of(name, shape))
    data, behind = (
        rows_of(stored_shape, number, first, last) for first, last in ((0, shape[0]), (shape[0], stored_shape[0]))
    )
    weight, padding = builder.view(name, "weight", data, shape), parameter.padding
    if padding:  # rows of padding that only the weight has would not be those of its master
        padding = {**padding, "weight": builder.view(f"{name}@padding", "weight", behind, behind.grid)}
    return replace(parameter, weight=weight, padding=padding)


def _add(builder: ShardMapBuilder, wanted: LogicalTensor, atom: Atom, file: int) -> int:
    flat = atom.bare or atom.shape != wanted.shape
    if flat and not (atom.shape == (wanted.numel,) and is_packed(atom.shape, atom.stride)):
        raise SourceError(
            "checkpoint.mixed",
            f"{printable(wanted.state)} of {printable(wanted.fqn)} is {atom.shape}, the model states say "
            f"{wanted.shape}",
            fix="the files are of different checkpoints: convert or copy one whole checkpoint",
        )
    tensor = builder.tensor(wanted.fqn, wanted.state, wanted.dtype, wanted.shape)
    builder.whole(tensor, file=file, offset=atom.offset, stride=None if flat else atom.stride)
    return tensor
