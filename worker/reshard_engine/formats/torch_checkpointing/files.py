"""The files of a directory of torch_checkpointing, and `metadata.pkl`, which says how tensors lie on ranks.

A payload has items (model, optimizer, ...). Each rank saves each item in a file of its own, `{item}_{rank}.pt` if the
item has no layout. `metadata.pkl` is a pickle of dicts, lists, tuples, texts and numbers alone. It lists the items that
have a resharder: for each tensor its shape, its mesh and its placements, with the ranks that they hold for, and for
each rank the path and the kind of its file. A run without resharders writes none.

Source: torch_checkpointing 0.1.1 `checkpoint_layout.py` (`default_torch_layout_info`, `LayoutInfo`, formats),
`distributed_metadata.py` (`DistributedMetadata`: versions 1.0 and 2.0), `dtensor_metadata.py`, `metadata_manager.py`,
`types.py` (`CheckpointPath`), `hf/consolidation.py`; verified by running.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

from reshard.choices import MANIFEST, OpaquePolicy
from reshard.errors import SourceError, counted, listed, printable
from reshard_engine.containers.source_file import SourceFile, parse_json
from reshard_engine.containers.torch_file import walk
from reshard_engine.formats.dtensors import Mesh, MeshForm, Placement, Shape, unraveled
from reshard_engine.formats.rank_states import SavedRun
from reshard_engine.formats.trainer_files import TrainerFacts
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PDict,
    PList,
    PObject,
    PTuple,
    configured_limits,
    kind_of,
    mapping_items,
)
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.vm import parse_pickle
from reshard_engine.storage.locations import Location, refuse_link_elsewhere
from reshard_engine.storage.protocol import Listing, ObjectInfo, read_bytes
from reshard_engine.tensors.dtypes import BY_NAME, Dtype

METADATA = "metadata.pkl"
CURRENT = "2.0"
"""The version of `metadata.pkl` that 0.1.1 writes."""
_FIRST = "1.0"
MODEL, OPTIMIZER = "model", "optimizer"
"""The usual names of these items."""
STATE, GROUPS, VERSION = "state", "param_groups", "_optimizer_state_format_version"
"""The keys of an optimizer."""
NAMES = "param_names"
NAMED = 1
"""The version of an optimizer whose keys are names."""
DTENSOR = "DTensorShardingMetadata"
TORCH, JSON, SAFETENSORS = "TorchSerialization", "JsonSerialization", "SafetensorsSerialization"
_SUFFIXES = {TORCH: ".pt", JSON: ".json", SAFETENSORS: ".safetensors"}
_BY_SUFFIX = {suffix: kind for kind, suffix in _SUFFIXES.items()}
_KINDS = {"Shard": "Shard", "StridedShard": "_StridedShard", "Replicate": "Replicate"}
_ITEM = re.compile(r"([A-Za-z0-9_-]+)_(\d{1,7})(\.pt|\.json|\.safetensors)")
_MODEL_FILE = re.compile(rf"{MODEL}_\d{{1,7}}\.(?:pt|safetensors)")
_OPTIMIZER_FILE = re.compile(rf"{OPTIMIZER}_\d{{1,7}}\.pt")
_FOLDER = re.compile(r"(?:.*[^0-9])?\d{1,7}")
_CONSOLIDATED = re.compile(r"model-\d{5,6}-of-\d{5,6}\.safetensors|model\.safetensors\.index\.json")
_METADATA_LIMIT_BYTES = 1 << 30
_PATH_CHARS = 1_024
_MOST, _MOST_RANKS = 1 << 62, 1 << 20
_ONE_PLACE = "copy the files of all ranks into one directory: each node may have kept its own on its disk"
_COPY_AGAIN = f"copy {METADATA} again from where it was written"

Path = tuple[str | int, ...]
"""The keys that lead to a tensor within an item."""


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape, the mesh and the placements of one tensor on the ranks of one mesh."""

    dtype: Dtype
    shape: Shape
    """The shape of the whole tensor."""
    mesh_shape: Shape
    places: Mapping[int, int]
    """The ranks of the mesh, each with its place in row-major order: the ranks whose files hold a part."""
    names: tuple[str, ...] | None
    device: str
    placements: tuple[Placement, ...]

    @property
    def whole(self) -> bool:
        """True if each of the ranks holds all of it."""
        return all(p.dim is None for p in self.placements)

    def mesh_of(self, rank: int) -> Mesh:
        """The mesh as one of its ranks knows it."""
        place = unraveled(self.places[rank], self.mesh_shape)
        return Mesh(self.mesh_shape, self.names, place, len(self.places), self.device, MeshForm.AXES)


