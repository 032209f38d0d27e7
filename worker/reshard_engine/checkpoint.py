"""What a reader finds: logical tensors with a shard map, and the non-tensor state as inert trees.

The hub between readers and writers: neither side knows the other's format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from reshard.errors import RequestError, SourceError, printable
from reshard.models import NotCarried
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.pickles.nodes import Node, is_mapping, mapping_items
from reshard_engine.pickles.state_dict import KeyPath, name_of
from reshard_engine.tensors.cuts import Cut
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.shard_map import ShardMap

FILE_STATE = "file"
"""State of a tensor that is all bytes of a file."""
MAX_AMPLIFICATION = 16
"""Bytes of all tensors for one byte of the files: views and tied tensors share bytes, a few times at most."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number as its file holds it: a Python number, or a one-element tensor with its bytes."""

    value: int | float
    dtype: Dtype | None = None
    """None for a Python number."""
    raw: bytes = b""
    """Little-endian bytes of the tensor's one element."""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model under its owner's name. Tensor numbers index the shard map."""

    fqn: str
    shape: tuple[int, ...]
    group: int | None
    """Index of its optimizer param group; None for parameters that the optimizer does not own."""
    weight: int | None
    """The weight in the model's dtype, where the source stores it."""
    states: Mapping[str, int] = field(default_factory=dict[str, int])
    """`fp32` and the optimizer's per-element states."""
    scalars: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """Optimizer states that are one number per parameter or group, such as `step`."""
    cut: Cut | None = None
    """How tensor parallelism cuts it; None where nothing says."""
    layer: int | None = None
    """The pipeline layer whose weights it is among; None in a run that is no pipeline."""
    padding: Mapping[str, int] = field(default_factory=dict[str, int])
    """The rows of padding behind a vocabulary, by state and as `weight`. Training writes into them."""
    frozen_late: bool = False
    """True if the optimizer owns it, and the run had frozen it since: DeepSpeed saves and loads it as frozen, too."""

    @property
    def trained(self) -> bool:
        """Whether the optimizer owns it."""
        return self.group is not None

    @property
    def best(self) -> int | None:
        """The tensor that says its value: the master is the truth, the 16-bit weight is its rounding."""
        return self.states.get("fp32", self.weight)

    def value(self) -> int:
        """Like `best`, but raises when no value is stored.

        Raises:
            RequestError: `request.unsatisfiable` if the checkpoint stores none.
        """
        if self.best is None:
            raise RequestError("request.unsatisfiable", f"the checkpoint stores no value for {printable(self.fqn)}")
        return self.best


@dataclass(frozen=True, slots=True)
class Buffer:
    """A persistent buffer, or another tensor of the state dict that is no parameter."""

    fqn: str
    tensor: int
    registered: bool = True
    """True if the module calls it a buffer. Extra states and what hooks of the model add are none."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What the optimizer keeps beside its per-element states, as trees."""

    param_groups: tuple[Node, ...]
    """Per group the mapping of hyper-parameters, as in the source."""
    extras: Mapping[str, Node]
    """Loss scaler, overflow flag, clip_grad, ds_version, ... by the framework's key."""
    rank_numbers: tuple[str, ...] = ()
    """States that are one number for each rank's partition, and not the same on all: of no other partition."""
    place: str = "optimizer"
    """The key under which the source's files keep `extras`, for people."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two tensors that must hold the same elements: copies, or a master and the weight that is its rounding."""

    fqn: str
    state: str
    first: int
    other: int
    where: str
    """Where the other one is, for people."""
    rounded: bool = False
    """Whether the other one is the first one, rounded to its element type."""
    advisory: bool = False
    """Whether the first one is meant in any case, so that a difference is only worth knowing."""


