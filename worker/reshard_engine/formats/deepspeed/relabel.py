"""A checkpoint under other names, and with the rules of the request in its own metadata.

The target holds everything that a request adds to a source. Otherwise the next conversion would need the same options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from reshard.choices import TargetFormat
from reshard.models import ConvertRequest, NameScheme
from reshard_engine.checkpoint import Buffer, Checkpoint, Parameter
from reshard_engine.formats.deepspeed.facts import facts_of
from reshard_engine.formats.deepspeed.megatron import ARGS, NO_PIPELINE_ARG, with_args
from reshard_engine.formats.deepspeed.names import FROZEN_FRAGMENTS, FROZEN_SHAPES, INFO, PARAM_SHAPES
from reshard_engine.formats.deepspeed.rules.describe import info_of
from reshard_engine.formats.deepspeed.rules.names import Renamed, nesting_of, rename_all
from reshard_engine.pickles.nodes import Node, PList, PTensorRef
from reshard_engine.pickles.plain import node_of
from reshard_engine.pickles.state_dict import KeyPath, nested_dict

_OF_ONE_SCHEME = (PARAM_SHAPES, FROZEN_SHAPES, FROZEN_FRAGMENTS, "shared_params", "buffer_names")


def relabelled(checkpoint: Checkpoint, request: ConvertRequest) -> Checkpoint:
    """The checkpoint with the names and the rules that the request gives.

    Raises:
        RequestError: `request.unsatisfiable` for names that the map does not know.
    """
    options = request.options.deepspeed
    if request.to in (TargetFormat.ZERO, TargetFormat.UNIVERSAL):
        checkpoint = checkpoint.as_in_the_run()
    if options.names is not None:
        checkpoint = _renamed(checkpoint, options.names)
    if not checkpoint.parameters or (options.names is None and options.rules is None and options.family is None):
        return checkpoint
    facts = facts_of(checkpoint)
    info = node_of(info_of(checkpoint.parameters, vocab_rows=facts.vocab_rows))
    return replace(checkpoint, facts=replace(facts, entries={**facts.entries, INFO: info}))


def _renamed(checkpoint: Checkpoint, scheme: NameScheme) -> Checkpoint:
    loose = [*(b.fqn for b in checkpoint.buffers), *checkpoint.extra_states]
    names = rename_all([p.fqn for p in checkpoint.parameters] + loose, scheme)
    # A source that already has these names also has layers of its own, which stay.
    unchanged = all(new.name == old for old, new in names.items())
    if unchanged:
        return checkpoint
    parameters = tuple(_parameter(p, names[p.fqn]) for p in checkpoint.parameters)
    extra_states = {names[n].name: node for n, node in checkpoint.extra_states.items()}
    # In the model's order; param groups have another order.
    order = dict.fromkeys((*(names[n].name for n in checkpoint.module_names if n in names), *_names(names)))
    facts, paths = facts_of(checkpoint), {name: _path(name, scheme) for name in order}
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
