"""The state dict of one directory: metadata, files, and every tensor and value by its path of keys.

A save without collectives has one metadata file for each rank; they are joined here.

Source: torch 2.13.0 `distributed/checkpoint/state_dict_saver.py` (`use_collectives`),
`distributed/checkpoint/filesystem.py` (`FileSystemReader.read_metadata`), verified by running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from reshard.errors import SourceError, counted, listed, printable
from reshard_engine.checkpoint import Counters
from reshard_engine.containers.source_file import SourceFile, open_all
from reshard_engine.containers.torch_file import SharedPickles, TorchFile, open_torch_file, place_of
from reshard_engine.formats.dcp_files.metadata.model import (
    METADATA_FILE,
    RANK_METADATA,
    SUFFIX,
    BytesEntry,
    Column,
    KeyPath,
    Metadata,
    TensorEntry,
)
from reshard_engine.formats.dcp_files.metadata.parse import parse_metadata
from reshard_engine.formats.dcp_files.records import decompressed, refuse_other_streams
from reshard_engine.pickles.nodes import Node, PTensor, PTensorRef
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.trees import rewrite
from reshard_engine.storage.locations import Location
from reshard_engine.storage.protocol import Listing, ObjectInfo, read_bytes
from reshard_engine.tensors.dtypes import BY_NAME
from reshard_engine.tensors.shard_map import ShardMapBuilder

_NOT_COUNTED = Counters()
_GROUPS = ".param_groups."
_COPY_AGAIN = "copy the checkpoint again: `.metadata` is written last, when all files are there"


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the state dict; its chunks are rows of the columns of its metadata."""

    path: KeyPath
    entry: TensorEntry
    part: Part


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value of the state dict that is not a tensor."""

    path: KeyPath
    entry: BytesEntry
    part: Part


Item = SavedTensor | SavedValue
"""An entry of the state dict."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One metadata file with the files that it names."""

    metadata: Metadata
    first_file: int
    """Number of its first file among all files of the state."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state dicts of one or several directories."""

    files: tuple[SourceFile, ...] = ()
    tensors: tuple[SavedTensor, ...] = ()
    """Tensors in the order of the metadata. Without collectives each rank has an entry for one path."""
    values: tuple[SavedValue, ...] = ()
    copies: tuple[tuple[SavedValue, SavedValue], ...] = ()
    """Values that several ranks saved: the one of `values`, and each other one."""
    order: tuple[KeyPath, ...] = ()
    """All paths in the order of the state dict, where the metadata keeps it."""
    counters: Counters = _NOT_COUNTED
    """Counters of the run that our own writer kept for the way back."""

    def joined(self, other: SavedState, *, below: KeyPath = ()) -> SavedState:
        """Both states as one, the other one below a path of keys; the files of `other` follow."""
        shift = len(self.files)
        parts = {id(i.part): i.part for i in (*other.tensors, *other.values, *(c for _, c in other.copies))}
        moved = {key: replace(p, first_file=p.first_file + shift) for key, p in parts.items()}
        known: dict[int, SavedValue] = {}

        def value(one: SavedValue) -> SavedValue:
            # A value and the first of its copies stay one object.
            return known.setdefault(id(one), replace(one, path=(*below, *one.path), part=moved[id(one.part)]))

        return SavedState(
            (*self.files, *other.files),
            (*self.tensors, *(replace(t, path=(*below, *t.path), part=moved[id(t.part)]) for t in other.tensors)),
            (*self.values, *map(value, other.values)),
            (*self.copies, *((value(a), value(b)) for a, b in other.copies)),
            (*self.order, *((*below, *path) for path in other.order)),
            self.counters if other.counters == _NOT_COUNTED else other.counters,
        )


def read_state(location: Location, listing: Listing, *, folder: str = "") -> SavedState:
    """Read the metadata of one directory.

    Args:
        location: The directory.
        listing: Its children.
        folder: Path of the directory below that of the checkpoint, for names of files.

    Raises:
        SourceError: `checkpoint.incomplete`, `checkpoint.mixed`, and all errors of the metadata.
    """
    infos_by_name = listing.by_name
    names = _metadata_names(location, infos_by_name)
    infos = [infos_by_name[n] for n in names]
    sources = [SourceFile(location.store, n, (i,)) for n, i in zip(names, infos, strict=True)]
    parsed = open_all(sources, lambda f: parse_metadata(read_bytes(f.store, f.objects[0]), f.name))
    files: list[SourceFile] = []
    parts: list[Part] = []
    for metadata in parsed:
        _refuse_overlaps(metadata, location, infos_by_name)
        plain = decompressed(metadata, _files_of(metadata, location, infos_by_name, folder))
        parts.append(Part(plain.metadata, len(files)))
        files += plain.files
    state = _state_of_ranks(parts) if len(parts) > 1 else _state_of(parts[0])
    known = {f.name for f in fields(Counters)}
    counted = {name: value for p in parts[:1] for name, value in p.metadata.counters.items() if name in known}
    return replace(state, files=tuple(files), counters=Counters(**counted))


