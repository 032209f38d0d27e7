"""Values of a saved state that are no tensors, as inert nodes.

Each value is a stream of `torch.save`, which torch reads back with `weights_only=False`. Here nothing of it is run.

Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`_write_item`, `FileSystemReader.read_data`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reshard_engine.containers.opening import open_all
from reshard_engine.containers.shared_pickles import SharedPickles
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile, open_torch_file
from reshard_engine.containers.torch_tensors import place_of
from reshard_engine.formats.dcp.reader.metadata import KeyPath
from reshard_engine.formats.dcp.reader.records import refuse_other_streams
from reshard_engine.formats.dcp.reader.saved_state import SavedValue
from reshard_engine.pickles.nodes import Node, PList, PTensor, PTensorRef, mapping_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.rewrite import rewrite
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import ShardMapBuilder

_MOST_GAPS = 1 << 12
"""Indices of a list without an entry. A stream of a few bytes must not make a long list."""


def open_values(files: Sequence[SourceFile], values: Sequence[SavedValue], ledger: OpaqueLedger) -> list[TorchFile]:
    """The parsed streams of these values, in their order.

    Raises:
        SourceError: `zip.*`, `pickle.*`, `source.unsupported` for compressed streams.
    """
    shared = SharedPickles(ledger)

    def parse(part: SourceFile) -> TorchFile:
        refuse_other_streams(part)
        return open_torch_file(part, ledger, pickles=shared)

    parts = [files[v.part.first_file + v.entry.file].part(v.entry.offset, v.entry.length) for v in values]
    return open_all(parts, parse)


class CarriedValues:
    """Replaces the tensors of values by references into the shard map that is being built."""

    def __init__(self, builder: ShardMapBuilder) -> None:
        """Add tensors to the checkpoint's builder."""
        self._builder = builder
        self._count = 0

    def carried(self, parsed: TorchFile, file: int) -> Node:
        """The value of a stream; `file` is the number of the file in the shard map."""
        known: dict[tuple[object, ...], PTensorRef] = {}

        def reference(tensor: PTensor) -> PTensorRef:
            place = place_of(tensor)
            if place not in known:
                self._count += 1
                known[place] = PTensorRef(self._add(tensor, parsed, file))
            return known[place]

        return rewrite(parsed.root, reference, lambda foreign: foreign)

    def _add(self, tensor: PTensor, parsed: TorchFile, file: int) -> int:
        number = self._builder.tensor(f"value.{self._count}", "value", BY_NAME[tensor.dtype], tensor.shape)
        if tensor.numel:
            begin = parsed.file.extent[0] if parsed.file.extent is not None else 0
            offset = begin + parsed.tensor_offset(tensor)
            self._builder.whole(number, file=file, offset=offset, stride=tensor.stride)
        return number


def nested(entries: Mapping[KeyPath, Node]) -> dict[str | int, Node]:
    """Entries by path as the nested dicts and lists that torch flattened; the top level as a dict of Python.

    Source: torch 2.13.0 `distributed/checkpoint/_nested_dict.py` (`unflatten_state_dict`), `_traverse.py` (a number
    is the index of a list).
    """
    top: dict[str | int, Node] = {}
    inner: dict[str | int, dict[KeyPath, Node]] = {}
    for path, node in entries.items():
        if len(path) == 1:
            top[path[0]] = node
        else:
            top.setdefault(path[0], None)
            inner.setdefault(path[0], {})[path[1:]] = node
    for key, below in inner.items():
        top[key] = _container(nested(below))
    return top


def _container(items: dict[str | int, Node]) -> Node:
    """A list where keys are indices, else a dict. Empty dicts in a list have no entry: torch puts None there."""
    numbers = [k for k in items if isinstance(k, int)]
    if items and len(numbers) == len(items) and min(numbers) >= 0 and max(numbers) < _MOST_GAPS + len(items):
        return PList([items.get(i) for i in range(max(numbers) + 1)])
    return mapping_of(items)
