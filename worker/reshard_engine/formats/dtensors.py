"""Sharded tensors in pickles of one rank: which box of the whole tensor its file holds; and DTensors to be written.

`DTensor` (FSDP2, and FSDP1 with a device mesh) names a mesh of ranks and a placement for each axis of the mesh. The
box of a rank follows from its coordinates by torch's rule of chunks. `ShardedTensor` (FSDP1) names the box itself.
Nothing is unpickled. What a file says twice must agree: shapes, ranks, coordinates, and the size of the local tensor.

The DTensors that are written are those of FSDP2. Their storages are as long as the shards; FSDP2's own are padded.

Source: torch 2.13.0 `distributed/tensor/_utils.py` (`_compute_local_shape_and_global_offset`),
`distributed/tensor/placement_types.py` (`_StridedShard`), `distributed/tensor/_dtensor_spec.py` (`shard_order`),
`distributed/device_mesh.py` (`__getstate__`), `distributed/_mesh_layout.py`; torch 2.5 `distributed/device_mesh.py`
(`mesh`, `_coordinate_on_dim`); torch 2.13.0 `distributed/_shard/sharded_tensor/api.py` (`__getstate__`); verified by
running with torch 2.1.2, 2.4.1, 2.6.0 and 2.13.0 (`tests/data/old_torch`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from math import prod

from reshard.errors import RequestError, SourceError, counted, listed, printable
from reshard_engine.containers.torch_file import TorchFile, place_of, walk
from reshard_engine.formats.model_weights import DTENSORS, SHARDED_TENSOR
from reshard_engine.pickles.nodes import (
    Global,
    Node,
    PDict,
    PList,
    PLiteral,
    PObject,
    PRuns,
    PTensor,
    PTensorRef,
    PTuple,
    kind_of,
    mapping_of,
    sequence_items,
)
from reshard_engine.pickles.rebuild import made_of_tensors
from reshard_engine.tensors.dtypes import BY_NAME, Dtype
from reshard_engine.tensors.shard_map import LogicalTensor, is_packed, packed_stride

Shape = tuple[int, ...]
_MOST = 1 << 62
_MOST_RANKS = 1 << 20
_MESH_TYPES = {"int32": "i", "int64": "q"}
_ANY = "a sharded tensor"
_COPY_AGAIN = "copy the files of this rank again from where they were written"

_SPEC = "torch.distributed.tensor._dtensor_spec"
_MESH = "torch.distributed._mesh_layout"
_DTENSOR = Global("torch.distributed.tensor", "DTensor")
_DTYPE_AT = {3: 2, 7: 1}
"""Which item of a specification's `tensor_meta` is the type, by their number. The first one is the shape.

Source: torch 2.4 `distributed/_tensor/placement_types.py` (`TensorMeta`: shape, stride, dtype); torch 2.1.2
`fx/passes/shape_prop.py` (`TensorMetadata`: shape, dtype, requires_grad, stride and three more).
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, in elements, and where the rank's file holds it."""

    offsets: Shape
    sizes: Shape
    at: int
    """Byte offset of the box's first element in the file."""
    stride: Shape | None
    """Strides of the box in the file, in elements; None if it is packed in row-major order."""
    place: tuple[object, ...]
    """A key that is equal for two parts of one file that are the same memory of the run."""
    sum: int | None
    """CRC-32 of the elements, where they are all of a record whose sum the file's directory has."""
    record: tuple[int, int] | None = None
    """Length in bytes and CRC-32 of the record that begins with the elements: FSDP2 pads storages at their ends."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Held:
    """The parts of one tensor in one rank's file."""

    dtype: Dtype
    shape: Shape
    """The shape of the whole tensor."""
    layout: str
    """The placement on all ranks, in words that every rank's file must agree on; `whole` for a plain tensor."""
    parts: tuple[Part, ...]
    """The boxes of this rank. A plain tensor is one box, and so is an empty shard."""
    coordinate: int | None = None
    """The place of this rank along the only axis that shards the tensor; None if there is no such single axis."""
    mesh: Mesh | None = None
    """The mesh of a DTensor."""
    dims: tuple[int | None, ...] = ()
    """For each axis of the mesh the dimension that it cuts; None for a replica, -1 for a strided cut."""

    @property
    def plain(self) -> bool:
        """True for a tensor that no mesh shards."""
        return self.layout == WHOLE


WHOLE = "whole"


