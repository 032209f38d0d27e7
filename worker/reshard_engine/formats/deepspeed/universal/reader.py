"""The universal reader: model states and `zero/`, put together to a checkpoint.

It reads two forms. Our writer, and `ds_to_universal` at stages 1 and 2, write one `mp_rank_00_model_states.pt`, and
atoms with shapes and a `step.pt` each. At stage 3 `ds_to_universal` writes every rank's model states, bare flat atoms,
and counters in `optimizer_state.pt` only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from reshard.errors import SourceError, printable
from reshard.models.jobs import NotCarried
from reshard_engine.checkpoint import Agreement, Checkpoint, OptimizerState, Parameter, Scalar
from reshard_engine.containers.source_file import SourceFile, open_all
from reshard_engine.containers.torch_file import TorchFile, open_torch_file
from reshard_engine.formats.carried import UNKNOWN, NotCarriedKeys
from reshard_engine.formats.deepspeed.config import configured_stage, decoupled_weight_decay, uses_round_robin
from reshard_engine.formats.deepspeed.facts import DeepSpeedFacts, own_entries, run_fields, split_groups
from reshard_engine.formats.deepspeed.files import (
    CONFIG,
    LAYOUT_NOTES,
    NUMBERED,
    OPTIMIZER_STATE,
    PARAM_SHAPES,
    TIED,
    RankFiles,
    sort_files,
)
from reshard_engine.formats.deepspeed.native.reader import missing_rank, note_copies, note_models, refuse_by_config
from reshard_engine.formats.deepspeed.native.slices import ModelTrees, ModuleTensors, group_of_subgroup, module_names
from reshard_engine.formats.deepspeed.parallel.experts import fused_experts
from reshard_engine.formats.deepspeed.parallel.ranks import degrees
from reshard_engine.formats.deepspeed.parallel.rules import as_count, as_items, as_mapping
from reshard_engine.formats.deepspeed.parallel.tensor import rules_of
from reshard_engine.formats.deepspeed.rank_files import (
    BASE_KEYS,
    EXTRA_KEYS,
    MAX_WORLD,
    PARTITION_KEYS,
    ModelStates,
    RankOpener,
    Shapes,
    parse_model_states,
    read_scalar,
)
from reshard_engine.formats.deepspeed.stage0 import EXTRA_KEYS as STAGE0_EXTRA_KEYS
from reshard_engine.formats.format import ReadOptions, refuse_choices
from reshard_engine.formats.model_weights import checked_name, checked_state
from reshard_engine.pickles.nodes import (
    Node,
    PObject,
    PTensor,
    is_mapping,
    kind_of,
    mapping_items,
    plain_value,
    sequence_items,
)
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import KeyPath, name_of
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing
from reshard_engine.tensors.cuts import Cut, rows_of
from reshard_engine.tensors.dtypes import BY_NAME, Dtype
from reshard_engine.tensors.shard_map import LogicalTensor, ShardMapBuilder, is_packed

# The files below `zero/`, and the tensor or number in each file.
#
# Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`: a mapping with `param` and how to
# cut it for tensor parallelism; `merge_zero3_slices`: a bare flat tensor; `step.pt`: a bare number),
# `checkpoint/universal_checkpoint.py` (`load_hp_checkpoint_state`: `cat_dim` is 0 where it is not written).

FOLDER = "zero"
OPTIMIZER_FILE = "optimizer_state.pt"
MASTER, STEP = "fp32", "step"
_SUFFIX = ".pt"
_CUT_KEYS: Mapping[str | int, Callable[[Node], bool]] = {
    "cat_dim": lambda v: type(v) is int and v in (0, 1),
    "param_n_sub_params": lambda v: type(v) is int and v == 2,
    "sub_param_shape": lambda v: isinstance(v, PObject),
    "vocab_tensor": lambda v: v is True,
    # Experts that AutoEP fused lie along the first dimension, all of them.
    "is_expert_param": lambda v: v is True,
    "ep_num_experts": lambda v: type(v) is int,
}


@dataclass(frozen=True, slots=True)
class Atom:
    """One tensor in one file."""

    file: SourceFile
    dtype: Dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """The place of its first element, in bytes of the file."""
    bare: bool
    """True if it is flat and without its shape, as `ds_to_universal` writes it at stage 3."""
    merged: bool
    """True if it has `cat_dim`, as `ds_to_universal` writes it at stages 1 and 2."""

    def split(self, shape: tuple[int, ...]) -> tuple[Atom, Atom | None]:
        """The rows of a vocabulary of this shape, and the rows of padding behind them; None if there are none.

        Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices` strips padding, `merge_zero3_slices`
        does not); our own universal checkpoints hold padding on purpose.
        """
        flat, row = len(self.shape) == 1 < len(shape), prod(shape[1:])
        rows = self.shape[0] // max(row, 1) if flat else (self.shape or (0,))[0]
        if rows <= shape[0] or self.shape not in ((rows * row,), (rows, *shape[1:])):
            return self, None

        def part(first: int, last: int) -> Atom:
            begin = first * (row if flat else self.stride[0]) * self.dtype.itemsize_bytes
            lengths = ((last - first) * row,) if flat else (last - first, *shape[1:])
            return replace(self, shape=lengths, offset=self.offset + begin)

        return part(0, shape[0]), part(shape[0], rows)


@dataclass(frozen=True, slots=True)
class AtomFiles:
    """The files below `zero/`."""

    optimizer: SourceFile | None
    by_name: Mapping[str, Mapping[str, SourceFile]]
    """Per parameter its files by state."""


def list_atoms(location: Location) -> AtomFiles:
    """The files of a universal directory's `zero` folder.

    Raises:
        SourceError: `name.invalid` for a folder or file that is not the name of a parameter or state.
    """
    optimizer: SourceFile | None = None
    by_name: dict[str, dict[str, SourceFile]] = {}
    for path, info in location.child(FOLDER).files().items():
        file = SourceFile(location.store, f"{FOLDER}/{path}", (info,))
        name, _, base = path.rpartition("/")
        if path == OPTIMIZER_FILE:
            optimizer = file
        elif base.endswith(_SUFFIX):  # the loader looks at no others
            state = base.removesuffix(_SUFFIX)
            by_name.setdefault(checked_name(name), {})[state if state == MASTER else checked_state(state)] = file
    return AtomFiles(optimizer, by_name)


def parse_atom(file: SourceFile, ledger: OpaqueLedger) -> Atom | Scalar:
    """The tensor of an atom, or the number of a `step.pt`.

    Raises:
        SourceError: `checkpoint.malformed`, `source.unsupported` for entries that describe another kind of cut, and as
            `open_torch_file`.
    """
    parsed = open_torch_file(file, ledger)
    what = printable(file.name)
    if file.name.endswith(f"/{STEP}{_SUFFIX}"):
        return read_scalar(parsed.root, parsed, what=what)
    bare = not is_mapping(parsed.root)
    entries: dict[str | int, Node] = {"param": parsed.root} if bare else mapping_items(parsed.root, what=what)
    tensor = _wrapped(entries, what)
    if not isinstance(tensor, PTensor):
        raise SourceError("checkpoint.malformed", f"{what} holds no tensor but {kind_of(tensor)}")
    offset = parsed.tensor_offset(tensor) if tensor.numel else 0
    dtype = BY_NAME[tensor.dtype]
    return Atom(parsed.file, dtype, tensor.shape, tensor.stride, offset, bare, "cat_dim" in entries)


def _wrapped(entries: Mapping[str | int, Node], what: str) -> Node:
    # The known entries are not needed: the rules in the model states say how every parameter is cut.
    others = [k for k, v in entries.items() if k != "param" and not (k in _CUT_KEYS and _CUT_KEYS[k](v))]
    if others:
        raise SourceError(
            "source.unsupported",
            f"{what} says how to cut it in a way that is not read ({printable(str(others[0]))})",
            fix="convert the original checkpoint",
        )
    return entries.get("param")


# `zero/optimizer_state.pt`: hyper-parameters by group, the loss scaler, and at stage 3 the step counters.
#
# Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`_save_optimizer_state`: rank 0's optimizer state
# without its flat tensors, with `param_groups`; `_save_optimizer_state_stage3`: the whole of it).

_KEPT = (*EXTRA_KEYS, *STAGE0_EXTRA_KEYS)


@dataclass(frozen=True, slots=True)
class OptimizerFile:
    """The parsed file."""

    torch_file: TorchFile
    group_nodes: tuple[Node, ...]
    param_groups: tuple[Mapping[str | int, Node], ...]
    extras: Mapping[str, Node]
    states: Mapping[str | int, Node]
    """Per (sub-)group its states, by number."""
    unread: tuple[str, ...] = ()
    """Keys of the file that nothing here knows, as paths from its top."""

    def groups_of(self, count: int) -> list[int]:
        """Per entry of `param_shapes` its optimizer group.

        The `params` of the groups are numbers of those entries. At stage 0 they are numbers of parameters instead, and
        each group has one entry.

        Raises:
            SourceError: `checkpoint.malformed` if the groups do not fit.
        """
        numbered = sum(len(getattr(g.get("params"), "items", ())) for g in self.param_groups)
        if numbered != count and len(self.param_groups) == count:
            return list(range(count))
        return group_of_subgroup(self.param_groups, count)

    def step_of(self, index: int) -> Scalar | None:
        """The step counter of a (sub-)group, or None if there is none."""
        entry = self.states.get(index)
        step = mapping_items(entry, what="state").get(STEP) if is_mapping(entry) else None
        return None if step is None else read_scalar(step, self.torch_file, what="state: step")

    def unread_states(self, atoms: Container[str]) -> Iterator[str]:
        """The paths of rank 0's states that no atom holds. Its other states are parts of the atoms' tensors."""
        for index, group in self.states.items():
            keys = mapping_items(group, what="state") if is_mapping(group) else {}
            yield from (f"optimizer_state_dict.state.{index}.{k}" for k in keys if k != STEP and str(k) not in atoms)


def parse_optimizer_file(torch_file: TorchFile) -> OptimizerFile:
    """The optimizer state beside the atoms.

    Raises:
        SourceError: `checkpoint.malformed`.
    """
    name = printable(torch_file.file.name)
    entries = mapping_items(torch_file.root, what=name)
    nodes = tuple(sequence_items(entries.get("param_groups"), what=f"{name}: param_groups"))
    if not nodes:
        raise SourceError("checkpoint.malformed", f"{name} has no param_groups")
    inner = entries.get(OPTIMIZER_STATE)
    state = mapping_items(inner, what=name).get("state") if is_mapping(inner) else None
    return OptimizerFile(
        torch_file,
        nodes,
        tuple(mapping_items(n, what=f"{name}: param_groups") for n in nodes),
        {str(k): v for k, v in entries.items() if k in _KEPT},
        mapping_items(state, what=f"{name}: state") if is_mapping(state) else {},
        tuple(_unread(entries, inner)),
    )


def _unread(entries: Mapping[str | int, Node], inner: Node) -> Iterator[str]:
    """Keys that the reader does not keep, without those that describe the ranks' partitions."""
    known = {*_KEPT, *PARTITION_KEYS, "param_groups"}
    yield from (str(k) for k in entries if k not in known)
    if is_mapping(inner):
        yield from (f"optimizer_state_dict.{k}" for k in mapping_items(inner, what="state") if k not in BASE_KEYS)


# Notes in our universal checkpoints about the source's layout, which names and shapes do not show.


@dataclass(frozen=True)
class LayoutNotes:
    """The notes of one checkpoint."""

    ours: bool = False
    """True if the checkpoint has notes; `ds_to_universal` writes none."""
    tied_layers: Mapping[str, Any] | None = None
    """The first layer of each tied parameter of a pipeline; None if the run was no pipeline."""
    vocab_divisor: int | None = None
    vocab_rows: int | None = None
    groups_kept: bool = False
    """True if the param groups of the stages below ZeRO-3 are those of ZeRO-3 too."""
    module_paths: tuple[KeyPath, ...] | None = None
    """Key paths of the model's state dict, where it is nested and `module` does not hold every entry."""

    @classmethod
    def of(cls, model: ModelStates) -> LayoutNotes:
        """The notes in model states.

        Raises:
            SourceError: `rules.invalid`, `checkpoint.malformed`.
        """
        node = model.entries.get(LAYOUT_NOTES)
        if node is None:
            return cls()
        facts = as_mapping(plain_value(node, what=LAYOUT_NOTES), LAYOUT_NOTES)
        tied, divisor, rows, paths = (
            facts.get(k) for k in ("tied_layers", "vocab_divisor", "vocab_rows", "module_paths")
        )
        return cls(
            ours=True,
            tied_layers=None if tied is None else as_mapping(tied, f"{LAYOUT_NOTES}: tied_layers"),
            vocab_divisor=None if divisor is None else as_count(divisor, f"{LAYOUT_NOTES}: vocab_divisor"),
            vocab_rows=None if rows is None else as_count(rows, f"{LAYOUT_NOTES}: vocab_rows"),
            groups_kept=facts.get("groups_kept") is True,
            module_paths=None if paths is None else tuple(map(_path, as_items(paths, _PATHS))),
        )

    def layer_of(self, name: str) -> int | None:
        """The pipeline layer of a parameter; None where the run was no pipeline."""
        if self.tied_layers is None:
            return None
        if name.startswith(TIED):
            layer = self.tied_layers.get(name)
            return layer if type(layer) is int and 0 <= layer < 1 << 20 else None
        match = NUMBERED.fullmatch(name)
        return int(match["layer"]) if match else None


_PATHS = f"{LAYOUT_NOTES}: module_paths"


def _path(value: Any) -> KeyPath:
    keys = as_items(value, _PATHS)
    if not keys or not all(isinstance(k, str) or type(k) is int for k in keys):
        raise SourceError("checkpoint.malformed", f"{_PATHS}: {len(keys)} keys, which are not names or numbers")
    checked_name(name_of(tuple(keys)))
    return tuple(keys)


# Builds a checkpoint from parsed model states, atoms and optimizer state.


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
        # At one tensor-parallel rank `module` holds a vocabulary with its padding, which is not part of the model.
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


# Opens the files of a universal checkpoint.


class UniversalReader:
    """Reads universal checkpoints, ours and `ds_to_universal`'s."""

    family = "deepspeed-universal"

    def recognises(self, listing: Listing) -> bool:
        """True if there is a `zero` folder beside model states, and no optimizer file of a rank."""
        names = listing.by_name
        return (
            FOLDER in listing.directories
            and any(n.endswith("_model_states.pt") for n in names)
            and not any("optim_states.pt" in n for n in names)
        )

    def read(self, location: Location, listing: Listing, options: ReadOptions) -> Checkpoint:
        """The checkpoint in a universal directory.

        Raises:
            SourceError: As the functions that read the files below `zero/` and the model states say.
        """
        refuse_choices(options.choices, f"{printable(location.url)} holds one model, and names its parameters")
        files = sort_files(location.store, listing)
        atoms = list_atoms(location)
        if atoms.optimizer is None:
            raise SourceError(
                "checkpoint.incomplete",
                f"{FOLDER}/{OPTIMIZER_FILE} is missing: it is written when all atoms are there",
                fix="convert or copy the checkpoint again",
            )
        opener = RankOpener(options.ledger)
        noted = NotCarriedKeys()
        models = _models(files, opener, noted)
        pp, tp = degrees(models[0], files.model_parallel, 0)
        copies = open_all(
            [_first_of(files, mp) for mp in range(1, pp * tp)], lambda f: opener.states(f, parse_model_states)
        )
        optimizer = parse_optimizer_file(open_torch_file(atoms.optimizer, options.ledger))
        noted.add_all(optimizer.unread, UNKNOWN, file=optimizer.torch_file.file.name)
        states = {state for held in atoms.by_name.values() for state in held}
        noted.add_all(optimizer.unread_states(states), UNKNOWN, file=optimizer.torch_file.file.name)
        note_models([models, *([m] for m in copies)], noted)
        noted.add_all(files.others, "no file of DeepSpeed's")
        found = Assembly(models, atoms, optimizer, options.ledger, options.rules, stages=copies[tp - 1 :: tp])
        return found.checkpoint(url=location.url, tag=options.tag, not_carried=noted.found())


def _first_of(files: RankFiles, mp: int) -> SourceFile:
    """The model states of one model-parallel rank; if each data-parallel rank has a file, the first rank's."""
    found = files.models.get(mp) or files.models_by_rank.get((0, mp))
    if found is None:
        raise SourceError("checkpoint.incomplete", f"the model states of model-parallel rank {mp} are missing")
    return found


def _models(files: RankFiles, opener: RankOpener, noted: NotCarriedKeys) -> list[ModelStates]:
    """The model states of rank 0, and at stage 3 those of all ranks if frozen parameters are spread over them."""
    if 0 in files.models:
        first = opener.states(files.models[0], parse_model_states)
        refuse_by_config(first)
        return [first]
    by_rank = {dp: f for (dp, mp), f in files.models_by_rank.items() if mp == 0}
    if 0 not in by_rank:
        raise SourceError("checkpoint.incomplete", "the model states of rank 0 are missing: they name the parameters")
    first = opener.states(by_rank[0], parse_model_states)
    refuse_by_config(first)
    if not first.frozen_shapes:
        note_copies(first, [f for rank, f in sorted(by_rank.items()) if rank], opener, noted)
        return [first]
    world = first.integer("dp_world_size") or len(by_rank)
    if world > MAX_WORLD:
        raise SourceError("checkpoint.too_large", f"dp_world_size is {world}; the limit is {MAX_WORLD} ranks")
    if missing := [r for r in range(world) if r not in by_rank]:
        raise missing_rank(missing, world, f"zero_pp_rank_{missing[0]}_mp_rank_00_model_states.pt")
    ranks = [by_rank[r] for r in range(1, world)]
    return [first, *open_all(ranks, lambda f: opener.states(f, parse_model_states))]