@dataclass(frozen=True, slots=True)
class Specs:
    """The meshes of one tensor: one of all ranks, or one for each set of ranks that shares a part."""

    each: tuple[Spec, ...]
    by_rank: Mapping[int, int]
    """For each rank the index of its mesh."""

    def of(self, rank: int) -> Spec | None:
        """Return the tensor's placement on the mesh of this rank; None if nothing says it."""
        at = self.by_rank.get(rank)
        return None if at is None else self.each[at]


@dataclass(frozen=True, slots=True)
class Layout:
    """The file of one item of one rank."""

    path: str
    """Relative to the directory."""
    kind: str


@dataclass(frozen=True, slots=True)
class ItemMetadata:
    """The description of one item in `metadata.pkl`."""

    specs: Mapping[Path, Specs]
    layouts: Mapping[int, Layout | None]
    """The file of each rank; None for that which an item without a layout has."""

    def spec(self, path: Path, rank: int) -> Spec | None:
        """Return the placement of the tensor at this path on the mesh of this rank; None if nothing says it."""
        found = self.specs.get(path)
        return None if found is None else found.of(rank)


@dataclass(frozen=True, slots=True)
class Metadata:
    """The contents of `metadata.pkl`."""

    world: int
    items: Mapping[str, ItemMetadata]


@dataclass(frozen=True, slots=True)
class Item:
    """The files of one item by rank."""

    key: str
    kind: str
    """The form of its files, such as `TorchSerialization`."""
    files: tuple[SourceFile, ...]
    metadata: ItemMetadata | None = None

    @property
    def pattern(self) -> str | None:
        """The path of each rank's file with `{rank}` for its number; None if that is not in one place of all paths."""
        paths = [f.name for f in self.files]
        first = paths[0]
        tried = [f"{first[: m.start()]}{{rank}}{first[m.end() :]}" for m in re.finditer(r"\d+", first)]
        fits = [t for t in tried if all(path_of(t, rank) == path for rank, path in enumerate(paths))]
        return fits[0] if len(fits) == 1 else None


def path_of(pattern: str, rank: int) -> str:
    """The path of one rank's file."""
    return pattern.replace("{rank}", str(rank))


