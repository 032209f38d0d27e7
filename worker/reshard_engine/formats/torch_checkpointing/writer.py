"""Directories of torch_checkpointing for any number of ranks of FSDP2, as its manager saves them on that many.

Each rank gets a file of each item. On as many ranks and on an equal mesh the framework's loader reads these whole, with
the optimizer's param groups; on others it reshards, and reads tensors alone. Items keep the source's layouts, which a
loader asks for. `metadata.pkl` comes last: without it the framework's loader leaves items with a resharder
as they are, and says so in a log alone.

Source: torch_checkpointing 0.1.1 `checkpoint_writer.py`, `metadata_manager.py` (`_merge_object_metadata_from_ranks`),
`default_resharder.py` (`_replicated_tensor_metadata`, `extract_sharding_metadata`), `walk_utils.py`,
`state_transformations.py` (`optimizer_transform_pre`), `checkpoint_reader.py` (`_read_with_resharding`); verified by
loading with its manager.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from reshard.choices import OpaquePolicy, RngPolicy
from reshard.errors import RequestError, listed, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.containers.safetensors import safetensors_template
from reshard_engine.formats.carried import AS_ASKED, OF_ANOTHER, named, padding_left_out
from reshard_engine.formats.dtensors import Shape, TensorsOfRank
from reshard_engine.formats.rank_optimizer import PARAMS
from reshard_engine.formats.rank_states import (
    NO_GROUPS,
    NO_OPTIMIZER,
    VERSIONS,
    TargetRanks,
    device_and_shape,
    model_entries,
    state_entries,
    steps_rates,
)
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.formats.torch_checkpointing.files import (
    CURRENT,
    DTENSOR,
    GROUPS,
    JSON,
    METADATA,
    MODEL,
    NAMED,
    NAMES,
    OPTIMIZER,
    SAFETENSORS,
    STATE,
    TORCH,
    VERSION,
    ItemFacts,
    SavedItems,
    path_of,
    path_text,
)
from reshard_engine.pickles.nodes import (
    Node,
    PList,
    PLiteral,
    PTensorRef,
    PTuple,
    is_mapping,
    mapping_items,
    mapping_of,
    ordered_dict,
    plain_value,
)
from reshard_engine.pickles.rebuild import made_of_tensors
from reshard_engine.tensors.layout import TargetFile, TargetLayout, literal_template
from reshard_engine.tensors.shard_map import ShardMap, packed_stride

_SCHEDULER = "lr_scheduler"
_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
"""A name that an item may have. Source: `types.py` (`CheckpointPath`)."""
_RANDOM = re.compile(r"(?:.*_)?(?:rng|random)(?:_.*)?")
_PROTOCOL = 4
_NO_PLACE = "items of torch_checkpointing have no place for it"
_OF_RANKS = "each rank saved another value of it, and nothing says what other ranks would hold"
_NO_NAMES = (
    "the mesh's axes have no names, as fully_shard makes one; for a run whose axes have names torch_checkpointing "
    "reshards, and reads tensors alone: there load the optimizer as an item without a resharder, for lr, weight_decay "
    "and betas"
)
_OTHER_PATHS = "the source's files of this item are at paths that do not show where the rank stands in them"
_SUFFIXES = {TORCH: ".pt", JSON: ".json", SAFETENSORS: ".safetensors"}


class TorchCheckpointingWriter:
    """Lays out the items of all ranks, and the metadata."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """Lay out each item of each rank.

        Raises:
            RequestError: `request.invalid` for options that do not go with it; `request.unsatisfiable` for a source
                whose states have no place in such files, or that does not say what they must.
            SourceError: `checkpoint.ambiguous`, `checkpoint.malformed`, `pickle.forbidden_global`.
        """
        if request.dtype is not None or request.exclude_frozen:
            raise RequestError(
                "request.invalid",
                "items of torch_checkpointing hold all parameters as the optimizer has them: no --dtype, no "
                "--exclude-frozen",
                fix="leave --dtype and --exclude-frozen out",
            )
        target = _Target.of(checkpoint.as_in_the_script(), request)
        laid = [*_Files(target).of_all_ranks()]
        ordered = (*(f for f in laid if not f.commit), *(f for f in laid if f.commit))
        return TargetLayout(ordered, None, tuple(_warnings(target)), not_carried=tuple(_left_out(target)))


@dataclass(frozen=True)
class _Target(TargetRanks):
    """The ranks that load the files, and the items that they look for."""

    saved: SavedItems | None
    """How the source's run saved it, if it saved such items."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, request: ConvertRequest) -> _Target:
        """Find the mesh. Its axes have the source's names if there are as many."""
        facts = checkpoint.facts
        saved = facts.saved if isinstance(facts, ItemFacts) else None
        run = None if saved is None else saved.run
        device, shape = device_and_shape(request, run)
        mesh = None if run is None else run.mesh
        names = mesh.names if mesh is not None and len(mesh.shape) == len(shape) else None
        return cls(checkpoint, request, run, device, shape, names, saved)

    @property
    def model(self) -> str:
        """The key of the model's item."""
        return MODEL if self.saved is None else self.saved.model

    @property
    def optimizer(self) -> str:
        """The key of the optimizer's item."""
        return OPTIMIZER if self.saved is None else self.saved.optimizer

    @cached_property
    def schedulers(self) -> Mapping[str, Node]:
        """The schedulers by item: all of the source's own kind; of others the optimizer's, if it is torch's."""
        found = self.checkpoint.schedulers
        if self.saved is not None:
            return dict(zip(self.saved.schedulers, found, strict=True))
        own = self.checkpoint.scheduler
        return {_SCHEDULER: own} if steps_rates(own) else {}

    def kind(self, key: str) -> str:
        """The form of an item's files: the source's, else that of torch."""
        return TORCH if self.saved is None or key not in self.saved.layouts else self.saved.layouts[key][0]

    def pattern(self, key: str) -> str:
        """The path of an item's file, with `{rank}`: as in the source, else the framework's own."""
        own = None if self.saved is None or key not in self.saved.layouts else self.saved.layouts[key][1]
        return own or f"{key}_{{rank}}{_SUFFIXES[self.kind(key)]}"

    def layouts(self, key: str) -> dict[int, dict[str, object] | None]:
        """Describe each rank's file of an item for the metadata; None for the framework's own path and form."""
        pattern, form = self.pattern(key), {"type": self.kind(key)}
        usual = pattern == f"{key}_{{rank}}.pt"
        return {
            rank: None if usual else {"file_path": path_of(pattern, rank), "serialization_format": {**form}}
            for rank in range(self.mesh.world)
        }

    @property
    def keeps_random(self) -> bool:
        """True unless random states are to be left out."""
        return self.request.rng is not RngPolicy.DROP

    @cached_property
    def others(self) -> Mapping[str, Node]:
        """The items that all ranks have alike, by key."""
        taken = {self.model, self.optimizer, *self.schedulers}
        held = {str(k): v for k, v in self.checkpoint.client_state.items()}
        held = {k: v for k, v in held.items() if _KEY.fullmatch(k) and k not in taken}
        return {k: v for k, v in held.items() if self.keeps_random or not _RANDOM.fullmatch(k)}

    @cached_property
    def of_ranks(self) -> Mapping[str, Sequence[Node]]:
        """The items that differ by rank: in the same world all of them, else the random states alone."""
        facts = self.checkpoint.facts
        held: Mapping[str, Sequence[Node]] = facts.rank_items if isinstance(facts, ItemFacts) else {}
        same = {len(values) for values in held.values()} == {self.mesh.world}
        return {k: v for k, v in held.items() if (self.keeps_random if _RANDOM.fullmatch(k) else same)}


