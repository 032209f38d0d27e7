"""Builds a checkpoint from parsed model states, atoms and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reshard.errors import SourceError, printable
from reshard.models import NotCarried
from reshard_engine.checkpoint import Checkpoint, OptimizerState, Parameter, Scalar
from reshard_engine.containers.opening import open_all
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.formats.deepspeed.config import decoupled_weight_decay
from reshard_engine.formats.deepspeed.facts import DeepSpeedFacts, own_entries, run_fields, split_groups
from reshard_engine.formats.deepspeed.names import CONFIG
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
from reshard_engine.tensors.cuts import Cut
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
        self._optimizer = optimizer
        self._ledger = ledger
        self._fused = fused = fused_experts(models[0])
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
        if any(isinstance(p, Atom) and p.merged for p in parsed) and not self._notes.ours:
            _refuse_permuted(model)
        by_file = dict(zip(wanted, parsed, strict=True))
        if self._parallel:
            self._take_whole_shapes(by_file)
        held = [p.file if isinstance(p, Atom) else f for f, p in by_file.items()]
        files = (*(m.torch_file.file for m in self._models), self._optimizer.torch_file.file, *held)
        number = {f: i for i, f in enumerate(files)}
        builder = ShardMapBuilder()
        trained = self._parameters(builder, by_file, number)
        sharded = model.torch_file.file.name.startswith("zero_pp_rank_")
        module = ModuleTensors(
            builder, self._models, number, owned=self._trained, sharded=sharded, whole=not self._parallel
        )
        self._refuse_strangers(module)
        trees = ModelTrees(builder, number)
        source = self._optimizer.torch_file
        extra_states = {n: trees.carried(v, model.torch_file) for n, v in model.extra_states.items()}
        paths = model.paths if self._notes.module_paths is None else self._notes.module_paths
        groups, params = split_groups(trees.carried(n, source) for n in self._optimizer.group_nodes)
        beside = {k: trees.carried(v, source) for k, v in self._optimizer.extras.items()}
        entries = trees.model_state(model, module.numbers, module, extra_states=extra_states)
        return Checkpoint(
            url=url,
            tag=tag,
            format="deepspeed-universal",
            framework_version=model.version,
            world={},
            files=files,
            parameters=(
                *(
                    replace(
                        p,
                        weight=module.weight_of(p.fqn, p.shape),
                        frozen_late=p.fqn in module.frozen_late,
                    )
                    for p in trained
                ),
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
            facts=DeepSpeedFacts(
                vocab_divisor=self._notes.vocab_divisor or (self._rules.vocab_divisor if self._rules else None),
                vocab_rows=self._notes.vocab_rows,
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
            for name, shape in group:
                states: dict[str, int] = {}
                scalars: dict[str, Scalar] = {}
                bare = False
                for state, file in self._atoms[name].items():
                    atom = atoms[file]
                    if isinstance(atom, Scalar):
                        scalars[state] = atom
                    else:
                        states[state] = _add(builder, LogicalTensor(name, state, atom.dtype, shape), atom, number[file])
                        bare |= atom.bare
                # `ds_to_universal` writes no counter for fused experts at stage 3 either; their atoms are not bare.
                if (bare or name in self._fused) and step is not None:
                    scalars.setdefault(STEP, step)
                cut, layer = self._cut_of(name, shape), self._notes.layer_of(name)
                found.append(Parameter(name, shape, group_of[index], None, states, scalars, cut, layer))
        return found

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


def _refuse_permuted(model: ModelStates) -> None:
    """Refuse runs with `round_robin_gradients` on several ranks: `ds_to_universal` gives values wrong names.

    Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`param_slice_mappings` in another order than the
    partitions); seen with 2 and 3 ranks, right with 1.
    """
    if uses_round_robin(model) and model.integer("dp_world_size") != 1:
        raise SourceError(
            "source.unsupported",
            "the run used round_robin_gradients: ds_to_universal then exchanges values between its parameters",
            fix="convert the original checkpoint, which is read correctly",
        )


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
