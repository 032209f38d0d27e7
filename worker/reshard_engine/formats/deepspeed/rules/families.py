"""Named packs of rules for model families whose checkpoints do not say how their parameters are cut.

Source: Megatron-DeepSpeed (main, July 2025) `megatron/model/gpt_model.py` (`universal_checkpoint_info`),
`megatron/model/transformer.py`, `megatron/core/tensor_parallel/layers.py`; BLOOM: bigscience/Megatron-DeepSpeed
`megatron/checkpointing.py` and DeepSpeed's `blogs` of universal checkpoints 0.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from reshard.errors import RequestError, printable
from reshard_engine.checkpoint import Parameter
from reshard_engine.formats.deepspeed.rules.cut_rules import (
    COLUMN,
    PIPELINE_REPLICATED,
    REPLICATED,
    ROW,
    TWO_SECTIONS,
    VOCABULARY,
)

# A layer's prefix: `7.` in pipelines, `language_model.encoder.layers.3.` without.
_LAYER = r"(\d+\.|language_model\.encoder\.layers\.\d+\.)"
_EMBEDDINGS = (r"tied_modules\.\w+\.", r"\d+\.", r"language_model\.embedding\.")
_WORDS = [rf"{p}word_embeddings\.weight" for p in _EMBEDDINGS]
_POSITIONS = [rf"{p}position_embeddings\.weight" for p in _EMBEDDINGS]
_NORMS = rf"{_LAYER}(input_layernorm|post_attention_layernorm)\.(weight|bias)$"
_LAST_NORM = r"(\d+|language_model\.encoder\.final_layernorm)\.(weight|bias)$"

_GPT: Mapping[str, Any] = {
    VOCABULARY: [*_WORDS, r"\d+\.lm_head\.weight", r"language_model\.output_layer\.weight"],
    PIPELINE_REPLICATED: [r"tied_modules\.\w+\.(word|position)_embeddings\.weight"],
    REPLICATED: [
        _NORMS,
        _LAST_NORM,
        *_POSITIONS,
        rf"{_LAYER}self_attention\.dense\.bias",
        rf"{_LAYER}mlp\.dense_4h_to_h\.bias",
    ],
    ROW: [rf"{_LAYER}self_attention\.dense\.weight", rf"{_LAYER}mlp\.dense_4h_to_h\.weight"],
    COLUMN: [
        rf"{_LAYER}self_attention\.(query_key_value|query|key_value|key|value)\.(weight|bias)",
        rf"{_LAYER}mlp\.dense_h_to_4h\.(weight|bias)",
    ],
}
_LLAMA: Mapping[str, Any] = {
    **_GPT,
    TWO_SECTIONS: [rf"{_LAYER}mlp\.dense_h_to_4h\.(weight|bias)"],
    COLUMN: [rf"{_LAYER}self_attention\.(query_key_value|query|key_value|key|value)\.(weight|bias)"],
}
_BLOOM: Mapping[str, Any] = {
    **_GPT,
    # BLOOM normalises its embeddings.
    REPLICATED: [*_GPT[REPLICATED], r"(tied_modules\.\w+\.|\d+\.)word_embeddings\.norm\.(weight|bias)"],
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {"gpt-megatron": _GPT, "llama-megatron": _LLAMA, "bloom": _BLOOM}
HEADED = [rf"{_LAYER}self_attention\.(query_key_value|query|key_value|key|value|dense)\."]
"""Parameters whose cut dimension consists of attention heads."""

_UNUSED_COPY = re.compile(r"tied_modules\.embed\.position_embeddings\.weight")


def is_unused_copy(name: str) -> bool:
    """True if the last stage of Megatron's pipelines holds a copy of a parameter that it never uses.

    The last stage ties the embedding module for its word embeddings alone. Its position embeddings get no gradient, and
    drift from those of the first stage.
    """
    return _UNUSED_COPY.fullmatch(name) is not None


SECTIONED_WARNING = (
    "query_key_value is declared as plain slices; Megatron-DeepSpeed since December 2024 stores [Q | K | V] in each "
    "slice and still declares plain slices: then a change of tensor parallelism needs parameter_with_sub_params "
    "(docs/rules.md)"
)


def may_be_sectioned(parameter: Parameter) -> bool:
    """True for a fused query_key_value with the plain cut that some versions of Megatron-DeepSpeed declare wrongly."""
    plain = parameter.cut is not None and parameter.cut.dim == 0 and not parameter.cut.sections
    return plain and "self_attention.query_key_value." in parameter.fqn


def family_rules(name: str) -> Mapping[str, Any]:
    """The rules of a pack.

    Raises:
        RequestError: `request.invalid` if no pack has this name.
    """
    found = FAMILIES.get(name)
    if found is None:
        raise RequestError(
            "request.invalid",
            f"no family is called {printable(name)!r}",
            fix=f"known are {', '.join(sorted(FAMILIES))}",
        )
    return found
