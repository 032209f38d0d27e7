"""The model-states file: parameter order and shapes, buffers, counters, client state.

Source: deepspeed 0.19.8 `runtime/engine.py` (`_common_checkpoint_state`, `_save_checkpoint`,
`_get_zero_param_shapes`, `_get_zero_frozen_param_attributes`, `_get_shared_params`); older shapes:
a plain dict of shapes before 0.5.4, shapes in the optimizer file before 0.6.0, no `shared_params`
before 0.9.0, no `frozen_*` before 0.9.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.errors import SourceError, printable
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.formats.deepspeed.names import FROZEN_FRAGMENTS, FROZEN_SHAPES, PARAM_SHAPES, VERSION
from reshard_engine.formats.names import checked_name
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PList,
    PObject,
    PTensor,
    PTuple,
    is_mapping,
    kind_of,
    mapping_items,
    sequence_items,
)
from reshard_engine.pickles.state_dict import Entry, KeyPath, state_dict_entries, tensors_of

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ModelStates:
    """A parsed model-states file."""

    torch_file: TorchFile
    entries: Mapping[str | int, Node]
    module: Mapping[str, PTensor]
    extra_states: Mapping[str, Node]
    """Entries of `module` that are no tensors, by name."""
    paths: tuple[KeyPath, ...]
    """Key paths of all entries of `module`, in its order."""
    buffer_names: tuple[str, ...]
    param_shapes: tuple[Shapes, ...] | None
    """Per group (ZeRO-1/2, BF16) or sub-group (ZeRO-3), in flat order; None at stage 0."""
    frozen_shapes: Shapes
    frozen_fragments: Mapping[str, PTensor]
    shared: Mapping[str, str]

    def integer(self, key: str) -> int | None:
        """A counter, or None if the file has none of that name."""
        value = self.entries.get(key)
        return value if type(value) is int else None

    @property
    def stepped(self) -> bool:
        """True if the counters show a step of the optimizer. Plain SGD keeps no state that would show one."""
        return (self.integer("global_steps") or 0) > (self.integer("skipped_steps") or 0)

    def leaves_out_frozen(self, stage: int) -> bool:
        """True if the run saved with `exclude_frozen_parameters=True`, as far as a file of this stage shows.

        From stage 2 on, the fragments are then None (0.9.1 and later); runs without frozen weights have an empty
        mapping. Below stage 2, only a tied weight shows it: DeepSpeed leaves out its first name, and no other name.
        """
        if stage >= 2 and FROZEN_FRAGMENTS in self.entries and self.entries[FROZEN_FRAGMENTS] is None:
            return True
        return bool(self.aliases_left)

    @property
    def aliases_left(self) -> tuple[str, ...]:
        """Names of tied weights that stayed in `module` when the weight's own name was left out as frozen."""
        trained = {n for group in self.param_shapes or () for n, _ in group}
        stored_names = self.module.keys() | trained | self.frozen_fragments.keys()
        return tuple(n for n, owner in self.shared.items() if owner not in stored_names and n in self.module)

    @property
    def version(self) -> str | None:
        """The `ds_version` that wrote the file."""
        value = self.entries.get(VERSION)
        return printable(value, max_chars=40) if isinstance(value, str) else None


def parse_model_states(torch_file: TorchFile) -> ModelStates:
    """The model states of a parsed file.

    Raises:
        SourceError: `checkpoint.malformed`, `name.invalid`.
    """
    name = printable(torch_file.file.name)
    entries = mapping_items(torch_file.root, what=name)
    if "module" not in entries:
        raise SourceError(
            "source.unsupported_version", f"{name} has no `module`: not a model-states file of DeepSpeed 0.3 or later"
        )
    module = module_entries(entries["module"], f"{name}: module")
    shapes = entries.get(PARAM_SHAPES)
    shared = {
        checked_name(str(k)): checked_name(v)
        for k, v in _mapping(entries.get("shared_params"), f"{name}: shared_params").items()
        if isinstance(v, str)
    }
    return ModelStates(
        torch_file,
        entries,
        tensors_of(module),
        {e.name: e.value for e in module if not isinstance(e.value, PTensor)},
        tuple(e.path for e in module),
        tuple(n for n in _names(entries.get("buffer_names"), name)),
        None if shapes is None else parse_param_shapes(shapes, what=f"{name}: param_shapes"),
        _shapes(entries.get(FROZEN_SHAPES), f"{name}: frozen_param_shapes"),
        module_tensors(entries.get(FROZEN_FRAGMENTS), f"{name}: frozen_param_fragments"),
        shared,
    )


def _mapping(node: Node, what: str) -> dict[str | int, Node]:
    return {} if node is None else mapping_items(node, what=what)


def _names(node: Node, what: str) -> list[str]:
    if node is None:
        return []
    return [checked_name(n) for n in sequence_items(node, what=f"{what}: buffer_names") if isinstance(n, str)]


def module_entries(node: Node, what: str) -> tuple[Entry, ...]:
    """The entries of a state dict; nothing for None.

    Raises:
        SourceError: `checkpoint.ambiguous` if two get one name, `checkpoint.malformed`, `name.invalid`.
    """
    entries = () if node is None else state_dict_entries(node, what=what)
    for entry in entries:
        checked_name(entry.name)
    return entries


def module_tensors(node: Node, what: str) -> dict[str, PTensor]:
    """The tensors of a state dict by name, as `module_entries` finds them."""
    return tensors_of(module_entries(node, what))


def shape_of(node: Node, what: str) -> tuple[int, ...]:
    """A `torch.Size` (or a plain tuple) as integers.

    Raises:
        SourceError: `checkpoint.malformed` otherwise.
    """
    if (
        isinstance(node, PObject)
        and isinstance(node.cls, Global)
        and node.cls.dotted == "torch.Size"
        and len(node.args.items) == 1
    ):
        node = node.args.items[0]
    items = node.items if isinstance(node, PTuple | PList) else None
    if items is None or len(items) > 64 or not all(type(i) is int and 0 <= i < 1 << 48 for i in items):
        raise SourceError("checkpoint.malformed", f"{what} is no shape but {kind_of(node)}")
    numel = 1
    for item in items:
        numel *= item
    if numel >= 1 << 62:
        raise SourceError("checkpoint.too_large", f"{what} declares more than 2**62 elements")
    return tuple(items)


def _shapes(node: Node, what: str) -> Shapes:
    return tuple(
        (checked_name(str(name)), shape_of(shape, f"{what}: {printable(str(name))}"))
        for name, shape in _mapping(node, what).items()
    )


def parse_param_shapes(node: Node, *, what: str) -> tuple[Shapes, ...]:
    """Per group the names and shapes in flat order; a plain mapping (before 0.5.4) is one group.

    Raises:
        SourceError: `checkpoint.malformed`, `checkpoint.ambiguous` if a name comes twice.
    """
    groups = (
        (_shapes(node, what),) if is_mapping(node) else tuple(_shapes(g, what) for g in sequence_items(node, what=what))
    )
    seen: set[str] = set()
    for group in groups:
        for name, _ in group:
            if name in seen:
                raise SourceError("checkpoint.ambiguous", f"{what}: {printable(name)} comes twice")
            seen.add(name)
    return groups