@dataclass(frozen=True, slots=True)
class ItemFiles:
    """The files of a directory."""

    world: int
    items: Mapping[str, Item]
    others: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files and directories that are not read, each with the reason."""

    @property
    def has_metadata(self) -> bool:
        """True if `metadata.pkl` describes an item."""
        return any(i.metadata is not None for i in self.items.values())


def holds_items(listing: Listing) -> bool:
    """True for files of items of ranks: of a model and its optimizer, or of any item that `metadata.pkl` describes."""
    names = listing.by_name.keys()
    if METADATA in names:
        folders = any(map(_FOLDER.fullmatch, listing.directories))
        return folders or any(map(_ITEM.fullmatch, names))
    return any(map(_MODEL_FILE.fullmatch, names)) and any(map(_OPTIMIZER_FILE.fullmatch, names))


def item_files(location: Location, listing: Listing) -> ItemFiles:
    """The files of a directory by item and rank.

    Raises:
        SourceError: `checkpoint.incomplete` if a rank's file is missing, `checkpoint.mixed` for files of several saves,
            `checkpoint.malformed` and `pickle.*` for metadata that are not as torch_checkpointing writes them,
            `source.unsupported` for forms that are not read.
    """
    infos = listing.by_name
    metadata = _metadata(location, infos[METADATA]) if METADATA in infos else None
    found: dict[str, dict[int, tuple[str, str]]] = {}
    for name in infos:
        if (match := _ITEM.fullmatch(name)) is not None:
            by_rank = found.setdefault(match[1], {})
            rank, kind = int(match[2]), _BY_SUFFIX[match[3]]
            if rank in by_rank:
                raise _twice(location, by_rank[rank][0], name)
            by_rank[rank] = name, kind
    described: Mapping[str, ItemMetadata] = {} if metadata is None else metadata.items
    world = metadata.world if metadata is not None else 1 + max(r for held in found.values() for r in held)
    items = {key: _described(location, infos, key, item, world) for key, item in described.items()}
    named = {file.name for item in items.values() for file in item.files}
    for key, held in found.items():
        left = {rank: pair for rank, pair in held.items() if pair[0] not in named}
        if key in items and left:
            raise _other_files(location, key, sorted(n for n, _ in left.values()))
        if left:
            items[key] = _undescribed(location, infos, key, left, world)
            named |= {n for n, _ in left.values()}
    return ItemFiles(world, dict(sorted(items.items())), _others(listing, named))


def _described(
    location: Location, infos: Mapping[str, ObjectInfo], key: str, metadata: ItemMetadata, world: int
) -> Item:
    """An item whose files `metadata.pkl` names."""
    layouts = {r: metadata.layouts[r] or Layout(f"{key}_{r}.pt", TORCH) for r in range(world)}
    kinds = {layout.kind for layout in layouts.values()}
    if len(kinds) > 1:
        raise _malformed(f"the files of {printable(key)} are of several kinds: {listed(sorted(kinds))}")
    below = {path.rpartition("/")[0] for path in (layout.path for layout in layouts.values())} - {""}
    held = dict(infos)
    for folder in sorted(below):
        place = location.child(*folder.split("/"))
        held |= {f"{folder}/{n}": i for n, i in place.store.list_directory(place.path).by_name.items()}
    names = [layouts[r].path for r in range(world)]
    return Item(key, kinds.pop(), _all_there(location, held, names, world), metadata)


def _undescribed(
    location: Location, infos: Mapping[str, ObjectInfo], key: str, found: Mapping[int, tuple[str, str]], world: int
) -> Item:
    """An item of which `metadata.pkl` says nothing: its files are known by their names."""
    kinds = {kind for _, kind in found.values()}
    if len(kinds) > 1 or max(found) >= world:
        beyond = sorted(n for r, (n, _) in found.items() if r >= world or len(kinds) > 1)
        raise _other_files(location, key, beyond, world=world)
    kind = kinds.pop()
    names = [f"{key}_{r}{_SUFFIXES[kind]}" for r in range(world)]
    names = [found[r][0] if r in found else name for r, name in enumerate(names)]
    return Item(key, kind, _all_there(location, infos, names, world))


def _all_there(
    location: Location, infos: Mapping[str, ObjectInfo], names: Sequence[str], world: int
) -> tuple[SourceFile, ...]:
    if missing := [n for n in names if n not in infos]:
        raise SourceError(
            "checkpoint.incomplete",
            f"{counted(len(missing), 'file')} of {world} ranks {'is' if len(missing) == 1 else 'are'} missing in "
            f"{printable(location.url)}: {listed(list(map(printable, missing)))}",
            fix=_ONE_PLACE,
        )
    for name in names:
        if "/" in name:  # a link in place of a folder could lead anywhere
            refuse_link_elsewhere(location, infos[name].path)
    return tuple(SourceFile(location.store, n, (infos[n],)) for n in names)


def _twice(location: Location, first: str, second: str) -> SourceError:
    return SourceError(
        "checkpoint.mixed",
        f"{printable(location.url)} holds {printable(first)} and {printable(second)} of one rank",
        fix="move the files of the other save into a directory of their own",
    )


def _other_files(location: Location, key: str, names: Sequence[str], *, world: int | None = None) -> SourceError:
    said = f"a run of {world} ranks has no such files" if world is not None else f"{METADATA} names other files"
    held = listed(list(map(printable, names)))
    return SourceError(
        "checkpoint.mixed",
        f"{printable(location.url)} holds {held} of the item {printable(key)}, and {said}",
        fix="move the files of the other save into a directory of their own",
    )


def _others(listing: Listing, named: set[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    folders = {n.split("/")[0] for n in named if "/" in n}
    for name in sorted(listing.by_name):
        if name not in named and name not in (METADATA, MANIFEST):
            copy = _CONSOLIDATED.fullmatch(name) is not None
            found[name] = _COPY_OF_MODEL if copy else _BESIDE
    found |= {f"{d}/": _BESIDE for d in listing.directories if d not in folders and not d.startswith(".")}
    return found


_COPY_OF_MODEL = "a copy of the model's weights, which torch_checkpointing consolidates from the ranks' files"
_BESIDE = "it lies beside the ranks' files, and nothing reads it"

# The metadata.


def _malformed(text: str) -> SourceError:
    return SourceError("checkpoint.malformed", f"{METADATA}: {text}", fix=_COPY_AGAIN)


def _metadata(location: Location, info: ObjectInfo) -> Metadata:
    """Parse `metadata.pkl`, which names no class and calls nothing."""
    if info.size_bytes > _METADATA_LIMIT_BYTES:
        raise SourceError("checkpoint.too_large", f"{METADATA} has {info.size_bytes} bytes")
    root, _ = parse_pickle(
        read_bytes(location.store, info), OpaqueLedger(OpaquePolicy.REFUSE), limits=configured_limits()
    )
    for node in walk(root):
        if not (node is None or isinstance(node, bool | int | str | PDict | PList | PTuple)):
            name = node.cls if isinstance(node, PObject) else node
            what = printable(name.dotted) if isinstance(name, Global) else kind_of(node)
            raise _malformed(f"it holds {what}, and torch_checkpointing writes dicts, lists, texts and numbers alone")
    return _Parsing().metadata(root)


class _Parsing:
    """One parse. Lists of ranks are equal for many tensors: each is kept once, for there may be a thousand of both."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], Mapping[int, int]] = {}
        self._by_rank: dict[tuple[int, ...], Mapping[int, int]] = {}

    def metadata(self, root: Node) -> Metadata:
        held = self._dict(root, "the root")
        version, world = held.get("version", _FIRST), held.get("world_size")
        if version not in (CURRENT, _FIRST):
            raise SourceError(
                "source.unsupported",
                f"{METADATA} is of version {printable(str(version), max_chars=40)}; {_FIRST} and {CURRENT} are known",
                fix="save it with torch_checkpointing 0.1.1, or report the version that wrote it",
            )
        if type(world) is not int or not 0 < world <= _MOST_RANKS:
            raise _malformed(f"world_size is {printable(str(world), max_chars=40)}")
        items = self._dict(held.get("metadata"), "metadata")
        if version == CURRENT:
            found = {str(key): self._item(node, str(key), world) for key, node in items.items()}
        else:
            found = self._first_version(items, held.get("rank_to_layout_info_mappings"), world)
        if not found:
            raise _malformed("it describes no item")
        paths = [layout.path for item in found.values() for layout in item.layouts.values() if layout is not None]
        if len({*paths}) != len(paths):
            twice = next(p for i, p in enumerate(paths) if p in paths[:i])
            raise _malformed(f"two ranks or items have the file {printable(twice)}")
        return Metadata(world, found)

    def _item(self, node: Node, key: str, world: int) -> ItemMetadata:
        held, what = self._dict(node, key), printable(key)
        layouts = self._dict(held.get("rank_to_layout_info"), f"rank_to_layout_info of {what}")
        specs = self._dict(held.get("nested_path_to_metadata"), f"nested_path_to_metadata of {what}")
        found = {self._path(path): self._specs(groups, path, world) for path, groups in specs.items()}
        return ItemMetadata(found, self._layouts(layouts, key, world))

    def _first_version(self, paths: Mapping[str | int, Node], mappings: Node, world: int) -> dict[str, ItemMetadata]:
        """Paths that begin with the item's name, and layouts by rank first.

        Source: `distributed_metadata.py` (`_convert_v1_to_v2`).
        """
        by_rank = self._dict(mappings, "rank_to_layout_info_mappings")
        layouts = {rank: self._dict(node, f"layouts of rank {rank}") for rank, node in by_rank.items()}
        found: dict[str, dict[Path, Specs]] = {}
        for text, groups in paths.items():
            key, *path = self._path(text)
            if not isinstance(key, str):
                raise _malformed(f"the path {printable(str(text))} does not begin with the name of an item")
            found.setdefault(key, {})[tuple(path)] = self._specs(groups, text, world)
        return {
            key: ItemMetadata(specs, self._layouts({r: held.get(key) for r, held in layouts.items()}, key, world))
            for key, specs in found.items()
        }

    def _layouts(self, held: Mapping[str | int, Node], key: str, world: int) -> dict[int, Layout | None]:
        by_rank = {int(r) if isinstance(r, str) and r.isdecimal() and len(r) < 8 else r: n for r, n in held.items()}
        if by_rank.keys() != {*range(world)}:
            raise _malformed(f"the layouts of {printable(key)} are not of the ranks 0 to {world - 1}")
        return {rank: self._layout(by_rank[rank], key) for rank in range(world)}

    def _layout(self, node: Node, key: str) -> Layout | None:
        if node is None:
            return None
        held = self._dict(node, f"a layout of {printable(key)}")
        path, form = held.get("file_path"), self._dict(held.get("serialization_format"), "a serialization format")
        parts = path.split("/") if isinstance(path, str) else []
        if not parts or len(str(path)) > _PATH_CHARS or not str(path).isprintable() or "\\" in str(path):
            parts = []
        if not parts or any(p in ("", ".", "..") for p in parts):
            raise _malformed(f"a file of {printable(key)} is called {printable(str(path), max_chars=80)!r}")
        if form.get("type") not in _SUFFIXES:
            kind = printable(str(form.get("type")), max_chars=40)
            raise SourceError(
                "source.unsupported",
                f"{METADATA}: files of {printable(key)} are of the kind {kind}",
                fix="save the item in the layout that torch_checkpointing has by default",
            )
        return Layout(str(path), str(form["type"]))

    def _path(self, text: str | int) -> Path:
        found = parse_json(str(text).encode(), code="checkpoint.malformed", what=f"{METADATA}: a path")
        keys: list[Any] = cast("list[Any]", found) if isinstance(found, list) else [None]
        if not all(type(k) is str or type(k) is int for k in keys):
            raise _malformed(f"the path {printable(str(text), max_chars=80)} is no list of names and numbers")
        return tuple(keys)

    def _specs(self, node: Node, path: str | int, world: int) -> Specs:
        what = printable(str(path), max_chars=120)
        found = tuple(self._spec(group, what, world) for group in self._items(node, what))
        if len({(s.dtype, s.shape) for s in found}) > 1:
            said = listed([f"{s.dtype.name} {s.shape}" for s in found])
            raise _malformed(f"{what} is of several kinds: {said}")
        key = tuple(id(s.places) for s in found)
        if key not in self._by_rank:
            by_rank: dict[int, int] = {}
            for index, spec in enumerate(found):
                if twice := by_rank.keys() & spec.places.keys():
                    raise _malformed(f"{what} lies on rank {min(twice)} in two ways")
                by_rank |= dict.fromkeys(spec.places, index)
            self._by_rank[key] = by_rank
        return Specs(found, self._by_rank[key])

    def _spec(self, node: Node, what: str, world: int) -> Spec:
        group = self._dict(node, what)
        packed = self._dict(group.get("sharding_metadata"), what)
        if packed.get("type") != DTENSOR:
            raise SourceError(
                "source.unsupported",
                f"{METADATA}: {what} is described by {printable(str(packed.get('type')), max_chars=80)}, and only "
                f"{DTENSOR} is read",
                fix="save the model with DTensors, as FSDP2 has them",
            )
        data = self._dict(packed.get("data"), what)
        mesh = self._dict(data.get("mesh_spec"), what)
        shape, mesh_shape = (self._numbers(n, what) for n in (data.get("global_shape"), mesh.get("mesh_shape")))
        ranks, placements = self._numbers(mesh.get("mesh_data"), what), self._items(data.get("placements"), what)
        names, device = mesh.get("mesh_dim_names"), mesh.get("device_type")
        words = None if names is None else tuple(str(n) for n in self._items(names, what))
        dtype = BY_NAME.get(str(data.get("dtype")).removeprefix("torch."))
        if dtype is None or not str(data.get("dtype")).startswith("torch."):
            raise _malformed(f"{what} is of the type {printable(str(data.get('dtype')), max_chars=40)}")
        holders = self._numbers(group.get("ranks"), what)
        if not 0 < len(ranks) == prod(mesh_shape) or len({*ranks}) != len(ranks) or max(ranks) >= world:
            raise _malformed(f"{what}: a mesh of {mesh_shape} of the ranks {listed(list(map(str, ranks)))} of {world}")
        if len(placements) != len(mesh_shape) or (words is not None and len(words) != len(mesh_shape)):
            raise _malformed(f"{what}: {counted(len(placements), 'placement')} on a mesh of {mesh_shape}")
        if len({*holders}) != len(holders):
            raise _malformed(f"{what}: a rank is in its list twice")
        if {*holders} != {*ranks}:
            raise _malformed(f"{what} is said of other ranks than those of its mesh")
        places = self._places.setdefault(ranks, {rank: at for at, rank in enumerate(ranks)})
        cuts = tuple(self._placement(n, len(shape), what) for n in placements)
        device = device if isinstance(device, str) else ""
        return Spec(dtype, shape, mesh_shape, places, words, device, cuts)

    def _placement(self, node: Node, dims: int, what: str) -> Placement:
        held = self._dict(node, what)
        kind, dim, split = _KINDS.get(str(held.get("type"))), held.get("dim"), held.get("split_factor", 1)
        if kind is None:
            raise SourceError(
                "source.unsupported",
                f"{METADATA}: {what} has the placement {printable(str(held.get('type')), max_chars=40)}",
                fix="redistribute the tensor to Shard or Replicate, and save again",
            )
        if kind == "Replicate":
            return Placement(kind)
        if type(dim) is not int or not 0 <= dim < dims or type(split) is not int or not 1 <= split < _MOST_RANKS:
            raise _malformed(f"{what}: {kind} of dimension {printable(str(dim), max_chars=40)} of {dims} dimensions")
        return Placement(kind, dim, split)

    # Values.

    def _dict(self, node: Node, what: str) -> dict[str | int, Node]:
        return mapping_items(node, what=f"{METADATA}: {printable(what, max_chars=120)}")

    def _items(self, node: Node, what: str) -> list[Node]:
        if not isinstance(node, PList | PTuple):
            raise _malformed(f"{what}: {kind_of(node)} in place of a list")
        return list(node.items)

    def _numbers(self, node: Node, what: str) -> tuple[int, ...]:
        found = self._items(node, what)
        if not all(type(n) is int and 0 <= n < _MOST for n in found):
            raise _malformed(f"{what}: lengths or ranks that are no counts")
        return tuple(found)


