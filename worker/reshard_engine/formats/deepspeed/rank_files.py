"""The two files of one rank: its model states, and its partition of the optimizer's states.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`, `_save_checkpoint`,
`_get_zero_param_shapes`, `_get_zero_frozen_param_attributes`, `_get_shared_params`); older shapes:
a plain dict of shapes before 0.5.4, shapes in the optimizer file before 0.6.0, no `shared_params`
before 0.9.0, no `frozen_*` before 0.9.1.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Scalar
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import SharedPickles, TorchFile, open_torch_file
from reshard_engine.formats.deepspeed.files import (
    CONFIG,
    FROZEN_FRAGMENTS,
    FROZEN_SHAPES,
    INFO,
    OPTIMIZER_STATE,
    PARAM_SHAPES,
    VERSION,
)
from reshard_engine.formats.model_weights import checked_name, checked_state
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PList,
    PObject,
    PTensor,
    PTuple,
    is_mapping,
    kind_of,
    mapping_items,
    sequence_items,
)
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import Entry, KeyPath, state_dict_entries, tensors_of
from reshard_engine.tensors.dtypes import BY_NAME

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ModelStates:
    """A parsed model-states file."""

    torch_file: TorchFile
    entries: Mapping[str | int, Node]
    module: Mapping[str, PTensor]
    extra_states: Mapping[str, Node]
    """Entries of `module` that are not tensors, by name."""
    paths: tuple[KeyPath, ...]
    """Key paths of all entries of `module`, in its order."""
    buffer_names: tuple[str, ...]
    param_shapes: tuple[Shapes, ...] | None
    """Per group (ZeRO-1/2, BF16) or sub-group (ZeRO-3), in flat order; None at stage 0."""
    frozen_shapes: Shapes
    frozen_fragments: Mapping[str, PTensor]
    shared: Mapping[str, str]

    def integer(self, key: str) -> int | None:
        """A counter, or None if the file has none of that name."""
        value = self.entries.get(key)
        return value if type(value) is int else None

    @property
    def stepped(self) -> bool:
        """True if the counters show a step of the optimizer. Plain SGD keeps no state that would show one."""
        return (self.integer("global_steps") or 0) > (self.integer("skipped_steps") or 0)

    def leaves_out_frozen(self, stage: int) -> bool:
        """True if the run saved with `exclude_frozen_parameters=True`, as far as a file of this stage shows.

        From stage 2 on, the fragments are then None (0.9.1 and later); runs without frozen weights have an empty
        mapping. Below stage 2, only a tied weight shows it: DeepSpeed leaves out its first name, and no other name.
        """
        if stage >= 2 and FROZEN_FRAGMENTS in self.entries and self.entries[FROZEN_FRAGMENTS] is None:
            return True
        return bool(self.aliases_left)

    @property
    def aliases_left(self) -> tuple[str, ...]:
        """Names of tied weights that stayed in `module` when the weight's own name was left out as frozen."""
        trained = {n for group in self.param_shapes or () for n, _ in group}
        stored_names = self.module.keys() | trained | self.frozen_fragments.keys()
        return tuple(n for n, owner in self.shared.items() if owner not in stored_names and n in self.module)

    @property
    def version(self) -> str | None:
        """The `ds_version` that wrote the file."""
        value = self.entries.get(VERSION)
        return printable(value, max_chars=40) if isinstance(value, str) else None


def parse_model_states(torch_file: TorchFile) -> ModelStates:
    """The model states of a parsed file.

    Raises:
        SourceError: `checkpoint.malformed`, `name.invalid`.
    """
    name = printable(torch_file.file.name)
    entries = mapping_items(torch_file.root, what=name)
    if "module" not in entries:
        raise SourceError(
            "source.unsupported_version", f"{name} has no `module`: not a model-states file of DeepSpeed 0.3 or later"
        )
    module = module_entries(entries["module"], f"{name}: module")
    shapes = entries.get(PARAM_SHAPES)
    shared = {
        checked_name(str(k)): checked_name(v)
        for k, v in _mapping(entries.get("shared_params"), f"{name}: shared_params").items()
        if isinstance(v, str)
    }
    return ModelStates(
        torch_file,
        entries,
        tensors_of(module),
        {e.name: e.value for e in module if not isinstance(e.value, PTensor)},
        tuple(e.path for e in module),
        tuple(n for n in _names(entries.get("buffer_names"), name)),
        None if shapes is None else parse_param_shapes(shapes, what=f"{name}: param_shapes"),
        _shapes(entries.get(FROZEN_SHAPES), f"{name}: frozen_param_shapes"),
        module_tensors(entries.get(FROZEN_FRAGMENTS), f"{name}: frozen_param_fragments"),
        shared,
    )


