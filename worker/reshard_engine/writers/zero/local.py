"""From the checkpoint's logical tensors to what each model-parallel rank of the target holds."""

from __future__ import annotations

from reshard.errors import RequestError, printable
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.pickles.nodes import is_mapping, mapping_items
from reshard_engine.writers.zero.model import LocalModel, LocalParameter
from reshard_engine.writers.zero.partitions import Run
from reshard_engine.writers.zero.target import Target


def local_models(checkpoint: Checkpoint, target: Target) -> list[LocalModel]:
    """The model-parallel ranks of the target, in the order of their numbers.

    Raises:
        RequestError: `request.unsatisfiable` if the model cannot be cut so.
    """
    layout = target.layout
    if (layout.tp, layout.pp, layout.ep) != (1, 1, 1):
        raise RequestError("request.unsatisfiable", "tensor, pipeline and expert parallel targets are not written yet")
    parameters = [_whole(checkpoint, p) for p in (*checkpoint.trained, *checkpoint.frozen)]
    buffers = {b.fqn: b.tensor for b in checkpoint.buffers}
    known = dict.fromkeys([p.fqn for p in checkpoint.parameters] + list(buffers) + list(checkpoint.shared))
    names = [n for n in _module_names(checkpoint) if n in known]
    return [
        LocalModel(
            pp=0,
            tp=0,
            parameters=tuple(parameters),
            buffers=buffers,
            shared=checkpoint.shared,
            names=tuple(dict.fromkeys([*names, *known])),
        )
    ]


def _module_names(checkpoint: Checkpoint) -> list[str]:
    state = mapping_items(checkpoint.model_state, what="model states") if is_mapping(checkpoint.model_state) else {}
    module = state.get("module")
    return [str(n) for n in mapping_items(module, what="module")] if is_mapping(module) else []


def _whole(checkpoint: Checkpoint, parameter: Parameter) -> LocalParameter:
    tensors = checkpoint.shard_map.tensors

    def runs(number: int) -> tuple[Run, ...]:
        return ((number, 0, tensors[number].numel),)

    best = parameter.states.get("fp32", parameter.weight)
    if best is None:
        raise RequestError("request.unsatisfiable", f"the checkpoint stores no value for {printable(parameter.fqn)}")
    return LocalParameter(
        fqn=parameter.fqn,
        shape=parameter.shape,
        group=parameter.group,
        states={s: runs(n) for s, n in parameter.states.items()},
        weight=runs(best),
        scalars=parameter.scalars,
    )
