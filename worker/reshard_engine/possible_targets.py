"""What a checkpoint can become, and where it cannot, why: the writers' own checks, asked before anyone tries."""

from __future__ import annotations

from collections.abc import Callable

from reshard.errors import RequestError, listed
from reshard.models import ConvertRequest, NativeLayout, PossibleTarget, SourceSpec, TargetFormat, ZeroStage
from reshard_engine.checkpoint import Checkpoint
from reshard_engine.cuts import Cut, CutError, taken
from reshard_engine.left_out import left_out
from reshard_engine.peft_names import adapter_names, adapter_parts, refuse_other_methods
from reshard_engine.peft_run import lacks_base
from reshard_engine.writers.cautions import HOW_TO_SAY, uncut
from reshard_engine.writers.optimizer_states import group_nodes, states_to_write
from reshard_engine.writers.zero.autoep import fused_experts
from reshard_engine.writers.zero.cutting import Cutter
from reshard_engine.writers.zero.experts import experts_by_layer, require_divisible
from reshard_engine.writers.zero.local import is_pipeline, local_models
from reshard_engine.writers.zero.megatron_groups import megatron_grouped
from reshard_engine.writers.zero.target import resolve
from reshard_engine.writers.zero.writer import refuse_empty_groups, refuse_impossible_layout

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of tensor-parallel ranks that are tried."""
_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of pipeline stages that are tried."""


def possible_targets(checkpoint: Checkpoint) -> tuple[PossibleTarget, ...]:
    """Targets by name, each with what is possible or what stands in the way."""
    if checkpoint.unexplained:
        count = len(checkpoint.unexplained)
        reason = f"nothing says how {count} parameters were cut: --rules FILE or --family NAME"
        return tuple(_no(name, reason) for name in ("zero", "universal", "safetensors", "torch"))
    detail = "any type" if left_out(checkpoint) is None else "any type; without the frozen parameters"
    weights = [PossibleTarget(name=name, possible=True, detail=detail) for name in ("safetensors", "torch")]
    weights += _adapters(checkpoint)
    if checkpoint.optimizer is None:
        reason = "the source has weights only"
        return (_no("zero", reason), _no("universal", reason), *weights)
    refusal = _refusal(lambda: (states_to_write(checkpoint), group_nodes(checkpoint)))
    if refusal is not None:
        return (_no("zero", refusal), _no("universal", refusal), *weights)
    return (*_native(checkpoint), _universal(checkpoint), *weights)


def _universal(checkpoint: Checkpoint) -> PossibleTarget:
    refusal, reason = _refusal(lambda: megatron_grouped(checkpoint, sharded=False)), uncut(checkpoint)
    if refusal is not None:
        return _no("universal", refusal)
    detail = "one directory for every stage and world"
    if reason is not None:
        detail = f"one directory for every stage and number of data-parallel ranks; --tp 1 only: {reason}: {HOW_TO_SAY}"
    return PossibleTarget(name="universal", possible=True, detail=detail)


def _adapters(checkpoint: Checkpoint) -> list[PossibleTarget]:
    """Nothing for runs without LoRA: nobody would ask."""
    names = adapter_names(adapter_parts(p.fqn for p in checkpoint.parameters))
    if not names:
        return []
    refusal = _refusal(lambda: refuse_other_methods(_names(checkpoint)))
    if refusal is not None:
        return [_no("peft", refusal)]
    merged = "safetensors --merge-adapter"
    if lacks_base(checkpoint):
        merged += " --base DIR (the base model's weights are not in the checkpoint)"
    return [PossibleTarget(name="peft", possible=True, detail=f"{listed(names)}; merged: {merged}")]


def _names(checkpoint: Checkpoint) -> list[str]:
    return [p.fqn for p in checkpoint.parameters] + [b.fqn for b in checkpoint.buffers] + list(checkpoint.shared)


def _refusal(check: Callable[[], object]) -> str | None:
    """Why a writer refuses; None if it does not."""
    try:
        check()
    except RequestError as error:
        return f"{error.message}; {error.fix}" if error.fix else error.message
    return None


