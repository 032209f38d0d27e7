"""Files of FSDP's ranks as a source format: runs of verl, which number parameters, and of Accelerate with names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from laws.dcp_files import Save, Sharded
from laws.dcp_kept import with_zeros
from laws.dcp_layout import Layout, Role
from laws.dcp_runs import as_run, idle_parameters
from laws.dcp_state_dicts import StateDicts
from laws.item_files import save_item_run
from laws.rank_files import World, save_run
from laws.torch_values import torch_value, tree_of
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.testing.logical import Bits, Case, LogicalParameter, LogicalState, Saved
from reshard_engine.testing.strategies import Rules, evenly, logical_states

_MESHES: tuple[tuple[tuple[Role, int], ...], ...] = (
    (("shard", 4),),
    (("replicate", 2), ("shard", 2)),
    (("shard", 1),),
    (("shard", 5),),
    (("replicate", 3),),
)
_RULES = Rules(dtypes=("float32",), frozen_dtypes=("uint8", "float32", "bfloat16"))
_SCHEDULER = "lr_scheduler"


@dataclass(frozen=True)
class RankSource:
    """One file for each rank."""

    name: str
    numbers: bool
    """verl's: numbers in place of names, and an extra state."""
    full: bool = True

    @property
    def zoo(self) -> Mapping[str, float]:
        """Nothing that this source must meet alone."""
        return {}

    def cases(self) -> st.SearchStrategy[Case]:
        """Runs on meshes without tensor parallelism, whose uneven cuts nothing proves."""
        return _cases(numbers=self.numbers)

    def fsdp_cases(self) -> st.SearchStrategy[Case]:
        """Runs that FSDP can have: an axis of the mesh shards rows, and every parameter has a dimension."""
        return _cases(numbers=self.numbers, of_fsdp=True)

    def write(self, case: Case, directory: Path) -> Saved:
        """The directory that a user names."""
        state, layout = case.state, case.layout
        world = World(layout.how.mesh, tuple(layout.roles))
        model, optimizer = _state_dicts(state, layout, numbers=self.numbers)
        values = {name: torch_value(value) for name, value in state.values.items()} if self.numbers else {}
        extra = {_SCHEDULER: values.pop(_SCHEDULER, None), "client_state": values} if self.numbers else None
        save_run(model, optimizer, extra, directory, world)
        idle = idle_parameters(state, layout)
        labels = frozenset({self.name, f"world {prod(layout.how.mesh)}"})
        found = with_zeros(_kept(state, model, numbers=self.numbers), idle)
        found = replace(found, values=tree_of({n: torch_value(v) for n, v in found.values.items()}))
        return Saved(found, labels, frozenset(), idle)

    def checks_metadata(self, case: Case) -> bool:
        """Archives have CRCs."""
        return True


