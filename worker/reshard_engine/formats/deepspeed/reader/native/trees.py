"""Model states as a tree that a writer can write again: `module` refers to whole tensors, the rest is as it was."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from reshard_engine.containers.torch_trees import TreeTensors
from reshard_engine.formats.deepspeed.names import FROZEN_FRAGMENTS
from reshard_engine.formats.deepspeed.reader.native.model_states import ModelStates
from reshard_engine.formats.deepspeed.reader.native.module import ModuleTensors
from reshard_engine.pickles.nodes import Node, PObject, PTensorRef, is_mapping, ordered_dict
from reshard_engine.pickles.state_dict import KeyPath, name_of, nested_dict


def module_names(paths: Iterable[KeyPath], numbers: Iterable[str], extra_states: Iterable[str]) -> tuple[str, ...]:
    """The names of the state dict in its order, then names that the state dict lacks (frozen shares, layers)."""
    return tuple(dict.fromkeys((*map(name_of, paths), *numbers, *extra_states)))


class ModelTrees(TreeTensors):
    """Trees of model-states files."""

    def model_state(
        self,
        model: ModelStates,
        numbers: Mapping[str, int],
        module: ModuleTensors,
        *,
        extra_states: Mapping[str, Node],
        without: Collection[str | int] = (),
    ) -> dict[str | int, Node]:
        """The entries of the model states.

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
                # An empty mapping says that no parameter is frozen, None that the save left frozen parameters out.
                whole = {**module.frozen_numbers, **module.weights}
                refs: dict[str, Node] = {n: PTensorRef(whole[n]) for n, _ in model.frozen_shapes if n in whole}
                entries[key] = ordered_dict(refs) if is_mapping(value) else None
            elif key == "optimizer":
                entries[key] = None
            else:
                entries[key] = self.carried(value, model.torch_file)
        return entries


def _module(
    paths: Collection[KeyPath], numbers: Mapping[str, int], shared: Mapping[str, str], extra_states: Mapping[str, Node]
) -> PObject:
    """The state dict with references, nested as it was, then entries that it lacks (frozen shares, layers)."""
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
