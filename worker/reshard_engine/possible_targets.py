"""What a checkpoint can become, and where it cannot, why: said before anyone tries."""

from __future__ import annotations

from reshard.models import PossibleTarget
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.cuts import CutError, taken

_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of tensor-parallel ranks that are tried."""


def possible_targets(checkpoint: Checkpoint) -> tuple[PossibleTarget, ...]:
    """Targets by name, each with what is possible or what stands in the way."""
    if checkpoint.unexplained:
        count = len(checkpoint.unexplained)
        reason = f"nothing says how {count} parameters were cut: --rules FILE or --family NAME"
        return tuple(_no(name, reason) for name in ("zero", "universal", "safetensors", "torch"))
    weights = [PossibleTarget(name=name, possible=True, detail="any type") for name in ("safetensors", "torch")]
    if checkpoint.optimizer is None:
        reason = "the source has weights only"
        return (_no("zero", reason), _no("universal", reason), *weights)
    universal = PossibleTarget(name="universal", possible=True, detail="one directory for every stage and world")
    return (*_native(checkpoint), universal, *weights)


def _no(name: str, reason: str) -> PossibleTarget:
    return PossibleTarget(name=name, possible=False, detail=reason)


def _native(checkpoint: Checkpoint) -> list[PossibleTarget]:
    experts = "ep" in checkpoint.world
    stages = "stages 1, 2 and bf16 (groups of experts)" if experts else "stages 0, 1, 2, 3 and bf16"
    found = [PossibleTarget(name="zero --dp", possible=True, detail=f"any number of ranks; {stages}")]
    unknown = [p.fqn for p in checkpoint.trained if p.cut is None]
    if unknown:
        reason = f"nothing says how {len(unknown)} parameters would be cut: --rules FILE or --family NAME"
        found.append(_no("zero --tp", reason))
    else:
        sizes = [n for n in _SIZES if all(_divides(p, n) for p in checkpoint.parameters)]
        text = (
            f"{', '.join(map(str, sizes))} (tried up to {_SIZES[-1]})" if sizes else "no number divides every parameter"
        )
        found.append(PossibleTarget(name="zero --tp", possible=bool(sizes), detail=text))
    layers = [p.layer for p in checkpoint.trained if p.layer is not None]
    if layers:
        detail = f"up to {len(set(layers))} stages at stage 1 and bf16; layers with parameters: {len(set(layers))}"
        found.append(PossibleTarget(name="zero --pp", possible=True, detail=detail))
    else:
        found.append(_no("zero --pp", "the run was no pipeline; for Megatron-DeepSpeed: --names megatron-pipeline"))
    return found


def _divides(parameter: Parameter, ranks: int) -> bool:
    cut = parameter.cut
    if cut is None or cut.dim is None or cut.vocabulary is not None:
        return True  # vocabularies are padded to what divides
    even = cut.even()
    try:
        taken(even, parameter.shape, 0, ranks, 0)
    except (CutError, ValueError):
        return False
    return True