class MeshForm(StrEnum):
    """The attributes that meshes have in pickles of several versions of torch."""

    AXES = "axes"
    """torch 2.13: a layout of axes."""
    LAYOUT = "layout"
    """torch 2.9 to 2.12: a layout of lengths and strides."""
    TENSOR = "tensor"
    """Earlier ones: a tensor of ranks."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh of ranks, and the place of one rank in it."""

    shape: Shape
    names: tuple[str, ...] | None
    coordinate: Shape
    ranks: int
    """Number of ranks in its list: more than it has itself if it is some axes of a larger mesh."""
    device: str
    """Type of the devices, such as `cuda`; empty if the file does not say."""
    form: MeshForm
    groups: tuple[str, ...] = ()
    """The name of this rank's process group for each axis; empty if the file does not say."""

    def __str__(self) -> str:
        axes = ", ".join(map(str, self.shape))
        return f"a mesh of ({axes}){'' if self.names is None else f' named {listed([*self.names])}'}"


@dataclass(frozen=True, slots=True)
class Placement:
    """One placement: `Shard` and `_StridedShard` have a dimension, `Replicate` has none."""

    kind: str
    dim: int | None = None
    split: int = 1
    """The number of cuts of its dimension that come before that of a `_StridedShard`."""

    def __str__(self) -> str:
        if self.dim is None:
            return self.kind
        return f"{self.kind}({self.dim})" if self.split == 1 else f"{self.kind}({self.dim}, {self.split})"


# Boxes.


def placed(
    dtype: Dtype, shape: Shape, mesh: Mesh, placements: Sequence[Placement], what: str
) -> tuple[Held, Shape, Shape]:
    """Read a tensor's placement on all ranks, without its parts, and the offsets and sizes of this rank's box.

    Raises:
        SourceError: `source.unsupported` for cuts of which nothing proves where they lie.
    """
    offsets, sizes = _box(shape, mesh, placements, what)
    cutting = [c for p, c in zip(placements, mesh.coordinate, strict=True) if p.dim is not None]
    layout = f"{', '.join(map(str, placements))} on {mesh}"
    single = cutting[0] if len(cutting) == 1 and placements[-1].dim is not None else None
    dims = tuple(p.dim if p.dim is None or p.kind == "Shard" else -1 for p in placements)
    return Held(dtype, shape, layout, (), single, mesh, dims), offsets, sizes


