"""Describes a checkpoint, for users and scripts, and rehearses what it can become."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from reshard.choices import OpaquePolicy
from reshard.errors import RequestError, ReshardError, SourceError
from reshard.models.jobs import ConvertRequest, Inspection, PossibleTarget, TensorInfo
from reshard.models.resume import RunLaunch
from reshard.options import SourceSpec
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.registry import (
    cautions,
    check_request,
    format_of,
    format_writing,
    formats,
    left_out,
    writer_of,
)
from reshard_engine.formats.torch_archive import dry_run
from reshard_engine.operations.requested import as_requested, foreign_in_model
from reshard_engine.operations.resume import resume_layout

# Rehearses conversions: has the writer lay out the target, without moving a byte, to see if it refuses.

_NAME = "rehearsed"
"""Name of the rehearsed target; any name would do."""


@dataclass(frozen=True)
class WriterDryRun:
    """Rehearsals of conversions of one checkpoint that was read."""

    checkpoint: Checkpoint
    source: SourceSpec

    def opaque(self, to: str) -> OpaquePolicy:
        """The policy that this source needs for a target: `drop` if that would otherwise refuse foreign objects."""
        known = self.checkpoint
        foreign = foreign_in_model(known) if format_writing(to).model_only else known.foreign_globals
        return OpaquePolicy.DROP if foreign else OpaquePolicy.REFUSE

    def refusal(self, to: str, **options: Any) -> RequestError | SourceError | None:
        """The reason why a conversion with these fields of `ConvertRequest` would be refused; None if there is none."""
        target = f"{self.source.url.rstrip('/')}_rehearsed"
        request = ConvertRequest(source=self.source, target=target, to=to, opaque=self.opaque(to), **options)
        try:
            check_request(request)
            with dry_run():
                checkpoint = as_requested(self.checkpoint, request)
                layout = writer_of(to).lay_out(checkpoint, request, name=_NAME)
                layout.map_over(checkpoint.shard_map)
        except (RequestError, SourceError) as error:
            return error
        return None

    @property
    def lacks_parameters(self) -> bool:
        """True if the checkpoint was saved without some of its parameters."""
        return left_out(self.checkpoint) is not None

    def possible(self, name: str, detail: str, flags: str) -> PossibleTarget:
        """A target that is possible with these flags of `reshard convert`."""
        opaque = self.opaque(name.partition(" ")[0])
        if opaque is OpaquePolicy.REFUSE:
            return PossibleTarget(name=name, possible=True, detail=detail, example=flags)
        detail += "; with --opaque drop, or keep: it holds objects of classes that are not on the allow-list"
        return PossibleTarget(name=name, possible=True, detail=detail, example=f"{flags} --opaque {opaque.value}")

    def impossible(self, name: str, refusal: ReshardError) -> PossibleTarget:
        """A target that is refused for this reason."""
        detail = f"{refusal.message}; {refusal.fix}" if refusal.fix else refusal.message
        return PossibleTarget(name=name, possible=False, detail=detail)


def possible_targets(checkpoint: Checkpoint, source: SourceSpec | None = None) -> tuple[PossibleTarget, ...]:
    """All targets by name, each with a note, or with the reason why it is not possible.

    Args:
        checkpoint: A checkpoint that was read.
        source: The source as the user named it; the checkpoint's URL if that is not known.
    """
    tried = WriterDryRun(checkpoint, source or SourceSpec(url=checkpoint.url))
    return tuple(target for known in formats() for target in known.presentation.possible_targets(tried))


def describe(checkpoint: Checkpoint, source: SourceSpec | None = None, launch: RunLaunch | None = None) -> Inspection:
    """The inspection of a checkpoint that was read.

    Args:
        checkpoint: The checkpoint.
        source: The source as the user named it.
        launch: A run that is about to resume from it, whose layout is described, too.

    Raises:
        RequestError: As `resume_layout`.
    """
    known = format_of(checkpoint)
    stage = known.presentation.zero_stage(checkpoint)
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
        family=checkpoint.family,
        zero_stage=None if stage is None else stage.number,
        stage=stage,
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
        warnings=(
            *checkpoint.warnings,
            *checkpoint.pin_warnings,
            *(f"{u.text}: {u.fix}" for u in checkpoint.undecided),
            *cautions(checkpoint),
        ),
        not_carried=checkpoint.not_carried,
        targets=possible_targets(checkpoint, source),
        tensors=tuple(infos),
        resume=None if launch is None else resume_layout(checkpoint, launch),
    )
