"""What a checkpoint can become, and where it cannot, why: each target is laid out by its writer before anyone tries.

Sizes of tensor parallelism are many and a layout of each takes long: the writer's cutter is asked about each kind of
parameter, and one size is laid out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reshard.errors import RequestError, ReshardError, listed
from reshard.models import ConvertRequest, NativeLayout, PossibleTarget, SourceSpec, TargetFormat, ZeroStage
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.deepspeed.cautions import HOW_TO_SAY, uncut
from reshard_engine.formats.deepspeed.writer.native.autoep import fused_experts
from reshard_engine.formats.deepspeed.writer.native.cutting import Cutter
from reshard_engine.formats.deepspeed.writer.native.experts import experts_by_layer, require_divisible
from reshard_engine.formats.deepspeed.writer.native.local import is_pipeline
from reshard_engine.formats.deepspeed.writer.native.target import resolve
from reshard_engine.formats.deepspeed.writer.native.writer import vocab_rows
from reshard_engine.formats.peft.left_out import left_out
from reshard_engine.formats.peft.names import adapter_names, adapter_parts
from reshard_engine.formats.peft.run import lacks_base
from reshard_engine.operations.rehearsal import Rehearsal

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of tensor-parallel ranks that are tried."""
_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of pipeline stages that are tried."""
_ANY_ALPHA = 1.0


def possible_targets(checkpoint: Checkpoint, source: SourceSpec | None = None) -> tuple[PossibleTarget, ...]:
    """Targets by name, each with what is possible or what stands in the way.

    Args:
        checkpoint: A checkpoint that was read.
        source: How the user named it; its own URL if that is not known.
    """
    tried = Rehearsal(checkpoint, source or SourceSpec(url=checkpoint.url))
    return (*_native(tried), _universal(tried), *_weights(tried), *_adapters(tried))


def _yes(tried: Rehearsal, name: str, detail: str, flags: str) -> PossibleTarget:
    if not tried.checkpoint.foreign_globals:
        return PossibleTarget(name=name, possible=True, detail=detail, example=flags)
    detail += "; with --opaque drop, or keep: it holds objects of classes that are not on the allow-list"
    return PossibleTarget(name=name, possible=True, detail=detail, example=f"{flags} --opaque {tried.opaque.value}")


def _no(name: str, refusal: ReshardError) -> PossibleTarget:
    detail = f"{refusal.message}; {refusal.fix}" if refusal.fix else refusal.message
    return PossibleTarget(name=name, possible=False, detail=detail)


def _universal(tried: Rehearsal) -> PossibleTarget:
    if (refusal := tried.refusal(TargetFormat.UNIVERSAL)) is not None:
        return _no("universal", refusal)
    detail, reason = "one directory for every stage and world", uncut(tried.checkpoint)
    if reason is not None:
        detail = f"one directory for every stage and number of data-parallel ranks; --tp 1 only: {reason}: {HOW_TO_SAY}"
    return _yes(tried, "universal", detail, "--to universal")


def _weights(tried: Rehearsal) -> Iterator[PossibleTarget]:
    detail = "any type" if left_out(tried.checkpoint) is None else "any type; without the frozen parameters"
    for to in (TargetFormat.SAFETENSORS, TargetFormat.TORCH):
        refusal = tried.refusal(to)
        yield _yes(tried, to.value, detail, f"--to {to.value}") if refusal is None else _no(to.value, refusal)


def _adapters(tried: Rehearsal) -> list[PossibleTarget]:
    """Nothing for runs without LoRA: nobody would ask."""
    names = adapter_names(adapter_parts(p.fqn for p in tried.checkpoint.parameters))
    if not names:
        return []
    # Several adapters are exported one at a time.
    chosen = {"adapter": names[0]} if len(names) > 1 else {}
    flags = f" --adapter {names[0]}" if chosen else ""
    refusal = tried.refusal(TargetFormat.PEFT, **chosen)
    needs = ""
    if refusal is not None:
        scaled = {**chosen, "lora_alpha": _ANY_ALPHA}
        if tried.refusal(TargetFormat.PEFT, **scaled) is not None:
            return [_no("peft", refusal)]
        chosen, flags, needs = scaled, f"{flags} --model-files DIR", f"; {refusal.message}: {refusal.fix}"
    return [_yes(tried, "peft", f"{listed(names)}; {_merged(tried, chosen)}{needs}", f"--to peft{flags}")]


def _merged(tried: Rehearsal, chosen: dict[str, str] | dict[str, str | float]) -> str:
    """How the adapter is merged into weights, or why it is not."""
    if lacks_base(tried.checkpoint):
        text = "merged: safetensors --merge-adapter --base DIR"
        return f"{text} (the base model's weights are not in the checkpoint)"
    refusal = tried.refusal(TargetFormat.SAFETENSORS, merge_adapter=True, **chosen)
    return "merged: safetensors --merge-adapter" if refusal is None else f"not merged: {refusal.message}"


def _native(tried: Rehearsal) -> list[PossibleTarget]:
    if tried.checkpoint.optimizer is None:
        # One answer for all of `zero`: the stage has nothing to do with it.
        refusal = tried.native(ZeroStage.STAGE_1, dp=1)
        return [] if refusal is None else [_no("zero", refusal)]
    stages = {stage: tried.native(stage, dp=1) for stage in ZeroStage}
    works = [stage for stage, refusal in stages.items() if refusal is None]
    refused = [refusal for refusal in stages.values() if refusal is not None]
    if not works:
        return [_no("zero --dp", refused[0])]
    detail = f"any number of ranks; stages {', '.join(s.value for s in works)}"
    if refused:
        detail += f" ({refused[0].message}; {refused[0].fix})"
    found = [_yes(tried, "zero --dp", detail, f"--to zero --dp 2 --zero-stage {works[0].value}")]
    # Model parallelism is what a run has beside its stage: any that is not refused shows which sizes there are.
    stage = next((s for s in works if s is not ZeroStage.STAGE_0), None)
    if stage is None:
        return found
    return [*found, _tensor_parallel(tried, stage), _pipeline(tried, stage), *_experts(tried, stage)]


def _tensor_parallel(tried: Rehearsal, stage: ZeroStage) -> PossibleTarget:
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
    refusal = refusals[2] if least is None else tried.native(stage, dp=1, tp=least)
    if refusal is not None:
        return _no(name, refusal)
    detail = f"{', '.join(map(str, sizes))} (tried up to {_SIZES[-1]}); not at stage 0"
    return _yes(tried, name, detail, f"--to zero --dp 1 --tp {least} --zero-stage {stage.value}")


def _uncuttable(tried: Rehearsal, kinds: Sequence[Parameter], layout: NativeLayout) -> RequestError | None:
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


def _pipeline(tried: Rehearsal, stage: ZeroStage) -> PossibleTarget:
    checkpoint, name = tried.checkpoint, "zero --pp"
    if not is_pipeline(checkpoint):
        reason = "the run was no pipeline; for Megatron-DeepSpeed: --names megatron-pipeline"
        return PossibleTarget(name=name, possible=False, detail=reason)
    most = len({p.layer for p in checkpoint.trained})
    refusals = {n: tried.native(stage, dp=1, pp=n) for n in _STAGES if n <= most}
    works = [n for n, refusal in refusals.items() if refusal is None]
    least = next((n for n in works if n > 1), None)
    if least is None:
        refusal = next((r for n, r in refusals.items() if n > 1 and r is not None), None)
        reason = PossibleTarget(name=name, possible=False, detail=f"the pipeline has {most} layers")
        return reason if refusal is None else _no(name, refusal)
    sizes = ", ".join(map(str, works))
    detail = f"{sizes} (tried up to {max(refusals)}, stage sizes as by default); stages 1 and bf16"
    return _yes(tried, name, detail, f"--to zero --dp 1 --pp {least} --zero-stage {stage.value}")


def _experts(tried: Rehearsal, stage: ZeroStage) -> list[PossibleTarget]:
    checkpoint, name = tried.checkpoint, "zero --ep"
    counts = list(experts_by_layer(p.fqn for p in checkpoint.trained).values())
    counts += [shape[0] for shape in fused_experts(checkpoint).values()]
    if not counts:
        return []
    sizes = [n for n in range(1, min(counts) + 1) if _divides(counts, n)]
    least = next((n for n in sizes if n > 1), 1)
    if (refusal := tried.native(stage, dp=least, ep=least)) is not None:
        return [_no(name, refusal)]
    detail = f"{', '.join(map(str, sizes))}, if it divides --dp"
    return [_yes(tried, name, detail, f"--to zero --dp {least} --ep {least} --zero-stage {stage.value}")]


def _divides(counts: Sequence[int], ranks: int) -> bool:
    try:
        require_divisible(counts, ranks, ranks)
    except RequestError:
        return False
    return True
