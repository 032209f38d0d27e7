"""FSDP runs as a source format: which runs, meshes and grammars are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from laws.dcp_files import ALL_ATTRIBUTES, Save, StridedShard, box_of
from laws.dcp_kept import kept, run_names
from laws.dcp_layout import MESHES, Grammar, Layout
from laws.dcp_runs import as_run, idle_parameters
from laws.dcp_state_dicts import write_run
from reshard_engine.testing.logical import Case, LogicalState, Saved
from reshard_engine.testing.strategies import Rules, evenly, logical_states

_ATTRIBUTES = (ALL_ATTRIBUTES, ALL_ATTRIBUTES, ALL_ATTRIBUTES[:3], ALL_ATTRIBUTES[:2])
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class DcpSource:
    """Distributed checkpoints of some grammars."""

    name: str
    grammars: tuple[Grammar, ...]
    full: bool = True

    @property
    def zoo(self) -> Mapping[str, float]:
        """Nothing that one source must meet alone: see `ZOO` and `GRAMMARS`."""
        return {}

    def cases(self) -> st.SearchStrategy[Case]:
        """Runs of these grammars on any mesh."""
        return _cases(self.grammars, full=self.full)

    def write(self, case: Case, directory: Path) -> Saved:
        """The directory that a user names."""
        write_run(case.state, case.layout, directory)
        idle = idle_parameters(case.state, case.layout) if self.full else frozenset[str]()
        found = kept(case.state, case.layout, full=self.full)
        labels = frozenset({self.name, *_labels(case.state, case.layout)})
        choices = _choices(case.state, case.layout, full=self.full) | {"buffers": ",".join(found.buffers) or "none"}
        names = run_names(case.state, case.layout)
        return Saved(found, labels, frozenset(), idle, frozenset(found.aliases), names, choices)

    def checks_metadata(self, case: Case) -> bool:
        """`.metadata` has no checksum."""
        return False


def _choices(state: LogicalState, layout: Layout, *, full: bool) -> dict[str, Any]:
    """The order of the optimizer's parameters, which neither a flattened nor a numbered optimizer tells."""
    if not full or layout.grammar not in ("flat", "numbers"):
        return {}
    groups = range(len(state.groups or ()))
    order = [n for group in groups for n in state.order if n in {p.fqn for p in state.of_group(group)}]
    return {"param_order": order} if order else {}


def _labels(state: LogicalState, layout: Layout) -> Iterator[str]:
    how = layout.how
    axes = sum(n > 1 for n in how.mesh)
    yield f"grammar {layout.grammar}"
    yield f"world {prod(how.mesh)}"
    cuts = [(p, layout.placements(p.fqn, p.shape)) for p in state.parameters]
    boxes = [[box_of(p.shape, how.mesh, at, placed) for at in how.coordinates] for p, placed in cuts]
    sizes = [{tuple(size) for _, size in found if 0 not in size} for found in boxes]
    found = {
        "two axes": axes == 2,
        "three axes": axes == 3,
        "chunk without elements": any(0 in size for each in boxes for _, size in each) and how.empty_chunks,
        "uneven cut": any(len(each) > 1 for each in sizes),
        "replicas": any(len(each) > len({*each}) for each in boxes),
        "no collectives": not how.collectives and axes > 0,
        "several files of a rank": how.threads > 1 or how.file_per_item,
        "early attributes": len(how.attributes) < len(ALL_ATTRIBUTES),
        "files of an earlier save": bool(how.stale),
        "wrapped name": bool(layout.wrapper),
        "strided cut": any(isinstance(p, StridedShard) for _, placed in cuts for p in placed),
        "boxes that are not rows": any(_is_grid(p.shape, each) for (p, _), each in zip(cuts, boxes, strict=True)),
        "strided record": layout.turned and any(len(p.shape) > 1 for p in state.parameters),
        "never updated": bool(idle_parameters(state, layout)),
    }
    yield from (label for label, present in found.items() if present)


def _is_grid(shape: tuple[int, ...], boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    return any(0 not in size and size[1:] != shape[1:] for _, size in boxes)


@st.composite
def _cases(draw: st.DrawFn, grammars: tuple[Grammar, ...], *, full: bool) -> Case:
    grammar: Grammar = draw(evenly(*grammars))
    axes = draw(evenly(*MESHES))
    mesh = tuple(n for _, n in axes)
    collectives = draw(evenly(True, True, True, False))
    bare = grammar == "bare"
    how = Save(
        mesh,
        threads=draw(evenly(1, 1, 2, 3)),
        file_per_item=draw(evenly(*[False] * 5, True)),
        collectives=collectives,
        lowest_rank=draw(evenly(False, True)),
        empty_chunks=draw(evenly(True, True, False)),
        flatten=not bare or draw(evenly(True, False)),
        whole_dicts=grammar == "old",
        attributes=draw(evenly(*_ATTRIBUTES)),
        protocol=draw(evenly(4, 4, 5, 2)),
        stale=draw(evenly(0, 0, 2)),
    )
    wrapper = draw(evenly("", "", *_WRAPPERS))
    turned = prod(mesh) == 1 and draw(evenly(False, True))
    layout = Layout(
        grammar,
        tuple(role for role, _ in axes),
        how,
        wrapper,
        idle=grammar != "numbers" and draw(evenly(False, False, True)),
        turned=turned,
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    rules = Rules() if not full else _RULES
    if grammar in ("numbers", "old"):  # numbers are told by the states' shapes; without states, all is one old value
        rules = replace(rules, distinct_shapes=grammar == "numbers", stepped=True)
    state = draw(logical_states(rules if full else replace(rules, max_groups=1)))
    return Case(as_run(state, layout) if full else _weights(state), layout)


_RULES = Rules(dtypes=("float32",), frozen_dtypes=("uint8", "float32", "bfloat16"))
"""FSDP keeps one copy of a weight: what DeepSpeed calls the master."""


def _weights(state: LogicalState) -> LogicalState:
    parameters = tuple(replace(p, group=None, states={}) for p in state.parameters)
    return replace(state, parameters=parameters, groups=(), steps=(), values={}, optimizer_values={})


NESTED = DcpSource("DCP, nested keys", ("nested", "app", "old", "numbers"))
TRAINERS = DcpSource("DCP of trainers", ("flat", "accelerate", "trainer", "lightning"))
WEIGHTS = DcpSource("DCP, weights alone", ("bare",), full=False)
DCP_SOURCES = (NESTED, TRAINERS, WEIGHTS)
ZOO = (
    *("two axes", "three axes", "chunk without elements", "uneven cut", "replicas", "no collectives"),
    *("several files of a rank", "early attributes", "files of an earlier save", "wrapped name"),
)
"""Items that the examples of all sources together must meet."""
GRAMMARS = tuple(f"grammar {grammar}" for source in DCP_SOURCES for grammar in source.grammars)
"""Items of a long run: in a short one, each source draws about fifteen layouts that differ."""