def _box(shape: Shape, mesh: Mesh, placements: Sequence[Placement], what: str) -> tuple[Shape, Shape]:
    """Offsets and sizes of this rank's box: the axes cut in order, those of `_StridedShard` after later ones."""
    offsets, sizes = [0] * len(shape), list(shape)
    for axis in _in_order(shape, mesh, placements, what):
        dim = placements[axis].dim
        if dim is None:
            continue
        length, count, place = sizes[dim], mesh.shape[axis], mesh.coordinate[axis]
        chunk = -(-length // count)
        begin, end = min(length, place * chunk), min(length, (place + 1) * chunk)
        offsets[dim] += begin
        sizes[dim] = end - begin
    return tuple(offsets), tuple(sizes)


def _in_order(shape: Shape, mesh: Mesh, placements: Sequence[Placement], what: str) -> list[int]:
    """The axes of a mesh in the order in which they cut.

    FSDP cuts what tensor parallelism has cut: its axis comes first in the mesh and second in time, which
    `_StridedShard` says by the number of cuts before it. That torch takes the same boxes is proven where all cuts
    are even; where they are not, torch itself puts such tensors together by another rule.
    """
    order = [i for i, p in enumerate(placements) if p.kind != "_StridedShard"]
    for axis, placement in enumerate(placements):
        if placement.kind != "_StridedShard":
            continue
        dim = placement.dim
        same = [i for i, p in enumerate(placements) if p.dim == dim]
        later = [i for i in same if i > axis]
        parts = prod(mesh.shape[i] for i in same)
        even = dim is not None and shape[dim] % parts == 0
        alone = len(same) == len(later) + 1 and all(placements[i].kind == "Shard" for i in later)
        if not even or not alone or placement.split != prod(mesh.shape[i] for i in later):
            text = f"{listed(list(map(str, placements)))} of {shape} on {mesh}"
            raise SourceError(
                "source.unsupported",
                f"{what} is {text}: such cuts are read where they are even, and where _StridedShard "
                "counts all later cuts of its dimension",
                fix="save with torch.distributed.checkpoint, whose files name each box",
            )
        order.append(axis)
    return order


# The file of one rank.


@dataclass(slots=True)
class RankFile:
    """One parsed file of one rank. Meshes are shared by all tensors of a file, so each is read once."""

    parsed: TorchFile
    rank: int
    """The rank in the file's name."""
    world: int
    """The number of ranks, by the files' names."""
    name: str = field(init=False)
    """The file's name, for messages."""
    _meshes: dict[int, Mesh] = field(default_factory=dict[int, Mesh])

    def __post_init__(self) -> None:
        """Make the name safe once: a file has a thousand tensors."""
        self.name = printable(self.parsed.file.name)

    def held(self, node: Node, what: str) -> Held | None:
        """Read the file's parts of a tensor; None for a value that is no tensor.

        Args:
            node: The value.
            what: Its name in messages, already safe.

        Raises:
            SourceError: `checkpoint.malformed` where the file contradicts itself, `checkpoint.mixed` for a file of
                another rank or world, `source.unsupported` for placements that are not read.
        """
        if isinstance(node, PTensor):
            return Held(BY_NAME[node.dtype], node.shape, WHOLE, (self._part(node, (0,) * len(node.shape)),))
        made = made_of_tensors(node)
        if made is None:
            return None
        if made.kind.dotted in DTENSORS:
            return self._dtensor(node, made.shape, BY_NAME[made.dtype], what)
        if made.kind.dotted == SHARDED_TENSOR:
            return self._sharded_tensor(node, made.shape, BY_NAME[made.dtype], what)
        raise SourceError(
            "source.unsupported",
            f"{self.name}: {what} is a {printable(made.kind.dotted)}, a tensor that is made of others",
            fix="save it as a plain tensor (dequantized), or name the directory of an older save",
        )

    def _bad(self, what: str, text: str) -> SourceError:
        return SourceError("checkpoint.malformed", f"{self.name}: {what}: {text}", fix=_COPY_AGAIN)

    def _part(self, tensor: PTensor, offsets: Shape) -> Part:
        stride = None if is_packed(tensor.shape, tensor.stride) else tensor.stride
        if not tensor.numel:
            return Part(offsets, tensor.shape, 0, None, place_of(tensor), None)
        record, at = self.parsed.storage_extent(tensor.storage), self.parsed.tensor_offset(tensor)
        length = tensor.numel * BY_NAME[tensor.dtype].itemsize_bytes
        whole = stride is None and (record.offset, record.length_bytes) == (at, length)
        begins = stride is None and record.offset == at
        known = (record.length_bytes, record.crc32) if begins and record.crc32 is not None else None
        return Part(offsets, tensor.shape, at, stride, place_of(tensor), record.crc32 if whole else None, known)

    def ranks_said(self) -> int | None:
        """The number of ranks that the file's first sharded tensor names; None if none is sharded.

        Raises:
            SourceError: `checkpoint.malformed`.
        """
        for node in walk(self.parsed.root):
            made = made_of_tensors(node) if isinstance(node, PObject) else None
            if made is None or not isinstance(node, PObject):
                continue
            if made.kind.dotted == SHARDED_TENSOR:
                state = self._items(node.args.items[3], _ANY)
                world = _attributes_of(state[2]).get("global_world_size") if len(state) == 5 else None
                return world if type(world) is int and 0 < world <= _MOST_RANKS else None
            if made.kind.dotted in DTENSORS:
                spec = _attributes_of(_attributes(node.args.items[3]).get("_spec"))
                mesh = _attributes_of(spec.get("mesh"))
                ranks = self._rank_map(mesh, _ANY) if "_rank_map" in mesh else self._numbers(mesh.get("mesh"), _ANY)
                return 1 + max(ranks)
        return None

    # DTensors.

    def _dtensor(self, node: PObject, shape: Shape, dtype: Dtype, what: str) -> Held:
        state = _attributes(node.args.items[3])
        local, spec = state.get("_local_tensor"), _attributes_of(state.get("_spec"))
        if not isinstance(local, PTensor) or not spec:
            raise self._bad(what, f"the local tensor of a DTensor is {kind_of(local)}")
        self._check_meta(spec.get("tensor_meta"), shape, dtype, what)
        if local.dtype != dtype.name:
            raise self._bad(what, f"the DTensor is {dtype.name}, and its local tensor {local.dtype}")
        mesh = self._mesh(spec.get("mesh"), what)
        placements = [self._placement(n, len(shape), what) for n in self._items(spec.get("placements"), what)]
        if len(placements) != len(mesh.shape):
            raise self._bad(what, f"{counted(len(placements), 'placement')} on {mesh}")
        self._check_order(spec.get("shard_order"), placements, what)
        found, offsets, sizes = placed(dtype, shape, mesh, placements, f"{self.name}: {what}")
        if local.shape != sizes:
            text = (
                f"{listed(list(map(str, placements)))} of {shape} at {mesh.coordinate} of {mesh} is {sizes}, and the "
                f"local tensor is {local.shape}"
            )
            raise self._bad(what, text)
        return replace(found, parts=(self._part(local, offsets),))

    def _check_meta(self, meta: Node, shape: Shape, dtype: Dtype, what: str) -> None:
        """Refuse a specification whose shape or type is another one than the tensor's."""
        if meta is None:
            return
        items = meta.args.items if isinstance(meta, PObject) else ()
        at = _DTYPE_AT.get(len(items))
        said = None if at is None or not items else self._shape(items[0], what)
        kind = None if at is None else items[at]
        if said != shape or not isinstance(kind, Global) or kind.dotted != f"torch.{dtype.name}":
            raise self._bad(what, f"the DTensor is {dtype.name} {shape}, and its specification says {said}")

    def _check_order(self, order: Node, placements: list[Placement], what: str) -> None:
        """Refuse an order of cuts that is not that of the mesh's axes: nothing here proves where its boxes lie.

        Source: torch 2.13.0 `distributed/tensor/_dtensor_spec.py` (`ShardOrderEntry`): None with `_StridedShard`.
        """
        for entry in [] if order is None else self._items(order, what):
            items = entry.args.items if isinstance(entry, PObject) else ()
            axes = self._items(items[1], what) if len(items) == 2 else []
            by_axis = [i for i, p in enumerate(placements) if p.dim is not None and items and p.dim == items[0]]
            if axes != by_axis:
                said = listed(list(map(str, placements)))
                text = f"it is cut over the mesh's axes {axes}, and its placements are {said}"
                raise SourceError(
                    "source.unsupported",
                    f"{self.name}: {what}: {text}",
                    fix="redistribute the tensor to placements in the order of the mesh, and save again",
                )

    def _placement(self, node: Node, dims: int, what: str) -> Placement:
        cls = node.cls if isinstance(node, PObject) else None
        kind = cls.name if isinstance(cls, Global) and cls.module.endswith(".placement_types") else ""
        if kind == "Replicate":
            return Placement(kind)
        if kind in ("Shard", "_StridedShard"):
            state = _attributes_of(node)
            dim, split = state.get("dim"), state.get("split_factor", 1)
            if type(dim) is not int or not 0 <= dim < dims or type(split) is not int or not 1 <= split < _MOST_RANKS:
                raise self._bad(what, f"{kind} of dimension {printable(str(dim))} of a tensor of {dims} dimensions")
            return Placement(kind, dim, split)
        raise SourceError(
            "source.unsupported",
            f"{self.name}: {what} has the placement {kind or kind_of(node)}, and only Shard, _StridedShard and "
            "Replicate say where elements lie",
            fix="redistribute the tensor to Shard or Replicate, and save again",
        )

    # Meshes.

    def _mesh(self, node: Node, what: str) -> Mesh:
        found = self._meshes.get(id(node))
        if found is None:
            found = self._meshes[id(node)] = self._read_mesh(node, what)
        return found

    def _read_mesh(self, node: Node, what: str) -> Mesh:
        state = _attributes_of(node)
        said = state.get("_coordinate_on_dim")
        names = state.get("_mesh_dim_names", state.get("mesh_dim_names"))
        words = None if names is None else tuple(str(n) for n in self._items(names, what))
        device, form = state.get("_device_type", state.get("device_type")), MeshForm.TENSOR
        if "_layout" in state and "_rank_map" in state:
            ranks = self._rank_map(state, what)
            shape, coordinate = self._of_layout(state.get("_layout"), ranks, state.get("_rank"), what)
            form = MeshForm.AXES if "axes" in _attributes_of(state.get("_layout")) else MeshForm.LAYOUT
        elif isinstance(state.get("mesh"), PTensor):
            shape = state["mesh"].shape
            ranks = self._numbers(state["mesh"], what)
            if self.rank not in ranks:
                raise self._other_rank(f"its mesh is of the ranks {listed(list(map(str, ranks)))}")
            coordinate = unraveled(ranks.index(self.rank), shape)
        else:
            raise SourceError(
                "source.unsupported",
                f"{self.name}: {what} lies on a device mesh with the attributes {listed(sorted(map(str, state)))}, "
                "whose form is not known",
                fix="report the torch version that wrote it; save with torch.distributed.checkpoint until then",
            )
        if said is None or tuple(self._items(said, what)) != coordinate:
            places = None if said is None else tuple(self._items(said, what))
            text = f"rank {self.rank} is at {coordinate} of its mesh, and the mesh says {places}"
            raise self._other_rank(text)
        if beyond := [r for r in ranks if r >= self.world]:
            raise SourceError(
                "checkpoint.incomplete",
                f"{self.name} is of a run of {max(beyond) + 1} ranks or more, and the directory holds files of "
                f"{self.world}",
                fix="copy the files of all ranks into one directory: each node may have kept its own",
            )
        if len(set(ranks)) != len(ranks):
            raise self._bad(what, "a rank is in its mesh twice")
        said = state.get("_dim_group_names")
        groups = tuple(str(n) for n in self._items(said, what)) if isinstance(said, PList) else ()
        device = device if isinstance(device, str) else ""
        return Mesh(shape, words, coordinate, len(ranks), device, form, groups)

    def _other_rank(self, text: str) -> SourceError:
        return SourceError(
            "checkpoint.mixed",
            f"{self.name} was not written by rank {self.rank} of {self.world}: {text}",
            fix="give the files the names that they were saved under: a rank's number is part of its files' names",
        )

    def _rank_map(self, state: Mapping[str, Node], what: str) -> list[int]:
        ranks = self._numbers(state["_rank_map"], what)
        flat = state.get("_flatten_rank_map")
        if flat is not None and self._items(flat, what) != ranks:
            raise self._bad(what, "its mesh lists its ranks twice, differently")
        return ranks

    def _numbers(self, tensor: Node, what: str) -> list[int]:
        """The numbers in a small tensor of ranks, which is no tensor of the model."""
        form = _MESH_TYPES.get(tensor.dtype) if isinstance(tensor, PTensor) else None
        if form is None or not 0 < tensor.numel <= _MOST_RANKS or not is_packed(tensor.shape, tensor.stride):
            raise self._bad(what, "its mesh is not a tensor of integers")
        size = tensor.numel * BY_NAME[tensor.dtype].itemsize_bytes
        data = self.parsed.file.read(self.parsed.tensor_offset(tensor), size)
        return list(struct.unpack(f"<{tensor.numel}{form}", data))

    def _of_layout(self, layout: Node, ranks: list[int], rank: Node, what: str) -> tuple[Shape, Shape]:
        """The shape of a mesh, and the coordinates of this rank.

        An axis is a list of lengths and strides over the list of ranks. A mesh of some axes of a larger one has less
        axes than its list of ranks; the rank itself says which part it is.
        """
        if rank != self.rank:
            raise self._other_rank(f"its mesh says that rank {printable(str(rank), max_chars=40)} wrote it")
        if self.rank not in ranks:
            raise self._other_rank(f"its mesh is of the ranks {listed(list(map(str, ranks)))}")
        at = ranks.index(self.rank)
        axes = self._axes(_attributes_of(layout), what)
        leaves = sorted((s, n) for axis in axes for n, s in axis)
        fits = all(high[0] % (low[0] * low[1]) == 0 for low, high in pairwise(leaves))
        if not fits or (leaves and leaves[-1][0] * leaves[-1][1] > len(ranks)):
            raise self._bad(what, f"the axes of its mesh do not fit a list of {counted(len(ranks), 'rank')}")
        coordinate: list[int] = []
        for axis in axes:
            place = 0
            for length, stride in axis:
                place = place * length + at // stride % length
            coordinate.append(place)
        return tuple(prod(n for n, _ in axis) for axis in axes), tuple(coordinate)

    def _axes(self, layout: Mapping[str, Node], what: str) -> list[list[tuple[int, int]]]:
        """For each axis of a mesh its lengths and strides. An axis of one rank has none."""
        if "axes" in layout:
            held = [_attributes_of(axis) for axis in self._items(layout["axes"], what)]
            pairs = [(a.get("shape"), a.get("stride")) for a in held]
        else:
            pairs = list(
                zip(self._items(layout.get("shape"), what), self._items(layout.get("stride"), what), strict=False)
            )
        found: list[list[tuple[int, int]]] = []
        for lengths, strides in pairs:
            one = [[n] if type(n) is int else self._items(n, what) for n in (lengths, strides)]
            if len(one[0]) != len(one[1]) or not all(
                type(n) is int and 0 < n < _MOST_RANKS for n in (*one[0], *one[1])
            ):
                raise self._bad(what, "an axis of its mesh has other lengths than strides")
            found.append(list(zip(*one, strict=True)))
        return found

    # ShardedTensors.

    def _sharded_tensor(self, node: PObject, shape: Shape, dtype: Dtype, what: str) -> Held:
        state = self._items(node.args.items[3], what)
        if len(state) != 5:
            raise self._bad(what, f"a ShardedTensor with {len(state)} parts of state")
        shards, metadata, group = self._items(state[0], what), _attributes_of(state[1]), _attributes_of(state[2])
        ranks, world = group.get("global_rank"), group.get("global_world_size")
        if ranks != self.rank:
            raise self._other_rank(f"its group says that rank {printable(str(ranks), max_chars=40)} wrote it")
        if world != self.world:
            raise SourceError(
                "checkpoint.incomplete",
                f"{self.name} is of a run of {printable(str(world), max_chars=40)} ranks, and the directory holds "
                f"files of {self.world}",
                fix="copy the files of all ranks of one save into one directory",
            )
        if self._shape(metadata.get("size"), what) != shape:
            raise self._bad(what, f"the tensor is {shape}, and its metadata says another size")
        boxes = [self._shard_box(n, len(shape), what) for n in self._items(metadata.get("shards_metadata"), what)]
        parts: list[Part] = []
        for shard in shards:
            held = _attributes_of(shard)
            box, tensor = self._shard_box(held.get("metadata"), len(shape), what), held.get("tensor")
            if box not in boxes:
                raise self._bad(what, f"its shard at {box[0]} is not one of those that the metadata lists")
            if not isinstance(tensor, PTensor) or tensor.shape != box[1] or tensor.dtype != dtype.name:
                raise self._bad(what, f"its shard at {box[0]} is {box[1]}, and the local tensor is another one")
            parts.append(self._part(tensor, box[0]))
        # Each rank lists the shards of all ranks, so the words are a digest: texts would take ranks times ranks.
        digest = hashlib.sha256(repr(boxes).encode()).hexdigest()[:12]
        return Held(dtype, shape, f"{counted(len(boxes), 'shard')}, {digest}", tuple(parts))

    def _shard_box(self, node: Node, dims: int, what: str) -> tuple[Shape, Shape]:
        state = _attributes_of(node)
        offsets, sizes = (self._shape(state.get(key), what) for key in ("shard_offsets", "shard_sizes"))
        if len(offsets) != dims or len(sizes) != dims:
            raise self._bad(what, f"a shard with {len(offsets)} offsets of a tensor of {dims} dimensions")
        return offsets, sizes

    # Values.

    def _items(self, node: Node, what: str) -> list[Node]:
        if isinstance(node, PTuple):
            return list(node.items)
        return sequence_items(node, what=f"{self.name}: {what}")

    def _shape(self, node: Node, what: str) -> Shape:
        if isinstance(node, PObject) and isinstance(node.cls, Global) and node.cls.dotted == "torch.Size":
            node = node.args.items[0] if node.args.items else PTuple()
        found = self._items(node, what)
        if not all(type(n) is int and 0 <= n < _MOST for n in found):
            raise self._bad(what, "a shape with lengths that are no counts")
        return tuple(found)


def unraveled(number: int, shape: Shape) -> Shape:
    """The coordinates of the element with this number in row-major order."""
    found: list[int] = []
    for length in reversed(shape):
        found.append(number % length)
        number //= length
    return tuple(reversed(found))


def _attributes_of(node: Node) -> dict[str, Node]:
    """The attributes of an object of a class; none for any other value."""
    return _attributes(node.state) if isinstance(node, PObject) and node.has_state else {}


def _attributes(state: Node) -> dict[str, Node]:
    """The attributes in the state of an object: a dict, or a pair of one and of slots."""
    dicts = [state] if isinstance(state, PDict) else list(state.items) if isinstance(state, PTuple) else []
    found: dict[str, Node] = {}
    for part in dicts:
        if isinstance(part, PDict):
            found |= {k: v for k, v in zip(part.pairs[::2], part.pairs[1::2], strict=True) if type(k) is str}
    return found


# DTensors as inert data.


def device_of(said: str | None, mesh: Mesh | None) -> str:
    """The type of the run's devices, which pickled meshes name.

    Raises:
        RequestError: `request.invalid` if nobody says it.
    """
    device = said or ("" if mesh is None else mesh.device)
    if not device.isascii() or not device.isalpha() or len(device) > 16:
        raise RequestError(
            "request.invalid",
            "the files name the type of the run's devices, and the source does not say it",
            fix="--device-type cuda for a run on GPUs",
        )
    return device


def require_rows(mesh: Mesh | None, other_cuts: Sequence[str]) -> None:
    """Refuse a source whose run cuts tensors in another way than rows, or whose torch pickles other meshes.

    Args:
        mesh: The mesh of the run that saved the source; None for a run without one, or if nothing says it.
        other_cuts: Names of tensors that are cut in another way than FSDP cuts rows.

    Raises:
        RequestError: `request.unsatisfiable`.
    """
    if mesh is None:
        return
    if other_cuts or len(mesh.shape) > 2 or mesh.ranks != prod(mesh.shape):
        cut = f"; {listed([printable(n) for n in other_cuts])} are cut in another way" if other_cuts else ""
        raise RequestError(
            "request.unsatisfiable",
            f"the run's tensors lie on {printable(str(mesh))} among {mesh.ranks} ranks, and files are written for FSDP "
            f"alone, which cuts rows{cut}",
            fix="--to dcp loads on any mesh",
        )
    if mesh.form is not MeshForm.AXES:
        raise RequestError(
            "request.unsatisfiable",
            "the source's torch pickles meshes in an older form, and files are written for torch 2.13 and newer",
            fix="--to dcp loads with any version of torch",
        )


def mesh_shape(world: int, said: int | None, mesh: Mesh | None) -> Shape:
    """The shape of the mesh, as verl makes it of `fsdp_size`: one axis if one copy fills all ranks.

    Args:
        world: Number of ranks.
        said: The user's word on how many share one copy.
        mesh: The source's mesh, if it has one.

    Raises:
        RequestError: `request.unsatisfiable` for ranks that are no multiple of those of a copy.

    Source: verl 0.9.1 `workers/engine/fsdp/utils.py` (`create_device_mesh`).
    """
    own = mesh.shape[-1] if mesh is not None and len(mesh.shape) == 2 else None
    size = said or own or world
    if size >= world:
        return (world,)
    if world % size:
        source = "" if said else " as in the source"
        raise RequestError(
            "request.unsatisfiable",
            f"{world} ranks are no multiple of the {size} ranks that share one copy{source}",
            fix=f"--dp {world // size * size}, or the run's fsdp_size on {world} ranks: --fsdp-size {world}",
        )
    return world // size, size


@dataclass(frozen=True)
class ProcessGroups:
    """The names of the process groups of a target's mesh, as far as the source's mesh shows them."""

    shape: Shape
    """The shape of the target's mesh."""
    mesh: Mesh | None
    """The first rank's mesh in the source."""

    @cached_property
    def first(self) -> int | None:
        """The number of the first process group of a mesh of two axes; None if the source does not show it.

        torch numbers process groups as they are made: those of the first axis, one for each rank of a copy, then those
        of the second. The run makes as many groups before them as the source's did.

        Source: torch 2.13.0 `distributed/device_mesh.py` (`_init_process_groups`), `distributed/distributed_c10d.py`
        (`_process_group_name`).
        """
        mesh = self.mesh
        if mesh is None or len(mesh.shape) != 2 or len(mesh.groups) != 2 or any(mesh.coordinate):
            return None
        first, second = (int(n) if n.isdecimal() and len(n) < 10 else -1 for n in mesh.groups)
        return first if first >= 0 and second - first == mesh.shape[1] else None

    def names(self, place: Sequence[int]) -> tuple[str, ...] | None:
        """The names of the process groups of a rank; None if nothing shows them, and its mesh has none then.

        A mesh of one axis is on the group of the whole world, which torch calls `0` if no file names another one.
        """
        mesh = self.mesh
        if len(self.shape) == 1:
            return mesh.groups if mesh is not None and len(mesh.groups) == len(mesh.shape) == 1 else ("0",)
        first = self.first
        return None if first is None else (str(first + place[1]), str(first + self.shape[1] + place[0]))


@dataclass(frozen=True, slots=True)
class TargetMesh:
    """The mesh of the ranks that load files: all ranks, or replicas and the ranks that share one copy."""

    shape: Shape
    names: tuple[str, ...] | None
    device: str
    """Type of the run's devices, such as `cuda`."""
    groups: Callable[[Sequence[int]], tuple[str, ...] | None]
    """The names of a rank's process groups, given its place on the mesh; None for a mesh without them."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.shape)


class TensorsOfRank:
    """Makes the tensors of one rank of FSDP2: whole ones, and DTensors whose rows the last axis of a mesh cuts."""

    def __init__(self, mesh: TargetMesh, rank: int, tensors: Sequence[LogicalTensor], plain: frozenset[int]) -> None:
        """Prepare what all tensors of a rank share.

        Args:
            mesh: The mesh of all ranks.
            rank: The rank.
            tensors: Those of the shard map.
            plain: Numbers of the weights that the run keeps whole.
        """
        self._of, self._rank, self._tensors, self._plain = mesh, rank, tensors, plain
        self._layout = _call("torch.serialization", "_get_layout", "torch.strided")
        self._device = _call("torch", "device", "cpu")
        axes, whole = len(mesh.shape), mesh.shape[-1]
        self._place, self._ranks = rank % whole, whole
        kinds = "torch.distributed.tensor.placement_types"
        shard = _object(kinds, "Shard", {"dim": 0})
        self._placements = PTuple((shard,) if axes == 1 else (_object(kinds, "Replicate", {}), shard))
        self._order = PTuple((_made(_SPEC, "ShardOrderEntry", 0, PTuple((axes - 1,))),))
        self._mesh = self._mesh_node()

    def whole(self, number: int) -> Node:
        """A tensor that each rank holds whole."""
        return PTensorRef(number)

    def parameter(self, number: int, weight: int | None) -> Node:
        """The shard of a parameter or of one of its states; whole where the run keeps the parameter whole.

        Args:
            number: The tensor.
            weight: The parameter's weight, by which its run knows it.
        """
        return self.whole(number) if not self.is_cut(weight) else self._dtensor(self._tensors[number], number)

    def is_cut(self, weight: int | None) -> bool:
        """True if the mesh cuts a parameter or one of its states: all but those that the run keeps whole."""
        return weight not in self._plain

    def run(self, number: int) -> tuple[Shape, int, int]:
        """The shape of this rank's shard of a tensor, and the first and the last of its elements, the latter excluded.

        Raises:
            RequestError: `request.unsatisfiable` for a tensor without dimensions.
        """
        shape = self._tensors[number].shape
        if not shape:
            raise RequestError(
                "request.unsatisfiable",
                f"{printable(self._tensors[number].fqn)} has no dimensions, and FSDP2 shards no such parameter",
                fix="write the weights alone: --to safetensors",
            )
        rows, row = shape[0], prod(shape[1:])
        chunk = -(-rows // self._ranks)
        first, last = (min(rows, place * chunk) for place in (self._place, self._place + 1))
        return (last - first, *shape[1:]), first * row, last * row

    def _dtensor(self, tensor: LogicalTensor, number: int) -> Node:
        """A DTensor whose rows are dealt as `torch.chunk` deals them.

        Source: torch 2.13.0 `distributed/tensor/placement_types.py` (`Shard.local_shard_size_and_offset`).
        """
        stride, dtype = packed_stride(tensor.shape), Global("torch", tensor.dtype.name)
        local, begin, end = self.run(number)
        part: Node = PRuns(tensor.dtype.name, local, ((number, begin, end),))
        part = part if prod(local) else PLiteral(tensor.dtype.name, local, b"")
        size = PObject("reduce", Global("torch", "Size"), PTuple((PTuple(tensor.shape),)))
        spec = _object(
            _SPEC,
            "DTensorSpec",
            {
                "mesh": self._mesh,
                "placements": self._placements,
                "tensor_meta": _made(_SPEC, "TensorMeta", size, PTuple(stride), dtype),
                "shard_order": self._order,
                "use_strided_shard_as_shard_order": False,
                "_hash": None,
            },
        )
        made = PTuple((_DTENSOR, dtype, PTuple(tensor.shape), PTuple(stride), 0, self._layout, self._device, False))
        state = PTuple((None, mapping_of({"_local_tensor": part, "_spec": spec})))
        wrapper = Global("torch._utils", "_rebuild_wrapper_subclass")
        args = PTuple((wrapper, _DTENSOR, made, state))
        return PObject("reduce", Global("torch._tensor", "_rebuild_from_type_v2"), args)

    def _mesh_node(self) -> Node:
        """The mesh as this rank knows it."""
        target, world = self._of, self._of.world
        ranks = tuple(range(world))
        strides = (1,) if len(target.shape) == 1 else (target.shape[1], 1)
        axes = [_axis(length, stride) for length, stride in zip(target.shape, strides, strict=True)]
        place = (self._rank,) if len(target.shape) == 1 else divmod(self._rank, target.shape[1])
        names = target.groups(place)
        groups: dict[str | int, Node] = {} if names is None else {"_dim_group_names": PList([*names])}
        return _object(
            "torch.distributed.device_mesh",
            "DeviceMesh",
            {
                "_device_type": target.device,
                "_layout": _object(_MESH, "_MeshLayout", {"axes": PTuple(tuple(axes))}),
                "_rank_map": PLiteral("int32", (world,), struct.pack(f"<{world}i", *ranks)),
                "_mesh_dim_names": None if target.names is None else PTuple(target.names),
                "_root_mesh": None,
                "_flatten_rank_map": PTuple(ranks),
                "_thread_id": None,
                "_flatten_mapping": mapping_of({}),
                **groups,
                "_rank": self._rank,
                "_coordinate_on_dim": PTuple(place),
                "_hash": None,
            },
        )


def _axis(length: int, stride: int) -> PObject:
    """An axis of a mesh; one of a single rank has no length, as torch joins axes."""
    lengths, strides = ((length,), (stride,)) if length > 1 else ((), ())
    return _object(_MESH, "_FlatLayout", {"shape": PTuple(lengths), "stride": PTuple(strides)})


def _call(module: str, name: str, text: str) -> PObject:
    return PObject("reduce", Global(module, name), PTuple((text,)))


def _made(module: str, name: str, *args: Node) -> PObject:
    return PObject("newobj", Global(module, name), PTuple(args))


def _object(module: str, name: str, state: dict[str | int, Node]) -> PObject:
    return PObject("newobj", Global(module, name), PTuple(), state=mapping_of(state), has_state=True)
