"""Weights of a checkpoint as torch tensors, read one by one on demand, all at once, or into a model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch

from reshard.choices import OpaquePolicy, ReplicaPolicy, TargetFormat, WeightDtype
from reshard.errors import RequestError, listed, printable
from reshard.models.jobs import ConvertRequest
from reshard.options import SourceSpec
from reshard_engine.checkpoint import OF_TRAINING, Checkpoint
from reshard_engine.execute.casts.placing import default_kernel
from reshard_engine.execute.checks.source import check_agreements
from reshard_engine.execute.executor import stop_check
from reshard_engine.execute.gather import TensorReader
from reshard_engine.formats.model_weights import Weight, weights_of
from reshard_engine.operations.conversion import REMOTE_THREADS
from reshard_engine.operations.requested import refuse_unexplained
from reshard_engine.operations.runs.steps import named_checkpoint
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.local import kept_open
from reshard_engine.storage.locations import open_location
from reshard_engine.tensors.dtypes import SHORT_NAMES

_BLOCK_BYTES = 16 << 20
"""The bytes of a tensor that one thread reads at once."""
_LOADED_BYTES = 1 << 30
"""The bytes of tensors that are read together to load a model: the memory that it takes beside the model."""


class LazyTensor:
    """A tensor of a checkpoint with known shape and type, whose bytes `contiguous` reads."""

    __slots__ = ("_checkpoint", "_weight", "dtype", "name", "shape")

    def __init__(self, checkpoint: Checkpoint, weight: Weight) -> None:
        """Take shape and type, without reading the tensor."""
        self._checkpoint, self._weight = checkpoint, weight
        self.name = weight.fqn
        self.shape = torch.Size(weight.shape)
        self.dtype: torch.dtype = getattr(torch, weight.dtype.name)

    def contiguous(self) -> torch.Tensor:
        """Read the tensor.

        Raises:
            SourceError: `source.changed`, or an error of the storage.
        """
        found = torch.empty(self.shape, dtype=self.dtype)
        _fill([(self, found)])
        return found

    def numel(self) -> int:
        """The number of elements."""
        return self.shape.numel()

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or the length of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def element_size(self) -> int:
        """The bytes of one element."""
        return self._weight.dtype.itemsize_bytes

    def is_floating_point(self) -> bool:
        """True if the element type is a floating-point type."""
        return self._weight.dtype.floating

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor in memory."""
        return self._weight.size_bytes

    def __repr__(self) -> str:
        """The name, shape and type."""
        return f"LazyTensor({self.name!r}, {tuple(self.shape)}, {self.dtype})"

    def read_into(self, target: torch.Tensor, begin: int, end: int) -> None:
        """Read the elements `[begin, end)` into their places in a tensor of this shape and type."""
        size, weight = self.element_size(), self._weight
        memory = target.reshape(-1).view(torch.uint8).numpy()[begin * size : end * size]
        with kept_open():
            TensorReader(self._checkpoint, default_kernel()).elements_into(weight.tensor, weight.dtype, begin, memory)

    @property
    def threads(self) -> int:
        """The number of concurrent reads that is worth while."""
        return (os.cpu_count() or 1) if self._checkpoint.is_local else REMOTE_THREADS


