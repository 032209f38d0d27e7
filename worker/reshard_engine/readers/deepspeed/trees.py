"""Non-tensor state as trees that can be written again, with their tensors in the shard map."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.pickles.nodes import Node, PDict, PTensor, PTensorRef, mapping_of, ordered_dict
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

    def model_state(self, model: ModelStates, module: ModuleTensors, *, without: Collection[str] = ()) -> PDict:
        """The model-states mapping: `module` with what is stored whole, everything else as it was.

        Frozen parameters are put together: their fragments become whole tensors, as stage 2 writes them.
        """
        entries: dict[str | int, Node] = {}
        for key, value in model.entries.items():
            if key in without:
                continue
            if key == "module":
                entries[key] = ordered_dict(
                    {n: PTensorRef(i) for n in _names(model, module) if (i := module.number_of(n)) is not None}
                )
            elif key == "frozen_param_fragments":
                refs: dict[str, Node] = {
                    n: PTensorRef(i) for n, i in module.frozen_numbers.items() if n in dict(model.frozen_shapes)
                }
                entries[key] = ordered_dict(refs) if refs else None
            elif key == "optimizer":
                entries[key] = None
            else:
                entries[key] = self.carried(value, model.torch_file)
        return mapping_of(entries)


def _names(model: ModelStates, module: ModuleTensors) -> list[str]:
    return list(dict.fromkeys([*model.module, *module.frozen_numbers]))