class _Files:
    """Lays out the files of each rank."""

    def __init__(self, target: _Target) -> None:
        """Refuse what these files have no place for.

        Raises:
            RequestError: `request.unsatisfiable`.
        """
        self._target, self._checkpoint = target, target.checkpoint
        self._optimizer = target.checkpoint.optimizer
        target.refuse_unwritable()

    def of_all_ranks(self) -> Iterator[TargetFile]:
        """All files. The models' and the metadata are commit files: without them no rank's loader goes on."""
        target = self._target
        alike = {k: target.carried(v) for k, v in (*target.schedulers.items(), *target.others.items())}
        described: dict[str, Node] = {}
        for number in range(target.mesh.world):
            rank = TensorsOfRank(target.mesh, number, self._checkpoint.shard_map.tensors, target.plain)
            items: dict[str, Node] = {target.model: self._model(rank)}
            items |= {} if self._optimizer is None else {target.optimizer: self._states_and_groups(rank)}
            described = described or items
            own = {k: target.carried(values[number % len(values)]) for k, values in target.of_ranks.items()}
            for key, node in (items | alike | own).items():
                if key == target.model and target.kind(key) == SAFETENSORS:
                    yield self._local_tensors(rank, number)
                else:
                    yield self._file(key, number, node)
        if target.saved is None or target.saved.described:
            data = _metadata(described, self._checkpoint.shard_map, target)
            yield TargetFile(METADATA, literal_template(data), (), commit=True)

    def _file(self, key: str, rank: int, node: Node) -> TargetFile:
        path, commit = path_of(self._target.pattern(key), rank), key == self._target.model
        if self._target.kind(key) == JSON:  # as `checkpoint_writer.py` (`_write_key`) makes it
            text = json.dumps(plain_value(node, what=printable(key)), sort_keys=True, indent=4)
            return TargetFile(path, literal_template(text.encode()), (), commit=commit)
        # The names of DTensors' parts are written, too. Those of the source's own trees were checked by `carried`.
        shard_map, keep = self._checkpoint.shard_map, OpaquePolicy.KEEP
        template, slots = tree_template("archive", node, shard_map, opaque=keep)
        return TargetFile(path, template, slots, commit=commit)

    def _local_tensors(self, rank: TensorsOfRank, number: int) -> TargetFile:
        """The model's file of one rank with its local tensors, as safetensors.

        Raises:
            RequestError: `request.unsatisfiable` for tied pairs and values that are no tensors.
        """
        checkpoint, tensors = self._checkpoint, self._checkpoint.shard_map.tensors
        if checkpoint.shared or checkpoint.extra_states:
            names = listed([printable(n) for n in (*checkpoint.shared, *checkpoint.extra_states)])
            text = f"safetensors hold neither tied tensors nor other values, and the model has {names}"
            raise RequestError("request.unsatisfiable", text, fix="--to dcp")
        runs: dict[str, tuple[int, Shape, int, int]] = {}
        for p in checkpoint.parameters:
            value = p.value()
            if rank.is_cut(p.weight):
                runs[p.fqn] = (value, *rank.run(value))
            else:
                runs[p.fqn] = (value, tensors[value].shape, 0, tensors[value].numel)
        for b in checkpoint.buffers:
            runs[b.fqn] = (b.tensor, tensors[b.tensor].shape, 0, tensors[b.tensor].numel)
        held = [(n, tensors[i].dtype, shape, end - begin) for n, (i, shape, begin, end) in runs.items()]
        begins = [begin for _, _, begin, _ in runs.values()]
        template = safetensors_template(held, {})
        moved = (replace(b, begin=b.begin + begins[b.slot], end=b.end + begins[b.slot]) for b in template.bodies)
        slots = tuple(index for index, _, _, _ in runs.values())
        path = path_of(self._target.pattern(self._target.model), number)
        return TargetFile(path, replace(template, bodies=tuple(moved)), slots, commit=True)

    def _model(self, rank: TensorsOfRank) -> Node:
        found = model_entries(self._checkpoint, rank, self._target.carried)
        node = ordered_dict(found)
        if self._target.run is not None and self._target.run.versions is not None:
            node.state, node.has_state = mapping_of({VERSIONS: self._target.run.versions}), True
        return node

    def _states_and_groups(self, rank: TensorsOfRank) -> Node:
        """The optimizer by names, as `optimizer_transform_pre` makes it; by numbers for a run that has these."""
        checkpoint, run, numbers = self._checkpoint, self._target.run, self._target.numbers
        groups = () if self._optimizer is None else self._optimizer.groups
        held = {numbers.get(p.fqn, p.fqn): state_entries(p, rank) for p in checkpoint.trained}
        states = {k: mapping_of(s) for k, s in held.items() if s}
        made: list[Node] = []
        for number, group in enumerate(groups):
            values = {key: self._target.carried(value) for key, value in group.hyper_parameters.items()}
            if numbers and run is not None:
                made.append(mapping_of({**values, PARAMS: PList([*run.lists[number]])}))
            else:
                values.pop(NAMES, None)
                names = PList([p.fqn for p in checkpoint.members(number)])
                made.append(mapping_of({NAMES: names, **values}))
        version: dict[str | int, Node] = {} if numbers else {VERSION: NAMED}
        return mapping_of({STATE: mapping_of({**states}), GROUPS: PList(made), **version})


