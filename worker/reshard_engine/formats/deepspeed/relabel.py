"""A checkpoint under other names, and with the rules of the request in its own metadata.

The target holds everything that a request adds to a source. Otherwise the next conversion would need the same options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reshard.choices import NameScheme, TargetFormat
from reshard.errors import RequestError, printable
from reshard.models.jobs import ConvertRequest
from reshard.options import DeepSpeedOptions
from reshard_engine.checkpoint import Buffer, Checkpoint, Parameter
from reshard_engine.formats.deepspeed.facts import (
    ARGS,
    NO_PIPELINE_ARG,
    VOCAB_DIVISOR_ARG,
    DeepSpeedFacts,
    facts_of,
    with_args,
)
from reshard_engine.formats.deepspeed.files import FROZEN_FRAGMENTS, FROZEN_SHAPES, INFO, PARAM_SHAPES, TIED
from reshard_engine.formats.deepspeed.parallel.rules import (
    AVERAGED,
    COLUMN,
    HEADS,
    MAX_VERSION,
    ORIGINAL_VOCAB,
    PADDED_VOCAB,
    PIPELINE_REPLICATED,
    REPLICATED,
    ROW,
    SECTION_WIDTHS,
    SECTIONS,
    TWO_SECTIONS,
    VERSION,
    VOCABULARY,
)
from reshard_engine.pickles.nodes import Node, PList, PTensorRef, namespace_items, node_of
from reshard_engine.pickles.trees import KeyPath, nested_dict
from reshard_engine.tensors.cuts import Cut

# Names of Megatron-DeepSpeed models with and without pipeline: one reversible map for its GPT and Llama families.
#
# A pipeline numbers its layers: 0 casts, 1 embeds (as a tied module where the head shares its weight), then come the
# transformer's, the last norm and the head. Without pipeline the same parameters are parts of a language model.
#
# Source: Megatron-DeepSpeed (main, July 2025) `megatron/model/gpt_model.py` (`GPTModelPipe`, `GPTModel`),
# `megatron/model/language_model.py` (`state_dict_for_save_checkpoint`: how the state dict is nested); checked against
# the names, shapes and orders of real checkpoints of both kinds.

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
        f"{printable(name)} is not a name of a GPT or Llama model of Megatron-DeepSpeed",
        fix="leave --names out: other models keep their names",
    )


def nesting_of(name: str) -> tuple[str, ...]:
    """The keys that lead to a tensor in the nested state dicts of a model without pipeline, outermost first."""
    parts = name.split(".")
    depth = 3 if name.startswith(_PLAIN_EMBEDDING) else 2
    return (*parts[:depth], ".".join(parts[depth:]))


# Cuts written as a `universal_checkpoint_info`, with one exact pattern for each parameter.
#
# Source: deepspeed 0.19.8 `checkpoint/ds_to_universal.py` (`merge_tp_slices`), `module_inject/layers.py`
# (`collect_autotp_universal_checkpoint_info`: exact patterns for each parameter).


def info_of(parameters: Iterable[Parameter], *, vocab_rows: int | None) -> dict[str, Any]:
    """The metadata of these parameters; a parameter whose cut is unknown is in no list."""
    lists: dict[str, list[str]] = {
        key: [] for key in (REPLICATED, AVERAGED, ROW, COLUMN, TWO_SECTIONS, VOCABULARY, PIPELINE_REPLICATED)
    }
    sections: list[dict[str, Any]] = []
    widths: dict[str, Any] = {}
    heads: dict[int, list[str]] = {}
    vocabulary: int | None = None
    for parameter in parameters:
        cut, pattern = parameter.cut, f"^{re.escape(parameter.fqn)}$"
        if parameter.fqn.startswith(TIED):
            lists[PIPELINE_REPLICATED].append(pattern)
        if cut is None:
            continue
        if cut.grid is not None and cut.dim is not None:
            sections.append({"patterns": [pattern], "shape": _sectioned(cut, cut.grid), "partition_dim": cut.dim})
            widths[pattern] = [list(w) for w in cut.widths] or [[size] for size in cut.sections]
        else:
            lists[_list_of(cut)].append(pattern)
        if cut.units is not None:
            heads.setdefault(cut.units, []).append(pattern)
        if cut.vocabulary is not None:
            lists[VOCABULARY].append(pattern)
            vocabulary = cut.vocabulary
    found: dict[str, Any] = {VERSION: MAX_VERSION, **lists, SECTIONS: sections}
    if sections:
        found[SECTION_WIDTHS] = widths
    if heads:
        found[HEADS] = [{"patterns": patterns, "heads": units} for units, patterns in heads.items()]
    if vocabulary is not None:
        found |= {ORIGINAL_VOCAB: vocabulary, PADDED_VOCAB: vocab_rows or vocabulary}
    return found


def _sectioned(cut: Cut, grid: tuple[int, ...]) -> list[Any]:
    """The grid in the form of the metadata, where the cut dimension is a list of its sections."""
    return [list(cut.sections) if dim == cut.dim else size for dim, size in enumerate(grid)]


def _list_of(cut: Cut) -> str:
    """The key of the list of patterns for a cut without a grid."""
    if cut.dim is None:
        return AVERAGED if cut.averaged else REPLICATED
    if len(cut.sections) == 2:
        return TWO_SECTIONS
    return ROW if cut.dim == 1 else COLUMN


# The checkpoint with the names and the rules of a request.

_SCHEMES = (NameScheme.MEGATRON_PIPELINE, NameScheme.MEGATRON_PLAIN)
"""The schemes of Megatron-DeepSpeed; other ones are Megatron-core's."""

