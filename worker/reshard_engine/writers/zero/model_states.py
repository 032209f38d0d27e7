"""The model-states files: weights in the model's dtype, names and shapes, counters, and the run's own state.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`, `_load_checkpoint`,
`_get_zero_frozen_param_attributes`: fragments are whole at stage 2 and shares at stage 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard_engine.checkpoint import Checkpoint
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PList,
    PLiteral,
    PObject,
    PRuns,
    PTensorRef,
    PTuple,
    is_mapping,
    mapping_items,
    mapping_of,
    ordered_dict,
)
from reshard_engine.writers.zero.model import LocalModel, LocalParameter
from reshard_engine.writers.zero.sharded import share_of
from reshard_engine.writers.zero.target import Target

RNG_KEYS = ("rng_state", "random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
"""Client-state entries that hold random states: Megatron's, and the names of its members."""


class ModelStatesFiles:
    """The model states of one model-parallel rank."""

    def __init__(
        self, checkpoint: Checkpoint, model: LocalModel, target: Target, shapes: Sequence[Sequence[LocalParameter]]
    ) -> None:
        """For the rank's own parameters, grouped as its flat tensors are."""
        self._checkpoint, self._model, self._target, self._shapes = checkpoint, model, target, shapes

    def entries_of(self, rank: int, run_state: Mapping[str | int, Node], optimizer: Node) -> Node:
        """The file of one data-parallel rank (below stage 3 there is one, of rank 0).

        Args:
            rank: Data-parallel rank.
            run_state: Everything of the source's model states that this writer does not lay out itself.
            optimizer: The `optimizer` entry; None but at stage 0.
        """
        model, target = self._model, self._target
        layout = target.layout
        entries: dict[str | int, Node] = {"module": self._module(), "buffer_names": PList(list(model.buffers))}
        entries["optimizer"] = optimizer
        entries["param_shapes"] = (
            PList([ordered_dict({p.fqn: size_node(p.shape) for p in group}) for group in self._shapes])
            if target.stage
            else None
        )
        entries["frozen_param_shapes"] = (
            ordered_dict({p.fqn: size_node(p.shape) for p in model.frozen}) if target.stage >= 2 else None
        )
        entries["frozen_param_fragments"] = self._fragments(rank) if target.stage >= 2 else None
        entries["shared_params"] = mapping_of({**model.shared})
        kept = {k: v for k, v in run_state.items() if k not in entries}
        entries |= kept
        for counter in ("skipped_steps", "global_steps"):
            entries.setdefault(counter, 0)
        entries.setdefault("lr_scheduler", None)
        entries["dp_world_size"] = layout.dp
        entries["mp_world_size"] = layout.pp * layout.tp
        if layout.pp * layout.tp > 1 or "checkpoint_parallel_dimensions" in kept:
            entries["checkpoint_parallel_dimensions"] = mapping_of({"pp_degree": layout.pp, "tp_degree": layout.tp})
        entries["ds_config"] = target.config
        entries["ds_version"] = target.version
        return mapping_of(entries)

    def _module(self) -> Node:
        model, sharded = self._model, self._target.stage == 3
        parameters = {p.fqn: p for p in model.parameters}
        owners: dict[str, Node] = {}
        found: dict[str, Node] = {}
        for name in model.names:
            owner = model.shared.get(name, name)
            if owner not in owners:
                if owner in parameters:
                    owners[owner] = self._placeholder() if sharded else self._weight(parameters[owner])
                elif owner in model.buffers:
                    owners[owner] = PTensorRef(model.buffers[owner])
                else:
                    continue
            found[name] = owners[owner]
        return ordered_dict(found)

    def _placeholder(self) -> Node:
        return PLiteral(self._target.dtype.name, (0,), b"")

    def _weight(self, parameter: LocalParameter) -> Node:
        return PRuns(self._weight_dtype(parameter), parameter.shape, parameter.weight)

    def _weight_dtype(self, parameter: LocalParameter) -> str:
        # Frozen integers and 8-bit weights stay what they are: a cast of the model leaves them alone.
        stored = [self._checkpoint.shard_map.tensors[t].dtype for t, _, _ in parameter.weight if t >= 0]
        if parameter.group is None and stored and not (stored[0].floating and stored[0].itemsize_bytes > 1):
            return stored[0].name
        return self._target.dtype.name

    def _fragments(self, rank: int) -> Node:
        found: dict[str, Node] = {}
        for parameter in self._model.frozen:
            if self._target.stage == 2:
                found[parameter.fqn] = self._weight(parameter)
                continue
            ranks = self._target.dp
            runs = tuple(share_of(parameter.weight, parameter.numel, rank, ranks))
            shape = (-(-parameter.numel // ranks),)
            found[parameter.fqn] = PRuns(self._weight_dtype(parameter), shape, runs)
        return ordered_dict(found)


def size_node(shape: tuple[int, ...]) -> Node:
    """A `torch.Size`."""
    return PObject("reduce", Global("torch", "Size"), PTuple((PTuple(shape),)))


def run_state_of(checkpoint: Checkpoint) -> dict[str | int, Node]:
    """The source's model-states entries, whatever wrote them."""
    state = checkpoint.model_state
    return mapping_items(state, what="model states") if is_mapping(state) else {}
