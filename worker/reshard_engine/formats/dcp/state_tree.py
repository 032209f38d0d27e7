"""A whole state dict as one tree, whatever its entries mean: between `dcp.save` and `torch.save`.

Source: torch 2.13.0 `distributed/checkpoint/format_utils.py` (`dcp_to_torch_save`, `torch_save_to_dcp`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.choices import ParamOrder
from reshard.dcp_options import DcpOptions, Framework
from reshard.errors import RequestError, SourceError, listed, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard_engine.checkpoint import Checkpoint, FormatFacts, Parameter, ParamGroup, Scalar
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import open_torch_file
from reshard_engine.formats.carried import named, of_the_format
from reshard_engine.formats.dcp.facts import ODD_STATE, facts_of, nested
from reshard_engine.formats.dcp.optimizers import STEP, groups_to_write, is_adam, joined_optimizers
from reshard_engine.formats.dcp.reader.reader import saved_state_in
from reshard_engine.formats.dcp_files.metadata.model import KeyPath
from reshard_engine.formats.dcp_files.saved_state import CarriedValues, SavedTensor, open_values
from reshard_engine.formats.dcp_files.tensors import ChunkTensors
from reshard_engine.formats.numbered import GROUPS, PARAMS, STATE, below, entries_of, optimizers_in
from reshard_engine.formats.torch_archive import scalar_node, tree_template
from reshard_engine.formats.trainer_files import trainer_facts
from reshard_engine.pickles.nodes import (
    Node,
    PList,
    PLiteral,
    PTensorRef,
    collector_paused,
    mapping_of,
    ordered_dict,
)
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.tensors.dtypes import FLOAT32
from reshard_engine.tensors.layout import TargetFile, TargetLayout
from reshard_engine.tensors.shard_map import ShardMapBuilder


@dataclass(frozen=True, slots=True)
class StateTree(FormatFacts):
    """The facts of a checkpoint that was read as one tree."""

    tree: Node
    """The nested state dict, with `PTensorRef`s in place of tensors."""

    def trees(self, checkpoint: Checkpoint) -> Iterator[tuple[Node, str]]:
        """The one tree."""
        yield self.tree, ""

    def group_states(self, checkpoint: Checkpoint) -> Iterator[tuple[Mapping[str | int, Node], dict[str, set[str]]]]:
        """The param groups of all optimizers in the tree, whose parameters are named as the optimizers name them."""
        for optimizer in map(entries_of, optimizers_in(self.tree)):
            states = {key: {*map(str, entries_of(held))} for key, held in entries_of(optimizer[STATE]).items()}
            for group in (entries_of(node) for _, node in below(GROUPS, optimizer[GROUPS])):
                keys = [key for _, key in below(PARAMS, group.get(PARAMS)) if isinstance(key, str | int)]
                yield group, {str(key): states[key] for key in keys if states.get(key)}


def read_state_tree(location: Location, ledger: OpaqueLedger) -> Checkpoint | None:
    """Read every entry of a distributed checkpoint; None for a directory that is none.

    Raises:
        SourceError: Any error of reading it.
    """
    listing = location.store.list_directory(location.path)
    with collector_paused():
        state = saved_state_in(location, listing)
        if state is None:
            return None
        builder = ShardMapBuilder()
        chunks = ChunkTensors(builder, state.files, state.tensors, ledger)
        carried = CarriedValues(builder)
        entries: dict[KeyPath, Node] = {}
        for value, parsed in zip(state.values, open_values(state.files, state.values, ledger), strict=True):
            entries[value.path] = carried.carried(parsed, value.part.first_file + value.entry.file)
        same: dict[KeyPath, list[SavedTensor]] = {}
        for tensor in state.tensors:
            same.setdefault(tensor.path, []).append(tensor)
        lost: list[NotCarried] = []
        for path, saved in same.items():
            kind = chunks.class_of(saved)
            if kind is None:
                entries[path] = PTensorRef(chunks.add(saved[0].entry.key, "value", saved))
            else:
                reason = f"chunks of a {printable(kind)}, which only its own class joins"
                lost.append(NotCarried(path=printable(saved[0].entry.key), reason=reason))
        order = {path: i for i, path in enumerate(state.order)}
        tree = mapping_of(nested(dict(sorted(entries.items(), key=lambda e: order.get(e[0], len(order))))))
    return replace(_checkpoint(location, state.files, builder, tree, ledger), not_carried=tuple(lost))


def read_torch_tree(location: Location, info: ObjectInfo, ledger: OpaqueLedger) -> Checkpoint:
    """Read a file of `torch.save` that holds a state dict, nested or flat.

    Raises:
        SourceError: `zip.*`, `pickle.*`, `tensor.*`.
    """
    with collector_paused():
        parsed = open_torch_file(SourceFile(location.store, location.path.rpartition("/")[2], (info,)), ledger)
        builder = ShardMapBuilder()
        tree = CarriedValues(builder).carried(parsed, 0)
    return _checkpoint(location, (parsed.file,), builder, tree, ledger)


def optimizers_of(checkpoint: Checkpoint) -> list[Node]:
    """The state dicts of optimizers in a tree that was read as it is."""
    return optimizers_in(checkpoint.facts.tree) if isinstance(checkpoint.facts, StateTree) else []


TARGET_KEYS = ("target_model_key", "target_optimizer_key")
"""Options that ask for other keys of model and optimizer."""
OF_ONE_FILE = ("target_scheduler_key", "target_param_order")
"""Options that say what one file of `torch.save` holds."""


def other_keys(options: DcpOptions) -> list[str]:
    """The options that ask for other keys than those that a file has, by their names."""
    return [name for name in options.given() if name != "files"]


def _checkpoint(
    location: Location, files: Sequence[SourceFile], builder: ShardMapBuilder, tree: Node, ledger: OpaqueLedger
) -> Checkpoint:
    facts, shard_map, foreign = StateTree(tree), builder.build(), ledger.foreign
    return Checkpoint.of_trees(
        facts, url=location.url, kind="state-dict", files=files, shard_map=shard_map, foreign=foreign
    )


# A whole state dict as one file of `torch.save`.
#
# Source: torch 2.13.0 `distributed/checkpoint/format_utils.py` (`dcp_to_torch_save`).


class TorchSaveWriter:
    """Lays out the file."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """One file: the state dict of a distributed checkpoint as it is, or a training state as scripts save it.

        Raises:
            RequestError: `request.invalid` for options that would change what tensors hold, or for other keys;
                `request.unsatisfiable` for an optimizer without param groups, for keys that come twice, and for an
                order that the source does not keep.
        """
        refuse_changes(request)
        options = request.options.of(DcpOptions)
        left: tuple[NotCarried, ...] = ()
        warnings: list[str] = []
        if isinstance(checkpoint.facts, StateTree):
            tree = checkpoint.facts.tree
        else:
            facts = trainer_facts(checkpoint)
            names = facts.saved_names or checkpoint.script_names
            kept = {names.get(name, name): number for name, number in facts.numbers.items()}
            odd = {names.get(name, name): states for name, states in odd_states(checkpoint).items()}
            checkpoint = checkpoint.renamed(names)
            kept = kept if options.target_param_order is None else _numbers(checkpoint, options.target_param_order)
            groups, warnings = groups_to_write(checkpoint, needs_initial_lr=False)
            file = _TrainingFile(checkpoint, groups, options, kept, odd)
            tree, left = file.tree(), (*file.left_out(),)
            warnings += file.warnings()
        root = options.torch_file.rpartition(".")[0] or "archive"
        template, slots = tree_template(root, tree, checkpoint.shard_map, opaque=request.opaque)
        written = TargetFile(options.torch_file, template, slots, commit=True)
        return TargetLayout((written,), None, tuple(warnings), not_carried=left)


def refuse_changes(request: ConvertRequest) -> None:
    """Refuse what would change a file that holds everything as it is.

    Raises:
        RequestError: `request.invalid`.
    """
    if request.dtype is not None or request.exclude_frozen:
        raise RequestError("request.invalid", "the file holds all as it is: no --dtype", fix="--to torch")


# A training state as one file: the model by name, the optimizer by number, as `Optimizer.state_dict()` has it.
#
# Source: torch 2.13.0 `optim/optimizer.py` (`state_dict`, `load_state_dict`: numbers follow the param groups);
# lightning 2.6.6 `pytorch/trainer/connectors/checkpoint_connector.py` (`dump_checkpoint`).

_LIGHTNING = "pytorch-lightning_version"
"""A key of Lightning's checkpoints alone."""
_FULL_LIGHTNING = "full-lightning"
"""The format of Lightning's files, whose numbers stay."""
_NUMBERS = (
    "the optimizer's numbers count its param groups, as Lightning's DDP loads them; its FSDP and ModelParallelStrategy "
    "take them for the order of the model's parameters: for these add --target-param-order model"
)
_NO_PLACE = "a file of torch.save has no place for it"


