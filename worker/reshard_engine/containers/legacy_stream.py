"""Legacy `torch.save` streams: five pickles, then each storage as an element count and its bytes.

DeepSpeed's FAST writer writes the same form; its part files are byte ranges of one such stream.

Source: torch 2.13.0 `torch/serialization.py` (`_legacy_save`, `_legacy_load`, MAGIC_NUMBER),
deepspeed 0.19.8 `io/fast_file_writer.py` (`_save_storage_list`).
"""

from __future__ import annotations

from collections.abc import Iterator

from reshard.errors import SourceError, printable
from reshard_engine.containers.source_file import CachedFile
from reshard_engine.pickles.limits import PickleLimits
from reshard_engine.pickles.nodes import Node, PDict, PList, PObject, PSet, PStorage, PTensor, PTuple, mapping_items
from reshard_engine.pickles.policy import OpaqueLedger
from reshard_engine.pickles.vm import parse_pickle
from reshard_engine.tensors.dtypes import BY_NAME

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
_FIRST_READ_BYTES = 256 << 10
_MAX_STORAGES = 1_000_000


def read_legacy_stream(
    cached: CachedFile, ledger: OpaqueLedger, limits: PickleLimits
) -> tuple[Node, dict[str, tuple[int, int]]]:
    """Read the value, and (offset, bytes) of each storage by key.

    Raises:
        SourceError: `source.unknown_kind` if the file is a pickle but not a torch stream, `pickle.*`,
            `checkpoint.incomplete` if the file ends inside a storage.
    """
    name = printable(cached.file.name)
    at = 0
    values: list[Node] = []
    for number in range(5):
        value, at = _next_pickle(cached, at, ledger, limits)
        values.append(value)
        if number == 0 and value != MAGIC_NUMBER:
            raise SourceError(
                "source.unknown_kind",
                f"{name} is a pickle, but not a torch stream",
                fix="name a file of torch.save, or the checkpoint's directory",
            )
        if number == 1 and value != PROTOCOL_VERSION:
            raise SourceError(
                "pickle.malformed", f"{name}: torch stream protocol {printable(str(value), max_chars=40)}"
            )
    system = mapping_items(values[2], what="sys_info")
    if system.get("little_endian") is not True:
        raise SourceError(
            "zip.bad_record",
            f"{name} was not written on a little-endian machine",
            fix="save it again on a little-endian machine",
        )
    keys = values[4].items if isinstance(values[4], PList) else None
    well_formed = keys is not None and len(keys) <= _MAX_STORAGES and all(type(k) is str for k in keys)
    if keys is None or not well_formed or len(set(keys)) != len(keys):
        raise SourceError("pickle.malformed", f"{name}: the list of storage keys is malformed")
    return values[3], _storage_offsets(cached, at, keys, storages_in(values[3]))


def _next_pickle(cached: CachedFile, at: int, ledger: OpaqueLedger, limits: PickleLimits) -> tuple[Node, int]:
    # The length of a pickle is known only after reading it: read a little first, then eight times as much.
    count = _FIRST_READ_BYTES
    while True:
        available = min(count, cached.size_bytes - at)
        try:
            value, used = parse_pickle(cached.read(at, available), ledger, limits=limits, allow_trailing=True)
            return value, at + used
        except SourceError as error:
            grown = min(count * 8, limits.stream_bytes)
            if error.code != "pickle.truncated" or available == cached.size_bytes - at or grown == count:
                raise
            count = grown


def storages_in(root: Node) -> dict[str, PStorage]:
    """All storages that a value refers to, by key."""
    found: dict[str, PStorage] = {}
    for node in walk(root):
        if isinstance(node, PTensor):
            known = found.setdefault(node.storage.key, node.storage)
            if (known.dtype, known.root_numel) != (node.storage.dtype, node.storage.root_numel):
                raise SourceError("tensor.bad_extent", f"storage {printable(known.key)} has two types or sizes")
    return found


def walk(root: Node) -> Iterator[Node]:
    """Yield every node of a value once, in no particular order. It does not recurse."""
    seen: set[int] = set()
    todo: list[Node] = [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        match node:
            case PList() | PTuple() | PSet():
                todo.extend(node.items)
            case PDict():
                todo.extend(node.pairs)
            case PObject():
                todo += [node.args, node.kwargs, node.state, *node.items, *node.appends]
            case _:
                continue


def _storage_offsets(
    cached: CachedFile, at: int, keys: list[str], storages: dict[str, PStorage]
) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    name = printable(cached.file.name)
    for key in keys:
        storage = storages.get(key)
        if storage is None:
            raise SourceError("checkpoint.malformed", f"{name}: storage {printable(key)} belongs to no tensor")
        count = int.from_bytes(cached.file.read(at, 8), "little", signed=True)
        if count != storage.root_numel:
            raise SourceError(
                "tensor.bad_extent", f"{name}: storage {printable(key)} has {count} of {storage.root_numel} elements"
            )
        length = count * BY_NAME[storage.dtype].itemsize_bytes
        if at + 8 + length > cached.size_bytes:
            raise SourceError(
                "checkpoint.incomplete",
                f"{name} ends inside storage {printable(key)}",
                fix="the file is truncated: copy the checkpoint again",
            )
        found[key] = (at + 8, length)
        at += 8 + length
    if at != cached.size_bytes:
        raise SourceError("pickle.trailing", f"{name}: {cached.size_bytes - at} bytes after the last storage")
    return found