_OF_ONE_SCHEME = (PARAM_SHAPES, FROZEN_SHAPES, FROZEN_FRAGMENTS, "shared_params", "buffer_names")


def relabelled(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint with the names and the rules that the request gives.

    Raises:
        RequestError: `request.unsatisfiable` for names that the map does not know.
    """
    options = request.options.of(DeepSpeedOptions)
    names = request.names if request.names in _SCHEMES else None
    if request.to in (TargetFormat.ZERO, TargetFormat.UNIVERSAL):
        checkpoint = checkpoint.as_in_the_run()
    if names is not None:
        checkpoint = _renamed(checkpoint, names)
    if not checkpoint.parameters or (names is None and options.rules is None and options.family is None):
        return checkpoint
    facts = facts_of(checkpoint)
    info = node_of(info_of(checkpoint.parameters, vocab_rows=facts.vocab_rows))
    return replace(checkpoint, facts=replace(facts, entries={**facts.entries, INFO: info}))


def _renamed(checkpoint: Checkpoint, scheme: NameScheme) -> Checkpoint:
    loose = [*(b.fqn for b in checkpoint.buffers), *checkpoint.extra_states]
    names = rename_all([p.fqn for p in checkpoint.parameters] + loose, scheme)
    # A source that already has these names also has layers of its own, which stay.
    unchanged = all(new.name == old for old, new in names.items())
    if unchanged and facts_of(checkpoint).order:
        return checkpoint
    parameters = tuple(_parameter(p, names[p.fqn]) for p in checkpoint.parameters)
    extra_states = {names[n].name: node for n, node in checkpoint.extra_states.items()}
    # In the model's order; param groups have another order.
    order = dict.fromkeys((*(names[n].name for n in checkpoint.module_names if n in names), *_names(names)))
    facts, paths = _with_vocabulary(checkpoint), {name: _path(name, scheme) for name in order}
    entries = {k: v for k, v in facts.entries.items() if k not in _OF_ONE_SCHEME}
    buffers = tuple(replace(b, fqn=names[b.fqn].name) for b in checkpoint.buffers)
    entries["module"] = _module((*parameters, *buffers), extra_states, paths)
    if registered := [b.fqn for b in buffers if b.registered]:
        entries["buffer_names"] = PList([*registered])
    tensors = tuple(replace(t, fqn=names[t.fqn].name) if t.fqn in names else t for t in checkpoint.shard_map.tensors)
    return replace(
        checkpoint,
        parameters=parameters,
        buffers=buffers,
        shared={a: names[o].name for a, o in checkpoint.shared.items() if o in names},
        shard_map=replace(checkpoint.shard_map, tensors=tensors),
        module_names=tuple(order),
        extra_states=extra_states,
        client_state=_client_state(checkpoint, scheme),
        facts=replace(facts, stage_layers=(), entries=entries, module_paths=tuple(paths.values())),
    )


def _with_vocabulary(checkpoint: Checkpoint) -> DeepSpeedFacts:
    """The facts, with those of a vocabulary that a source of another format says: its rows, and their divisor."""
    facts = facts_of(checkpoint)
    vocabularies = [p for p in checkpoint.parameters if p.cut is not None and p.cut.vocabulary is not None]
    if facts.order or not vocabularies:
        return facts
    divisor = namespace_items(checkpoint.client_state.get(ARGS)).get(VOCAB_DIVISOR_ARG)
    return replace(
        facts,
        vocab_divisor=divisor if type(divisor) is int and divisor > 0 else None,
        vocab_rows=max(p.shape[0] for p in vocabularies) + checkpoint.padding_rows,
    )


def _names(names: Mapping[str, Renamed]) -> list[str]:
    return [new.name for new in names.values()]


def _parameter(parameter: Parameter, new: Renamed) -> Parameter:
    return replace(parameter, fqn=new.name, layer=new.layer)


def _path(name: str, scheme: NameScheme) -> KeyPath:
    return nesting_of(name) if scheme is NameScheme.MEGATRON_PLAIN else (name,)


def _module(
    owners: Sequence[Parameter | Buffer], extra_states: Mapping[str, Node], paths: Mapping[str, KeyPath]
) -> Node:
    numbers = {o.fqn: o.tensor if isinstance(o, Buffer) else _weight(o) for o in owners}
    refs = {name: PTensorRef(number) for name in paths if (number := numbers.get(name)) is not None}
    return nested_dict((paths[n], node) for n, node in {**refs, **extra_states}.items())


def _weight(parameter: Parameter) -> int | None:
    return parameter.weight if parameter.weight is not None else parameter.states.get("fp32")


def _client_state(checkpoint: Checkpoint, scheme: NameScheme) -> Mapping[str | int, Node]:
    found = checkpoint.client_state
    plain = scheme is NameScheme.MEGATRON_PLAIN
    return {**found, ARGS: with_args(found[ARGS], {NO_PIPELINE_ARG: plain})} if ARGS in found else found
