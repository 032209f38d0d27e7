"""The trees of torch files, which are no training state that any other format knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from reshard_engine.checkpoint import Checkpoint, FormatFacts
from reshard_engine.pickles.nodes import Node, mapping_of


@dataclass(frozen=True, slots=True)
class TorchFilesFacts(FormatFacts):
    """Files as trees."""

    files: Mapping[str, Node]
    """By path: the value that torch saved, with `PTensorRef`s in place of tensors, or a reference to all bytes."""

    def trees(self, checkpoint: Checkpoint) -> Iterator[tuple[Node, str]]:
        """The trees of all files."""
        yield mapping_of({**self.files}), ""


def files_of(checkpoint: Checkpoint) -> Mapping[str, Node]:
    """The trees of a checkpoint by path; none of one that came from elsewhere."""
    return checkpoint.facts.files if isinstance(checkpoint.facts, TorchFilesFacts) else {}
