"""The content of one model-parallel rank of the target: parameters in the rank's shapes, buffers, names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard_engine.checkpoint import Scalar
from reshard_engine.formats.deepspeed.partitioning import Run
from reshard_engine.pickles.nodes import Node
from reshard_engine.pickles.state_dict import KeyPath
from reshard_engine.tensors.dtypes import Dtype


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A parameter, or one rank's part of it."""

    fqn: str
    shape: tuple[int, ...]
    group: int | None
    """Its optimizer param group; None for frozen ones."""
    states: Mapping[str, tuple[Run, ...]]
    """`fp32` and the optimizer's per-element states."""
    weight: tuple[Run, ...]
    """The elements that its weight in the model's dtype is made of: those of the stored weight, or of the master."""
    dtypes: Mapping[str, Dtype]
    """Element types of the states. The runs of a part that is all padding do not show them."""
    weight_dtype: Dtype
    """Element type of the tensor that the weight is made of."""
    scalars: Mapping[str, Scalar]
    frozen_late: bool = False
    """True if the run froze it after the optimizer was made."""

    @property
    def numel(self) -> int:
        """Elements of this part."""
        return sum(end - begin for _, begin, end in self.weight)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """One model-parallel rank."""

    pp: int
    tp: int
    parameters: tuple[LocalParameter, ...]
    """Trained ones in the optimizer's order, then frozen ones."""
    layers: Mapping[str, int]
    """The layer whose file holds each parameter's weight; empty in a run without a pipeline."""
    buffers: Mapping[str, int]
    """Tensor numbers of persistent buffers, and of other tensors that are no parameters."""
    shared: Mapping[str, str]
    """Owner's name of each tied name."""
    extra_states: Mapping[str, Node]
    """Entries of `module` that are no tensors, by name."""
    paths: tuple[KeyPath, ...]
    """The key path of every entry of `module`, in the model's order."""
    fused: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """Whole shapes of the parameters in which AutoEP fused experts; they are whole here."""

    def group(self, index: int) -> list[LocalParameter]:
        """The parameters of one optimizer param group."""
        return [p for p in self.parameters if p.group == index]

    @property
    def frozen(self) -> list[LocalParameter]:
        """The parameters that DeepSpeed loads as frozen, those that were frozen late included."""
        return [p for p in self.parameters if p.group is None or p.frozen_late]
