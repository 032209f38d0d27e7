"""Reads weights in one file or in shards, of any container: finds, opens and joins them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from reshard.errors import counted, printable
from reshard_engine.checkpoint import Checkpoint, Parameter
from reshard_engine.containers.opening import open_all
from reshard_engine.containers.source_file import SourceFile
from reshard_engine.containers.torch_file import TorchFile
from reshard_engine.containers.torch_trees import TreeTensors
from reshard_engine.formats.names import checked_name
from reshard_engine.formats.not_carried import NotCarriedKeys
from reshard_engine.formats.reader import ReadOptions
from reshard_engine.formats.weights.reader.files import WeightFiles, stem_of_index
from reshard_engine.formats.weights.reader.index import WeightIndex, read_index
from reshard_engine.pickles.nodes import Node
from reshard_engine.storage.locations import Location
from reshard_engine.tensors.dtypes import Dtype
from reshard_engine.tensors.shard_map import ShardMapBuilder


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor of a file."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int
    """Offset of the first element in the file, in bytes."""
    stride: tuple[int, ...] | None = None
    """Strides in elements; None if the tensor is packed."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One parsed file."""

    file: SourceFile
    tensors: Sequence[HeldTensor]
    aliases: Mapping[str, str]
    """Tied names that the file lists beside their owners."""
    texts: Mapping[str, str]
    """Other metadata of the file."""
    extra_states: Mapping[str, Node] = field(default_factory=dict[str, Node])
    """Entries of the state dict that are not tensors, by name."""
    torch_file: TorchFile | None = None
    """The parsed file, if torch wrote it."""


def read_weights(
    location: Location,
    files: WeightFiles,
    parse: Callable[[SourceFile], Shard],
    *,
    preferred: str,
    form: str,
    options: ReadOptions,
) -> Checkpoint:
    """Read the weights of a directory as a checkpoint without optimizer.

    Raises:
        SourceError: `checkpoint.*`, `name.invalid`, and all errors of `parse`.
    """
    chosen = files.chosen(preferred)
    index = None
    names = [chosen]
    if chosen in files.indexes:
        index = read_index(location.store, files.indexes[chosen], suffix=files.suffix)
        _check_files(index, files, stem_of_index(chosen, files.suffix))
        names = list(index.names_by_file)
    sources = [SourceFile(location.store, n, (files.named[n],)) for n in names]
    shards = open_all(sources, parse)
    tensors = [t for s in shards for t in s.tensors]
    texts = {k: v for s in shards for k, v in s.texts.items()} | (dict(index.texts) if index else {})
    shared, rest = _aliases(texts, {checked_name(t.name) for t in tensors})
    for shard in shards:
        shared |= {checked_name(a): o for a, o in shard.aliases.items()}
    if index is not None:
        for shard in shards:
            index.check_shard(shard.file.name, {t.name for t in shard.tensors}, {*shared, *shard.extra_states})
    builder = ShardMapBuilder()
    parameters: list[Parameter] = []
    for number, shard in enumerate(shards):
        for held in shard.tensors:
            tensor = builder.tensor(held.name, "weight", held.dtype, held.shape)
            builder.whole(tensor, file=number, offset=held.offset, stride=held.stride)
            parameters.append(Parameter(held.name, held.shape, None, tensor))
    trees = TreeTensors(builder, {s.file: i for i, s in enumerate(shards)})
    extra_states = {
        n: trees.carried(node, s.torch_file)
        for s in shards
        if s.torch_file is not None
        for n, node in s.extra_states.items()
    }
    shard_map = builder.build()
    noted = NotCarriedKeys()
    noted.add_all((f"__metadata__.{k}" for k in rest), "metadata of a weights file")
    for name in files.optimizers:
        noted.add(name, "a file of optimizer states, which is not read yet", file=name)
    return Checkpoint(
        url=location.url,
        tag=options.tag,
        format=form,
        framework_version=None,
        world={},
        files=tuple(s.file for s in shards),
        shard_map=shard_map,
        parameters=tuple(parameters),
        buffers=(),
        shared=shared,
        optimizer=None,
        no_optimizer=files.no_optimizer,
        extra_states=extra_states,
        not_carried=noted.found(),
        foreign_globals=tuple(sorted(options.ledger.foreign)),
        warnings=tuple(_warnings(rest, index, shard_map.read_bytes_of(range(len(tensors))))),
    )


def _check_files(index: WeightIndex, files: WeightFiles, stem: str) -> None:
    if missing := [n for n in index.names_by_file if n not in files.named]:
        raise index.bad(
            f"of {counted(len(index.names_by_file), 'shard')}, {counted(len(missing), 'is', 'are')} missing: "
            f"{printable(missing[0])}"
        )
    if unnamed := sorted(files.shards_of(stem) - index.names_by_file.keys()):
        raise index.bad(f"{printable(unnamed[0])} exists, but the index does not name it")


def _aliases(texts: Mapping[str, str], names: set[str]) -> tuple[dict[str, str], list[str]]:
    """The metadata texts that name the owner of a tied name, and the keys of the other texts."""
    shared = {checked_name(k): v for k, v in texts.items() if v in names and k not in names}
    return shared, [k for k in texts if k not in shared and k != "format"]


def _warnings(rest: Sequence[str], index: WeightIndex | None, total_bytes: int) -> list[str]:
    found: list[str] = []
    if rest:
        listed = ", ".join(printable(k, max_chars=64) for k in rest[:8])
        found.append(f"metadata of the weights files are not carried over: {listed}")
    if index is not None and index.total_bytes not in (None, total_bytes):
        found.append(f"{index.name} says {counted(index.total_bytes, 'byte')}, the tensors have {total_bytes}")
    return found
