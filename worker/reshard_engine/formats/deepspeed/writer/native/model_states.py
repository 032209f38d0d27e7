"""The model-states files: weights in the model's dtype, names and shapes, counters, and the run's own state.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`, `_load_checkpoint`,
`_get_zero_frozen_param_attributes`: fragments are whole at stage 2 and shares at stage 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.formats.deepspeed.names import (
    CONFIG,
    FROZEN_FRAGMENTS,
    FROZEN_SHAPES,
    PARALLEL_DIMENSIONS,
    PARAM_SHAPES,
    SCHEDULER,
    VERSION,
)
from reshard_engine.formats.deepspeed.writer.native.autoep import entries_for
from reshard_engine.formats.deepspeed.writer.native.experts import expert_of
from reshard_engine.formats.deepspeed.writer.native.model import LocalModel, LocalParameter
from reshard_engine.formats.deepspeed.writer.native.sharded import share_of
from reshard_engine.formats.deepspeed.writer.native.target import Target
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PList,
    PLiteral,
    PObject,
    PRuns,
    PRunsPart,
    PTensorRef,
    PTuple,
    is_mapping,
    mapping_of,
    ordered_dict,
)
from reshard_engine.pickles.state_dict import KeyPath, name_of, nested_dict


class ModelStatesFiles:
    """The model states of one model-parallel rank."""

    def __init__(
        self, checkpoint: Checkpoint, model: LocalModel, target: Target, shapes: Sequence[Sequence[LocalParameter]]
    ) -> None:
        """Take the rank's parameters, and `shapes`: its trained parameters by group or sub-group, in flat order."""
        self._checkpoint, self._model, self._target, self._shapes = checkpoint, model, target, shapes
        self._parameters = {p.fqn: p for p in model.parameters if expert_of(p.fqn) is None and p.fqn not in model.fused}
        self._nodes: dict[str, Node] = {}
        self._flat = self._flat_weights()

    def entries_of(self, rank: int, run_state: Mapping[str | int, Node], optimizer: Node) -> Node:
        """The content of one data-parallel rank's file (below stage 3 only rank 0 has one).

        Args:
            rank: Data-parallel rank.
            run_state: The source's model states. Entries that this writer lays out itself replace the source's.
            optimizer: The `optimizer` entry; None at stages 1 to 3.
        """
        model, target = self._model, self._target
        layout = target.layout
        entries: dict[str | int, Node] = {"module": self._module(), "buffer_names": PList(self._buffer_names())}
        entries["optimizer"] = optimizer
        entries[PARAM_SHAPES] = (
            PList([ordered_dict({p.fqn: size_node(p.shape) for p in group}) for group in self._shapes])
            if target.stage
            else None
        )
        entries |= self._frozen_entries(rank, run_state)
        entries["shared_params"] = mapping_of({**model.shared})
        kept = {k: v for k, v in run_state.items() if k not in (*entries, FROZEN_SHAPES, FROZEN_FRAGMENTS)}
        entries |= kept
        entries |= entries_for(kept, target, model.fused, rank)
        for counter in ("skipped_steps", "global_steps"):
            entries.setdefault(counter, 0)
        entries.setdefault(SCHEDULER, None)
        entries["dp_world_size"] = target.dp
        entries["mp_world_size"] = layout.pp * layout.tp
        if layout.pp * layout.tp > 1 or PARALLEL_DIMENSIONS in kept:
            entries[PARALLEL_DIMENSIONS] = mapping_of({"pp_degree": layout.pp, "tp_degree": layout.tp})
        entries[CONFIG] = target.config
        entries[VERSION] = target.version
        return mapping_of(entries)

    def _buffer_names(self) -> list[Node]:
        return [b.fqn for b in self._checkpoint.buffers if b.registered]

    def _module(self) -> Node:
        """The state dict, nested as the source's."""
        model = self._model
        if model.layers:
            return None  # pipelines keep their weights in layer files
        found: list[tuple[KeyPath, Node]] = []
        for path in model.paths:
            name = name_of(path)
            if name in model.extra_states:
                found.append((path, model.extra_states[name]))
            elif (node := self._named(name)) is not None:
                found.append((path, node))
        return nested_dict(found)

    def _named(self, name: str) -> Node:
        """The node of one name of the state dict; tied names share a node. None for experts, which have own files."""
        model = self._model
        owner = model.shared.get(name, name)
        if owner not in self._nodes:
            node: Node = None
            if (parameter := self._parameters.get(owner)) is not None:
                sharded = self._target.stage == 3
                node = self._placeholder() if sharded else self._flat.get(owner) or self.weight_node(parameter)
            elif owner in model.buffers:
                node = PTensorRef(model.buffers[owner])
            self._nodes[owner] = node
        return self._nodes[owner]

    def _placeholder(self) -> Node:
        return PLiteral(self._target.dtype.name, (0,), b"")

    def _flat_weights(self) -> dict[str, PRunsPart]:
        """The weights of stages 1 and 2; each is a part of its group's flat tensor, as in DeepSpeed's own files."""
        found: dict[str, PRunsPart] = {}
        if self._target.stage not in (1, 2) or self._model.layers:
            return found
        for group in self._shapes:
            members = [p for p in group if p.fqn in self._parameters]
            runs = tuple(run for p in members for run in p.weight)
            whole = PRuns(self._target.dtype.name, (sum(p.numel for p in members),), runs)
            offset = 0
            for parameter in members:
                found[parameter.fqn] = PRunsPart(whole, offset, parameter.shape)
                offset += parameter.numel
        return found

    def weight_node(self, parameter: LocalParameter) -> Node:
        """A parameter's weight in the model's dtype."""
        return PRuns(self._weight_dtype(parameter), parameter.shape, parameter.weight)

    def _weight_dtype(self, parameter: LocalParameter) -> str:
        # Frozen integers and 8-bit weights keep their type: a cast of the model does not change them.
        stored = parameter.weight_dtype
        if parameter.group is None and not (stored.floating and stored.itemsize_bytes > 1):
            return stored.name
        return self._target.dtype.name

    def _frozen_entries(self, rank: int, run_state: Mapping[str | int, Node]) -> dict[str | int, Node]:
        """The entries `frozen_param_shapes` and `frozen_param_fragments`.

        A loader that finds a mapping requires all frozen parameters in it. If the source left some out, or may have
        left them out, the values are None, which loads: frozen weights then come from `module` below stage 3, or from
        the base model. If no parameter is frozen, both entries may be absent.
        """
        if self._target.stage < 2 or self._checkpoint.frozen_left_out:
            return {FROZEN_SHAPES: None, FROZEN_FRAGMENTS: None}
        frozen = self._model.frozen
        if not is_mapping(run_state.get(FROZEN_FRAGMENTS)) and not frozen:
            return {}
        shapes = ordered_dict({p.fqn: size_node(p.shape) for p in frozen})
        return {FROZEN_SHAPES: shapes, FROZEN_FRAGMENTS: self._fragments(rank)}

    def _fragments(self, rank: int) -> Node:
        found: dict[str, Node] = {}
        for parameter in self._model.frozen:
            if self._target.stage == 2:
                # The same node as in `module`, so that it is written once. A parameter that was frozen late is a part
                # of its group's tensor.
                found[parameter.fqn] = self._flat.get(parameter.fqn) or self.weight_node(parameter)
                continue
            ranks = self._target.dp
            runs = tuple(share_of(parameter.weight, parameter.numel, rank, ranks))
            shape = (-(-parameter.numel // ranks),)
            found[parameter.fqn] = PRuns(self._weight_dtype(parameter), shape, runs)
        return ordered_dict(found)


def size_node(shape: tuple[int, ...]) -> Node:
    """A `torch.Size`."""
    return PObject("reduce", Global("torch", "Size"), PTuple((PTuple(shape),)))
