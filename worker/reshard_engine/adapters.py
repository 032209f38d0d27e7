"""A LoRA run as the model that it trained: adapters merged into their weights, names without PEFT's.

What `PeftModel.merge_and_unload` gives, computed as the bytes are written.

Source: peft 0.21.2 `tuners/lora/layer.py` (`scaling`, `get_delta_weight`, `transpose`, `merge`) and `config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any

import re2

from reshard.errors import RequestError, SourceError, printable
from reshard.models import ConvertRequest
from reshard_engine.adapter_config import CONFIG, adapter_config, not_lora
from reshard_engine.checkpoint import Buffer, Checkpoint, Parameter
from reshard_engine.dtypes import FLOAT32
from reshard_engine.peft_names import WRAPPED, AdapterPart, adapter_parts, chosen_adapter
from reshard_engine.shardmap import Merge, StoredTensor

_NO_RULE = ("use_qalora", "arrow_config", "corda_config", "layer_replication", "alora_invocation_tokens", "use_bdlora")
"""Options under which a merge is more than a product of two factors."""
_RE2: Any = re2


@dataclass(frozen=True, slots=True)
class _Scaling:
    """What a configuration says of scales."""

    alpha: float
    by_module: Mapping[str, float]
    by_root: bool
    transposed: bool

    def of(self, module: str, rank: int) -> float:
        """The factor of B A for a module, whose name is without PEFT's beginning."""
        alpha = self.alpha
        for pattern, value in self.by_module.items():
            if _RE2.fullmatch(rf"(.*\.)?({pattern})", module) is not None:
                alpha = value
                break
        return alpha / (sqrt(rank) if self.by_root else rank)