def _no(name: str, reason: str) -> PossibleTarget:
    return PossibleTarget(name=name, possible=False, detail=reason)


def _native(checkpoint: Checkpoint) -> list[PossibleTarget]:
    stages = {s.value: _refusal(lambda s=s: _asked(checkpoint, NativeLayout(dp=1, zero_stage=s))) for s in ZeroStage}
    works = [name for name, refusal in stages.items() if refusal is None]
    if not works:
        return [_no("zero --dp", next(r for r in stages.values() if r is not None))]
    detail = f"any number of ranks; stages {', '.join(works)}"
    reasons = dict.fromkeys(r for r in stages.values() if r is not None)
    detail += f" ({next(iter(reasons))})" if reasons else ""
    found = [PossibleTarget(name="zero --dp", possible=True, detail=detail)]
    return [*found, _tensor_parallel(checkpoint), _pipeline(checkpoint), *_experts(checkpoint)]


def _asked(checkpoint: Checkpoint, layout: NativeLayout) -> None:
    source = SourceSpec(url=checkpoint.url)
    request = ConvertRequest(source=source, target="-", to=TargetFormat.ZERO, layout=layout)
    target = resolve(checkpoint, request)
    refuse_impossible_layout(target, checkpoint)
    megatron_grouped(checkpoint, sharded=target.stage == 3)
    if layout.pp > 1:
        count = len(group_nodes(checkpoint))
        refuse_empty_groups(local_models(checkpoint, target, Cutter(checkpoint, 1, None, dtype=target.dtype)), count)


def _tensor_parallel(checkpoint: Checkpoint) -> PossibleTarget:
    unknown = [p.fqn for p in checkpoint.parameters if p.cut is None]
    if unknown:
        reason = f"nothing says how {len(unknown)} parameters would be cut: --rules FILE or --family NAME"
        return _no("zero --tp", f"above 1 {reason}")
    # Layers repeat: a few kinds of parameters stand for thousands.
    kinds = {(p.cut, p.shape) for p in checkpoint.parameters if p.cut is not None}
    sizes = [n for n in _SIZES if all(_divides(cut, shape, n) for cut, shape in kinds)]
    text = f"{', '.join(map(str, sizes))} (tried up to {_SIZES[-1]}); not at stage 0"
    return PossibleTarget(name="zero --tp", possible=True, detail=text)


def _pipeline(checkpoint: Checkpoint) -> PossibleTarget:
    if not is_pipeline(checkpoint):
        return _no("zero --pp", "the run was no pipeline; for Megatron-DeepSpeed: --names megatron-pipeline")
    most = len({p.layer for p in checkpoint.trained})
    tried = {n: _refusal(lambda n=n: _asked(checkpoint, _stages(n))) for n in _STAGES if n <= most}
    works = [str(n) for n, refusal in tried.items() if refusal is None]
    limit = max(tried)
    detail = f"{', '.join(works)} (tried up to {limit}, stage sizes as by default); stages 1 and bf16"
    return PossibleTarget(name="zero --pp", possible=True, detail=detail)


def _stages(count: int) -> NativeLayout:
    return NativeLayout(dp=1, pp=count, zero_stage=ZeroStage.STAGE_1)


def _experts(checkpoint: Checkpoint) -> list[PossibleTarget]:
    counts = list(experts_by_layer(p.fqn for p in checkpoint.trained).values())
    counts += [shape[0] for shape in fused_experts(checkpoint).values()]
    if not counts:
        return []
    sizes = [n for n in range(1, min(counts) + 1) if _refusal(lambda n=n: require_divisible(counts, n, n)) is None]
    detail = f"{', '.join(map(str, sizes))}, if it divides --dp"
    return [PossibleTarget(name="zero --ep", possible=True, detail=detail)]


def _divides(cut: Cut, shape: tuple[int, ...], ranks: int) -> bool:
    if cut.dim is None or cut.vocabulary is not None:
        return True  # vocabularies are padded to what divides
    try:
        taken(cut.even(), shape, 0, ranks, 0)
    except (CutError, ValueError):
        return False
    return True