def _mapping(node: Node, what: str) -> dict[str | int, Node]:
    return {} if node is None else mapping_items(node, what=what)


def _names(node: Node, what: str) -> list[str]:
    if node is None:
        return []
    return [checked_name(n) for n in sequence_items(node, what=f"{what}: buffer_names") if isinstance(n, str)]


def module_entries(node: Node, what: str) -> tuple[Entry, ...]:
    """The entries of a state dict; nothing for None.

    Raises:
        SourceError: `checkpoint.ambiguous` if two get one name, `checkpoint.malformed`, `name.invalid`.
    """
    entries = () if node is None else state_dict_entries(node, what=what)
    for entry in entries:
        checked_name(entry.name)
    return entries


def module_tensors(node: Node, what: str) -> dict[str, PTensor]:
    """The tensors of a state dict by name, as `module_entries` finds them."""
    return tensors_of(module_entries(node, what))


def shape_of(node: Node, what: str) -> tuple[int, ...]:
    """A `torch.Size` (or a plain tuple) as integers.

    Raises:
        SourceError: `checkpoint.malformed` otherwise.
    """
    if (
        isinstance(node, PObject)
        and isinstance(node.cls, Global)
        and node.cls.dotted == "torch.Size"
        and len(node.args.items) == 1
    ):
        node = node.args.items[0]
    items = node.items if isinstance(node, PTuple | PList) else None
    if items is None or len(items) > 64 or not all(type(i) is int and 0 <= i < 1 << 48 for i in items):
        raise SourceError("checkpoint.malformed", f"{what} is not a shape but {kind_of(node)}")
    numel = 1
    for item in items:
        numel *= item
    if numel >= 1 << 62:
        raise SourceError("checkpoint.too_large", f"{what} declares more than 2**62 elements")
    return tuple(items)


def _shapes(node: Node, what: str) -> Shapes:
    return tuple(
        (checked_name(str(name)), shape_of(shape, f"{what}: {printable(str(name))}"))
        for name, shape in _mapping(node, what).items()
    )


def parse_param_shapes(node: Node, *, what: str) -> tuple[Shapes, ...]:
    """Per group the names and shapes in flat order; a plain mapping (before 0.5.4) is one group.

    Raises:
        SourceError: `checkpoint.malformed`, `checkpoint.ambiguous` if a name comes twice.
    """
    groups = (
        (_shapes(node, what),) if is_mapping(node) else tuple(_shapes(g, what) for g in sequence_items(node, what=what))
    )
    seen: set[str] = set()
    for group in groups:
        for name, _ in group:
            if name in seen:
                raise SourceError("checkpoint.ambiguous", f"{what}: {printable(name)} comes twice")
            seen.add(name)
    return groups


# The optimizer-states file of one data-parallel rank: flat partitions and what surrounds them.
#
# Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`state_dict`, `_get_base_optimizer_state`),
# `runtime/zero/stage3.py` (`_rigid_state_dict`), `runtime/bf16_optimizer.py` (`state_dict`).

MAX_WORLD = 1 << 20
FP32_KEYS = ("single_partition_of_fp32_groups", "fp32_flat_groups", "single_partition_of_fp32_params")


@dataclass(frozen=True, slots=True)
class RankStates:
    """One rank's optimizer file. Lists are per group (ZeRO-1/2, BF16) or sub-group (ZeRO-3)."""

    torch_file: TorchFile
    stage: int
    bf16_optimizer: bool
    fp32: tuple[PTensor, ...]
    states: tuple[Mapping[str, Node], ...]
    """Per (sub-)group the optimizer's states; empty before the first step."""
    param_groups: tuple[Mapping[str | int, Node], ...]
    """Hyper-parameters; empty for list-form (elastic) states, which have none."""
    param_group_nodes: tuple[Node, ...]
    partition_counts: tuple[int, ...]
    """Stated numbers of ranks, one for each group; at ZeRO-3 one number for all groups; empty if the file has none."""
    alignment_paddings: tuple[tuple[int, ...], ...]
    extras: Mapping[str, Node]
    elastic: bool
    legacy_param_shapes: Node
    """`param_shapes` of checkpoints before 0.6.0."""
    unread: tuple[str, ...] = ()
    """Keys of the file that nothing here knows, as paths from its top."""
    swapped: Mapping[str, SourceFile] = field(default_factory=dict[str, SourceFile])
    """Files that the rank kept on NVMe, by the names that the rank's empty tensors give."""

    @property
    def partition_count(self) -> int | None:
        """Data-parallel size that the file states."""
        return max(self.partition_counts, default=None)