# The metadata.


def _metadata(items: Mapping[str, Node], shard_map: ShardMap, target: _Target) -> bytes:
    """The bytes of `metadata.pkl`: what the framework says of each tensor in these items, which are those of a rank."""
    mesh = target.mesh
    ranks = tuple(range(mesh.world))
    every = {"device_type": mesh.device, "mesh_shape": (mesh.world,), "mesh_data": ranks, "mesh_dim_names": None}
    own = {"device_type": mesh.device, "mesh_shape": mesh.shape, "mesh_data": ranks, "mesh_dim_names": mesh.names}
    shard: list[dict[str, object]] = [{"type": "Shard", "dim": 0}]
    cut = shard if len(mesh.shape) == 1 else [{"type": "Replicate"}, *shard]
    found: dict[str, object] = {}
    for key, node in items.items():
        specs: dict[str, object] = {}
        for path, (dtype, shape, sharded) in _leaves(node, shard_map, ()):
            data = {
                "global_shape": [*shape],
                "dtype": f"torch.{dtype}",
                "stride": [*packed_stride(shape)],
                "mesh_spec": own if sharded else every,
                "placements": cut if sharded else [{"type": "Replicate"}],
            }
            spec = {"sharding_metadata": {"type": DTENSOR, "data": data}, "ranks": ranks}
            specs[path_text(path)] = [spec]
        if specs:
            found[key] = {"nested_path_to_metadata": specs, "rank_to_layout_info": target.layouts(key)}
    return pickle.dumps({"metadata": found, "world_size": mesh.world, "version": CURRENT}, protocol=_PROTOCOL)


