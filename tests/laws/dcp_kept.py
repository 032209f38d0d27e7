"""What the files of a distributed checkpoint keep of the run that saved it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from laws.dcp_files import box_of, flattened, nested
from laws.dcp_layout import Layout
from laws.dcp_runs import idle_parameters, is_trainable
from laws.dcp_state_dicts import StateDicts, lightning_meta
from laws.torch_values import tree_of
from reshard_engine.testing.logical import Bits, LogicalParameter, LogicalState, Tree


def kept(state: LogicalState, layout: Layout, *, full: bool) -> LogicalState:
    """What the files hold of a run.

    They do not say which tensors are tied, and which are frozen parameters and which are buffers. Ties are found by
    equal matrices of which the optimizer has updated one. Buffers are found by their element types and because FSDP
    leaves them whole.
    """
    ties = {a: o for a, o in state.aliases.items() if full and _is_found_tied(state, layout, o)}
    entries = {n: _entry(state, layout, state.aliases.get(n, n)) for n in state.order}
    most = max(entry.chunks for entry in entries.values())
    owned = {p.fqn: p for p in state.trained} if full else {}
    loose = {n: e for n, e in entries.items() if n not in owned and ties.get(n) not in owned}
    buffers = {n: e.bits for n, e in loose.items() if e.is_taken_for_buffer(most)}
    ties = {a: o for a, o in ties.items() if a not in buffers}
    parameters = [
        owned[n] if n in owned else LogicalParameter(n, entries[n].bits.shape, None, entries[n].bits, {})
        for n in state.order
        if n not in ties and n not in buffers
    ]
    found = replace(state, parameters=tuple(parameters), buffers=buffers, aliases=ties)
    if not full:
        return _renamed(replace(found, groups=(), steps=(), values={}))
    found = with_zeros(found, idle_parameters(state, layout))
    return _renamed(replace(found, values=_kept_values(state, layout)))


@dataclass(frozen=True)
class _Entry:
    """A tensor of the model as the files show it."""

    bits: Bits
    chunks: int
    """Different chunks."""
    whole: bool
    """Each rank that says something of it has all of it."""

    def is_taken_for_buffer(self, most_chunks: int) -> bool:
        """True for what no optimizer trains, and for what alone is whole. Buffers are never cut."""
        if most_chunks > 1 and self.chunks > 1:
            return False
        plain = self.whole and most_chunks > 1 and self.bits.shape[:1] > (1,)
        quantized = self.bits.dtype in ("int8", "uint8") and len(self.bits.shape) > 1
        return (not is_trainable(self.bits) and not quantized) or self.bits.shape == () or (plain and not quantized)


def _entry(state: LogicalState, layout: Layout, owner: str) -> _Entry:
    bits = state.buffers.get(owner) or state.parameter(owner).weight
    assert bits is not None
    if owner in state.buffers or not bits.shape:
        return _Entry(bits, 1 if bits.numel else 0, whole=bool(bits.numel))
    placed, how = layout.placements(owner, bits.shape), layout.how
    held = [box_of(bits.shape, how.mesh, at, placed) for at in how.coordinates]
    full = {box for box in held if 0 not in box[1]}
    # Without collectives, a rank that holds nothing says so. Else there is one list of chunks.
    said = held if not how.collectives and how.empty_chunks else full
    return _Entry(bits, len({*said}), whole=len(full) == 1 and all(size == bits.shape for _, size in said))


def _is_found_tied(state: LogicalState, layout: Layout, owner: str) -> bool:
    parameter = state.parameter(owner)
    updated = parameter.group is not None and bool(state.state_names or state.steps[parameter.group] is not None)
    known = updated and owner not in idle_parameters(state, layout)
    return known and len(parameter.shape) > 1 and parameter.weight is not None and parameter.weight.numel > 0


def with_zeros(state: LogicalState, idle: frozenset[str]) -> LogicalState:
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
    return state.renamed({n: n.removeprefix("module.") for n in state.order})


def run_names(state: LogicalState, layout: Layout) -> dict[str, str]:
    """For each name as the files of a compiled model are read that of the compiled model."""
    if layout.wrapper != "_orig_mod":
        return {}
    bare = all(n.startswith("module.") for n in state.order)
    names = {n: layout.wrapped(n) for n in state.order}
    return {n.removeprefix("module."): w.removeprefix("module.") for n, w in names.items()} if bare else names


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