class FormatFacts:
    """Base of the record of facts that one format family writes and reads, and that means nothing to any other."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as data: metadata and extents, no tensor bytes."""

    url: str
    tag: str | None
    format: str
    """Name of the reader's format, for people."""
    framework_version: str | None
    world: Mapping[str, int]
    step: int | None
    files: tuple[SourceFile, ...]
    shard_map: ShardMap
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    shared: Mapping[str, str]
    """Alias name to owner name of tied parameters."""
    optimizer: OptimizerState | None
    model_state: Node
    """The framework's model-state mapping with `PTensorRef`s in place of tensors."""
    foreign_globals: tuple[str, ...]
    warnings: tuple[str, ...]
    agreements: tuple[Agreement, ...] = ()
    """What must hold for the parts to have been put together rightly; compared before anything is written."""
    rng: tuple[Mapping[str, Node], ...] = ()
    """Random states by rank, where the source has any: of each model-parallel rank, at ZeRO-3 of all ranks."""
    model_files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Configuration, tokenizer and the like by file name, where they are to lie beside the weights."""
    module_paths: tuple[KeyPath, ...] = ()
    """Key paths of the entries of the model's state dict, in its order; empty where the source keeps none."""
    extra_states: Mapping[str, Node] = field(default_factory=dict[str, Node])
    """Entries of the model's state dict that are no tensors, by name, such as torch's extra states of modules."""
    not_carried: tuple[NotCarried, ...] = ()
    """Everything that the source holds and this checkpoint does not."""
    unexplained: tuple[str, ...] = ()
    """Parameters of which nothing says how tensor parallelism cut them; only their first part is in the map."""
    facts: FormatFacts | None = None
    """The facts of its own that the format noted."""
    unties: bool = False
    """True if names that the source ties are not tied here: a configuration that says they are would be wrong."""
    described: frozenset[str] = frozenset()
    """Entries of `model_state` that other fields of this checkpoint say: names, shapes and values of tensors."""
    family: str = ""
    """Name of the format whose reader read it; empty for a checkpoint that was made otherwise."""
    frozen_left_out: bool = False
    """True if the save left out frozen weights, or may have (`exclude_frozen_parameters`): what is here is not all."""

    def __post_init__(self) -> None:
        """Prove that names are distinct, states have their parameter's shape, and tensors share bytes within reason.

        Raises:
            SourceError: `checkpoint.ambiguous`, `checkpoint.malformed`, `tensor.amplification`.
        """
        owners = Counter((*(p.fqn for p in self.parameters), *(b.fqn for b in self.buffers)))
        if twice := next((name for name, count in owners.items() if count > 1), None):
            raise SourceError("checkpoint.ambiguous", f"{printable(twice)} is two tensors of the checkpoint")
        tensors = self.shard_map.tensors
        computed = {*self.shard_map.views, *self.shard_map.means, *self.shard_map.merges}
        stored = (t for i, t in enumerate(tensors) if i not in computed)
        wanted, there = sum(t.size_bytes for t in stored), sum(f.size_bytes for f in self.files)
        if wanted > MAX_AMPLIFICATION * there:
            raise SourceError(
                "tensor.amplification", f"tensors of {wanted} bytes over {there} bytes of files, again and again"
            )
        for parameter in self.parameters:
            numbers = [*parameter.states.values(), *([] if parameter.weight is None else [parameter.weight])]
            for stored in (tensors[n] for n in numbers):
                if stored.shape != parameter.shape:
                    raise SourceError(
                        "checkpoint.malformed",
                        f"{printable(stored.state)} of {printable(parameter.fqn)} is {stored.shape}, "
                        f"the parameter is {parameter.shape}",
                    )

    def module_names(self) -> list[str]:
        """The names of the state dict, joined by dots where it is nested: the model's own order."""
        state = self.model_state
        entries = mapping_items(state, what="model states") if is_mapping(state) else {}
        # Paths name what is stored elsewhere too; of a pipeline there are none, and the tree is made of its layers.
        return list(dict.fromkeys((*map(name_of, self.module_paths), *_leaf_names(entries.get("module"), ""))))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters and buffers by name."""
        buffers = {b.fqn: self.shard_map.tensors[b.tensor].shape for b in self.buffers}
        return buffers | {p.fqn: p.shape for p in self.parameters}

    @property
    def padding_rows(self) -> int:
        """Rows of padding that the source holds behind a vocabulary."""
        tensors = self.shard_map.tensors
        return max((tensors[n].shape[0] for p in self.parameters for n in p.padding.values()), default=0)

    @property
    def is_local(self) -> bool:
        """Whether all its files are on this machine: nothing waits for a network."""
        return all(f.store.scheme == "file" for f in self.files)

    @property
    def trained(self) -> tuple[Parameter, ...]:
        """The parameters that the optimizer owns, in its order."""
        return tuple(p for p in self.parameters if p.trained)

    @property
    def frozen(self) -> tuple[Parameter, ...]:
        """The parameters that the optimizer does not own."""
        return tuple(p for p in self.parameters if not p.trained)


def _leaf_names(node: Node, prefix: str) -> Iterator[str]:
    for key, value in mapping_items(node, what="module").items() if is_mapping(node) else ():
        if is_mapping(value):
            yield from _leaf_names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
