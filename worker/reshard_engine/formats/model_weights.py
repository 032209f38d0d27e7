"""Chooses the tensors of a checkpoint that are the weights of its model, and their element types in a target."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import RequestError
from reshard.models import ConvertRequest, WeightDtype
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.tensors.dtypes import BY_NAME, SHORT_NAMES, Dtype
from reshard_engine.tensors.layout import require_distinct


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of the output."""

    fqn: str
    tensor: int
    dtype: Dtype
    shape: tuple[int, ...]
    numel: int

    @property
    def size_bytes(self) -> int:
        """Bytes in the output."""
        return self.numel * self.dtype.itemsize_bytes


def weights_of(checkpoint: Checkpoint, request: ConvertRequest) -> list[Weight]:
    """Every tensor to write: trained parameters from their masters, frozen ones, buffers.

    Floating-point tensors are cast to the requested dtype; scalars, integers and booleans keep their types. Without
    a requested dtype masters stay fp32, and a source without masters keeps its own types.

    Raises:
        RequestError: `request.unsatisfiable` if a parameter is stored nowhere, or if frozen parameters are to be left
            out and the source does not say which are frozen.
        SourceError: `checkpoint.ambiguous` if two tensors would have one name.
    """
    if request.exclude_frozen and not checkpoint.trained:
        raise RequestError(
            "request.unsatisfiable",
            "the source holds weights only: it does not say which of them were frozen",
            fix="leave out --exclude-frozen, or name the training checkpoint as the source",
        )
    dtype = request.dtype or (WeightDtype.FP32 if checkpoint.trained else None)
    wanted = BY_NAME[SHORT_NAMES[dtype.value]] if dtype else None
    found: list[Weight] = []
    for parameter in checkpoint.parameters:
        if request.exclude_frozen and not parameter.trained:
            continue
        found.append(_weight(checkpoint, parameter.fqn, parameter.value(), wanted))
    found += [_weight(checkpoint, b.fqn, b.tensor, wanted) for b in checkpoint.buffers]
    require_distinct(w.fqn for w in found)
    return found


def _weight(checkpoint: Checkpoint, fqn: str, index: int, wanted: Dtype | None) -> Weight:
    stored = checkpoint.shard_map.tensors[index]
    cast = stored.dtype.floating and stored.shape != () and stored.dtype.itemsize_bytes > 1
    return Weight(fqn, index, wanted if cast and wanted else stored.dtype, stored.shape, stored.numel)
