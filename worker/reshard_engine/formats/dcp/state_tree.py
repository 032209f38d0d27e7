"""A whole state dict as one tree, whatever its entries mean: for conversions between `dcp.save` and `torch.save`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from reshard_engine.checkpoint import Checkpoint, FormatFacts
from reshard_engine.pickles.nodes import Node


@dataclass(frozen=True, slots=True)
class StateTree(FormatFacts):
    """The facts of a checkpoint that was read as one tree."""

    tree: Node
    """The nested state dict, with `PTensorRef`s in place of tensors."""

    def trees(self, checkpoint: Checkpoint) -> Iterator[tuple[Node, str]]:
        """The one tree."""
        yield self.tree, ""