def _state_dicts(state: LogicalState, layout: Layout, *, numbers: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    writer = StateDicts(state, layout)
    model = writer.model()
    model = {n: model[state.aliases.get(n, n)] for n in model}
    optimizer = writer.optimizer()
    if not numbers:
        return model, optimizer
    order = [n for n in model if n in {p.fqn for p in state.trained}]
    keys = {name: number for number, name in enumerate(order)}
    groups = [{**g, "params": sorted(keys[n] for n in g["params"])} for g in optimizer["param_groups"]]
    return model, {"state": {keys[n]: s for n, s in optimizer["state"].items()}, "param_groups": groups}


def _kept(state: LogicalState, model: Mapping[str, Any], *, numbers: bool) -> LogicalState:
    """The run that the files hold: ties are names of one memory, and whole tensors beside sharded ones are buffers."""
    cut = {n for n, value in model.items() if isinstance(value, Sharded)}
    trained = {p.fqn: p for p in state.trained}
    bits = {n: state.buffers.get(o) or state.parameter(o).weight for n in model for o in (state.aliases.get(n, n),)}
    held = {n: b for n, b in bits.items() if b is not None}
    ties = {a: o for a, o in state.aliases.items() if held[a].numel and (a in cut or not cut)}
    loose = [n for n in model if n not in trained and n not in ties]
    buffers = {n: held[n] for n in loose if n not in cut and _is_taken_for_buffer(held[n], bool(cut) or numbers)}
    parameters = [
        trained.get(n) or LogicalParameter(n, held[n].shape, None, held[n], {})
        for n in state.order
        if n not in ties and n not in buffers
    ]
    values = state.values if numbers else {}
    return replace(state, parameters=tuple(parameters), buffers=buffers, aliases=ties, values=values)


def _is_taken_for_buffer(bits: Bits, beside_shards: bool) -> bool:
    return beside_shards or not BY_NAME[bits.dtype].trainable


@st.composite
def _cases(draw: st.DrawFn, *, numbers: bool, of_fsdp: bool = False) -> Case:
    axes = draw(evenly(*[m for m in _MESHES if not of_fsdp or any(role == "shard" for role, _ in m)]))
    layout = Layout(
        "nested",
        tuple(role for role, _ in axes),
        Save(tuple(n for _, n in axes)),
        wrapper="",
        idle=draw(evenly(False, False, True)),
        turned=False,
        seed=draw(st.integers(0, 2**32 - 1)),
        rows=of_fsdp,
    )
    rules = replace(_RULES, max_groups=1, stepped=True) if numbers else _RULES
    drawn = draw(logical_states(rules))
    state = as_run(_with_dimensions(drawn) if of_fsdp else drawn, layout)
    return Case(_numbered(state) if numbers else state, layout)


def _with_dimensions(state: LogicalState) -> LogicalState:
    """The run with one dimension for each parameter without dimensions."""

    def widened(parameter: LogicalParameter) -> LogicalParameter:
        if parameter.shape:
            return parameter
        weight = None if parameter.weight is None else replace(parameter.weight, shape=(1,))
        states = {name: replace(bits, shape=(1,)) for name, bits in parameter.states.items()}
        return replace(parameter, shape=(1,), weight=weight, states=states)

    return replace(state, parameters=tuple(map(widened, state.parameters)))


def _numbered(state: LogicalState) -> LogicalState:
    """The run without what verl's optimizer would number, too: frozen parameters, and those without dimensions."""
    kept = {p.fqn for p in state.trained if p.shape}
    kept = kept or {p.fqn for p in state.trained}
    gone = {p.fqn for p in state.parameters if p.fqn not in kept}
    aliases = {a: o for a, o in state.aliases.items() if o in kept and state.parameter(o).weight is not None}
    if not any(p.shape for p in state.trained):  # nothing is cut, so that nothing tells a buffer
        gone |= {n for n, b in state.buffers.items() if BY_NAME[b.dtype].trainable}
    gone |= state.aliases.keys() - aliases.keys()
    aliases = {a: o for a, o in aliases.items() if (w := state.parameter(o).weight) is not None and w.numel}
    return replace(
        state,
        parameters=tuple(p for p in state.parameters if p.fqn in kept),
        aliases=aliases,
        buffers={n: b for n, b in state.buffers.items() if n not in gone},
        order=tuple(n for n in state.order if n not in gone and (n not in state.aliases or n in aliases)),
    )


@dataclass(frozen=True)
class ItemSource(RankSource):
    """Items of torch_checkpointing: names, and the script's values as items of their own."""

    def write(self, case: Case, directory: Path) -> Saved:
        """The directory that a user names."""
        state, layout = case.state, case.layout
        model, optimizer = _state_dicts(state, layout, numbers=False)
        # An item is called as a part of a file's name.
        values = {n: torch_value(v) for n, v in state.values.items() if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", n)}
        values = {n: v for n, v in values.items() if n not in ("model", "optimizer")}
        world = World(layout.how.mesh, tuple(layout.roles))
        save_item_run(model, optimizer, values, directory, world)
        idle = idle_parameters(state, layout)
        found = with_zeros(_kept(state, model, numbers=False), idle)
        return Saved(replace(found, values=tree_of(values)), frozenset({self.name}), frozenset(), idle)


ITEM_SOURCE = ItemSource("items of torch_checkpointing", numbers=False)
RANK_SOURCES = (RankSource("ranks of verl", numbers=True), RankSource("ranks of Accelerate", numbers=False))
