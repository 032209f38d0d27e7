"""Model states as a tree that can be written again: `module` with what is stored whole, the rest as it was."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from reshard_engine.containers.torch_trees import TreeTensors
from reshard_engine.formats.deepspeed.names import FROZEN_FRAGMENTS
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates
from reshard_engine.formats.deepspeed.reader.native.module import ModuleTensors
from reshard_engine.pickles.nodes import Node, PDict, PObject, PTensorRef, is_mapping, mapping_of, ordered_dict
from reshard_engine.pickles.state_dict import KeyPath, name_of, nested_dict


class ModelTrees(TreeTensors):
    """Trees of model-states files."""

    def model_state(
        self,
        model: ModelStates,
        numbers: Mapping[str, int],
        module: ModuleTensors,
        *,
        extra_states: Mapping[str, Node],
        without: Collection[str] = (),
    ) -> PDict:
        """The model-states mapping.

        Frozen parameters are put together: their fragments become whole tensors, as stage 2 writes them.

        Args:
            model: The model states of rank 0.
            numbers: Tensors of `module` by name.
            module: Tied names and frozen parameters.
            extra_states: Entries of `module` that are no tensors, by name.
            without: Entries to leave out.
        """
        entries: dict[str | int, Node] = {}
        for key, value in model.entries.items():
            if key in without:
                continue
            if key == "module":
                entries[key] = _module(model.paths, numbers, module.shared, extra_states)
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


def _module(
    paths: Collection[KeyPath], numbers: Mapping[str, int], shared: Mapping[str, str], extra_states: Mapping[str, Node]
) -> PObject:
    """The state dict with references, nested as it was; what it lacks (frozen shares, layers) follows."""
    nodes: dict[str, Node] = {name: PTensorRef(number) for name, number in numbers.items()} | {**extra_states}
    found: list[tuple[KeyPath, Node]] = []
    left = dict(nodes)
    for path in paths:
        name = name_of(path)
        owner = shared.get(name, name)
        if owner in nodes:
            found.append((path, nodes[owner]))
            left.pop(name, None)
    return nested_dict([*found, *(((name,), node) for name, node in left.items())])
