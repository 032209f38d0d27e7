"""The optimizer-states file of one data-parallel rank: flat partitions and what surrounds them.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`state_dict`, `_get_base_optimizer_state`),
`runtime/zero/stage3.py` (`_rigid_state_dict`), `runtime/bf16_optimizer.py` (`state_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.errors import SourceError, printable
from reshard_engine.checkpoint import Scalar
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.formats.deepspeed.names import CONFIG, INFO, OPTIMIZER_STATE, PARAM_SHAPES, VERSION
from reshard_engine.formats.names import checked_state
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PObject,
    PTensor,
    is_mapping,
    kind_of,
    mapping_items,
    sequence_items,
)
from reshard_engine.tensors.dtypes import BY_NAME

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
        raise SourceError("checkpoint.malformed", f"{what} holds something that is no flat tensor")
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
        SourceError: `name.invalid` for a name that is no plain word, or that is taken (`fp32`).
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
            raise SourceError("checkpoint.malformed", f"{name}: an alignment padding is no small integer")
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
    raise SourceError("checkpoint.malformed", f"{what} is no number but {kind_of(node)}")