def merged(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint's weights with an adapter merged, under the names of the model without PEFT.

    Raises:
        RequestError: `request.unsatisfiable` if there is no LoRA adapter, several and none named, nothing that says its
            scale, or one that is merged by another rule.
        SourceError: `checkpoint.malformed` if shapes or the configuration contradict one another.
    """
    names = [p.fqn for p in checkpoint.parameters]
    parts = {p.fqn: p for p in adapter_parts(names)}
    adapter = chosen_adapter(names, parts.values(), request.adapter)
    mine = [p for p in parts.values() if p.adapter == adapter]
    scaling = _scaling(checkpoint, request)
    by_name = {p.fqn: p for p in checkpoint.parameters}
    saved = {p.module: p for p in mine if p.kind == "modules_to_save"}
    found: list[Parameter] = []
    tensors: list[StoredTensor] = []
    merges: list[Merge] = []
    new_names: dict[str, str] = {}
    factors = _factors(mine)
    for parameter in checkpoint.parameters:
        part = parts.get(parameter.fqn)
        if part is not None and (part.adapter != adapter or part.kind != "modules_to_save"):
            continue
        name = _plain(part.saved_as if part is not None else parameter.fqn, saved)
        if name is None:
            continue
        new_names[parameter.fqn] = name
        module = parameter.fqn.removesuffix(".weight").removesuffix(".base_layer")
        if module in factors and parameter.fqn.endswith(".weight") and part is None:
            found.append(Parameter(name, parameter.shape, 0, len(checkpoint.shard_map.tensors) + len(merges)))
            tensors.append(StoredTensor(name, "weight", FLOAT32, parameter.shape))
            held = {kind: by_name[fqn] for kind, fqn in factors[module].items()}
            merges.append(_merge(parameter, held, scaling, module=module.removeprefix(WRAPPED)))
            continue
        found.append(Parameter(name, parameter.shape, 0, parameter.best))
    if len(merges) != len(factors):
        raise SourceError(
            "checkpoint.malformed", f"{len(factors)} modules are adapted, {len(merges)} of them have a weight"
        )
    return replace(
        checkpoint,
        parameters=tuple(found),
        buffers=tuple(Buffer(_plain(b.fqn, {}) or b.fqn, b.tensor) for b in checkpoint.buffers),
        shared=_shared(checkpoint, new_names, saved),
        optimizer=None,
        shard_map=checkpoint.shard_map.with_merges(tensors, merges),
    )


def _shared(checkpoint: Checkpoint, names: Mapping[str, str], saved: Mapping[str, AdapterPart]) -> dict[str, str]:
    found: dict[str, str] = {}
    taken = set(names.values())
    for alias, owner in checkpoint.shared.items():
        name = _plain(alias, saved)
        if name is not None and owner in names and name not in taken:
            found[name] = names[owner]
    return found


def _plain(fqn: str, saved: Mapping[str, AdapterPart]) -> str | None:
    """A name of the model without PEFT; None for the original of a module that was saved whole."""
    head, original, tail = fqn.partition(".original_module.")
    if original:
        if head in saved:
            return None
        fqn = f"{head}.{tail}"
    return fqn.removeprefix(WRAPPED).replace(".base_layer.", ".")


def _factors(mine: list[AdapterPart]) -> dict[str, dict[str, str]]:
    """By module the names of its factors; of an embedding under the same keys."""
    found: dict[str, dict[str, str]] = {}
    for part in mine:
        if part.kind == "modules_to_save":
            continue
        if part.tail == ".bias":
            raise _unmergeable(part.fqn, "a bias of the adapter's own")
        found.setdefault(part.module, {})[part.kind.replace("embedding_", "")] = part.fqn
        if "embedding" in part.kind:
            found[part.module]["embedding"] = part.fqn
    return found


def _merge(parameter: Parameter, factors: Mapping[str, Parameter], scaling: _Scaling, *, module: str) -> Merge:
    a, b = (factors.get(kind) for kind in ("lora_A", "lora_B"))
    if a is None or b is None or not len(parameter.shape) == len(a.shape) == len(b.shape) == 2:
        raise _unmergeable(parameter.fqn, "a layer that is no matrix with two factors")
    (rank, inputs), (outputs, other) = a.shape, b.shape
    transposed = scaling.transposed or "embedding" in factors
    if parameter.shape != ((inputs, outputs) if transposed else (outputs, inputs)) or rank != other:
        shapes = f"{printable(parameter.fqn)} is {parameter.shape}, its factors are {a.shape} and {b.shape}"
        raise SourceError("checkpoint.malformed", shapes, fix="is `fan_in_fan_out` in adapter_config.json right?")
    magnitude = factors.get("lora_magnitude_vector")
    if magnitude is not None and (transposed or magnitude.shape != (outputs,)):
        raise _unmergeable(parameter.fqn, "a weight whose magnitudes are not one for each row")
    left, right = (a, b) if transposed else (b, a)
    return Merge(
        parameter.value(),
        left.value(),
        right.value(),
        scaling.of(module, rank),
        transposed,
        None if magnitude is None else magnitude.value(),
    )


def _unmergeable(fqn: str, why: str) -> RequestError:
    return RequestError(
        "request.unsatisfiable",
        f"{printable(fqn)} is {why}: no rule merges it here",
        fix="--to peft, then PEFT's merge_and_unload",
    )


def _scaling(checkpoint: Checkpoint, request: ConvertRequest) -> _Scaling:
    config = adapter_config(checkpoint, request)
    if config is None:
        return _Scaling(request.lora_alpha or 0.0, {}, by_root=False, transposed=False)
    try:
        scaling = _parsed(config.facts)
    except (ValueError, KeyError, TypeError, _RE2.error) as error:
        raise not_lora(f"`lora_alpha` or `alpha_pattern` ({type(error).__name__})") from None
    if others := [k for k in _NO_RULE if config.facts.get(k)]:
        raise _unmergeable(CONFIG, f"of an adapter with {', '.join(others)}")
    return scaling


def _parsed(facts: Mapping[str, Any]) -> _Scaling:
    by_module = {str(k): float(v) for k, v in dict(facts.get("alpha_pattern") or {}).items()}
    for pattern in by_module:
        _RE2.compile(pattern)
    alpha = float(facts["lora_alpha"])
    if not all(map(isfinite, (alpha, *by_module.values()))):
        raise ValueError(alpha)
    by_root, transposed = (bool(facts.get(k)) for k in ("use_rslora", "fan_in_fan_out"))
    return _Scaling(alpha, by_module, by_root=by_root, transposed=transposed)
