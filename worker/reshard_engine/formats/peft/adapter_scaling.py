"""Makes the rules that merge the factors of a LoRA adapter into a weight: scale, orientation, and refusals.

Source: peft 0.21.2 `tuners/lora/layer.py` (`scaling`, `get_delta_weight`, `transpose`, `merge`, `dispatch_default`: the
layer's type decides `fan_in_fan_out`, and the configuration keeps what the last layer said) and `utils/other.py`
(`get_pattern_key`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, cast

import re2

from reshard.errors import RequestError, SourceError, printable
from reshard_engine.checkpoint import Parameter
from reshard_engine.formats.peft.adapter_config import AdapterConfig, not_lora
from reshard_engine.tensors.derived import LoraBias, LoraMerge

_RE2: Any = re2
Factors = Mapping[str, Parameter]
"""Parameters of one adapted module: `lora_A`, `lora_B`, `lora_embedding_A`, ..., `lora_B.bias`."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The scales of a configuration, and the orientation of its matrices."""

    alpha: float
    by_module: Mapping[str, float]
    by_root: bool
    transposed: bool | None
    """The orientation of square matrices, whose shape does not show it; None if it is unknown."""

    def of(self, module: str, rank: int) -> float:
        """The factor of B A for a module, given by its name without PEFT's prefix."""
        alpha = self.alpha
        for pattern, value in self.by_module.items():
            if _RE2.fullmatch(rf"(.*\.)?({pattern})", module) is not None:
                alpha = value
                break
        return alpha / (sqrt(rank) if self.by_root else rank)


def scaling_of(config: AdapterConfig | None, alpha: float | None, seen: Iterable[bool | None]) -> Scaling:
    """The scaling of a configuration, or of a scale in the request.

    Args:
        config: The run's, if there is one.
        alpha: `lora_alpha` of the request.
        seen: For each matrix, True if its shape shows that it is stored transposed; None if the shape does not show it.

    Raises:
        SourceError: `checkpoint.malformed` if the configuration has no valid scales.
    """
    known = {t for t in seen if t is not None}
    if config is None:
        # Layers of transformers are nn.Linear or, as in GPT-2, all Conv1D.
        return Scaling(alpha or 0.0, {}, by_root=False, transposed=True in known if len(known) < 2 else None)
    facts = config.facts
    patterns = cast("dict[str, float]", facts.get("alpha_pattern") or {})
    by_module = {pattern: float(value) for pattern, value in patterns.items()}
    for pattern in by_module:
        try:
            _RE2.compile(pattern)
        except _RE2.error:
            raise not_lora(f"`alpha_pattern` has {printable(pattern)!r}, which is no regular expression") from None
    if (said := facts.get("lora_alpha")) is None:
        raise not_lora("it has no `lora_alpha`")
    by_root, transposed = (bool(facts.get(k)) for k in ("use_rslora", "fan_in_fan_out"))
    return Scaling(float(said), by_module, by_root=by_root, transposed=transposed if known <= {transposed} else None)


def transposed_by_shape(shape: tuple[int, ...], factors: Factors) -> bool | None:
    """True if a matrix is stored `[in, out]`, as in Conv1D and embeddings; None if its shape does not show it."""
    a, b = factors.get("lora_A"), factors.get("lora_B")
    if a is None or b is None or not len(shape) == len(a.shape) == len(b.shape) == 2:
        return None
    straight, turned = (b.shape[0], a.shape[1]), (a.shape[1], b.shape[0])
    return None if straight == turned else shape == turned if shape in (straight, turned) else None


def merge_of(name: str, base: Parameter, factors: Factors, scaling: Scaling) -> LoraMerge:
    """The rule that merges a module's weight.

    Args:
        name: The weight's name in the model without PEFT.
        base: The base weight.
        factors: The factors that adapt it.
        scaling: The scaling of the adapter.

    Raises:
        RequestError: `request.unsatisfiable` for adapters that are merged by another rule.
        SourceError: `checkpoint.malformed` if shapes contradict one another.
    """
    embedding = "lora_embedding_A" in factors
    a, b = (factors.get(f"lora_embedding_{k}" if embedding else f"lora_{k}") for k in "AB")
    if a is None or b is None or not len(base.shape) == len(a.shape) == len(b.shape) == 2:
        raise unmergeable(name, "a layer that is no matrix with two factors")
    (rank, inputs), (outputs, other) = a.shape, b.shape
    by_shape = transposed_by_shape(base.shape, factors)
    transposed = True if embedding else scaling.transposed if by_shape is None else by_shape
    if transposed is None:
        raise unmergeable(name, "square, beside matrices of both orientations (nn.Linear and Conv1D)")
    if base.shape != ((inputs, outputs) if transposed else (outputs, inputs)) or rank != other:
        raise SourceError(
            "checkpoint.malformed",
            f"{printable(name)} is {base.shape}, its factors are {a.shape} and {b.shape}",
            fix="name the model that the run started from, with its added tokens: --base, --model-files",
        )
    magnitude = factors.get("lora_magnitude_vector")
    if magnitude is not None and (transposed or magnitude.shape != (outputs,)):
        raise unmergeable(name, "a weight whose magnitudes are not one for each row (DoRA of Conv1D or embeddings)")
    left, right = (a, b) if transposed else (b, a)
    scale = scaling.of(name.removesuffix(".weight"), rank)
    length = None if magnitude is None else magnitude.value()
    return LoraMerge(base.value(), left.value(), right.value(), scale, transposed, length)


def shift_of(name: str, base: Parameter, factors: Factors, scaling: Scaling) -> LoraBias:
    """The rule that merges a module's bias with the bias of its adapter (`lora_bias`).

    Raises:
        RequestError: `request.unsatisfiable` if the adapted layer is not linear.
        SourceError: `checkpoint.malformed` if shapes contradict one another.
    """
    a, own = factors.get("lora_A"), factors["lora_B.bias"]
    if a is None:
        raise unmergeable(name, "a bias of another adapter than a linear layer's")
    if base.shape != own.shape or len(base.shape) != 1:
        raise SourceError("checkpoint.malformed", f"{printable(name)} is {base.shape}, its adapter's is {own.shape}")
    return LoraBias(base.value(), own.value(), scaling.of(name.removesuffix(".bias"), a.shape[0]))


def unmergeable(fqn: str, why: str) -> RequestError:
    """The error for an adapter that is merged by another rule."""
    return RequestError(
        "request.unsatisfiable",
        f"{printable(fqn)} is {why}: no rule merges it here",
        fix="--to peft, then PEFT's merge_and_unload",
    )
