"""Describes a checkpoint, for users and scripts."""

from __future__ import annotations

from math import prod

from reshard.models import Inspection, SourceSpec, TensorInfo
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.registry import cautions, format_of
from reshard_engine.operations.dry_run import possible_targets


def describe(checkpoint: Checkpoint, source: SourceSpec | None = None) -> Inspection:
    """The inspection of a checkpoint that was read; `source` is how the user named it."""
    tensors = checkpoint.shard_map.tensors
    knows_frozen = bool(checkpoint.trained)  # weights alone do not say who trained them

    def parameter(p: Parameter) -> TensorInfo:
        best = p.weight if p.weight is not None else p.states["fp32"]
        return TensorInfo(
            fqn=p.fqn,
            states=(*(() if p.weight is None else ("weight",)), *p.states),
            shape=p.shape,
            dtype=tensors[best].dtype.name,
            frozen=knows_frozen and not p.trained,
        )

    infos = [parameter(p) for p in checkpoint.parameters]
    infos += [
        TensorInfo(fqn=b.fqn, states=("buffer",), shape=tensors[b.tensor].shape, dtype=tensors[b.tensor].dtype.name)
        for b in checkpoint.buffers
    ]
    shapes = {i.fqn: i for i in infos}
    infos += [
        TensorInfo(fqn=alias, states=(), shape=shapes[owner].shape, dtype=shapes[owner].dtype, shared_with=owner)
        for alias, owner in checkpoint.shared.items()
        if owner in shapes
    ]
    states = dict.fromkeys(s for p in checkpoint.trained for s in p.states if s != "fp32")
    scalars = dict.fromkeys(s for p in checkpoint.trained for s in p.scalars)
    return Inspection(
        url=checkpoint.url,
        tag=checkpoint.tag,
        format=checkpoint.format,
        framework_version=checkpoint.framework_version,
        zero_stage=format_of(checkpoint).zero_stage(checkpoint),
        world=dict(checkpoint.world),
        step=checkpoint.counters.steps,
        param_groups=len(checkpoint.optimizer.groups) if checkpoint.optimizer else 0,
        parameters=len(checkpoint.parameters),
        parameter_elems=sum(prod(p.shape) for p in checkpoint.parameters),
        optimizer_states=(*states, *scalars),
        dtypes=tuple(sorted({t.dtype.name for t in tensors})),
        files=sum(len(f.objects) for f in checkpoint.files),
        total_bytes=sum(f.size_bytes for f in checkpoint.files),
        foreign_globals=checkpoint.foreign_globals,
        warnings=(*checkpoint.warnings, *(f"{u.text}: {u.fix}" for u in checkpoint.undecided), *cautions(checkpoint)),
        not_carried=checkpoint.not_carried,
        targets=possible_targets(checkpoint, source),
        tensors=tuple(infos),
    )
