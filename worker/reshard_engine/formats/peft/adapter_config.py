"""Reads `adapter_config.json`, the only file of a run with the scale of its LoRA adapter.

Source: peft 0.21.2 `config.py` (`PeftConfigMixin`), `tuners/lora/config.py` (`LoraConfig`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from reshard.errors import RequestError, SourceError, printable
from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint

CONFIG = "adapter_config.json"
_OWN_BASE = frozenset({True, False, "gaussian", "eva", "orthogonal", "mica"})
"""Values of `init_lora_weights` that do not change the base weights. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA
subtract the first factors from them."""
_UNDERSTOOD = frozenset(
    {
        # Keys that name the run, or that chose its modules and ranks: the tensors show these.
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
        *("task_type", "runtime_config", "r", "rank_pattern", "target_modules", "exclude_modules"),
        *("layers_to_transform", "layers_pattern", "modules_to_save", "ensure_weight_tying", "bias", "lora_dropout"),
        # Keys for the initial factors: the checkpoint has the present factors and base weights.
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        # Keys that are used only with another option.
        *("megatron_core", "qalora_group_size"),
        # Keys that decide a merge.
        *("lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"),
        "trainable_token_indices",
    }
)
"""Keys of peft 0.21.2's `LoraConfig` under which a merge is what `reshard_engine.formats.peft.adapters` computes."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A parsed configuration, and its bytes."""

    data: bytes
    facts: Mapping[str, Any]

    @property
    def changed_base(self) -> str | None:
        """The initialisation of the adapter, if it changed the base weights; else None."""
        begun = self.facts.get("init_lora_weights", True)
        if isinstance(begun, (bool, str)) and begun in _OWN_BASE:
            return None
        return printable(begun)


def adapter_config(checkpoint: Checkpoint, request: ConvertRequest) -> AdapterConfig | None:
    """The configuration beside the source or in `--model-files`; None if the request gives the scale instead.

    Raises:
        RequestError: `request.unsatisfiable` if the scale is unknown, or the adapter is of another method than LoRA.
        SourceError: `checkpoint.malformed` if the configuration describes no adapter.
    """
    data = checkpoint.model_files.get(CONFIG)
    if data is None:
        if request.options.peft.lora_alpha is None:
            raise RequestError(
                "request.unsatisfiable",
                f"the scale of the adapter is unknown: there is no {CONFIG}, and the checkpoint does not have it",
                fix=f"--model-files DIR (with {CONFIG}, as PEFT's save_pretrained wrote it), or --lora-alpha N",
            )
        return None
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise not_lora("no JSON") from None
    facts = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    kind = facts.get("peft_type")
    if isinstance(kind, str) and kind != "LORA":
        raise RequestError(
            "request.unsatisfiable",
            f"{CONFIG} is of the PEFT method {printable(kind)}: only LoRA is exported and merged",
            fix="merge with PEFT itself (merge_and_unload); --to safetensors writes all weights as they are",
        )
    if kind != "LORA":
        raise not_lora("`peft_type` is not LORA")
    return AdapterConfig(data, facts)


def refuse_other_rules(config: AdapterConfig) -> None:
    """Refuse unknown options, and options whose adapters are merged by another rule.

    Raises:
        RequestError: `request.unsatisfiable` with the keys.
    """
    others = [k for k, v in sorted(config.facts.items()) if k not in _UNDERSTOOD and not _is_off(v)]
    if config.facts.get("bias", "none") not in ("none", "all", "lora_only"):
        others.append("bias")
    if others:
        raise RequestError(
            "request.unsatisfiable",
            f"{CONFIG} is of an adapter with {', '.join(map(printable, others[:8]))}: no rule merges it here",
            fix="--to peft, then PEFT's merge_and_unload",
            details={"keys": [printable(k) for k in others[:64]]},
        )


def _is_off(value: object) -> bool:
    return value is None or value is False or value in ({}, [])


def not_lora(why: str) -> SourceError:
    """The error for a configuration without a required value."""
    return SourceError(
        "checkpoint.malformed",
        f"{CONFIG} describes no LoRA adapter: {why}",
        fix=f"name the directory with the run's own {CONFIG}: --model-files DIR",
    )
