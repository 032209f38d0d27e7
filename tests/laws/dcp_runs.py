"""The state of a run of FSDP, made of a logical state: what torch can save of it, under keys that tell it apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from laws.dcp_files import flattened
from laws.dcp_layout import Layout
from laws.torch_values import torch_value
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.testing.logical import MASTER, Bits, LogicalState, Tree

_CLIENT = "client:"


def is_trainable(bits: Bits) -> bool:
    """True for the element types of which torch computes gradients."""
    return BY_NAME[bits.dtype].trainable


def as_run(state: LogicalState, layout: Layout) -> LogicalState:
    """The state as a run of FSDP has it: one copy of each weight, which is the master, and torch's own scheduler."""
    found = [replace(p, weight=p.states[MASTER]) if p.group is not None else p for p in state.parameters]
    state = _without(replace(state, parameters=tuple(found), optimizer_values={}), _narrow_buffers(state))
    if layout.grammar == "numbers":
        state = _with_telling_shapes(state)
    if layout.grammar == "flat":
        state = _with_telling_groups(state)
    if layout.idle:  # states of parameters without gradients are known for optimizers with torch's own keys
        groups = state.groups or ()
        state = replace(state, groups=tuple(g if "bias_correction" in g else {**g, "foreach": None} for g in groups))
    return replace(state, values=_values(state))


def _values(state: LogicalState) -> dict[str, Tree]:
    """Client state that torch can flatten, and a scheduler."""
    found: dict[str, Tree] = {}
    keys: set[str] = set()
    for name, value in state.values.items():
        own = {name, *_flat_keys({name: torch_value(value)})}
        if name.startswith(_CLIENT) and "" not in own | keys and not own & keys:
            keys |= own
            found[name] = value
    step = int(state.values["global_steps"]) % 10_000
    if state.values["lr_scheduler"] is not None:
        rates = [float(g["lr"]) for g in state.groups or ()]
        counted = {"last_epoch": step, "_step_count": step + 1, "_last_lr": rates}
        found["lr_scheduler"] = {"step_size": 30, "gamma": 1.0, "base_lrs": rates, **counted}  # StepLR
    return found


def _flat_keys(state_dict: Mapping[str, Any]) -> list[str]:
    """The keys that torch makes of a state dict; an empty one if two of them are the same."""
    try:
        return list(flattened(state_dict)[0])
    except ValueError:
        return [""]


def _with_telling_shapes(state: LogicalState) -> LogicalState:
    """Without the tensors that have the shape of a numbered parameter: with them, its name could not be told."""
    shapes = {p.shape for p in state.parameters}
    buffers = {n for n, b in state.buffers.items() if b.shape in shapes and is_trainable(b)}
    return _without(state, buffers | {a for a, o in state.aliases.items() if len(state.parameter(o).shape) < 2})


def _narrow_buffers(state: LogicalState) -> set[str]:
    """Buffers of eight bits. They may be taken for frozen parameters, of which DeepSpeed keeps masters."""
    return {n for n, b in state.buffers.items() if b.dtype.startswith("float8")}


def _without(state: LogicalState, gone: set[str]) -> LogicalState:
    """The state without some buffers and aliases."""
    return replace(
        state,
        buffers={n: b for n, b in state.buffers.items() if n not in gone},
        aliases={a: o for a, o in state.aliases.items() if a not in gone},
        order=tuple(n for n in state.order if n not in gone),
    )


def _with_telling_groups(state: LogicalState) -> LogicalState:
    """With groups of different rates, so that they are found again; without a scheduler, in their parameters' order."""
    order = list(dict.fromkeys(p.group for n in state.order for p in state.trained if p.fqn == n))
    if state.values["lr_scheduler"] is not None:
        order.sort(key=lambda group: group or 0)
    numbers = {old: new for new, old in enumerate(order)}
    groups, steps = state.groups or (), state.steps
    parameters = tuple(replace(p, group=None if p.group is None else numbers[p.group]) for p in state.parameters)
    told = tuple({**groups[old or 0], "lr": groups[old or 0]["lr"] + 2.0 * new} for new, old in enumerate(order))
    return replace(state, parameters=parameters, groups=told, steps=tuple(steps[old or 0] for old in order))


def idle_parameters(state: LogicalState, layout: Layout) -> frozenset[str]:
    """A trained parameter without states, if there is to be one; others of its group have some."""
    members = [p for p in state.trained if len(state.of_group(p.group)) > 1]
    wide = all(p.states[s].dtype == "float32" for p in state.trained for s in state.state_names)
    if not (layout.idle and members and state.state_names and wide):
        return frozenset()
    chosen = layout.chance("idle").choice(members).fqn
    updated = {p.fqn for p in state.trained} - {chosen}
    # Without it, an adapter alone would have been updated, as if PEFT had frozen the rest.
    of_adapter = {p.fqn for p in state.trained if ".lora_" in f".{p.fqn}"}
    return frozenset() if updated == of_adapter else frozenset({chosen})
