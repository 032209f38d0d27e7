"""Names of Megatron-DeepSpeed models with and without pipeline: one reversible map for its GPT and Llama families.

A pipeline numbers its layers: 0 casts, 1 embeds (as a tied module where the head shares its weight), then come the
transformer's, the last norm and the head. Without pipeline the same parameters are parts of a language model.

Source: Megatron-DeepSpeed (main, July 2025) `megatron/model/gpt_model.py` (`GPTModelPipe`, `GPTModel`),
`megatron/model/language_model.py` (`state_dict_for_save_checkpoint`: how the state dict is nested); checked against the
names, shapes and orders of real checkpoints of both kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reshard.errors import RequestError, printable
from reshard.models import NameScheme

FIRST_BLOCK = 2
"""The pipeline layer of the first transformer block."""
_BLOCK = re.compile(
    r"(?P<layer>[1-9][0-9]{0,5})\.(?P<inner>(?:input_layernorm|self_attention|post_attention_layernorm|mlp)\..+)"
)
_PLAIN_BLOCK = re.compile(r"language_model\.encoder\.layers\.(?P<layer>0|[1-9][0-9]{0,5})\.(?P<inner>.+)")
_EMBEDDING = re.compile(r"(?P<kind>word|position)_embeddings\.weight")
_TIED, _PLAIN_EMBEDDING = "tied_modules.embed.", "language_model.embedding."
_UNTIED = "1."
_NORM = re.compile(r"(?P<layer>[1-9][0-9]{0,5})\.(?P<what>weight|bias)")
_PLAIN_NORM = "language_model.encoder.final_layernorm."
_HEAD = re.compile(r"(?P<layer>[1-9][0-9]{0,5})\.lm_head\.weight")
_PLAIN_HEAD = "language_model.output_layer.weight"


@dataclass(frozen=True, slots=True)
class Renamed:
    """A parameter's name in the other scheme, and its pipeline layer there; None without pipeline."""

    name: str
    layer: int | None


def rename_all(names: Iterable[str], scheme: NameScheme) -> Mapping[str, Renamed]:
    """Every name in the given scheme; names that are already in it stay.

    Raises:
        RequestError: `request.unsatisfiable` for a name that the map does not know.
    """
    listed = list(names)
    if scheme is NameScheme.MEGATRON_PIPELINE:
        return _to_pipeline(listed)
    last = max((int(m["layer"]) for m in map(_BLOCK.fullmatch, listed) if m), default=FIRST_BLOCK - 1)
    return {name: Renamed(_to_plain(name, last), None) for name in listed}


def _to_plain(name: str, last: int) -> str:
    """One name without pipeline, of a model whose last block is the layer `last`."""
    if name.startswith("language_model."):
        return name
    if match := _BLOCK.fullmatch(name):
        return f"language_model.encoder.layers.{int(match['layer']) - FIRST_BLOCK}.{match['inner']}"
    for prefix in (_TIED, _UNTIED):
        if name.startswith(prefix) and _EMBEDDING.fullmatch(name.removeprefix(prefix)):
            return f"{_PLAIN_EMBEDDING}{name.removeprefix(prefix)}"
    if (match := _NORM.fullmatch(name)) and int(match["layer"]) == last + 1:
        return f"{_PLAIN_NORM}{match['what']}"
    if (match := _HEAD.fullmatch(name)) and int(match["layer"]) == last + 2:
        return _PLAIN_HEAD
    raise _unknown(name)


def _to_pipeline(names: list[str]) -> dict[str, Renamed]:
    tied = _PLAIN_HEAD not in names
    last = max((int(m["layer"]) for m in map(_PLAIN_BLOCK.fullmatch, names) if m), default=-1) + FIRST_BLOCK
    found: dict[str, Renamed] = {}
    for name in names:
        inner = name.removeprefix(_PLAIN_EMBEDDING)
        if match := _PLAIN_BLOCK.fullmatch(name):
            layer = int(match["layer"]) + FIRST_BLOCK
            found[name] = Renamed(f"{layer}.{match['inner']}", layer)
        elif inner != name and _EMBEDDING.fullmatch(inner):
            found[name] = Renamed(f"{_TIED if tied else _UNTIED}{inner}", 1)
        elif name.startswith(_PLAIN_NORM):
            found[name] = Renamed(f"{last + 1}.{name.removeprefix(_PLAIN_NORM)}", last + 1)
        elif name == _PLAIN_HEAD:
            found[name] = Renamed(f"{last + 2}.lm_head.weight", last + 2)
        else:
            raise _unknown(name)
    return found


def _unknown(name: str) -> RequestError:
    return RequestError(
        "request.unsatisfiable",
        f"{printable(name)} is no name of a GPT or Llama model of Megatron-DeepSpeed",
        fix="leave --names out: other models keep their names",
    )


def nesting_of(name: str) -> tuple[str, ...]:
    """The keys that lead to a tensor in the nested state dicts of a model without pipeline, outermost first."""
    parts = name.split(".")
    depth = 3 if name.startswith(_PLAIN_EMBEDDING) else 2
    return (*parts[:depth], ".".join(parts[depth:]))