OUTER_KEYS = frozenset({OPTIMIZER_STATE, CONFIG, VERSION, PARAM_SHAPES})
"""Keys of a rank's file. The configuration is that of the model states; `param_shapes` is here before 0.6.0."""
EXTRA_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", VERSION, "zero_stage")

PARTITION_KEYS = frozenset(
    {
        *(*FP32_KEYS, OPTIMIZER_STATE, "base_optimizer_state", "base_optimizer_state_step", PARAM_SHAPES),
        *("group_paddings", "partition_count", "param_slice_mappings", "param_alignment_paddings"),
        *("ds_zero_partition_groups", INFO),
    }
)
"""Keys of the optimizer state that describe the partitions. They are not carried: each target has its own."""
BASE_KEYS = frozenset({"state", "param_groups"})
"""Keys of the base optimizer's own state dict. Source: torch 2.13.0 `optim/optimizer.py` (`state_dict`)."""


def unread_keys(outer: Mapping[str | int, Node], inner: Mapping[str | int, Node], base: Node) -> tuple[str, ...]:
    """The keys of a rank's file that nothing here knows, as paths from its top."""
    name = OPTIMIZER_STATE
    found = [str(k) for k in outer if k not in OUTER_KEYS]
    found += [f"{name}.{k}" for k in inner if k not in PARTITION_KEYS and k not in EXTRA_KEYS]
    if is_mapping(base):
        wrapped = next(k for k in (name, "base_optimizer_state") if inner.get(k) is base)
        found += [f"{name}.{wrapped}.{k}" for k in mapping_items(base, what=wrapped) if k not in BASE_KEYS]
    return tuple(found)


def parse_rank_states(torch_file: TorchFile) -> RankStates:
    """The optimizer states of one rank.

    Raises:
        SourceError: `checkpoint.malformed`, `checkpoint.too_large`, `source.unsupported_version`.
    """
    name = printable(torch_file.file.name)
    outer = mapping_items(torch_file.root, what=name)
    if OPTIMIZER_STATE not in outer:
        raise SourceError("source.unsupported_version", f"{name} has no `optimizer_state_dict`")
    inner = mapping_items(outer[OPTIMIZER_STATE], what=f"{name}: optimizer_state_dict")
    key = next((k for k in FP32_KEYS if k in inner), None)
    if key is None:
        raise SourceError(
            "source.unsupported_version",
            f"{name} has none of {', '.join(FP32_KEYS)}: not a ZeRO optimizer file of a known version",
        )
    stage = 3 if key == "fp32_flat_groups" else _stage(inner.get("zero_stage"))
    base = inner.get(OPTIMIZER_STATE if stage == 3 else "base_optimizer_state")
    fp32 = _tensor_list(inner[key], f"{name}: {key}")
    states, groups, nodes, elastic = _base_states(base, inner, name, len(fp32))
    return RankStates(
        torch_file,
        stage,
        "zero_stage" not in inner and "loss_scaler" not in inner,
        fp32,
        states,
        groups,
        nodes,
        _partition_counts(inner.get("partition_count")),
        _paddings(inner.get("param_alignment_paddings"), name),
        {k: inner[k] for k in EXTRA_KEYS if k in inner},
        elastic,
        outer.get(PARAM_SHAPES, inner.get(PARAM_SHAPES)),
        unread_keys(outer, inner, base),
    )


def _stage(node: Node) -> int:
    # BF16_Optimizer files state no stage; they are partitioned as those of stage 1.
    if (
        isinstance(node, PObject)
        and isinstance(node.cls, Global)
        and node.cls.name == "ZeroStageEnum"
        and node.args.items
    ):
        node = node.args.items[0]
    if node is None:
        return 1
    if type(node) is not int or node not in (1, 2, 3):
        raise SourceError("source.unsupported_version", f"zero_stage is {kind_of(node)}")
    return node


def _tensor_list(node: Node, what: str) -> tuple[PTensor, ...]:
    items = sequence_items(node, what=what)
    if not all(isinstance(i, PTensor) and len(i.shape) == 1 for i in items):
        raise SourceError("checkpoint.malformed", f"{what} holds something that is not a flat tensor")
    return tuple(items)