def _leaves(
    node: Node, shard_map: ShardMap, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], tuple[str, Shape, bool]]]:
    """The tensors within a value, each with its path, its type, its shape, and True for a sharded one."""
    if isinstance(node, PTensorRef):
        tensor = shard_map.tensors[node.index]
        yield path, (tensor.dtype.name, tensor.shape, False)
    elif isinstance(node, PLiteral):
        yield path, (node.dtype, node.shape, False)
    elif (made := made_of_tensors(node)) is not None:
        yield path, (made.dtype, made.shape, True)
    elif is_mapping(node):
        for key, value in mapping_items(node, what="an item").items():
            yield from _leaves(value, shard_map, (*path, key))
    elif isinstance(node, PList | PTuple):
        for number, value in enumerate(node.items):
            yield from _leaves(value, shard_map, (*path, number))


# What the user is told.


def _warnings(target: _Target) -> Iterator[str]:
    checkpoint, world = target.checkpoint, target.mesh.world
    if checkpoint.optimizer is None:
        yield NO_OPTIMIZER
    if target.names is None and (target.run is None or target.run.mesh is None):
        yield _NO_NAMES
    if len(target.shape) == 2 and target.groups.first is None:
        yield NO_GROUPS
    for key, (_, pattern) in target.saved.layouts.items() if target.saved is not None else ():
        if pattern is None:
            yield f"{printable(key)}: {_OTHER_PATHS}; it is written as {printable(target.pattern(key))}"
    if checkpoint.padding_rows:
        yield padding_left_out(checkpoint)
    for key, values in target.of_ranks.items():
        if len(values) != world:
            yield f"{printable(key)} does not fit other worlds: rank r gets that of source rank r mod {len(values)}"


def _left_out(target: _Target) -> Iterator[NotCarried]:
    """Yield what the source holds and these files do not."""
    checkpoint, facts = target.checkpoint, target.checkpoint.facts
    kept = {*target.others, *target.of_ranks, *(["schedulers"] if target.schedulers else [])}
    of_ranks: Mapping[str, Sequence[Node]] = facts.rank_items if isinstance(facts, ItemFacts) else {}
    others = facts.of_others(checkpoint)
    yield from named(others, OF_ANOTHER)
    for key in map(str, facts.run_state(checkpoint)):
        if key not in kept and key not in others:
            dropped = not target.keeps_random and _RANDOM.fullmatch(key) is not None
            yield from named([key], AS_ASKED if dropped else _OF_RANKS if key in of_ranks else _NO_PLACE)
    yield from target.numbers_left_out()
