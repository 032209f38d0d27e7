"""How a parameter is cut over tensor-parallel ranks: the oracle's own rules, stated where the model is defined.

Nothing here knows the engine under test or DeepSpeed's pattern lists: a cut belongs to a layer, slices the full tensor
when a layout's first weights are made, and joins the ranks' slices again when a truth is dumped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class CutError(AssertionError):
    """Slices that cannot have come from one full tensor."""


@dataclass(frozen=True)
class Cut:
    """One way to cut a full tensor into ``size`` slices of equal shape.

    Attributes:
        dim: the dimension that is cut; None if every rank holds the whole tensor.
        blocks: lengths of blocks along ``dim`` that are cut one by one, as in ``[gate | up]`` or ``[Q | K | V]``; every
            rank holds its slice of the first block, then its slice of the second, and so on.
        vocab: real rows of a vocabulary; the full tensor is padded with zero rows before it is cut.
        pad_to: the padded number of rows is a multiple of this times the number of ranks (Megatron's
            ``make_vocab_size_divisible_by``), so that it depends on the layout.
    """

    dim: int | None = None
    blocks: tuple[int, ...] = ()
    vocab: int | None = None
    pad_to: int = 1

    def padded_rows(self, size: int) -> int:
        """Rows of the padded vocabulary on ``size`` ranks."""
        assert self.vocab is not None
        unit = self.pad_to * size
        return -(-self.vocab // unit) * unit

    def slice(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Rank ``rank``'s part of the full tensor (a vocabulary without its padding), as new contiguous memory."""
        if self.dim is None:
            return full.clone()
        if self.vocab is not None:
            full = torch.cat([full, full.new_zeros(self.padded_rows(size) - full.shape[0], *full.shape[1:])])
        parts = []
        for block in full.split(self.blocks or (full.shape[self.dim],), self.dim):
            if block.shape[self.dim] % size:
                raise CutError(f"{size} ranks do not divide {tuple(block.shape)} along dimension {self.dim}")
            parts.append(block.chunk(size, self.dim)[rank])
        return torch.cat(parts, self.dim).clone(memory_format=torch.contiguous_format)

    def join(self, slices: list[Tensor]) -> Tensor:
        """The full tensor out of all ranks' slices, in rank order; a vocabulary keeps its padding.

        Raises:
            CutError: copies differ in a bit.
        """
        if self.dim is None:
            for other in slices[1:]:
                if not same_bits(slices[0], other):
                    raise CutError("copies on tensor-parallel ranks differ")
            return slices[0]
        if not self.blocks:
            return torch.cat(slices, self.dim)
        lengths = [length // len(slices) for length in self.blocks]
        by_rank = [part.split(lengths, self.dim) for part in slices]
        return torch.cat([part[b] for b in range(len(lengths)) for part in by_rank], self.dim)


WHOLE = Cut()
ROWS = Cut(dim=0)
COLUMNS = Cut(dim=1)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree in dtype, shape and every bit; NaNs and signed zeros count as stored."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))