def _metadata_names(location: Location, infos_by_name: Mapping[str, ObjectInfo]) -> list[str]:
    """The metadata files of a directory: the one of the whole save, or one for each rank."""
    if METADATA_FILE in infos_by_name:
        return [METADATA_FILE]
    ranks = {int(m[1]): n for n in infos_by_name if (m := RANK_METADATA.fullmatch(n))}
    if not ranks:
        count = sum(n.endswith(SUFFIX) for n in infos_by_name)
        raise SourceError(
            "checkpoint.incomplete",
            f"{printable(location.url)} has {counted(count, 'file')} *{SUFFIX} and no `{METADATA_FILE}`: "
            "the save did not finish",
            fix=f"resume from an older checkpoint; if the save did finish, {_COPY_AGAIN}",
        )
    if missing := [f"__{r}.metadata" for r in range(max(ranks) + 1) if r not in ranks]:
        raise SourceError(
            "checkpoint.incomplete",
            "each rank of this save wrote its own metadata, and "
            f"{counted(len(missing), 'file is', 'files are')} missing: {listed(missing)}",
            fix="copy the files of all ranks into one directory",
        )
    return [ranks[r] for r in sorted(ranks)]


def _files_of(
    metadata: Metadata, location: Location, infos_by_name: Mapping[str, ObjectInfo], folder: str
) -> list[SourceFile]:
    """The data files that the metadata names, with the ranges of their archives."""
    if missing := [n for n in metadata.files if n not in infos_by_name]:
        raise SourceError(
            "checkpoint.incomplete",
            f"the metadata names {counted(len(metadata.files), 'file')}, "
            f"of which {counted(len(missing), 'is', 'are')} missing: {listed(missing)}",
            fix=_COPY_AGAIN,
        )
    file, offset, length = _all_records(metadata)
    first = np.searchsorted(file, np.arange(len(metadata.files) + 1))
    found: list[SourceFile] = []
    for number, name in enumerate(metadata.files):
        rows, info = slice(int(first[number]), int(first[number + 1])), infos_by_name[name]
        end = int((offset[rows] + length[rows]).max(initial=0))
        if end > info.size_bytes:
            raise SourceError(
                "checkpoint.incomplete",
                f"{printable(name)} has {info.size_bytes} bytes, and the metadata names bytes up to {end}",
                fix="the file is truncated: copy the checkpoint again",
            )
        path = f"{folder}/{name}" if folder else name
        archives = np.stack([offset[rows], length[rows]], axis=1)
        found.append(SourceFile(location.store, path, (info,), archives=archives))
    return found


def _all_records(metadata: Metadata) -> tuple[Column, Column, Column]:
    """File, offset and length of the records of all chunks and values, in the order of files and offsets."""
    values = metadata.values
    file = np.concatenate([metadata.file.astype(np.int64), np.array([v.file for v in values], dtype=np.int64)])
    offset = np.concatenate([metadata.offset, np.array([v.offset for v in values], dtype=np.int64)])
    length = np.concatenate([metadata.length, np.array([v.length for v in values], dtype=np.int64)])
    order = np.lexsort((offset, file))
    return file[order], offset[order], length[order]


def _refuse_overlaps(metadata: Metadata, location: Location, infos_by_name: Mapping[str, ObjectInfo]) -> None:
    """Refuse records that share bytes: one of them would be read as another one.

    Raises:
        SourceError: `checkpoint.malformed`; `source.unsupported` for files of another serialization, whose tensors all
            name the begin of one blob.
    """
    file, offset, length = _all_records(metadata)
    shared = (file[1:] == file[:-1]) & (offset[:-1] + length[:-1] > offset[1:])
    if not shared.any():
        return
    row = int(np.flatnonzero(shared)[0])
    name = metadata.files[int(file[row])]
    if name in infos_by_name:
        whole = SourceFile(location.store, name, (infos_by_name[name],))
        begin = min(int(offset[row]), whole.size_bytes)
        refuse_other_streams(whole.part(begin, min(4, whole.size_bytes - begin)))
    raise SourceError(
        "checkpoint.malformed",
        f"{printable(name)}: {int(shared.sum())} records share bytes with others, the first at byte {int(offset[row])}",
        fix="the metadata is damaged: copy the checkpoint again",
    )