@dataclass(frozen=True, slots=True)
class _TrainingFile:
    """A training state to be written as one file."""

    checkpoint: Checkpoint
    groups: Sequence[ParamGroup]
    options: DcpOptions
    kept: Mapping[str, int]
    """Numbers that do not count those of the groups one after another, by name."""
    odd: Mapping[str, Mapping[str, Node]]
    """States of other shapes than their parameters, by name."""

    @property
    def _of_lightning(self) -> bool:
        """True for Lightning's keys: as asked, or for what its checkpoint held.

        Raises:
            RequestError: `request.invalid` for other frameworks, `request.unsatisfiable` without Lightning's own state.
        """
        framework, held = self.options.framework, _LIGHTNING in self.checkpoint.client_state
        if framework not in (None, Framework.STATE_DICT, Framework.LIGHTNING):
            raise RequestError(
                "request.invalid",
                f"--framework {framework}: a single file has the keys of a script, or Lightning's",
                fix=f"--framework {Framework.STATE_DICT}, or --to dcp for the files of {framework}",
            )
        if framework is Framework.LIGHTNING and not held:
            raise RequestError(
                "request.unsatisfiable",
                "the source holds no state of Lightning's loops, without which Lightning does not resume",
                fix=f"--framework {Framework.STATE_DICT}",
            )
        return held and framework is not Framework.STATE_DICT

    def tree(self) -> Node:
        """The value of the file.

        Raises:
            RequestError: `request.unsatisfiable` for client state under the key of the model, of the optimizer or of
                the scheduler, and for a scheduler's key where there is not one scheduler.
        """
        found, lightning = self.checkpoint, self._of_lightning
        if self.options.target_scheduler_key is not None and (lightning or len(found.schedulers) != 1):
            text = "Lightning lists schedulers" if lightning else f"the source holds {len(found.schedulers)} schedulers"
            raise RequestError(
                "request.unsatisfiable",
                f"--target-scheduler-key: {text}, and the key is that of one",
                fix="leave it out",
            )
        model, saved = ordered_dict({**model_entries(found)}), trainer_facts(found)
        if self._is_model_alone:
            return model
        state: dict[str | int, Node] = {
            self.options.target_model_key or (not lightning and saved.model_key) or _MODEL[lightning]: model
        }
        if found.optimizer is not None:
            key = self.options.target_optimizer_key or (not lightning and saved.optimizer_key) or _OPTIMIZER[lightning]
            optimizer = numbered_optimizer(found, self.groups, odd=self.odd, kept=self.kept)
            state[key] = PList([optimizer]) if lightning else optimizer
        state |= {"lr_schedulers": PList([*found.schedulers])} if lightning else self._schedulers()
        if twice := state.keys() & found.client_state.keys():
            raise RequestError(
                "request.unsatisfiable",
                f"the source's client state has the keys {listed(sorted(map(str, twice)))}, too",
                fix="--target-model-key KEY, --target-optimizer-key KEY and --target-scheduler-key KEY",
            )
        # Lightning's own entries come first, as it saves them.
        return mapping_of({**found.client_state, **state} if lightning else {**state, **found.client_state})

    @property
    def _is_model_alone(self) -> bool:
        """True if the source is a file of a model's state dict without a key, and nothing else is to be written."""
        found, options = self.checkpoint, self.options
        more = found.optimizer is not None or found.schedulers or found.client_state
        return trainer_facts(found).model_key == "" and not more and options.target_model_key is None

    def warnings(self) -> Iterator[str]:
        """A word on param groups of several optimizers, and on Lightning's numbers, which strategies take in two ways.

        Source: lightning 2.6.6 `fabric/strategies/model_parallel.py` (`_rekey_optimizer_state_if_needed`), and
        `pytorch/strategies/fsdp.py` (`load_optimizer_state_dict`): they take a number for that of `model.parameters()`.
        """
        said = self.options.target_param_order is not None or self.checkpoint.format == _FULL_LIGHTNING
        if self._of_lightning and len(self.groups) > 1 and not said:
            yield _NUMBERS
        yield from joined_optimizers(self.groups)

    def _schedulers(self) -> dict[str | int, Node]:
        """Each scheduler under its key in the source, or `lr_scheduler`."""
        nodes, keys = self.checkpoint.schedulers, self.checkpoint.scheduler_keys
        if (said := self.options.target_scheduler_key) is not None:
            return {said: nodes[0]}
        own = len(keys) == len(nodes) and all(map(str.isidentifier, keys))
        return {keys[i] if own else f"lr_scheduler{f'_{i}' if i else ''}": node for i, node in enumerate(nodes)}

    def left_out(self) -> Iterator[NotCarried]:
        """The parts of the training state that the file has no place for."""
        found = self.checkpoint
        yield from named(dict.fromkeys(key for rank in found.rng for key in rank), _NO_PLACE)
        written = {f"{ODD_STATE}{state}" for states in self.odd.values() for state in states}
        yield from (one for one in of_the_format(found, _NO_PLACE) if one.path not in written)


