"""Non-tensor state as trees that can be written again, with their tensors in the shard map."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.deepspeed_names import FROZEN_FRAGMENTS
from reshard_engine.pickles.nodes import (
    Node,
    PDict,
    PObject,
    PTensor,
    PTensorRef,
    check_depth,
    is_mapping,
    mapping_items,
    mapping_of,
    ordered_dict,
)
from reshard_engine.pickles.rewrite import rewrite
from reshard_engine.readers.deepspeed.model_states import ModelStates
from reshard_engine.readers.deepspeed.module import ModuleTensors
from reshard_engine.readers.tensors import add_whole_tensor
from reshard_engine.shardmap import ShardMapBuilder


class TreeTensors:
    """Replaces the tensors of trees by references into the shard map that is being built."""

    def __init__(self, builder: ShardMapBuilder, number: Mapping[SourceFile, int]) -> None:
        """Share the builder of the checkpoint."""
        self._builder = builder
        self._number = number
        self._count = 0

    def carried(self, node: Node, torch_file: TorchFile) -> Node:
        """A copy of the tree whose tensors are references; foreign objects stay as they are."""

        def reference(tensor: PTensor) -> PTensorRef:
            self._count += 1
            file = self._number[torch_file.file]
            name = f"state.{self._count}"
            return PTensorRef(add_whole_tensor(self._builder, name, "value", tensor, torch_file=torch_file, file=file))

        return rewrite(node, reference, lambda foreign: foreign)

    def model_state(
        self,
        model: ModelStates,
        numbers: Mapping[str, int],
        module: ModuleTensors,
        *,
        without: Collection[str] = (),
    ) -> PDict:
        """The model-states mapping: `module` with what is stored whole, everything else as it was.

        Frozen parameters are put together: their fragments become whole tensors, as stage 2 writes them.

        Args:
            model: The model states of rank 0.
            numbers: Tensors of `module` by name.
            module: Tied names and frozen parameters.
            without: Entries to leave out.
        """
        entries: dict[str | int, Node] = {}
        for key, value in model.entries.items():
            if key in without:
                continue
            if key == "module":
                entries[key] = self._module(value, numbers, module.shared)
            elif key == FROZEN_FRAGMENTS:
                # An empty mapping says that there are none, None that they were left out.
                whole = {**module.frozen_numbers, **module.weights}
                refs: dict[str, Node] = {n: PTensorRef(whole[n]) for n, _ in model.frozen_shapes if n in whole}
                entries[key] = ordered_dict(refs) if is_mapping(value) else None
            elif key == "optimizer":
                entries[key] = None
            else:
                entries[key] = self.carried(value, model.torch_file)
        return mapping_of(entries)

    def _module(self, node: Node, numbers: Mapping[str, int], shared: Mapping[str, str]) -> Node:
        """The state dict with references, nested as it was; what it lacks (frozen shares, layers) follows."""
        left = dict(numbers)

        def walk(mapping: Node, prefix: str, depth: int) -> PObject:
            check_depth(depth)
            found: dict[str, Node] = {}
            for key, value in mapping_items(mapping, what="module").items():
                name = f"{prefix}{key}"
                if is_mapping(value):
                    found[str(key)] = walk(value, f"{name}.", depth + 1)
                elif (number := numbers.get(shared.get(name, name))) is not None:
                    found[str(key)] = PTensorRef(number)
                    left.pop(name, None)
            return ordered_dict(found)

        tree = walk(node, "", 0) if is_mapping(node) else ordered_dict({})
        for name, number in left.items():
            tree.items += (name, PTensorRef(number))
        return tree
