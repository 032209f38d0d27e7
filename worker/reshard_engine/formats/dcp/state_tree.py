"""A whole state dict as one tree, whatever its entries mean: between `dcp.save` and `torch.save`.

Source: torch 2.13.0 `distributed/checkpoint/format_utils.py` (`dcp_to_torch_save`, `torch_save_to_dcp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from reshard.dcp_options import DcpOptions
from reshard.errors import RequestError, SourceError, printable
from reshard.models.jobs import ConvertRequest, NotCarried
from reshard_engine.checkpoint import Checkpoint, FormatFacts
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import open_torch_file
from reshard_engine.formats.dcp.metadata.model import KeyPath
from reshard_engine.formats.dcp.reader.reader import saved_state_in
from reshard_engine.formats.dcp.reader.saved_state import CarriedValues, SavedTensor, nested, open_values
from reshard_engine.formats.dcp.reader.tensors import ChunkTensors
from reshard_engine.formats.numbered import optimizers_in
from reshard_engine.formats.torch_archive import tree_template
from reshard_engine.pickles.nodes import Node, PTensorRef, collector_paused, mapping_of
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import ObjectInfo
from reshard_engine.tensors.layout import TargetFile, TargetLayout
from reshard_engine.tensors.shard_map import ShardMapBuilder


@dataclass(frozen=True, slots=True)
class StateTree(FormatFacts):
    """The facts of a checkpoint that was read as one tree."""

    tree: Node
    """The nested state dict, with `PTensorRef`s in place of tensors."""

    def trees(self, checkpoint: Checkpoint) -> Iterator[tuple[Node, str]]:
        """The one tree."""
        yield self.tree, ""


def read_state_tree(location: Location, ledger: OpaqueLedger) -> Checkpoint:
    """Read every entry of a distributed checkpoint.

    Raises:
        SourceError: `source.unknown_kind` if it is none, and all errors of reading it.
    """
    listing = location.store.list_directory(location.path)
    with collector_paused():
        state = saved_state_in(location, listing)
        if state is None:
            raise SourceError(
                "source.unknown_kind",
                f"{printable(location.url)} is not a distributed checkpoint",
                fix="name the directory that holds `.metadata`",
            )
        builder = ShardMapBuilder()
        chunks = ChunkTensors(builder, state.files, state.tensors, ledger)
        carried = CarriedValues(builder)
        entries: dict[KeyPath, Node] = {}
        for value, parsed in zip(state.values, open_values(state.files, state.values, ledger), strict=True):
            entries[value.path] = carried.carried(parsed, value.part.first_file + value.entry.file)
        same: dict[KeyPath, list[SavedTensor]] = {}
        for tensor in state.tensors:
            same.setdefault(tensor.path, []).append(tensor)
        lost: list[NotCarried] = []
        for path, saved in same.items():
            kind = chunks.class_of(saved)
            if kind is None:
                entries[path] = PTensorRef(chunks.add(saved[0].entry.key, "value", saved))
            else:
                reason = f"chunks of a {printable(kind)}, which only its own class joins"
                lost.append(NotCarried(path=printable(saved[0].entry.key), reason=reason))
        order = {path: i for i, path in enumerate(state.order)}
        tree = mapping_of(nested(dict(sorted(entries.items(), key=lambda e: order.get(e[0], len(order))))))
    return replace(_checkpoint(location, state.files, builder, tree, ledger), not_carried=tuple(lost))


def read_torch_tree(location: Location, info: ObjectInfo, ledger: OpaqueLedger) -> Checkpoint:
    """Read a file of `torch.save` that holds a state dict, nested or flat.

    Raises:
        SourceError: `zip.*`, `pickle.*`, `tensor.*`.
    """
    with collector_paused():
        parsed = open_torch_file(SourceFile(location.store, location.path.rpartition("/")[2], (info,)), ledger)
        builder = ShardMapBuilder()
        tree = CarriedValues(builder).carried(parsed, 0)
    return _checkpoint(location, (parsed.file,), builder, tree, ledger)


def optimizers_of(checkpoint: Checkpoint) -> list[Node]:
    """The state dicts of optimizers in a tree that was read as it is."""
    return optimizers_in(checkpoint.facts.tree) if isinstance(checkpoint.facts, StateTree) else []


def other_keys(options: DcpOptions) -> list[str]:
    """The options that ask for other keys than those that a file has, by their names."""
    return [name for name in options.given() if name not in ("files", "missing_moments")]


def _checkpoint(
    location: Location, files: Sequence[SourceFile], builder: ShardMapBuilder, tree: Node, ledger: OpaqueLedger
) -> Checkpoint:
    facts, shard_map, foreign = StateTree(tree), builder.build(), ledger.foreign
    return Checkpoint.of_trees(
        facts, url=location.url, kind="state-dict", files=files, shard_map=shard_map, foreign=foreign
    )


# A whole state dict as one file of `torch.save`.
#
# Source: torch 2.13.0 `distributed/checkpoint/format_utils.py` (`dcp_to_torch_save`).


class TorchSaveWriter:
    """Lays out the file."""

    def lay_out(self, checkpoint: Checkpoint, request: ConvertRequest, *, name: str) -> TargetLayout:
        """One file with the nested state dict.

        Raises:
            RequestError: `request.invalid` for options that would change what tensors hold.
        """
        if request.dtype is not None or request.exclude_frozen:
            raise RequestError("request.invalid", "the file holds all as it is: no --dtype", fix="--to torch")
        if not isinstance(checkpoint.facts, StateTree):
            raise RequestError(
                "request.unsatisfiable", "only a distributed checkpoint is one state dict", fix="--to torch"
            )
        path = request.options.of(DcpOptions).torch_file
        root = path.rpartition(".")[0] or "archive"
        template, slots = tree_template(root, checkpoint.facts.tree, checkpoint.shard_map, opaque=request.opaque)
        return TargetLayout((TargetFile(path, template, slots, commit=True),), None)