def _numbers(checkpoint: Checkpoint, order: ParamOrder) -> Mapping[str, int]:
    """The number of each parameter, frozen ones included, in the model's order; none where the groups say it.

    Raises:
        RequestError: `request.unsatisfiable` for a source that does not keep the model's order.

    Source: torch 2.13.0 `distributed/fsdp/_optim_utils.py` (`_get_param_id_to_param_from_optim_input`: without the
    optimizer's own input, numbers count `model.parameters()`), through which Lightning gives numbers and takes them.
    """
    if order is ParamOrder.GROUPS:
        return {}
    held = {p.fqn for p in checkpoint.parameters}
    names = dict.fromkeys(checkpoint.shared.get(n, n) for n in checkpoint.module_names)
    found = {name: number for number, name in enumerate(n for n in names if n in held)}
    if lost := [printable(p.fqn) for p in checkpoint.trained if p.fqn not in found]:
        raise RequestError(
            "request.unsatisfiable",
            f"the source does not keep the order of the model's parameters ({listed(lost)}), which "
            f"--target-param-order {order} numbers",
            fix="--to dcp --framework lightning, whose optimizer has names",
        )
    return found


def model_entries(checkpoint: Checkpoint) -> dict[str, Node]:
    """The model's state dict, in its order: tensors as references, and extra states of modules."""
    numbers = {p.fqn: p.value() for p in checkpoint.parameters} | {b.fqn: b.tensor for b in checkpoint.buffers}
    numbers |= {a: numbers[o] for a, o in checkpoint.shared.items() if o in numbers and a not in checkpoint.copies}
    entries: dict[str, Node] = {name: PTensorRef(n) for name, n in {**numbers, **checkpoint.copies}.items()}
    entries |= checkpoint.extra_states
    order = dict.fromkeys((*checkpoint.module_names, *entries))
    return {name: entries[name] for name in order if name in entries}