def _paths(metadata: Metadata) -> Mapping[str, KeyPath]:
    """The path of each key; of a planner without flattening a key is a path of one part, but for joined keys.

    A state dict of one level may hold a flattened optimizer below a key of its own, and a model below another. The
    optimizer's names then tell which keys are the model's.

    Source: torch 2.13.0 `distributed/checkpoint/default_planner.py` (`flatten_state_dict=False`: no `planner_data`).
    """
    if metadata.paths is not None:
        return metadata.paths
    keys = {e.key for e in (*metadata.tensors, *metadata.values)}
    found: dict[str, KeyPath] = {}
    for place in dict.fromkeys(k[: k.index(_GROUPS)] for k in keys if _GROUPS in k):
        own = {k: (place, k[len(place) + 1 :]) for k in keys if k.startswith((f"{place}.state.", f"{place}{_GROUPS}"))}
        names = [path[1].partition(".")[2].rpartition(".")[0] for k, path in own.items() if _GROUPS in k]
        left = keys - own.keys()
        models = {k.removesuffix(f".{names[0]}") for k in left if k.endswith(f".{names[0]}")}
        for model in models if names[0] not in left else ():
            if all(f"{model}.{name}" in left for name in names):
                found |= {k: (model, k[len(model) + 1 :]) for k in left if k.startswith(f"{model}.")}
        found |= own
    return found


def _state_of(part: Part) -> SavedState:
    metadata = part.metadata
    paths = _paths(metadata)
    return SavedState(
        tensors=tuple(SavedTensor(paths.get(t.key, (t.key,)), t, part) for t in metadata.tensors),
        values=tuple(SavedValue(paths.get(v.key, (v.key,)), v, part) for v in metadata.values),
        order=tuple((metadata.paths or {}).values()),
    )


def _state_of_ranks(parts: Sequence[Part]) -> SavedState:
    """The state of a save without collectives: every rank has its own chunks, and what all ranks hold."""
    tensors: dict[KeyPath, list[SavedTensor]] = {}
    values: dict[KeyPath, SavedValue] = {}
    copies: list[tuple[SavedValue, SavedValue]] = []
    order: dict[KeyPath, None] = {}
    for alone in map(_state_of, parts):
        order |= dict.fromkeys(alone.order)
        for tensor in alone.tensors:
            tensors.setdefault(tensor.path, []).append(tensor)
        copies += [(values[v.path], v) for v in alone.values if v.path in values]
        values |= {v.path: v for v in alone.values if v.path not in values}
    for same in tensors.values():
        _refuse_other_tensors(same)
    if twice := [p for p in tensors if p in values]:
        raise SourceError(
            "checkpoint.mixed",
            f"{printable(tensors[twice[0]][0].entry.key)} is a tensor to one rank and another value to the next",
            fix="the metadata files are of different saves: copy those of one save",
        )
    return SavedState(
        tensors=tuple(t for same in tensors.values() for t in same),
        values=tuple(values.values()),
        copies=tuple(copies),
        order=tuple(order),
    )


def _refuse_other_tensors(same: Sequence[SavedTensor]) -> None:
    first = same[0].entry
    for other in (t.entry for t in same[1:]):
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise SourceError(
                "checkpoint.mixed",
                f"{printable(first.key)} is {first.dtype.name} {first.shape} to one rank and "
                f"{other.dtype.name} {other.shape} to another",
                fix="the metadata files are of different saves: copy those of one save",
            )


# Values of a saved state that are not tensors, as inert nodes.
#
# Each value is a stream of `torch.save`, which torch reads back with `weights_only=False`. Here nothing of it is run.
#
# Source: torch 2.13.0 `distributed/checkpoint/filesystem.py` (`_write_item`, `FileSystemReader.read_data`).


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
            offset = parsed.file.begin + parsed.tensor_offset(tensor)
            self._builder.whole(number, file=file, offset=offset, stride=tensor.stride)
        return number
