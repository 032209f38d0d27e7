"""Which DeepSpeed targets a checkpoint can become: each is laid out by its writer before anyone tries.

Sizes of tensor parallelism are many and a layout of each takes long: the writer's cutter is asked about each kind of
parameter, and one size is laid out.
"""

from __future__ import annotations

from collections.abc import Sequence

from reshard.errors import RequestError, ReshardError
from reshard.models import ConvertRequest, NativeLayout, PossibleTarget, TargetFormat, ZeroStage
from reshard_engine.checkpoint import Parameter
from reshard_engine.formats.deepspeed.cautions import HOW_TO_SAY, uncut
from reshard_engine.formats.deepspeed.writer.native.autoep import fused_experts
from reshard_engine.formats.deepspeed.writer.native.cutting import Cutter
from reshard_engine.formats.deepspeed.writer.native.experts import experts_by_layer, require_divisible
from reshard_engine.formats.deepspeed.writer.native.local import is_pipeline
from reshard_engine.formats.deepspeed.writer.native.target import resolve
from reshard_engine.formats.deepspeed.writer.native.writer import vocab_rows
from reshard_engine.formats.format import Trial

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of tensor-parallel ranks that are tried."""
_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of pipeline stages that are tried."""


def universal_target(tried: Trial) -> PossibleTarget:
    """Whether the checkpoint can become universal."""
    if (refusal := tried.refusal(TargetFormat.UNIVERSAL)) is not None:
        return tried.impossible("universal", refusal)
    detail, reason = "one directory for every stage and world", uncut(tried.checkpoint)
    if reason is not None:
        detail = f"one directory for every stage and number of data-parallel ranks; --tp 1 only: {reason}: {HOW_TO_SAY}"
    return tried.possible("universal", detail, "--to universal")


def _refusal(tried: Trial, stage: ZeroStage, **world: int) -> ReshardError | None:
    """The reason for which a run of this stage on `dp` ranks is refused, with `tp`, `pp` and `ep` where given."""
    return tried.refusal(TargetFormat.ZERO, layout=NativeLayout.model_validate({"zero_stage": stage, **world}))


def native_targets(tried: Trial) -> list[PossibleTarget]:
    """Which native layouts the checkpoint can become, by kind of parallelism."""
    if tried.checkpoint.optimizer is None:
        # One answer for all of `zero`: the stage has nothing to do with it.
        refusal = _refusal(tried, ZeroStage.STAGE_1, dp=1)
        return [] if refusal is None else [tried.impossible("zero", refusal)]
    stages = {stage: _refusal(tried, stage, dp=1) for stage in ZeroStage}
    works = [stage for stage, refusal in stages.items() if refusal is None]
    refused = [refusal for refusal in stages.values() if refusal is not None]
    if not works:
        return [tried.impossible("zero --dp", refused[0])]
    detail = f"any number of ranks; stages {', '.join(s.value for s in works)}"
    if refused:
        detail += f" ({refused[0].message}; {refused[0].fix})"
    found = [tried.possible("zero --dp", detail, f"--to zero --dp 2 --zero-stage {works[0].value}")]
    # Model parallelism is what a run has beside its stage: any that is not refused shows which sizes there are.
    stage = next((s for s in works if s is not ZeroStage.STAGE_0), None)
    if stage is None:
        return found
    return [*found, _tensor_parallel(tried, stage), _pipeline(tried, stage), *_experts(tried, stage)]


def _tensor_parallel(tried: Trial, stage: ZeroStage) -> PossibleTarget:
    checkpoint, name = tried.checkpoint, "zero --tp"
    unknown = [p.fqn for p in checkpoint.parameters if p.cut is None]
    if unknown:
        reason = f"above 1 nothing says how {len(unknown)} parameters would be cut: --rules FILE or --family NAME"
        return PossibleTarget(name=name, possible=False, detail=reason)
    # Layers repeat: a few kinds of parameters stand for thousands.
    kinds = list({(p.cut, p.shape, *p.padding): p for p in checkpoint.parameters}.values())
    refusals = {n: _uncuttable(tried, kinds, NativeLayout(dp=1, tp=n, zero_stage=stage)) for n in _SIZES}
    sizes = [n for n, refusal in refusals.items() if refusal is None]
    least = next((n for n in sizes if n > 1), None)
    refusal = refusals[2] if least is None else _refusal(tried, stage, dp=1, tp=least)
    if refusal is not None:
        return tried.impossible(name, refusal)
    detail = f"{', '.join(map(str, sizes))} (tried up to {_SIZES[-1]}); not at stage 0"
    return tried.possible(name, detail, f"--to zero --dp 1 --tp {least} --zero-stage {stage.value}")


def _uncuttable(tried: Trial, kinds: Sequence[Parameter], layout: NativeLayout) -> RequestError | None:
    """Why the writer would not cut some kind of parameter for so many ranks."""
    request = ConvertRequest(source=tried.source, target="-", to=TargetFormat.ZERO, layout=layout)
    try:
        dtype = resolve(tried.checkpoint, request).dtype
        cutter = Cutter(tried.checkpoint, layout.tp, vocab_rows(tried.checkpoint, layout), dtype=dtype)
        for parameter in kinds:
            for rank in {0, layout.tp - 1}:
                cutter.local(parameter, rank)
    except RequestError as error:
        return error
    return None


def _pipeline(tried: Trial, stage: ZeroStage) -> PossibleTarget:
    checkpoint, name = tried.checkpoint, "zero --pp"
    if not is_pipeline(checkpoint):
        reason = "the run was no pipeline; for Megatron-DeepSpeed: --names megatron-pipeline"
        return PossibleTarget(name=name, possible=False, detail=reason)
    most = len({p.layer for p in checkpoint.trained})
    refusals = {n: _refusal(tried, stage, dp=1, pp=n) for n in _STAGES if n <= most}
    works = [n for n, refusal in refusals.items() if refusal is None]
    least = next((n for n in works if n > 1), None)
    if least is None:
        refusal = next((r for n, r in refusals.items() if n > 1 and r is not None), None)
        reason = PossibleTarget(name=name, possible=False, detail=f"the pipeline has {most} layers")
        return reason if refusal is None else tried.impossible(name, refusal)
    sizes = ", ".join(map(str, works))
    detail = f"{sizes} (tried up to {max(refusals)}, stage sizes as by default); stages 1 and bf16"
    return tried.possible(name, detail, f"--to zero --dp 1 --pp {least} --zero-stage {stage.value}")


def _experts(tried: Trial, stage: ZeroStage) -> list[PossibleTarget]:
    checkpoint, name = tried.checkpoint, "zero --ep"
    counts = list(experts_by_layer(p.fqn for p in checkpoint.trained).values())
    counts += [shape[0] for shape in fused_experts(checkpoint).values()]
    if not counts:
        return []
    sizes = [n for n in range(1, min(counts) + 1) if _divides(counts, n)]
    least = next((n for n in sizes if n > 1), 1)
    if (refusal := _refusal(tried, stage, dp=least, ep=least)) is not None:
        return [tried.impossible(name, refusal)]
    detail = f"{', '.join(map(str, sizes))}, if it divides --dp"
    return [tried.possible(name, detail, f"--to zero --dp {least} --ep {least} --zero-stage {stage.value}")]


def _divides(counts: Sequence[int], ranks: int) -> bool:
    try:
        require_divisible(counts, ranks, ranks)
    except RequestError:
        return False
    return True
