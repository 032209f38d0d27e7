"""Lays out a tree and its tensors as one torch archive."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from math import prod

from reshard.models import OpaquePolicy
from reshard_engine.checkpoint import Scalar
from reshard_engine.containers.zip_layout import StorageRecord, zip_template
from reshard_engine.pickles.emit import emit_pickle
from reshard_engine.pickles.nodes import Node, PLiteral, PRuns, PRunsPart, PStorage, PTensor, PTensorRef
from reshard_engine.pickles.rewrite import rewrite
from reshard_engine.tensors.dtypes import BY_NAME, UINT8, Dtype
from reshard_engine.tensors.layout import FileTemplate
from reshard_engine.tensors.shard_map import ShardMap, packed_stride

_REHEARSED: ContextVar[bool] = ContextVar("rehearsed", default=False)


@contextmanager
def dry_run() -> Generator[None]:
    """Make `tree_template` return empty archives within the block: most of a layout's time goes into the real ones.

    Writers refuse the same sources as outside of the block, and only that matters to a dry_run.
    """
    token = _REHEARSED.set(True)
    try:
        yield
    finally:
        _REHEARSED.reset(token)


@cache
def _empty_archive() -> FileTemplate:
    return zip_template("dry_run", emit_pickle(None), [])


def tree_template(
    root: str, node: Node, shard_map: ShardMap, *, opaque: OpaquePolicy
) -> tuple[FileTemplate, tuple[int, ...]]:
    """The template of an archive whose value is `node`, and the tensors of its slots.

    Each tensor gets a storage of its own, exactly as long as it is; two references to one tensor
    share it, so that tied weights stay tied, and so do the parts of one whole.

    Args:
        root: Root name inside the archive.
        node: The value; its tensors are `PTensorRef`s, or `PRuns` of several, or parts of these.
        shard_map: Where the references point to.
        opaque: The policy for objects whose classes are not on the allow-list.

    Raises:
        SourceError: `pickle.forbidden_global` under the policy `refuse`.
    """
    if _REHEARSED.get():
        return _empty_archive(), ()
    slots: dict[int, int] = {}
    placed_tensors: dict[PTensorRef | PRuns, PTensor] = {}
    storages: list[StorageRecord] = []

    def slot(number: int) -> int:
        return slots.setdefault(number, len(slots))

    wholes: dict[int, PTensor] = {}

    def part(ref: PRunsPart) -> PTensor:
        # Keys are identities: hashing a tensor by its runs for each parameter would take quadratic time.
        whole = wholes.get(id(ref.whole)) or wholes.setdefault(id(ref.whole), placed(ref.whole))
        return PTensor(whole.storage, whole.dtype, ref.offset, ref.shape, packed_stride(ref.shape))

    def placed(ref: PTensorRef | PLiteral | PRuns | PRunsPart) -> PTensor:
        if isinstance(ref, PRunsPart):
            return part(ref)
        key = str(len(storages))
        if isinstance(ref, PLiteral):
            storages.append(StorageRecord(key, (), ref.data))
            return output_tensor(key, BY_NAME[ref.dtype], ref.shape)
        if ref in placed_tensors:
            return placed_tensors[ref]
        if isinstance(ref, PTensorRef):
            stored = shard_map.tensors[ref.index]
            dtype, shape, runs = stored.dtype, stored.shape, ((ref.index, 0, stored.numel),)
        else:
            dtype, shape, runs = BY_NAME[ref.dtype], ref.shape, ref.runs
        storages.append(StorageRecord(key, tuple((slot(t), begin, end, dtype) for t, begin, end in runs)))
        placed_tensors[ref] = output_tensor(key, dtype, shape)
        return placed_tensors[ref]

    tree = rewrite(node, placed, lambda foreign: None if opaque is OpaquePolicy.DROP else foreign)
    pickle = emit_pickle(tree, keep_foreign=opaque is OpaquePolicy.KEEP)
    return zip_template(root, pickle, storages), tuple(slots)


def output_tensor(key: str, dtype: Dtype, shape: tuple[int, ...]) -> PTensor:
    """A packed tensor over a storage of its own."""
    numel = prod(shape)
    untyped = dtype.storage_class is None
    storage = PStorage(
        UINT8.name if untyped else dtype.name, key, "cpu", numel * dtype.itemsize_bytes if untyped else numel, untyped
    )
    return PTensor(storage, dtype.name, 0, shape, packed_stride(shape))


def scalar_node(scalar: Scalar) -> Node:
    """A number as a value of a tree, of the kind that the source had: Python number or one-element tensor."""
    return scalar.value if scalar.dtype is None else PLiteral(scalar.dtype.name, scalar.shape, scalar.raw)


def single_tensor_template(
    root: str,
    dtype: Dtype,
    shape: tuple[int, ...],
    wrap: Callable[[Node], Node],
    *,
    cache: dict[object, FileTemplate],
    kind: object = None,
) -> FileTemplate:
    """The template of an archive that holds one tensor, in the value that `wrap` makes around it.

    Cached by shape, and by what the caller says of the value around the tensor.
    """
    key = (root, dtype.name, shape, kind)
    found = cache.get(key)
    if found is None:
        tensor = output_tensor("0", dtype, shape)
        pickle = emit_pickle(wrap(tensor))
        found = zip_template(root, pickle, [StorageRecord("0", ((0, 0, tensor.numel, dtype),))])
        cache[key] = found
    return found