def path_text(path: Sequence[str | int]) -> str:
    """A path as `metadata.pkl` has it.

    Source: `distributed_metadata.py` (`_serialize_nested_path`).
    """
    return json.dumps(list(path), separators=(",", ":"))


# How the run saved its items, for a target of the same kind.


@dataclass(frozen=True, slots=True)
class SavedItems:
    """How a run saved its items, for a target of the same kind."""

    run: SavedRun
    model: str
    optimizer: str
    """The keys of these items."""
    schedulers: tuple[str, ...]
    """The keys of the schedulers' items."""
    described: bool
    """True if the save has `metadata.pkl`."""
    layouts: Mapping[str, tuple[str, str | None]] = field(default_factory=dict[str, tuple[str, str | None]])
    """For items in another layout than the default: the form of the files, and the path with `{rank}` if all ranks'
    paths show where the rank stands in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFacts(TrainerFacts):
    """The facts that only torch_checkpointing keeps, and the models and optimizers that were not read."""

    saved: SavedItems | None = None
    rank_items: Mapping[str, tuple[Node, ...]] = field(default_factory=dict[str, tuple[Node, ...]])
    """Items that differ from rank to rank, such as random states: for each rank its value."""

    def own_state(self) -> Mapping[str | int, Node]:
        """The items of single ranks, and the models and optimizers that were not read."""
        return {**TrainerFacts.own_state(self), **{key: PList([*values]) for key, values in self.rank_items.items()}}
