"""A checkpoint under other names, and with the rules of the request in its own metadata.

What a request adds to a source must be in what is written, or the next conversion would have to be told again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from reshard.models import ConvertRequest, NameScheme
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.formats.deepspeed.facts import facts_of
from reshard_engine.formats.deepspeed.megatron import ARGS, NO_PIPELINE_ARG, with_args
from reshard_engine.formats.deepspeed.names import INFO
from reshard_engine.formats.deepspeed.rules.describe import info_of
from reshard_engine.formats.deepspeed.rules.names import Renamed, nesting_of, rename_all
from reshard_engine.pickles.nodes import (
    Node,
    PTensorRef,
    is_mapping,
    mapping_items,
    mapping_of,
)
from reshard_engine.pickles.plain import node_of
from reshard_engine.pickles.state_dict import KeyPath, nested_dict

_OF_ONE_SCHEME = ("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "buffer_names")


def relabelled(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint as the request wants it called and described.

    Raises:
        RequestError: `request.unsatisfiable` for names that the map does not know.
    """
    if request.names is not None:
        checkpoint = _renamed(checkpoint, request.names)
    if request.names is None and request.rules is None and request.family is None:
        return checkpoint
    if not is_mapping(checkpoint.model_state):
        return checkpoint
    entries = dict(mapping_items(checkpoint.model_state, what="model states"))
    entries[INFO] = node_of(info_of(checkpoint.parameters, vocab_rows=facts_of(checkpoint).vocab_rows))
    return replace(checkpoint, model_state=mapping_of(entries))


def _renamed(checkpoint: Checkpoint, scheme: NameScheme) -> Checkpoint:
    loose = [*(b.fqn for b in checkpoint.buffers), *checkpoint.extra_states]
    names = rename_all([p.fqn for p in checkpoint.parameters] + loose, scheme)
    # A source that has these names already has its own layers too.
    unchanged = all(new.name == old for old, new in names.items())
    if unchanged:
        return checkpoint
    parameters = tuple(_parameter(p, names[p.fqn]) for p in checkpoint.parameters)
    extra_states = {names[n].name: node for n, node in checkpoint.extra_states.items()}
    # In the model's order, which the order of groups is not.
    order = dict.fromkeys((*(names[n].name for n in checkpoint.module_names() if n in names), *_names(names)))
    tensors = tuple(replace(t, fqn=names[t.fqn].name) if t.fqn in names else t for t in checkpoint.shard_map.tensors)
    return replace(
        checkpoint,
        parameters=parameters,
        buffers=tuple(replace(b, fqn=names[b.fqn].name) for b in checkpoint.buffers),
        shared={a: names[o].name for a, o in checkpoint.shared.items() if o in names},
        shard_map=replace(checkpoint.shard_map, tensors=tensors),
        model_state=_state(checkpoint, parameters, extra_states, tuple(order), scheme),
        module_paths=tuple(_path(name, scheme) for name in order),
        extra_states=extra_states,
        facts=replace(facts_of(checkpoint), stage_layers=()),
    )


def _names(names: Mapping[str, Renamed]) -> list[str]:
    return [new.name for new in names.values()]


def _parameter(parameter: Parameter, new: Renamed) -> Parameter:
    return replace(parameter, fqn=new.name, layer=new.layer)


def _path(name: str, scheme: NameScheme) -> KeyPath:
    return nesting_of(name) if scheme is NameScheme.MEGATRON_PLAIN else (name,)


def _state(
    checkpoint: Checkpoint,
    parameters: tuple[Parameter, ...],
    extra_states: Mapping[str, Node],
    order: tuple[str, ...],
    scheme: NameScheme,
) -> Node:
    if not is_mapping(checkpoint.model_state):
        return checkpoint.model_state
    entries = {
        k: v for k, v in mapping_items(checkpoint.model_state, what="model states").items() if k not in _OF_ONE_SCHEME
    }
    weights = {p.fqn: p.weight if p.weight is not None else p.states.get("fp32") for p in parameters}
    refs = {name: PTensorRef(number) for name in order if (number := weights.get(name)) is not None}
    plain = scheme is NameScheme.MEGATRON_PLAIN
    entries["module"] = nested_dict((_path(n, scheme), node) for n, node in {**refs, **extra_states}.items())
    if ARGS in entries:
        entries[ARGS] = with_args(entries[ARGS], {NO_PIPELINE_ARG: plain})
    return mapping_of(entries)
