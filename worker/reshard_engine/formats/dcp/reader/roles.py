"""Sorts the entries of a saved state by their roles: model, optimizer states, param groups, everything else.

Frameworks nest the same state dicts under different keys. An optimizer is found by its `param_groups`; the model is
the place whose entries have the names of the optimizer's parameters.

Source: torch 2.13.0 `distributed/checkpoint/state_dict.py` (`get_optimizer_state_dict`, `_flatten_optim_state_dict`),
`distributed/checkpoint/_traverse.py` (paths of `planner_data`); torchtitan 0.3 `components/optimizer.py`; verified by
running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from reshard.errors import SourceError, listed, printable
from reshard_engine.formats.dcp.reader.metadata import KeyPath
from reshard_engine.formats.dcp.reader.saved_state import SavedState, SavedTensor, SavedValue

GROUPS, STATE, PARAMS = "param_groups", "state", "params"
_FLAT_PARAMETER = "_flat_param"
_EXTRA_STATE = "_extra_state"
_MODEL = "model"
"""The key under which nearly all frameworks save the model."""
Item = SavedTensor | SavedValue


@dataclass(frozen=True, slots=True)
class OptimizerPlace:
    """The place of an optimizer's state dict."""

    path: KeyPath
    flat: bool
    """True if names, states and hyper-parameters are joined to one key, as `flatten_optimizer_state_dict` does it."""


@dataclass(slots=True)
class Roles:
    """The entries of a saved state by role. Tensors that several ranks hold are listed together."""

    model_path: KeyPath
    optimizer: OptimizerPlace | None
    weights: dict[str, list[SavedTensor]] = field(default_factory=dict[str, list[SavedTensor]])
    """Tensors of the model's state dict, by name."""
    extra_states: dict[KeyPath, list[Item]] = field(default_factory=dict[KeyPath, list[Item]])
    """Other entries of the model's state dict, by their path in it."""
    states: dict[str, dict[str, list[Item]]] = field(default_factory=dict[str, dict[str, list[Item]]])
    """States by the optimizer's key of the parameter (its name or number) and the state's name."""
    groups: dict[str | int, dict[KeyPath, list[Item]]] = field(
        default_factory=dict[str | int, dict[KeyPath, list[Item]]]
    )
    """Hyper-parameters by group and path in it; a flat optimizer has a group for each parameter's name."""
    whole_groups: SavedValue | None = None
    """All param groups as one value, as torch up to 2.3 saves them."""
    rest: dict[KeyPath, list[Item]] = field(default_factory=dict[KeyPath, list[Item]])
    """Everything else, by its path beside the model, or from the root if it is not there."""
    at_root: set[str] = field(default_factory=set[str])
    """First keys of entries of `rest` whose paths begin at the root, although the model lies deeper."""
    other_optimizers: tuple[KeyPath, ...] = ()
    """Places of further optimizers."""

    @property
    def home(self) -> KeyPath:
        """The place in which the model lies."""
        return self.model_path[:-1]


def sort_roles(state: SavedState) -> Roles:
    """Sort the entries of a saved state.

    Raises:
        SourceError: `source.unsupported` for FSDP's local state dicts, which keep neither names nor shapes.
    """
    _refuse_flat_parameters(state)
    places = _optimizers([i.path for i in (*state.tensors, *state.values)])
    first = places[0] if places else None
    left = [t for t in state.tensors if not any(_within(t.path, p.path) for p in places)]
    names = _names_of_parameters(state, first) if first is not None else set[str]()
    shapes = _shapes_of_states(state, first) if first is not None and not names else set[tuple[int, ...]]()
    roles = Roles(_model_path(left, names, shapes), first, other_optimizers=tuple(p.path for p in places[1:]))
    for item in _in_order(state):
        _place(roles, item, places)
    return roles


def _in_order(state: SavedState) -> Iterable[Item]:
    """All entries in the order of the state dict. Ranks write what they hold, so the metadata's order is another."""
    numbers = {path: i for i, path in enumerate(state.order)}
    return sorted((*state.tensors, *state.values), key=lambda i: numbers.get(i.path, len(numbers)))


def _refuse_flat_parameters(state: SavedState) -> None:
    flat = [t.entry.key for t in state.tensors if str(t.path[-1]).rpartition(".")[2] == _FLAT_PARAMETER]
    if flat:
        raise SourceError(
            "source.unsupported",
            f"it holds flat parameters of FSDP (LOCAL_STATE_DICT), without the names and shapes within: {listed(flat)}",
            fix="save with StateDictType.SHARDED_STATE_DICT, or with torch.distributed.checkpoint.state_dict",
        )


def _within(path: KeyPath, place: KeyPath) -> bool:
    return len(path) > len(place) and path[: len(place)] == place


def _optimizers(paths: Sequence[KeyPath]) -> list[OptimizerPlace]:
    """The places of optimizers, in the order in which they come."""
    found: dict[KeyPath, bool] = {}
    for path in paths:
        for depth, part in enumerate(path):
            flat = isinstance(part, str) and part.startswith(f"{GROUPS}.") and depth == len(path) - 1
            if part == GROUPS or flat:
                found.setdefault(path[:depth], flat)
                break
    return [OptimizerPlace(path, flat) for path, flat in found.items()]


