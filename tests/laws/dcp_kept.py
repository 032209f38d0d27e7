"""What the files of a distributed checkpoint keep of the run that saved it."""

from __future__ import annotations

from dataclasses import replace

import torch

from laws.dcp_files import Sharded, boxes_of, flattened, nested
from laws.dcp_layout import Layout
from laws.dcp_runs import idle_parameters, is_trainable
from laws.dcp_state_dicts import StateDicts, lightning_meta
from laws.torch_values import tree_of
from reshard_engine.testing.logical import Bits, LogicalParameter, LogicalState, Tree


def kept(state: LogicalState, layout: Layout, *, full: bool) -> LogicalState:
    """What the files hold of a run.

    They do not say which tensors are tied, and which are frozen parameters and which are buffers. Ties are found by
    equal matrices of which the optimizer has one. Buffers are found by their element types and because FSDP leaves
    them whole.
    """
    ties = {a: o for a, o in state.aliases.items() if full and _is_found_tied(state, layout, o)}
    loose: dict[str, tuple[Bits, int]] = {}
    for name in state.order:
        owner = state.aliases.get(name, name)
        if name not in ties and (owner in state.buffers or state.parameter(owner).group is None or owner != name):
            loose[name] = _bits_and_chunks(state, layout, owner)
    most = max(_bits_and_chunks(state, layout, state.aliases.get(n, n))[1] for n in state.order)
    buffers = {n: bits for n, (bits, count) in loose.items() if _is_taken_for_buffer(bits, count, most)}
    owned = {p.fqn: p for p in state.trained} if full else {}
    parameters = [
        owned[n] if n in owned else LogicalParameter(n, bits.shape, None, bits, {})
        for n in state.order
        if n not in ties and n not in buffers
        for bits, _ in [_bits_and_chunks(state, layout, state.aliases.get(n, n))]
    ]
    found = replace(state, parameters=tuple(parameters), buffers=buffers, aliases=ties)
    if not full:
        return _renamed(replace(found, groups=(), steps=(), values={}))
    found = _with_zeros(found, idle_parameters(state, layout))
    return _renamed(replace(found, values=_kept_values(state, layout)))


def _bits_and_chunks(state: LogicalState, layout: Layout, owner: str) -> tuple[Bits, int]:
    """A tensor of the model, and the number of its chunks that have elements."""
    if owner in state.buffers:
        bits = state.buffers[owner]
        return bits, 1 if bits.numel else 0
    weight = state.parameter(owner).weight
    assert weight is not None
    if not weight.shape:
        return weight, 1
    sharded = Sharded(torch.empty(weight.shape, device="meta"), layout.placements(owner, weight.shape))
    return weight, len(boxes_of(sharded, layout.how.mesh))


def _is_found_tied(state: LogicalState, layout: Layout, owner: str) -> bool:
    parameter = state.parameter(owner)
    known = layout.grammar == "numbers" or parameter.group is not None
    return known and len(parameter.shape) > 1 and parameter.weight is not None and parameter.weight.numel > 0


def _is_taken_for_buffer(bits: Bits, count: int, most: int) -> bool:
    whole = count == 1 and most > 1 and bits.shape[:1] > (1,)
    return not is_trainable(bits) or bits.shape == () or whole


def _with_zeros(state: LogicalState, idle: frozenset[str]) -> LogicalState:
    """What Adam would have begun with, in place of the states that parameters without gradients do not have."""
    names = state.state_names

    def zeroed(parameter: LogicalParameter) -> LogicalParameter:
        zeros = {s: replace(parameter.states[s], data=bytes(len(parameter.states[s].data))) for s in names}
        return replace(parameter, states={**parameter.states, **zeros})

    return replace(state, parameters=tuple(zeroed(p) if p.fqn in idle else p for p in state.parameters))


def _renamed(state: LogicalState) -> LogicalState:
    """Without `module.`, if it is before every name."""
    if not all(n.startswith("module.") for n in state.order):
        return state
    new = {n: n.removeprefix("module.") for n in state.order}
    return replace(
        state,
        parameters=tuple(replace(p, fqn=new[p.fqn]) for p in state.parameters),
        buffers={new[n]: b for n, b in state.buffers.items()},
        aliases={new[a]: new[o] for a, o in state.aliases.items()},
        order=tuple(new[n] for n in state.order),
    )


def _kept_values(state: LogicalState, layout: Layout) -> dict[str, Tree]:
    values = StateDicts(state, layout).beside()
    if layout.folders:
        scheduler = {k: values.pop(k) for k in ("lr_scheduler",) if k in values}
        steps = {"global_steps": 3} if layout.grammar == "trainer" else {}
        objects = {"custom_checkpoint_0.pkl": values} if values and layout.grammar == "accelerate" else {}
        return tree_of({**scheduler, **steps, **objects})
    if layout.grammar == "lightning":
        found = lightning_meta(values)
        schedulers = found.pop("lr_schedulers")
        return tree_of({**found, **({"lr_scheduler": schedulers[0]} if schedulers else {}), "global_steps": 3})
    return tree_of(nested(*flattened(values, whole_dicts=layout.how.whole_dicts)))
