"""`adapter_config.json`: the one place where a run says how its LoRA adapter is scaled.

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
"""`init_lora_weights` that leave the base weights what they were; of PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA they are
what the first factors left over."""
_UNDERSTOOD = frozenset(
    {
        # What names the run, and what chose its modules and ranks: the tensors say these themselves.
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
        *("task_type", "runtime_config", "r", "rank_pattern", "target_modules", "exclude_modules"),
        *("layers_to_transform", "layers_pattern", "modules_to_save", "ensure_weight_tying", "bias", "lora_dropout"),
        # How the factors began: what they are now is in the checkpoint, and so is what is left of the base weights.
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        # Names of things that are used only with another option.
        *("megatron_core", "qalora_group_size"),
        # What decides a merge.
        *("lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"),
        "trainable_token_indices",
    }
)
"""Keys of peft 0.21.2's `LoraConfig` under which a merge is what `reshard_engine.formats.peft.adapters` computes."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What a configuration says, and its bytes."""

    data: bytes
    facts: Mapping[str, Any]

    @property
    def changed_base(self) -> str | None:
        """The way in which the adapter was initialised, if that took something out of the base weights."""
        begun = self.facts.get("init_lora_weights", True)
        if isinstance(begun, (bool, str)) and begun in _OWN_BASE:
            return None
        return printable(begun)


def adapter_config(checkpoint: Checkpoint, request: ConvertRequest) -> AdapterConfig | None:
    """The configuration that lies beside the source or was named; None where the request gives the scale in its place.

    Raises:
        RequestError: `request.unsatisfiable` if nothing says the scale, or it is of another method than LoRA.
        SourceError: `checkpoint.malformed` if it describes no adapter.
    """
    data = checkpoint.model_files.get(CONFIG)
    if data is None:
        if request.lora_alpha is None:
            raise RequestError(
                "request.unsatisfiable",
                f"nothing says how the adapter is scaled: there is no {CONFIG}, and the checkpoint does not say",
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
    """Refuse what a merge does not understand: options that are merged by another rule, and unknown ones.

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
    """The error for a configuration that does not say what it has to."""
    return SourceError(
        "checkpoint.malformed",
        f"{CONFIG} describes no LoRA adapter: {why}",
        fix=f"name the directory with the run's own {CONFIG}: --model-files DIR",
    )