def _fill(pairs: list[tuple[LazyTensor, torch.Tensor]]) -> None:
    """Read each tensor into the memory beside it, several blocks at a time."""
    blocks: list[tuple[LazyTensor, torch.Tensor, int, int]] = []
    for lazy, target in pairs:
        step = max(1, _BLOCK_BYTES // lazy.element_size())
        numel = lazy.numel()
        blocks += [(lazy, target, low, min(low + step, numel)) for low in range(0, numel, step)]
    if len(blocks) == 1:
        lazy, target, low, high = blocks[0]
        lazy.read_into(target, low, high)
        return
    with ThreadPoolExecutor(max((p[0].threads for p in pairs), default=1)) as pool:
        for done in [pool.submit(lazy.read_into, target, low, high) for lazy, target, low, high in blocks]:
            done.result()


def lazy(source: SourceSpec, *, exclude_frozen: bool) -> dict[str, LazyTensor]:
    """The fp32 weights of a checkpoint: buffers, frozen parameters, trained ones, then tied names.

    Raises:
        SourceError: The errors of readers; `checkpoint.disagreement` if copies of tensor-parallel ranks differ.
        RequestError: `request.unsatisfiable` if frozen parameters are to be left out, but the source does not show
            them.
    """
    # Foreign objects are not weights: any of them is ignored.
    place = open_location(source.url, source.profile)
    checkpoint = named_checkpoint(place, source, OpaqueLedger(OpaquePolicy.KEEP))
    refuse_unexplained(checkpoint)
    checkpoint.refuse_undecided(*(() if exclude_frozen else OF_TRAINING))
    check_agreements(checkpoint, ReplicaPolicy.ERROR, stop_check(None))
    request = ConvertRequest(
        source=source, target="-", to=TargetFormat.TORCH, dtype=WeightDtype.FP32, exclude_frozen=exclude_frozen
    )
    weights = {w.fqn: w for w in weights_of(checkpoint, request)}
    first = [b.fqn for b in checkpoint.buffers] + [p.fqn for p in checkpoint.frozen]
    order = [*(n for n in first if n in weights), *(n for n in weights if n not in set(first))]
    found = {name: LazyTensor(checkpoint, weights[name]) for name in order}
    return found | {a: found[o] for a, o in checkpoint.shared.items() if o in found and a not in found}


def whole(
    tensors: Mapping[str, LazyTensor], *, dtype: WeightDtype | None = None, empty: bool = False
) -> dict[str, torch.Tensor]:
    """Read all tensors; tied names share one tensor. With `dtype`, floating-point tensors are cast to it."""
    wanted = None if dtype is None else getattr(torch, SHORT_NAMES[dtype.value])
    unique: dict[int, tuple[LazyTensor, torch.Tensor]] = {}
    for one in tensors.values():
        if id(one) not in unique:
            unique[id(one)] = one, torch.empty(one.shape, dtype=one.dtype)
    if not empty:
        _fill(list(unique.values()))
    cast = {
        key: found.to(wanted) if wanted is not None and one.is_floating_point() else found
        for key, (one, found) in unique.items()
    }
    return {name: cast[id(one)] for name, one in tensors.items()}


def load(model: Any, tensors: Mapping[str, LazyTensor]) -> None:
    """Move a model to the CPU and load the tensors into it, a bounded part at a time.

    Raises:
        RequestError: `request.unsatisfiable` if both sides have names that the other lacks, or a shape differs.
    """
    own_state: Mapping[str, Any] = model.state_dict()
    missing, unexpected = [n for n in own_state if n not in tensors], [n for n in tensors if n not in own_state]
    if missing and unexpected:
        raise RequestError(
            "request.unsatisfiable",
            f"the model has {len(missing)} names that the checkpoint does not have ({listed(missing)}), and lacks "
            f"{len(unexpected)} of the checkpoint's ({listed(unexpected)})",
            fix="build the model that was trained, or rename: get_fp32_state_dict_from_zero_checkpoint returns a dict",
            details={"missing": missing[:64], "unexpected": unexpected[:64]},
        )
    wrong = [n for n in tensors if n in own_state and tuple(own_state[n].shape) != tuple(tensors[n].shape)]
    if wrong:
        first = wrong[0]
        raise RequestError(
            "request.unsatisfiable",
            f"{len(wrong)} tensors have another shape in the model: {printable(first)} is "
            f"{tuple(own_state[first].shape)} there and {tuple(tensors[first].shape)} in the checkpoint",
            fix="build the model that was trained; an embedding may have been resized",
        )
    model.cpu()
    part: dict[str, LazyTensor] = {}
    held = 0
    for name in (n for n in tensors if n in own_state):
        if part and held + tensors[name].nbytes > _LOADED_BYTES:
            model.load_state_dict(whole(part), strict=False)
            part, held = {}, 0
        part[name] = tensors[name]
        held += tensors[name].nbytes
    if part:
        model.load_state_dict(whole(part), strict=False)


def cloned(item: Any, device: Any) -> Any:
    """A copy of nested containers whose tensors are copies on a device.

    Source: deepspeed 0.19.8 `checkpoint/utils.py` (`clone_tensors_for_torch_save`).
    """
    if isinstance(item, torch.Tensor):
        wanted = torch.device(device)
        return item.detach().clone() if wanted == item.device else item.detach().to(wanted)
    if isinstance(item, list):
        return [cloned(v, device) for v in cast("list[Any]", item)]
    if isinstance(item, tuple):
        return tuple([cloned(v, device) for v in cast("tuple[Any, ...]", item)])
    if isinstance(item, dict):
        items = cast("dict[Any, Any]", item)
        return type(items)({k: cloned(v, device) for k, v in items.items()})
    return item
