"""A model's state dict as entries with key paths: flat as torch makes it, or nested as Megatron nests it.

Source: torch 2.13.0 `nn/modules/module.py` (`_EXTRA_STATE_KEY_SUFFIX`; `get_extra_state` may return any picklable
value, and strict loading misses the entry of a module that has the method); Megatron-DeepSpeed (July 2025)
`megatron/model/language_model.py` (`state_dict_for_save_checkpoint` nests one dict per submodule).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from reshard.errors import SourceError, printable
from reshard_engine.pickles.nodes import (
    Node,
    PObject,
    PTensor,
    check_depth,
    is_mapping,
    mapping_items,
    ordered_dict,
)

KeyPath = tuple[str | int, ...]
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a state dict: no mapping within it is a state dict of its own."""

    path: KeyPath
    value: Node

    @property
    def name(self) -> str:
        """The keys joined by dots, as in `state_dict()` of the whole model."""
        return name_of(self.path)


def name_of(path: KeyPath) -> str:
    """The keys of a path joined by dots."""
    return ".".join(map(str, path))


def is_extra_state(name: str) -> bool:
    """True if torch keeps a module's extra state under this name."""
    return name == _EXTRA_STATE or name.endswith(f".{_EXTRA_STATE}")


def state_dict_entries(node: Node, *, what: str) -> tuple[Entry, ...]:
    """Every entry of a state dict, in its order. Empty mappings within it are entries: Megatron looks for their keys.

    Raises:
        SourceError: `checkpoint.malformed`, `pickle.too_deep`, `checkpoint.ambiguous` if two entries have one name.
    """
    found: dict[str, Entry] = {}
    for entry in _entries(node, (), what):
        if found.setdefault(entry.name, entry) is not entry:
            raise SourceError("checkpoint.ambiguous", f"{what}: {printable(entry.name)} comes twice")
    return tuple(found.values())


def _entries(node: Node, path: KeyPath, what: str) -> Iterator[Entry]:
    check_depth(len(path))
    for key, value in mapping_items(node, what=what).items():
        inner = (*path, key)
        if is_mapping(value) and not is_extra_state(str(key)) and mapping_items(value, what=what):
            yield from _entries(value, inner, what)
        else:
            yield Entry(inner, value)


def tensors_of(entries: Iterable[Entry]) -> dict[str, PTensor]:
    """The entries that are tensors, by name."""
    return {e.name: e.value for e in entries if isinstance(e.value, PTensor)}


def nested_dict(entries: Iterable[tuple[KeyPath, Node]]) -> PObject:
    """A state dict with these entries, nested as their paths say."""
    tree = ordered_dict({})
    levels: dict[KeyPath, PObject] = {(): tree}
    for path, value in entries:
        for depth in range(1, len(path)):
            if path[:depth] not in levels:
                levels[path[:depth]] = ordered_dict({})
                levels[path[: depth - 1]].items += (path[depth - 1], levels[path[:depth]])
        levels[path[:-1]].items += (path[-1], value)
    return tree
