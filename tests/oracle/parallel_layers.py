"""Tensor-parallel layers written by hand: column- and row-parallel matrices, a vocabulary cut by rows.

The collectives are Megatron's (arXiv 1909.08053, section 3): identity forward and all-reduce backward where a
replicated activation enters a cut matrix, the reverse where partial sums leave one.  Weights are slices of one full
tensor that follows from seed and name alone, so that all layouts start from the same model.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from oracle.parallel_cuts import COLUMNS, ROWS, WHOLE, Cut


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel ranks that this process belongs to; ``group`` is None for a single one."""

    rank: int
    size: int
    group: Any


@dataclass(frozen=True)
class Place:
    """Where in the model a layer stands: its name prefix, its ranks, the seed of its weights."""

    ranks: Ranks
    seed: int
    prefix: str

    def inside(self, name: str) -> Place:
        """The place of a submodule."""
        return replace(self, prefix=f"{self.prefix}.{name}")

    def parameter(self, name: str, shape: tuple[int, ...], cut: Cut, *, mean: float = 0.0, std: float) -> nn.Parameter:
        """This rank's slice of the full tensor of ``shape``, drawn from the seed and the parameter's full name."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}:{self.prefix}.{name}".encode()))
        full = torch.randn(shape, generator=generator) * std + mean
        param: Any = nn.Parameter(cut.slice(full, self.ranks.rank, self.ranks.size))
        param.cut = cut
        # DeepSpeed counts replicated gradients once in the clipping norm; this is how it tells (0.19.8,
        # runtime/utils.py `is_model_parallel_parameter`).
        param.tensor_model_parallel = cut.dim is not None
        made: nn.Parameter = param
        return made


class _Enter(torch.autograd.Function):
    """A replicated activation enters cut layers: gradients of all ranks add up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    """Partial sums leave cut layers: they add up, and every rank takes the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:  # type: ignore[override]
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Join(torch.autograd.Function):
    """Slices of the last dimension become whole on every rank; all compute the same loss, each keeps its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: Ranks) -> Tensor:  # type: ignore[override]
        ctx.ranks = ranks
        value = value.contiguous()
        parts = [torch.empty_like(value) for _ in range(ranks.size)]
        dist.all_gather(parts, value, group=ranks.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.chunk(ctx.ranks.size, -1)[ctx.ranks.rank].contiguous(), None


def enter(value: Tensor, ranks: Ranks) -> Tensor:
    """``value`` as the input of column-parallel layers."""
    return value if ranks.size == 1 else _applied(_Enter, value, ranks.group)


def leave(value: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks of a row-parallel layer's partial results."""
    return value if ranks.size == 1 else _applied(_Leave, value, ranks.group)


def join(value: Tensor, ranks: Ranks) -> Tensor:
    """The last dimension whole, from slices in rank order."""
    return value if ranks.size == 1 else _applied(_Join, value, ranks)


def _applied(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


class ColumnParallel(nn.Module):
    """``x @ W.T (+ b)`` with the rows of ``W`` cut over the ranks; the output stays cut."""

    def __init__(self, place: Place, inputs: int, outputs: int, *, bias: bool, cut: Cut = ROWS) -> None:
        super().__init__()
        self.ranks = place.ranks
        self.weight = place.parameter("weight", (outputs, inputs), cut, std=0.2)
        self.bias = place.parameter("bias", (outputs,), cut, std=0.1) if bias else None

    def forward(self, value: Tensor) -> Tensor:
        """This rank's part of the outputs."""
        return F.linear(enter(value, self.ranks), self.weight, self.bias)


class RowParallel(nn.Module):
    """``x @ W.T + b`` with the columns of ``W`` cut like the input; the bias is whole and added once, after the sum."""

    def __init__(self, place: Place, inputs: int, outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.ranks = place.ranks
        self.weight = place.parameter("weight", (outputs, inputs), COLUMNS, std=0.2)
        self.bias = place.parameter("bias", (outputs,), WHOLE, std=0.1) if bias else None

    def forward(self, value: Tensor) -> Tensor:
        """The whole outputs, equal on all ranks."""
        out = leave(F.linear(value, self.weight), self.ranks)
        return out if self.bias is None else out + self.bias


class VocabParallel(nn.Module):
    """A vocabulary cut by rows: token embedding and, transposed, the output layer.

    Padding rows start as zeros and get exactly zero gradients, because logits of padding are cut off before the loss:
    they stay zero, and losses do not depend on how much padding a layout needs.
    """

    def __init__(self, place: Place, cut: Cut, width: int) -> None:
        super().__init__()
        assert cut.vocab is not None
        self.ranks, self.vocab = place.ranks, cut.vocab
        self.weight = place.parameter("weight", (cut.vocab, width), cut, std=0.3)
        self.first = place.ranks.rank * self.weight.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of ``tokens``, whole on all ranks."""
        local = tokens - self.first
        foreign = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return leave(found.masked_fill(foreign.unsqueeze(-1), 0.0), self.ranks)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the real vocabulary, whole on all ranks."""
        return join(F.linear(enter(hidden, self.ranks), self.weight), self.ranks)[..., : self.vocab]


class Norm(nn.Module):
    """Layer norm with whole, randomly drawn weights: equal ones would hide that two were swapped."""

    def __init__(self, place: Place, width: int) -> None:
        super().__init__()
        self.weight = place.parameter("weight", (width,), WHOLE, mean=1.0, std=0.1)
        self.bias = place.parameter("bias", (width,), WHOLE, std=0.1)

    def forward(self, value: Tensor) -> Tensor:
        """Normalised values."""
        return F.layer_norm(value, (value.shape[-1],), self.weight, self.bias)
