"""`adapter_config.json`: the one place where a run says how its LoRA adapter is scaled.

Source: peft 0.21.2 `config.py` (`PeftConfigMixin`), `tuners/lora/config.py` (`LoraConfig`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from reshard.errors import RequestError, SourceError
from reshard.models import ConvertRequest
from reshard_engine.checkpoint import Checkpoint

CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What a configuration says, and its bytes."""

    data: bytes
    facts: Mapping[str, Any]


def adapter_config(checkpoint: Checkpoint, request: ConvertRequest) -> AdapterConfig | None:
    """The configuration that lies beside the source or was named; None where the request gives the scale in its place.

    Raises:
        RequestError: `request.unsatisfiable` if nothing says the scale.
        SourceError: `checkpoint.malformed` if it describes no LoRA adapter.
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
    if facts.get("peft_type") != "LORA":
        raise not_lora("`peft_type` is not LORA")
    return AdapterConfig(data, facts)


def not_lora(why: str) -> SourceError:
    """The error for a configuration that does not say what it has to."""
    return SourceError("checkpoint.malformed", f"{CONFIG} describes no LoRA adapter: {why}", fix="name the run's own")