def numbered_optimizer(
    checkpoint: Checkpoint,
    groups: Sequence[ParamGroup],
    *,
    odd: Mapping[str, Mapping[str, Node]],
    kept: Mapping[str, int] | None = None,
) -> Node:
    """The optimizer's state dict as torch numbers parameters: those of the first group, then those of the second.

    Args:
        checkpoint: The source.
        groups: Its param groups, as they are written.
        odd: States of other shapes than their parameters, by name.
        kept: Other numbers, by name. Torch loads them by their places in the groups.
    """
    members = [checkpoint.members(i) for i in range(len(groups))]
    fqns = [p.fqn for group in members for p in group]
    numbers = kept if kept is not None and {*kept} >= {*fqns} else {name: i for i, name in enumerate(fqns)}
    states: dict[str | int, Node] = {
        numbers[p.fqn]: _states(p, group, odd.get(p.fqn, {}))
        for group, held in zip(groups, members, strict=True)
        for p in held
        if not p.never_updated or p.fqn in odd
    }
    written = [
        mapping_of({**g.hyper_parameters, "params": PList([numbers[p.fqn] for p in held])})
        for g, held in zip(groups, members, strict=True)
    ]
    return mapping_of({"state": mapping_of(states), "param_groups": PList([*written])})


def odd_states(checkpoint: Checkpoint) -> Mapping[str, Mapping[str, Node]]:
    """Optimizer states of other shapes than their parameters, by name and state.

    Raises:
        RequestError: `request.unsatisfiable` for states of classes of their own, whose chunks only these join.
    """
    facts = facts_of(checkpoint)
    if facts is None:
        return {}
    for states in facts.opaque_states.values():
        kinds = listed(sorted({printable(one.kind) for one in states.values()}))
        text = f"the optimizer keeps {kinds}, and only its own class joins the chunks"
        raise RequestError("request.unsatisfiable", text, fix="--to dcp keeps it as it is")
    return facts.odd_states


def _states(parameter: Parameter, group: ParamGroup, odd: Mapping[str, Node]) -> Node:
    held: dict[str | int, Node] = {}
    as_torch = is_adam(group.hyper_parameters, parameter.states.keys() - {"fp32"})
    # torch's own order: the step first, then moments.
    for name in sorted(parameter.scalars, key=lambda n: n != STEP):
        scalar = parameter.scalars[name]
        one = scalar.dtype is None and as_torch
        held[name] = _as_tensor(scalar) if one else scalar_node(scalar)
    return mapping_of({**held, **{n: PTensorRef(t) for n, t in parameter.states.items() if n != "fp32"}, **odd})


_MODEL, _OPTIMIZER = ("model", "state_dict"), ("optimizer", "optimizer_states")
"""The keys of scripts, and Lightning's."""


def _as_tensor(scalar: Scalar) -> PLiteral:
    """A number of Python as the tensor that torch's Adam keeps.

    Raises:
        SourceError: `checkpoint.malformed` for a number that is no fp32.
    """
    try:
        return PLiteral(FLOAT32.name, (), struct.pack("<f", scalar.value))
    except OverflowError as error:
        raise SourceError("checkpoint.malformed", f"a number of the optimizer is {scalar.value}") from error
