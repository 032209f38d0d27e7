"""Non-tensor state as trees that can be written again, with their tensors in the shard map."""

from __future__ import annotations

from collections.abc import Mapping

from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.containers.torch_tensors import add_whole_tensor
from reshard_engine.pickles.nodes import Node, PTensor, PTensorRef
from reshard_engine.pickles.rewrite import rewrite
from reshard_engine.tensors.shard_map import ShardMapBuilder


class TreeTensors:
    """Replaces the tensors of trees by references into the shard map that is being built."""

    def __init__(self, builder: ShardMapBuilder, number: Mapping[SourceFile, int]) -> None:
        """Add tensors of file `number` to the checkpoint's builder."""
        self._builder = builder
        self._number = number
        self._count = 0

    def carried(self, node: Node, torch_file: TorchFile) -> Node:
        """Copy the tree and replace its tensors by references; foreign objects stay as they are."""

        def reference(tensor: PTensor) -> PTensorRef:
            self._count += 1
            file = self._number[torch_file.file]
            name = f"state.{self._count}"
            return PTensorRef(add_whole_tensor(self._builder, name, "value", tensor, torch_file=torch_file, file=file))

        return rewrite(node, reference, lambda foreign: foreign)