def _names_of_parameters(state: SavedState, place: OptimizerPlace) -> set[str]:
    """The optimizer's keys of parameters. Values are not read yet, so only states and flat groups tell of them."""
    depth = len(place.path)
    found: set[str] = set()
    for path in (i.path for i in (*state.tensors, *state.values)):
        if not _within(path, place.path):
            continue
        head = str(path[depth])
        if place.flat and head.startswith((f"{STATE}.", f"{GROUPS}.")):
            found.add(head.partition(".")[2].rpartition(".")[0])
        elif head == STATE and len(path) > depth + 1:
            found.add(str(path[depth + 1]))
    # Numbers are no names: any list has an entry that is called 0.
    return set() if all(name.isdecimal() for name in found) else found


def _shapes_of_states(state: SavedState, place: OptimizerPlace) -> set[tuple[int, ...]]:
    """The shapes of the optimizer's states, which are those of its parameters."""
    return {t.entry.shape for t in state.tensors if _within(t.path, place.path) and t.path[-1] != "step"}


def _model_path(tensors: Iterable[SavedTensor], names: set[str], shapes: set[tuple[int, ...]]) -> KeyPath:
    """The place whose tensors have the most of these names or shapes; else `model`, or that with the most elements."""
    named: Counter[KeyPath] = Counter()
    size: Counter[KeyPath] = Counter()
    for tensor in tensors:
        parent, name = tensor.path[:-1], str(tensor.path[-1])
        named[parent] += name in names or _plain(name) in names or tensor.entry.shape in shapes
        size[parent] += prod(tensor.entry.shape)
    if not size:
        return ()
    best = max(size, key=lambda place: (named[place], place[-1:] == (_MODEL,), size[place]))
    # An entry such as an extra state, or a module that nests its state dict, may have more elements than its model.
    while len(best) > 1 and not named[best] and _EXTRA_STATE in str(best[-1]):
        best = best[:-1]
    return best


_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Modules that only wrap others: of torch.compile, FSDP and activation checkpointing."""


def _plain(name: str) -> str:
    return ".".join(p for p in name.split(".") if p not in _WRAPPERS)


def plain_names(names: Sequence[str]) -> dict[str, str]:
    """The names without those of wrappers, and without `module.` if all of them begin with it.

    Raises:
        SourceError: `checkpoint.ambiguous` if two names become one.
    """
    found = {name: _plain(name) for name in names}
    if found and all(plain.startswith("module.") for plain in found.values()):
        found = {name: plain.removeprefix("module.") for name, plain in found.items()}
    if len(set(found.values())) != len(found):
        twice = Counter(found.values()).most_common(1)[0][0]
        raise SourceError(
            "checkpoint.ambiguous", f"two entries are called {printable(twice)} without the names of wrapping modules"
        )
    return found


def _place(roles: Roles, item: Item, optimizers: Sequence[OptimizerPlace]) -> None:
    path = item.path
    for place in optimizers:
        if _within(path, place.path):
            if place is roles.optimizer:
                _place_in_optimizer(roles, item, path[len(place.path) :], flat=place.flat)
            return
    depth = len(roles.model_path)
    inner = path[depth:]
    extra = any(_EXTRA_STATE in str(part) for part in inner)
    if _within(path, roles.model_path) and (depth or len(inner) == 1 or extra):
        if isinstance(item, SavedTensor) and not extra:
            roles.weights.setdefault(".".join(map(str, inner)), []).append(item)
            return
        if depth or extra:
            roles.extra_states.setdefault(inner, []).append(item)
            return
    home = roles.home
    if home and not _within(path, home):
        roles.at_root.add(str(path[0]))
    roles.rest.setdefault(path[len(home) :] if _within(path, home) else path, []).append(item)


def _place_in_optimizer(roles: Roles, item: Item, inner: KeyPath, *, flat: bool) -> None:
    head = str(inner[0])
    if flat and head.startswith(f"{STATE}."):
        name, _, state = head.removeprefix(f"{STATE}.").rpartition(".")
        roles.states.setdefault(name, {}).setdefault(state, []).append(item)
    elif flat and head.startswith(f"{GROUPS}."):
        name, _, value = head.removeprefix(f"{GROUPS}.").rpartition(".")
        roles.groups.setdefault(name, {}).setdefault((value, *inner[1:]), []).append(item)
    elif head == STATE and len(inner) == 3:
        roles.states.setdefault(str(inner[1]), {}).setdefault(str(inner[2]), []).append(item)
    elif head == GROUPS and len(inner) >= 3 and isinstance(inner[1], int):
        roles.groups.setdefault(inner[1], {}).setdefault(inner[2:], []).append(item)
    elif head == GROUPS and len(inner) == 1 and isinstance(item, SavedValue):
        roles.whole_groups = item
    else:
        roles.rest.setdefault(item.path, []).append(item)


def below(items: dict[KeyPath, list[Item]]) -> Iterator[tuple[KeyPath, Item]]:
    """The first item of each path."""
    yield from ((path, found[0]) for path, found in items.items())