def _base_states(
    base: Node, inner: Mapping[str | int, Node], name: str, count: int
) -> tuple[tuple[Mapping[str, Node], ...], tuple[Mapping[str | int, Node], ...], tuple[Node, ...], bool]:
    if base is None:
        raise SourceError("source.unsupported_version", f"{name} has no optimizer state")
    if not is_mapping(base):
        per_group = [mapping_items(g, what=f"{name}: elastic state") for g in sequence_items(base, what=name)]
        step = inner.get("base_optimizer_state_step")
        states = [named_states(g) for g in per_group]
        for state in states:
            if step is not None:
                state.setdefault("step", step)
        return tuple(states), (), (), True
    entries = mapping_items(base, what=f"{name}: optimizer state")
    by_index = mapping_items(entries.get("state"), what=f"{name}: state") if entries.get("state") is not None else {}
    if any(type(k) is not int or not 0 <= k < count for k in by_index):
        raise SourceError("checkpoint.malformed", f"{name}: optimizer state for groups that do not exist")
    nodes = tuple(sequence_items(entries.get("param_groups"), what=f"{name}: param_groups"))
    groups = tuple(mapping_items(n, what=f"{name}: param_groups") for n in nodes)
    found: list[Mapping[str, Node]] = []
    for index in range(count):
        entry = by_index.get(index)
        found.append({} if entry is None else named_states(mapping_items(entry, what=f"{name}: state")))
    return tuple(found), groups, nodes, False


def named_states(entries: Mapping[str | int, Node]) -> dict[str, Node]:
    """An optimizer's states by name; the names become file names.

    Raises:
        SourceError: `name.invalid` for a name that is not a plain word, or that is taken (`fp32`).
    """
    return {checked_state(k): v for k, v in entries.items()}


def _partition_counts(node: Node) -> tuple[int, ...]:
    if node is None:
        return ()
    counts = (
        [node] if type(node) is int else [i for i in sequence_items(node, what="partition_count") if type(i) is int]
    )
    if any(c <= 0 for c in counts):
        raise SourceError("checkpoint.malformed", "partition_count is not positive")
    if any(c > MAX_WORLD for c in counts):
        raise SourceError("checkpoint.too_large", f"partition_count is beyond {MAX_WORLD} ranks")
    return tuple(counts)


def _paddings(node: Node, name: str) -> tuple[tuple[int, ...], ...]:
    if node is None:
        return ()
    groups: list[tuple[int, ...]] = []
    for group in sequence_items(node, what=f"{name}: param_alignment_paddings"):
        values = sequence_items(group, what=f"{name}: param_alignment_paddings")
        if not all(type(v) is int and 0 <= v < 1 << 20 for v in values):
            raise SourceError("checkpoint.malformed", f"{name}: an alignment padding is not a small integer")
        groups.append(tuple(values))
    return tuple(groups)


def read_scalar(node: Node, torch_file: TorchFile, *, what: str) -> Scalar:
    """A Python number, or a tensor of one element with its value.

    Raises:
        SourceError: `checkpoint.malformed` otherwise.
    """
    if type(node) is int or type(node) is float:
        return Scalar(node)
    if isinstance(node, PTensor) and node.numel == 1:
        found = Scalar.of_element(torch_file.read_scalar_bytes(node), BY_NAME[node.dtype], node.shape)
        if found is not None:
            return found
    raise SourceError("checkpoint.malformed", f"{what} is not a number but {kind_of(node)}")


# Opens the files of one checkpoint's ranks, and parses equal pickles once.

States = TypeVar("States", ModelStates, RankStates)
_KEPT = 16


class RankOpener:
    """Opens files during one read of one checkpoint."""

    def __init__(self, ledger: OpaqueLedger) -> None:
        """Start without open files."""
        self._pickles = SharedPickles(ledger)
        self._parsed: OrderedDict[tuple[int, str], tuple[Node, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, file: SourceFile) -> TorchFile:
        """The file's metadata.

        Raises:
            SourceError: As `open_torch_file`.
        """
        return open_torch_file(file, self._pickles.ledger, pickles=self._pickles)

    def states(self, file: SourceFile, parse: Callable[[TorchFile], States]) -> States:
        """The result of `parse` for the file. `parse` reads only the pickle, so equal pickles share the result.

        Raises:
            SourceError: As `open_torch_file` and `parse`.
        """
        opened = self.open(file)
        key = (id(opened.root), parse.__qualname__)
        with self._lock:
            if key in self._parsed:
                known: States = self._parsed[key][1]
                self._parsed.move_to_end(key)
                return replace(known, torch_file=opened)
            states = parse(opened)
            # The key is the root's address. The root is kept too, so that no other object gets this address.
            self._parsed[key] = (opened.root, states)
            if len(self._parsed) > _KEPT:
                self._parsed.popitem(last=False)
            return states
