"""The groups, states and counters of the optimizer in a native checkpoint, for any stage.

Source: deepspeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`state_dict`), `runtime/zero/stage3.py` (`_rigid_state_dict`),
`runtime/bf16_optimizer.py` (`state_dict`), `runtime/fp16/fused_optimizer.py` and `unfused_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reshard.errors import RequestError, printable
from reshard_engine.checkpoint import Checkpoint, Scalar
from reshard_engine.formats.deepspeed.facts import group_node
from reshard_engine.formats.deepspeed.optimizer_states import groups_of
from reshard_engine.formats.deepspeed.partitioning import Run
from reshard_engine.formats.deepspeed.writer.native.experts import renamed_group
from reshard_engine.formats.deepspeed.writer.native.model import LocalModel, LocalParameter
from reshard_engine.formats.deepspeed.writer.native.target import Target
from reshard_engine.formats.torch_archive import scalar_node
from reshard_engine.pickles.nodes import Global, Node, PList, PObject, PRuns, PTuple, mapping_of
from reshard_engine.tensors.dtypes import FLOAT32, Dtype
from reshard_engine.tensors.layout import ZEROS


class Groups:
    """The optimizer's param groups and the states that their parameters have."""

    def __init__(self, checkpoint: Checkpoint, states: Sequence[str]) -> None:
        """Take the per-element states to write, `fp32` first."""
        self.groups = groups_of(checkpoint)
        self.states = tuple(states)

    @property
    def count(self) -> int:
        """The number of param groups."""
        return len(self.groups)

    def with_params(self, params: Sequence[Iterable[int]], *, ep: int = 1) -> PList:
        """The entry `param_groups` with these numbers as `params`, for `ep` expert-parallel ranks."""
        found: list[Node] = []
        for group, numbers in zip(self.groups, params, strict=True):
            found.append(group_node(renamed_group(group, ep), PList(list(numbers))))
        return PList(found)

    @staticmethod
    def dtype_of(state: str, parameters: Sequence[LocalParameter]) -> Dtype:
        """The one element type of a state in a group.

        Raises:
            RequestError: `request.unsatisfiable` if its parameters have several types: a flat tensor has one type.
        """
        dtypes = {p.dtypes[state] for p in parameters if state in p.dtypes}
        if len(dtypes) > 1:
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(state)} of one group has the types {', '.join(sorted(d.name for d in dtypes))}",
                fix="--zero-stage 0 keeps each parameter's states apart",
            )
        return dtypes.pop() if dtypes else FLOAT32

    def scalars_of(self, parameters: Sequence[LocalParameter]) -> dict[str | int, Node]:
        """The one-number states that a (sub-)group has in common.

        Raises:
            RequestError: `request.unsatisfiable` if its parameters have different counters.
        """
        distinct = {tuple((k, _same(v)) for k, v in sorted(p.scalars.items())): p for p in parameters}
        if len(distinct) > 1:
            first, second = list(distinct.values())[:2]
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(first.fqn)} and {printable(second.fqn)} have different counters "
                f"({_counters(first.scalars)} and {_counters(second.scalars)}), and ZeRO keeps one for a whole group",
                fix="--zero-stage 0 in fp32 keeps each parameter's own",
            )
        return {k: scalar_node(v) for k, v in parameters[0].scalars.items()} if parameters else {}

    def state_entry(
        self, parameters: Sequence[LocalParameter], runs_of: Mapping[str, tuple[Run, ...]], shape: tuple[int, ...]
    ) -> Node:
        """The optimizer's state of one flat tensor: counters, then per-element states made of these runs."""
        entries = self.scalars_of(parameters)
        for state in self.states[1:]:
            entries[state] = PRuns(self.dtype_of(state, parameters).name, shape, runs_of[state])
        return mapping_of(entries)


def _same(scalar: Scalar) -> tuple[object, ...]:
    # 0.0 and -0.0 are equal as values, and a nan never equals itself: so bytes are compared.
    return (scalar.raw, scalar.dtype, scalar.shape, type(scalar.value), None if scalar.dtype else repr(scalar.value))


def _counters(scalars: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{printable(k)}={v.value}" for k, v in scalars.items()) or "none"


def state_runs(parameter: LocalParameter, state: str) -> tuple[Run, ...]:
    """The runs of elements that make up one state of a parameter; zeros where the parameter has no such state."""
    return parameter.states.get(state) or ((ZEROS, 0, parameter.numel),)


def flat_runs(parameters: Sequence[LocalParameter], paddings: Sequence[int], state: str) -> list[Run]:
    """The runs of one state of several parameters in order, with alignment padding between the parameters."""
    found: list[Run] = []
    for parameter, padding in zip(parameters, paddings, strict=True):
        found += state_runs(parameter, state)
        if padding:
            found.append((ZEROS, 0, padding))
    return found


def zero_stage_node(stage: int) -> Node:
    """The enumeration's member, as DeepSpeed pickles it."""
    return PObject("reduce", Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), PTuple((stage,)))


def fragment_node(numel: int, start: int) -> Node:
    """A `fragment_address`: the place of a parameter's piece in its rank's partition."""
    cls = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    return PObject("newobj", cls, PTuple(), state=mapping_of({"numel": numel, "start": start}), has_state=True)


def clip_grad_of(target: Target) -> Node:
    """The source's gradient clipping, from its files or its config (stage 3 stores none); None where neither has it.

    Without this entry, a loader keeps the value of its own config. The default was 0, and became 1.0 during 0.19.
    """
    return target.extras.get("clip_grad", target.source.clip_grad)


def trained_groups(model: LocalModel, count: int) -> list[list[LocalParameter]]:
    """The rank's trained parameters by param group."""
    return [model.group(index) for index in range(count)]
