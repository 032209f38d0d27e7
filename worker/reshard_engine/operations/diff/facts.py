"""Non-tensor state of two checkpoints compared: hyper-parameters, counters, schedulers, client state, loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.diffs import Difference, DifferenceKind
from reshard_engine.checkpoint import Checkpoint, OptimizerState
from reshard_engine.formats.deepspeed.megatron import ARGS, without_layout
from reshard_engine.formats.deepspeed.names import INFO, LAYOUT_NOTES, PARALLEL_DIMENSIONS
from reshard_engine.operations.diff.pairs import Matching, TensorPair
from reshard_engine.pickles.differences import TensorsAt, compare_trees, text_of
from reshard_engine.pickles.nodes import Node, PObject, PTensorRef, is_mapping, mapping_items

LAYOUT_KEYS = frozenset(
    {
        "module",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "buffer_names",
        "shared_params",
        "dp_world_size",
        "mp_world_size",
        PARALLEL_DIMENSIONS,
        LAYOUT_NOTES,
        INFO,
        "ds_config",
        "ds_version",
    }
)
"""Entries of model states that describe the files, or that are compared as tensors: another layout has others.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`, `_save_checkpoint`).
"""
_NOT_HYPER = frozenset({"params", "step"})
"""Numbers of a group's members, and the counter that is compared per parameter."""
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


@dataclass(frozen=True, slots=True)
class Facts:
    """What comparing non-tensor state found."""

    differences: tuple[Difference, ...]
    pairs: tuple[TensorPair, ...]
    """Tensors inside the trees, still to be compared."""
    notes: tuple[str, ...]
    values: int
    """Values that were compared, nested ones counted as one."""


class FactComparison:
    """Compares the state that is no tensor of a parameter."""

    def __init__(self, a: Checkpoint, b: Checkpoint, matching: Matching) -> None:
        """The two sides, and which param groups have parameters in common."""
        self._a, self._b, self._matching = a, b, matching
        self._differences: list[Difference] = []
        self._pairs: list[TensorPair] = []
        self._notes: list[str] = []
        self._values = 0

    def compare(self) -> Facts:
        """Everything.

        Raises:
            SourceError: `checkpoint.malformed` for trees of the wrong shape.
        """
        if self._a.optimizer is not None and self._b.optimizer is not None:
            self._hyper_parameters(self._a.optimizer, self._b.optimizer)
            self._optimizer_facts(self._a.optimizer, self._b.optimizer)
        elif self._a.optimizer is not self._b.optimizer:
            self._lone("optimizer states", in_a=self._a.optimizer is not None)
        mine, theirs = _entries(self._a), _entries(self._b)
        if bool(mine) != bool(theirs):
            self._lone("counters and client state", in_a=bool(mine))
        else:
            self._model_states(mine, theirs)
        self._extra_states(self._a.extra_states, self._b.extra_states)
        return Facts(tuple(self._differences), tuple(self._pairs), tuple(self._notes), self._values)

    def _lone(self, what: str, *, in_a: bool) -> None:
        mine, theirs = ("present", None) if in_a else (None, "present")
        self._differences.append(Difference(kind=DifferenceKind.MISSING, name=what, a=mine, b=theirs))

    def _hyper_parameters(self, a: OptimizerState, b: OptimizerState) -> None:
        if not a.param_groups or not b.param_groups:
            self._notes.append("a side carries no hyper-parameters (list-form states): not compared")
            return
        for (left, right), first, count in self._matching.group_pairs():
            mine = mapping_items(a.param_groups[left], what="param_groups of A")
            theirs = mapping_items(b.param_groups[right], what="param_groups of B")
            for key in dict.fromkeys((*mine, *theirs)):
                if key in _NOT_HYPER:
                    continue
                self._tree(
                    (mine.get(key), theirs.get(key)),
                    DifferenceKind.HYPER_PARAMETER,
                    first,
                    state=str(key),
                    parameters=count,
                )

    def _optimizer_facts(self, a: OptimizerState, b: OptimizerState) -> None:
        """The loss scale whatever object keeps it, and the clipping; the rest describes the stage."""
        mine, theirs = _scaler(a.extras), _scaler(b.extras)
        for key in _SCALER:
            if key == "cur_scale":
                # Stage 0 in fp32 and BF16_Optimizer keep none: they scale by one.
                left, right = mine.get(key, 1.0), theirs.get(key, 1.0)
            elif key in mine and key in theirs:
                left, right = mine[key], theirs[key]
            else:
                continue
            self._tree((left, right), DifferenceKind.STATE, f"loss_scaler.{key}")
        if "clip_grad" in a.extras and "clip_grad" in b.extras:
            self._tree((a.extras["clip_grad"], b.extras["clip_grad"]), DifferenceKind.STATE, "clip_grad")

    def _model_states(self, mine: Mapping[str | int, Node], theirs: Mapping[str | int, Node]) -> None:
        for key in dict.fromkeys((*mine, *theirs)):
            if key not in LAYOUT_KEYS:
                nodes = (mine.get(key), theirs.get(key))
                if key == ARGS:
                    nodes = (without_layout(nodes[0]), without_layout(nodes[1]))
                self._tree(nodes, DifferenceKind.STATE, str(key))

    def _extra_states(self, mine: Mapping[str, Node], theirs: Mapping[str, Node]) -> None:
        """Entries of the models' state dicts that are no tensors."""
        for name in dict.fromkeys((*mine, *theirs)):
            if name in mine and name in theirs:
                self._tree((mine[name], theirs[name]), DifferenceKind.STATE, f"module.{name}")
            else:
                self._lone(f"module.{name}", in_a=name in mine)

    def _tree(
        self, nodes: tuple[Node, Node], kind: DifferenceKind, name: str, *, state: str = "", parameters: int = 1
    ) -> None:
        """Compare two values; None and an entry that is not there are the same."""
        self._values += 1
        a, b = nodes
        if (a is None) != (b is None):
            mine, theirs = None if a is None else text_of(a), None if b is None else text_of(b)
            found = Difference(
                kind=DifferenceKind.MISSING, name=name, state=state, a=mine, b=theirs, parameters=parameters
            )
            self._differences.append(found)
            return
        for part in compare_trees(a, b, state or name):
            inner, where = (name, part.path) if state else (part.path, "")
            if isinstance(part, TensorsAt):
                assert isinstance(part.a, PTensorRef)
                assert isinstance(part.b, PTensorRef)
                self._tensors((part.a.index, part.b.index), inner, where)
                continue
            self._differences.append(
                Difference(kind=kind, name=inner, state=where, a=part.a, b=part.b, parameters=parameters)
            )

    def _tensors(self, numbers: tuple[int, int], name: str, state: str) -> None:
        left, right = self._matching.a.tensor(numbers[0]), self._matching.b.tensor(numbers[1])
        if left.shape != right.shape or left.dtype is not right.dtype:
            kind = DifferenceKind.SHAPE if left.shape != right.shape else DifferenceKind.DTYPE
            texts = [f"{t.dtype.name} {list(t.shape)}" for t in (left, right)]
            self._differences.append(Difference(kind=kind, name=name, state=state, a=texts[0], b=texts[1]))
            return
        pair = TensorPair(name, state or "value", *numbers, left.dtype, rounded=False, shape=left.shape)
        self._pairs.append(pair)


def _entries(checkpoint: Checkpoint) -> Mapping[str | int, Node]:
    return mapping_items(checkpoint.model_state, what="model states") if is_mapping(checkpoint.model_state) else {}


def _scaler(extras: Mapping[str, Node]) -> Mapping[str | int, Node]:
    """The loss scaler's attributes: of the object of stages 1 to 3, or of stage 0's own entries.

    Source: deepspeed 0.19.8 `runtime/fp16/loss_scaler.py` (`LossScalerBase`), `runtime/fp16/fused_optimizer.py`.
    """
    node = extras.get("loss_scaler")
    if isinstance(node, PObject) and node.has_state and is_mapping(node.state):
        return mapping_items(node.state, what="loss_scaler")
    return {k: v for k, v in extras.items() if k in _SCALER}
